// SPDX-License-Identifier: BSD-3-Clause
// A rank of mpi_nccl_test.cc, which each MPI's mpirun starts: one group whose CPU tensors go to MPI
// and whose device's tensors go to NCCL, that is to the stand-in on the test device.
//
// With "cells": makes every call on tensors of both kinds of device on backend mpi alone. With
// "aware": the same under an MPI that takes memory of the device.
// Prints "rank R: WHAT" for what is wrong and exits with 1, or prints "right R".
#include <torch/types.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend_cells.h"
#include "core/group/device_memory.h"
#include "core/group/group_core.h"
#include "testing/limits.h"

namespace {
bool mpi_is_aware = false;
}

/// In place of MPI's own, whether it has one or not. The device's memory is host memory.
extern "C" __attribute__((visibility("default"))) int MPIX_Query_cuda_support() {
  return mpi_is_aware ? 1 : 0;
}

namespace muster::testing {
namespace {

constexpr const char* kBackends = "cpu:mpi,deferred:nccl";
int problems = 0;

void expect(bool holds, const std::string& what) {
  if (holds) return;
  ++problems;
  std::printf("rank %d: %s\n", get_rank(), what.c_str());
}
void expect_says(const std::string& text, const std::string& part) {
  expect(text.find(part) != std::string::npos, "'" + part + "' is not in: " + text);
}

int opened() { return standin_calls("ncclCommInitRankConfig"); }

/// Every kind of call on tensors that `place` puts somewhere.
void use(const Group& group, const std::function<at::Tensor(at::Tensor)>& place) {
  const int me = get_rank(group), n = get_world_size(group);
  const auto full = [&](double value, std::int64_t count = 3) {
    return place(torch::full({count}, value));
  };
  const auto is = [](const at::Tensor& tensor, double value) {
    return tensor.cpu().eq(value).all().item<bool>();
  };
  const double sum = n * (n + 1) / 2.0;
  auto x = full(me + 1);
  all_reduce(x, {.group = group});
  expect(is(x, sum), "all_reduce");
  x = full(me + 1);
  all_reduce(x, {.op = ReduceOp::AVG, .group = group, .async_op = true})->wait();
  expect(is(x, sum / n), "asynchronous AVG");
  x = full(me);
  broadcast(x, {.group = group, .group_src = n - 1});
  expect(is(x, n - 1), "broadcast");
  auto all = full(-1, n);
  all_gather_into_tensor(all, full(me, 1), {.group = group});
  expect(torch::equal(all.cpu(), torch::arange(n, at::kFloat)), "all_gather_into_tensor");
  auto part = full(0, 1);
  reduce_scatter_tensor(part, place(torch::arange(n, at::kFloat)), {.group = group});
  expect(is(part, n * me), "reduce_scatter_tensor");
  auto exchanged = full(-1, n);
  all_to_all_single(exchanged, full(me, n), {.group = group});
  expect(torch::equal(exchanged.cpu(), torch::arange(n, at::kFloat)), "all_to_all_single");
  const int next = (me + 1) % n, previous = (me + n - 1) % n;
  auto got = full(-1);
  const auto sent = isend(full(me), {.group = group, .group_dst = next});
  recv(got, {.group = group, .group_src = previous});
  sent->wait();
  expect(is(got, previous), "a message");
}

void check_group(int rank) {
  const auto here = [](const at::Tensor& tensor) { return tensor; };
  const auto there = [rank](const at::Tensor& tensor) { return deferred::on_device(tensor, rank); };
  const auto world = default_group();
  expect(get_backend() == kBackends, "get_backend says " + get_backend());
  for (const auto& [device, backend] : core_of(world).parts().backends) {
    const std::string name(backend->capabilities().name);
    expect(name == (device == at::kCPU ? "mpi" : "nccl"),
           "the backend of " + c10::DeviceTypeName(device, true) + " is " + name);
  }
  const int before = opened();
  use(world, here);
  barrier();  // the CPU's backend makes it
  std::vector<int> ranks(static_cast<std::size_t>(get_world_size()));
  all_gather_object(ranks, rank);
  expect(ranks.back() == get_world_size() - 1, "all_gather_object");
  expect(opened() == before, "NCCL got calls of the CPU");
  use(world, there);
  expect(opened() > before, "NCCL got no calls of the device");
  // In turns, and with both in flight.
  const auto on_cpu = torch::ones({4}), on_device = there(torch::ones({4}));
  const std::vector<WorkRef> works{all_reduce(on_cpu, {.async_op = true}),
                                   all_reduce(on_device, {.async_op = true})};
  for (const auto& work : works) work->wait();
  expect(torch::equal(on_cpu, on_device.cpu()), "calls on both at once");
  // A reduction that NCCL lacks is refused in NCCL's name; MPI has it, and the group goes on.
  const auto bits = torch::full({2}, 6 + rank, at::kInt);
  const auto refused = text_of([&] { all_reduce(there(bits), {.op = ReduceOp::BAND}); });
  expect_says(refused, "backend 'nccl' cannot do all_reduce");
  all_reduce(bits, {.op = ReduceOp::BAND});
  const int both = get_world_size() == 2 ? 6 & 7 : 6 & 7 & 8;
  expect(bits.eq(both).all().item<bool>(), "BAND by MPI");
  expect_says(text_of([&] {
                isend(there(torch::ones({1})), {.dst = (rank + 1) % get_world_size(), .tag = 4});
              }),
              "NCCL has no tags");
  // Groups made of it have both.
  const auto parts = split_group(nullptr, {{0}, {1, 2}});
  for (const auto& group : {parts, new_group({.ranks = std::vector<int>{0, 2}})}) {
    if (!group->is_member()) continue;
    expect(get_backend(group) == kBackends, "get_backend of a group of it");
    if (get_world_size(group) == 1) continue;
    use(group, there);
    use(group, here);
  }
}

/// Bytes that MPI alone moves are not copied through host memory, and the stream is waited for.
void check_awareness(int rank) {
  const auto there = [rank](const at::Tensor& tensor) { return deferred::on_device(tensor, rank); };
  const auto copies = [](const std::function<void()>& call) {
    const int before = deferred::PinnedMemory::given;
    call();
    return deferred::PinnedMemory::given - before;
  };
  const int n = get_world_size();
  const auto tensor = there(torch::full({1000}, rank + 1.0F));
  expect(copies([&] { broadcast(tensor, {.src = 1}); }) == 0, "broadcast was staged");
  expect(tensor.cpu().eq(2).all().item<bool>(), "broadcast");
  const auto mine = there(torch::full({3}, rank + 1.0F)), all = there(torch::zeros({3 * n}));
  expect(copies([&] { all_gather_into_tensor(all, mine, {.async_op = true})->wait(); }) == 0,
         "all_gather_into_tensor was staged");
  expect(all.cpu().sum().item<float>() == 4.5F * n + 1.5F * n * (n - 2), "all_gather_into_tensor");
  const auto exchanged = there(torch::zeros({3 * n}));
  expect(copies([&] { all_to_all_single(exchanged, all); }) == 0, "all_to_all_single was staged");
  const auto writes = [&](const Place& place) {
    const auto out = place(torch::zeros({3 * n}));
    const auto before = out._version();
    all_gather_into_tensor(out, place(torch::ones({3})));
    return out._version() - before;
  };
  expect((writes(there) > 0) == (writes(on_cpu) > 0), "autograd is told of other writes");
  TensorList apart{there(torch::zeros({3})), there(torch::zeros({3}))};
  expect(copies([&] { all_gather(apart, mine); }) > 0, "all_gather into two pieces was not staged");
  expect(copies([&] { all_reduce(mine); }) > 0, "an all_reduce was not staged");
}

/// Every call that docs/user/backends.md lists.
int run_cells() {
  use_standin();
  if (mpi_is_aware) group::device_of_libraries = deferred::kType;
  init_process_group({.backend = "mpi", .timeout = muster::testing::kMustHappen});
  const int rank = get_rank();
  deferred::current_device = static_cast<c10::DeviceIndex>(rank);
  for (const bool on_cpus : {true, false}) {
    const auto lacked =
        LackedCells::find(rank, get_world_size(), on_cpus ? on_cpu : on_device_of(rank), !on_cpus);
    for (const auto& [operation, kinds] : lacked.operations())
      expect(lacked.has_all(operation), "mpi lacks some of " + operation);
  }
  if (mpi_is_aware) check_awareness(rank);
  expect(!::testing::UnitTest::GetInstance()->Failed(),
         "a result differs from that of CPU tensors");
  destroy_process_group();
  if (problems == 0) std::printf("right %d\n", rank);
  std::fflush(stdout);
  return problems == 0 ? 0 : 1;
}

int run() {
  use_standin();
  for (int round = 0; round < 2; ++round) {
    init_process_group({.backend = kBackends,
                        .timeout = muster::testing::kMustHappen,
                        .pg_options = std::make_shared<ProcessGroupNCCL::Options>(true)});
    const int rank = get_rank();
    deferred::current_device = static_cast<c10::DeviceIndex>(rank);
    check_group(rank);
    const bool last = round == 1;
    destroy_process_group();
    if (last && problems == 0) std::printf("right %d\n", rank);
    std::fflush(stdout);
  }
  return problems == 0 ? 0 : 1;
}

}  // namespace
}  // namespace muster::testing

int main(int count, char** arguments) {
  try {
    mpi_is_aware = count > 1 && std::string(arguments[1]) == "aware";
    return count > 1 ? muster::testing::run_cells() : muster::testing::run();
  } catch (const std::exception& error) {
    std::printf("it threw %s\n", error.what());
    return 1;
  }
}
