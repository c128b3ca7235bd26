// SPDX-License-Identifier: BSD-3-Clause
// Workers as real processes: what sockets, shared memory and sudden deaths do to calls.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/types.h>

#include <cstdlib>
#include <random>

#include "muster/rpc_calls.h"
#include "testing/budget.h"
#include "testing/limits.h"
#include "testing/process_usage.h"
#include "testing/rank_processes.h"
#include "testing/reserved_port.h"
#include "testing/scratch_folder.h"
#include "testing/seed.h"

namespace muster::rpc {
namespace {

using muster::testing::kMustHappen;
using muster::testing::RankEnd;
using muster::testing::RankProcesses;
using muster::testing::ScratchFolder;
using muster::testing::SharedCounter;

std::string name_of(int rank) { return "worker" + std::to_string(rank); }

/// Body of one process: joins, does its part, and says what went wrong.
std::string as_worker(const std::string& where, int rank, int count,
                      const std::function<std::string()>& body, RpcBackendOptions options = {}) {
  try {
    options.init_method = where;
    init_rpc(name_of(rank), {.rank = rank,
                             .world_size = count,
                             .rpc_backend_options = options,
                             .join_timeout = kMustHappen});
    auto report = body();
    if (is_initialized()) shutdown(true, kMustHappen);
    return report;
  } catch (const std::exception& error) {
    return std::string("threw ") + error.what();
  }
}

/// The text of the error that the call ends with.
template <class Call>
std::string error_text_of(Call call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

#define EXPECT_HAS(text, part) \
  EXPECT_NE(std::string(text).find(part), std::string::npos) << "in: " << (text)

TEST(RpcProcess, CallsOverSharedMemoryAndOverSockets) {
  for (const bool sockets : {false, true}) {
    ScratchFolder folder;
    RankProcesses job(3, [&](int rank) {
      RpcBackendOptions options;
      options.shared_memory = !sockets;
      register_function("twice", [](const at::Tensor& tensor) { return tensor * 2; });
      return as_worker(
          "file://" + folder.file("meet"), rank, 3,
          [&]() -> std::string {
            for (const std::int64_t elements : {1, 1000, 5000, 3000000}) {
              const auto tensor = torch::arange(elements, torch::kFloat);
              for (int to = 0; to < 3; ++to) {
                if (!torch::equal(rpc_sync<at::Tensor>(to, "twice", tensor), tensor * 2))
                  return "another result of " + std::to_string(elements);
                if (!torch::equal(rpc_async<at::Tensor>(name_of(to), "aten::mul", tensor, 2).wait(),
                                  tensor * 2))
                  return "another product";
              }
            }
            return "good";
          },
          options);
    });
    for (const RankEnd& end : job.join(kMustHappen))
      EXPECT_EQ(end.report, "good") << "over " << (sockets ? "sockets" : "shared memory");
  }
}

// spec: N6 a failed peer closes only its own
TEST(RpcProcess, KilledCalleesAreNamedAtOnceAndOthersGoOn) {
  ScratchFolder folder;
  SharedCounter hanging;
  RankProcesses job(3, [&](int rank) {
    register_function("hang", [&] {
      hanging.add(1);
      const Promise<void> never{std::weak_ptr<Agent>()};
      never.future().wait();
    });
    register_function("who", [] { return get_worker_info().name(); });
    return as_worker("file://" + folder.file("meet"), rank, 3, [&]() -> std::string {
      if (rank == 2) return rpc_sync<std::string>(0, "who");
      const int other = 1 - rank;
      const auto doomed = rpc_async<void>(2, "hang");
      const auto text = error_text_of([&] { doomed.wait(); });
      const auto again = error_text_of([&] { rpc_sync<std::string>(2, "who"); });
      return text + " | " + again + " | " + rpc_sync<std::string>(other, "who");
    });
  });
  ASSERT_TRUE(hanging.wait_for(2, kMustHappen));
  job.kill(2, SIGKILL);
  const auto ends = job.join(kMustHappen);
  for (int rank = 0; rank < 2; ++rank) {
    const auto& report = ends[static_cast<std::size_t>(rank)].report;
    EXPECT_HAS(report, "the call of 'hang' on worker 'worker2' (rank 2) has failed");
    EXPECT_HAS(report, "| the call of 'who' on worker 'worker2' (rank 2) has failed");
    EXPECT_HAS(report, "| worker" + std::to_string(1 - rank));
  }
}

// spec: N4 waits for all
TEST(RpcProcess, KilledCallersAreNotWaitedFor) {
  ScratchFolder folder;
  SharedCounter serving;
  SharedCounter killed;
  RankProcesses job(3, [&](int rank) {
    register_function("serve_until_killed", [&] {
      serving.add(1);
      killed.wait_for(1, kMustHappen);
      return torch::ones({1000000});
    });
    register_function("who", [] { return get_worker_info().name(); });
    return as_worker("file://" + folder.file("meet"), rank, 3, [&]() -> std::string {
      if (rank == 0) return error_text_of([&] { rpc_sync<at::Tensor>(1, "serve_until_killed"); });
      killed.wait_for(1, kMustHappen);
      return rpc_sync<std::string>(3 - rank, "who");
    });
  });
  ASSERT_TRUE(serving.wait_for(1, kMustHappen));
  job.kill(0, SIGKILL);
  killed.add(1);
  const auto ends = job.join(kMustHappen);
  EXPECT_EQ(ends[1].report, "worker2");
  EXPECT_EQ(ends[2].report, "worker1");
}

// A process without the job's secret is told so, before anything that it sends is read.
TEST(RpcProcess, AWrongSecretIsRefused) {
  const auto port = muster::testing::reserve_port();
  SharedCounter refused;
  RankProcesses job(2, [&](int rank) {
    ::setenv("MUSTER_SECRET", rank == 0 ? "the secret of this job" : "some other job's words", 1);
    const auto report = as_worker("tcp://127.0.0.1:" + std::to_string(port), rank, 2,
                                  [] { return std::string("joined"); });
    refused.add(rank);
    return report;
  });
  ASSERT_TRUE(refused.wait_for(1, kMustHappen));
  job.kill(0, SIGKILL);  // it would wait for the other until its time is over
  const auto ends = job.join(kMustHappen);
  EXPECT_HAS(ends[1].report, "threw ");
  EXPECT_HAS(ends[1].report, "secret");
}

// ---- many calls

/// Calls of random sizes and kinds to one worker. Each answer is compared with the arguments; the
/// first difference is kept.
class RandomCalls {
 public:
  RandomCalls(int to, std::uint64_t seed) : to_(to), random_(seed) {}

  std::string play(int count) {
    while (count > 0 && wrong_.empty()) {
      if (below(10) == 0) {
        count -= several();
      } else {
        one();
        --count;
      }
    }
    return wrong_;
  }

 private:
  struct Sent {
    at::Tensor tensor;
    std::string text;
    bool throws() const { return text.size() % 7 == 3; }
  };

  std::int64_t below(std::uint64_t bound) { return static_cast<std::int64_t>(random_() % bound); }
  Sent some() {
    // Mostly within one message, some in pieces, a few of megabytes.
    const auto dice = below(2000);
    const auto elements = dice == 0 ? below(2000000) : dice < 80 ? below(150000) : below(40);
    return {torch::full({elements}, static_cast<double>(++number_)),
            std::string(static_cast<std::size_t>(below(60)), 'x')};
  }
  template <class Get>
  void check(const Sent& sent, Get get) {
    try {
      if (!torch::equal(get(), sent.tensor) || sent.throws())
        wrong_ = "another result of call " + std::to_string(number_);
    } catch (const std::out_of_range& error) {
      if (!sent.throws() || std::string(error.what()).find(sent.text) == std::string::npos)
        wrong_ = error.what();
    }
  }
  void one() {
    const Sent sent = some();
    check(sent, [&] { return rpc_sync<at::Tensor>(to_, "same", sent.tensor, sent.text); });
  }
  int several() {
    std::vector<std::pair<Sent, Future<at::Tensor>>> calls;
    for (auto left = 1 + below(32); left > 0; --left) {
      Sent sent = some();
      auto future = rpc_async<at::Tensor>(to_, "same", sent.tensor, sent.text);
      calls.emplace_back(std::move(sent), std::move(future));
    }
    for (const auto& [sent, future] : calls) check(sent, [&, &f = future] { return f.wait(); });
    return static_cast<int>(calls.size());
  }

  const int to_;
  std::mt19937_64 random_;
  std::uint64_t number_ = 0;
  std::string wrong_;
};

void call_both_ways(bool sockets, int calls) {
  ScratchFolder folder;
  RankProcesses job(2, [&](int rank) {
    at::set_num_threads(1);
    register_function("same", [](at::Tensor tensor, const std::string& text) {
      if (text.size() % 7 == 3) throw std::out_of_range(text);
      return tensor;
    });
    RpcBackendOptions options;
    options.shared_memory = !sockets;
    return as_worker(
        "file://" + folder.file("meet"), rank, 2,
        [&]() -> std::string {
          RandomCalls random(1 - rank,
                             muster::testing::test_seed() + static_cast<std::uint64_t>(rank));
          if (auto wrong = random.play(200 + calls / 20); !wrong.empty()) return wrong;
          const auto before = muster::testing::memory_in_use();
          if (auto wrong = random.play(calls); !wrong.empty()) return wrong;
          const auto after = muster::testing::memory_in_use();
          const auto grown = [](std::size_t now, std::size_t then) {
            return now > then + (32U << 20);
          };
          if (muster::testing::kMemoryTells &&
              (grown(after.own, before.own) || grown(after.shared, before.shared)))
            return "grew from " + std::to_string((before.own + before.shared) >> 20) + " to " +
                   std::to_string((after.own + after.shared) >> 20) + " MiB";
          return "flat";
        },
        options);
  });
  for (const RankEnd& end : job.join(std::chrono::minutes(20)))
    EXPECT_EQ(end.report, "flat") << "over " << (sockets ? "sockets" : "shared memory");
}

// A million calls in long runs.
TEST(RpcProcess, ManyCallsOfRandomSizesLeaveMemoryFlat) {
  call_both_ways(false, muster::testing::test_rounds(600, 300000));
  call_both_ways(true, muster::testing::test_rounds(400, 200000));
}

}  // namespace
}  // namespace muster::rpc
