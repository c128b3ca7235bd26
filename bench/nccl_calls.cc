// SPDX-License-Identifier: BSD-3-Clause
// The CPU time of a call of backend nccl, in microseconds: of the thread that makes it, and of the
// whole process. NCCL is the stand-in of the tests, and the device one that they make up, so what
// the process takes is theirs above all; the calling thread's time is muster's, but for the short
// functions of theirs that enqueue. The ranks are threads.
//
//   MUSTER_NCCL_LIBRARY=tests/accelerator/nccl_standin/libnccl_standin.so bin/muster_nccl_calls
//       [RANKS] [CALLS]
#include <c10/core/DeviceGuard.h>
#include <torch/types.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <vector>

#include "muster/distributed.h"
#include "testing/deferred_device.h"

namespace {

namespace deferred = muster::testing::deferred;

double microseconds(clockid_t clock) {
  std::timespec now{};
  ::clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
}

struct Tensors {
  at::Tensor mine, got;
};

void all_reduce(Tensors& with) { muster::all_reduce(with.mine); }
void all_reduce_async(Tensors& with) { muster::all_reduce(with.mine, {.async_op = true})->wait(); }
void exchange(Tensors& with) {
  const int ranks = muster::get_world_size(), rank = muster::get_rank();
  const auto works =
      muster::batch_isend_irecv({{muster::isend, with.mine, (rank + 1) % ranks},
                                 {muster::irecv, with.got, (rank + ranks - 1) % ranks}});
  for (const auto& work : works) work->wait();
}

constexpr struct {
  const char* name;
  void (*call)(Tensors&);
} kCalls[] = {{"all_reduce", &all_reduce},
              {"all_reduce, asynchronous, and wait", &all_reduce_async},
              {"isend and irecv in a ring, and wait", &exchange}};

/// Rank 0's times of one kind of call in one round.
struct CallTimes {
  double thread = 0, process = 0, wall = 0;
};

CallTimes measured(void (*call)(Tensors&), Tensors& tensors, int calls) {
  const auto device = tensors.mine.device().index();
  const c10::impl::VirtualGuardImpl guard(deferred::kType);
  muster::barrier();
  const CallTimes before{microseconds(CLOCK_THREAD_CPUTIME_ID),
                         microseconds(CLOCK_PROCESS_CPUTIME_ID), microseconds(CLOCK_MONOTONIC)};
  for (int i = 0; i < calls; ++i) call(tensors);
  const double thread = microseconds(CLOCK_THREAD_CPUTIME_ID) - before.thread;
  guard.synchronizeDevice(device);
  muster::barrier();
  return {thread / calls, (microseconds(CLOCK_PROCESS_CPUTIME_ID) - before.process) / calls,
          (microseconds(CLOCK_MONOTONIC) - before.wall) / calls};
}

double median(std::vector<CallTimes> rounds, double CallTimes::*of) {
  std::ranges::sort(rounds, {}, of);
  return rounds[rounds.size() / 2].*of;
}

void rank_body(int rank, int calls) {
  constexpr int kRounds = 9;
  Tensors tensors{deferred::on_device(at::ones({4}), rank),
                  deferred::on_device(at::ones({4}), rank)};
  for (const auto& one : kCalls) {
    std::vector<CallTimes> rounds(kRounds);
    measured(one.call, tensors, calls);
    for (auto& round : rounds) round = measured(one.call, tensors, calls);
    if (rank == 0)
      std::printf("| %s | %.1f | %.1f | %.1f |\n", one.name, median(rounds, &CallTimes::thread),
                  median(rounds, &CallTimes::process), median(rounds, &CallTimes::wall));
  }
}

}  // namespace

int main(int count, char** words) {
  const int ranks = count > 1 ? std::atoi(words[1]) : 2;
  const int calls = count > 2 ? std::atoi(words[2]) : 500;
  deferred::install();
  const auto store = std::make_shared<muster::HashStore>();
  std::printf("| call on %d ranks | its thread | the process | wall |\n| --- | --- | --- | --- |\n",
              ranks);
  muster::spawn(
      [&](int rank) {
        const c10::DeviceGuard on(
            c10::Device(deferred::kType, static_cast<c10::DeviceIndex>(rank)));
        muster::init_process_group({.backend = "cpu:native,deferred:nccl",
                                    .world_size = ranks,
                                    .rank = rank,
                                    .store = store});
        rank_body(rank, calls);
        muster::destroy_process_group();
      },
      {.nprocs = ranks, .mode = muster::SpawnMode::threads});
}
