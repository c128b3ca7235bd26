// SPDX-License-Identifier: BSD-3-Clause
#include "muster/debug.h"

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <signal.h>
#include <sys/wait.h>
#include <torch/csrc/autograd/profiler_legacy.h>

#include <atomic>
#include <future>
#include <set>

#include "core/group/calls.h"
#include "core/group/group_core.h"
#include "core/group/testing/compress_within_host.h"
#include "core/group/testing/ranks.h"
#include "muster/collectives.h"
#include "testing/limits.h"
#include "testing/needs_all_wings.h"

namespace muster {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::message_of;
using testing::on_ranks;

// spec: H1 monitored_barrier passes if all arrive, on native, gloo, tcp; on groups
TEST(MonitoredBarrier, PassesWhenAllCome) {
  for (const char* backend : {"native", "gloo", "tcp"}) {
    std::atomic<int> came{0};
    on_ranks(
        4,
        [&](int rank) {
          for (int round = 1; round <= 5; ++round) {
            ++came;
            monitored_barrier({.wait_all_ranks = round % 2 == 0});
            EXPECT_GE(came.load(), 4 * round);
          }
          const auto pair = new_group({.ranks = {1, 3}});
          monitored_barrier({.group = pair});  // does nothing on ranks 0 and 2
          const auto alone = new_group({.ranks = {rank}, .use_local_synchronization = true});
          monitored_barrier({.group = alone, .timeout = milliseconds(1)});
        },
        backend);
  }
}

// spec: H1.first rank 0 throws at the first missing rank, text; if one misses, all fail; H13
// Original exception:, wait_all_ranks False by default
TEST(MonitoredBarrier, NamesTheFirstMissing) {
  std::promise<void> seen;
  const auto over = seen.get_future().share();
  on_ranks(4, [&](int rank) {
    barrier();
    if (rank == 0) {
      try {
        monitored_barrier({.timeout = milliseconds(2000)});
        ADD_FAILURE() << "passed";
      } catch (const DistBackendError& error) {
        const std::string text = error.what();
        EXPECT_TRUE(text.starts_with(
            "Rank 1 failed to pass monitoredBarrier in 2000 ms\n Original exception:\n"))
            << text;
        EXPECT_EQ(error.ranks(), std::vector<int>{1});
        EXPECT_EQ(error.code(), Code::timed_out);
      }
      seen.set_value();
    } else {
      if (rank != 3) over.wait();  // ranks 1 and 2 arrive late
      const auto said = message_of<DistBackendError>(
          [] { monitored_barrier({.timeout = muster::testing::kMustHappen}); });
      EXPECT_HAS(said, "Rank 1 failed to pass monitoredBarrier in 2000 ms");
    }
    // The group stays usable, and messages of the failed barrier are not taken for the next one's.
    for (int round = 0; round < 3; ++round)
      monitored_barrier({.timeout = muster::testing::kMustHappen});
    auto tensor = torch::ones({1});
    all_reduce(tensor);
    EXPECT_EQ(tensor.item<int>(), 4);
  });
}

// spec: H1.all or lists them all; H13 timeout None is the group's
TEST(MonitoredBarrier, ListsAllMissing) {
  std::promise<void> seen;
  const auto over = seen.get_future().share();
  on_ranks(4, [&](int rank) {
    barrier();
    if (rank == 1 || rank == 2) return over.wait();
    set_timeout(milliseconds(2000));
    const auto said =
        message_of<DistBackendError>([] { monitored_barrier({.wait_all_ranks = true}); });
    EXPECT_HAS(said, "Ranks 1, 2 failed to pass monitoredBarrier in 2000 ms\n Original exception:");
    set_timeout(seconds(60));
    if (rank == 0) seen.set_value();
    if (rank == 3) over.wait();
  });
}

// spec: H1 if one misses, all fail: rank 0 too
TEST(MonitoredBarrier, RankZeroMissing) {
  std::promise<void> seen;
  const auto over = seen.get_future().share();
  on_ranks(2, [&](int rank) {
    if (rank == 0) return over.wait();
    EXPECT_HAS(
        message_of<DistBackendError>([] { monitored_barrier({.timeout = milliseconds(100)}); }),
        "Rank 0 failed to pass monitoredBarrier in 100 ms");
    seen.set_value();
  });
}

// spec: H1 a rank that has left is named, not waited for
TEST(MonitoredBarrier, NamesARankThatLeft) {
  const auto ranks = [store = std::make_shared<HashStore>()](int rank) {
    init_process_group(
        {.timeout = muster::testing::kMustHappen, .world_size = 3, .rank = rank, .store = store});
    barrier();
    if (rank == 1) return;
    const auto said = message_of<DistBackendError>(
        [] { monitored_barrier({.timeout = seconds(50), .wait_all_ranks = true}); });
    EXPECT_HAS(said, "Ranks 1 failed to pass monitoredBarrier in 50000 ms\n Original exception:\n");
  };
  spawn(ranks, {.nprocs = 3, .mode = SpawnMode::threads});
}

class DebugLevels : public ::testing::Test {
 protected:
  void TearDown() override {
    ::unsetenv("TORCH_DISTRIBUTED_DEBUG");
    set_debug_level(DebugLevel::OFF);
  }
};

// spec: H2 set_debug_level_from_env
TEST_F(DebugLevels, FromTheEnvironment) {
  ::setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL", 1);
  set_debug_level_from_env();
  EXPECT_EQ(get_debug_level(), DebugLevel::DETAIL);
  ::setenv("TORCH_DISTRIBUTED_DEBUG", "SOME", 1);
  EXPECT_HAS(message_of<DistError>([] { set_debug_level_from_env(); }), "SOME");
  EXPECT_EQ(get_debug_level(), DebugLevel::DETAIL);
}

// spec: H10 DETAIL's text for mismatched shapes; H6 shapes and call stack of both calls,
// synchronous and not
TEST_F(DebugLevels, MismatchedShapes) {
  set_debug_level(DebugLevel::DETAIL);
  for (const bool async_op : {false, true}) {
    on_ranks(2, [&](int rank) {
      const auto said = message_of<DistBackendError>([&] {
        if (const auto work =
                all_reduce(torch::ones({rank == 0 ? 10 : 20}), {.async_op = async_op}))
          work->wait();
      });
      EXPECT_HAS(said, "Error when verifying shape tensors for collective ALLREDUCE on rank " +
                           std::to_string(rank) +
                           ". This likely indicates that input shapes into the collective are "
                           "mismatched across ranks. Got shapes: " +
                           (rank == 0 ? "10" : "20"));
      EXPECT_HAS(said, "Rank 0: all_reduce with shapes 10, called from\n");
      EXPECT_HAS(said, "Rank 1: all_reduce with shapes 20, called from\n");
      for (const auto at : {said.find("called from"), said.rfind("called from")}) {
        EXPECT_HAS(said.substr(at), "  #0 ");
        EXPECT_HAS(said.substr(at),
                   "muster::all_reduce(at::Tensor const&, muster::AllReduceOptions const&) (");
        EXPECT_HAS(said.substr(at), "MismatchedShapes_Test::TestBody()");
      }
      EXPECT_EQ(said.find("unknown function"), std::string::npos) << said;
    });
  }
}

// spec: H6 the future of an asynchronous call has the details too
TEST_F(DebugLevels, FuturesHaveTheDetails) {
  set_debug_level(DebugLevel::DETAIL);
  on_ranks(2, [&](int rank) {
    const auto work = all_reduce(torch::ones({rank == 0 ? 10 : 20}), {.async_op = true});
    const auto future = work->get_future();
    EXPECT_EQ(future, work->get_future());
    future->wait();
    ASSERT_TRUE(future->hasError());
    const auto said = future->tryRetrieveErrorMessage();
    EXPECT_HAS(said, "Error when verifying shape tensors for collective ALLREDUCE on rank " +
                         std::to_string(rank));
    EXPECT_HAS(said, "Rank 0: all_reduce with shapes 10, called from\n");
    EXPECT_HAS(said, "Rank 1: all_reduce with shapes 20, called from\n");
  });
  on_ranks(2, [&](int) {
    const auto future = all_reduce(torch::ones({3}), {.async_op = true})->get_future();
    future->wait();
    EXPECT_FALSE(future->hasError());
    EXPECT_EQ(future->constValue().toTensorVector().front().sum().item<float>(), 6);
  });
}

// spec: H6 an asynchronous call with compression, and its future, have them
TEST_F(DebugLevels, CompressedCallsHaveTheDetails) {
  set_debug_level(DebugLevel::DETAIL);
  for (const char* backend : {"native", "tcp"}) {
    const auto body = [&](int rank) {
      const auto work = all_reduce(torch::ones({rank == 0 ? 10 : 20}),
                                   {.async_op = true, .compression = Compression::int8});
      const auto future = work->get_future();
      const auto said = message_of<DistBackendError>([&] { work->wait(); });
      future->wait();
      ASSERT_TRUE(future->hasError());
      for (const auto& text : {said, future->tryRetrieveErrorMessage()}) {
        EXPECT_HAS(text, "Rank 0: ");
        EXPECT_HAS(text, "Rank 1: ");
        EXPECT_HAS(text, "called from\n");
      }
    };
    on_ranks(2, body, backend);
  }
}

// spec: H6 different collectives: both sides with shapes and stack
TEST_F(DebugLevels, MismatchedCalls) {
  set_debug_level(DebugLevel::DETAIL);
  on_ranks(2, [&](int rank) {
    const auto said = message_of<DistBackendError>([&] {
      if (rank == 0) {
        all_reduce(torch::ones({2, 3}));
      } else {
        broadcast(torch::ones({6}), {.src = 1});
        barrier();  // the root of a broadcast may have returned
      }
    });
    EXPECT_HAS(said, "Rank 0: all_reduce with shapes 2, 3, called from\n");
    EXPECT_HAS(said, "Rank 1: ");
    EXPECT_EQ(said.find("verifying shape"), std::string::npos) << said;
  });
}

// spec: H10 the ranks stuck before the collective
TEST_F(DebugLevels, RanksStuckBefore) {
  set_debug_level(DebugLevel::DETAIL);
  std::promise<void> seen;
  const auto over = seen.get_future().share();
  const auto ranks = [&, store = std::make_shared<HashStore>()](int rank) {
    init_process_group(
        {.timeout = muster::testing::kMustHappen, .world_size = 2, .rank = rank, .store = store});
    if (rank == 1) return over.wait();
    const auto said = message_of<DistBackendError>(
        [] { all_reduce(torch::ones({5}), {.timeout = milliseconds(100)}); });
    EXPECT_HAS(said,
               "Ranks stuck before the collective ALLREDUCE: 1\nRank 0: all_reduce with shapes 5, "
               "called from\n");
    seen.set_value();
  };
  spawn(ranks, {.nprocs = 2, .mode = SpawnMode::threads});
}

// Without DETAIL the error has no details.
TEST_F(DebugLevels, NoDetailUnlessAskedFor) {
  set_debug_level(DebugLevel::INFO);
  on_ranks(2, [](int rank) {
    const auto said = message_of<DistBackendError>([&] { all_reduce(torch::ones({rank + 1})); });
    EXPECT_EQ(said.find("called from"), std::string::npos) << said;
  });
}

thread_local std::multiset<std::string>* observed = nullptr;
thread_local std::size_t observed_inputs = 0;

// spec: H9 every collective and P2P call shows as a range
TEST(Profiling, EveryCallIsARange) {
  on_ranks(
      2,
      [](int rank) {
        std::multiset<std::string> seen;
        observed = &seen;
        const auto handle = at::addThreadLocalCallback(
            at::RecordFunctionCallback([](const at::RecordFunction& range) {
              observed->insert(range.name());
              observed_inputs += range.inputs().size();
              return std::unique_ptr<at::ObserverContext>();
            })
                .scopes({at::RecordScope::USER_SCOPE})
                .needsInputs(true));
        const auto t = [](std::int64_t n = 2) { return torch::zeros({n}); };
        broadcast(t(), {.src = 0});
        all_reduce(t());
        all_reduce(t(), {.async_op = true})->wait();
        reduce(t(), {.dst = 0});
        all_gather({t(), t()}, t());
        all_gather_into_tensor(t(4), t());
        gather(t(), {.gather_list = rank == 0 ? TensorList{t(), t()} : TensorList{}});
        scatter(t(), {.scatter_list = rank == 0 ? TensorList{t(), t()} : TensorList{}});
        reduce_scatter(t(), {t(), t()});
        reduce_scatter_tensor(t(), t(4));
        all_to_all_single(t(), t());
        all_to_all({t(), t()}, {t(), t()});
        barrier();
        all_reduce_coalesced({t(), t()});
        all_gather_coalesced({{t()}, {t()}}, {t()});
        reduce_scatter_coalesced({t()}, {{t()}, {t()}});
        rank == 0 ? void(send(t(), {.dst = 1})) : void(recv(t(), {.src = 0}));
        (rank == 0 ? isend(t(), {.dst = 1}) : irecv(t(), {.src = 0}))->wait();
        const auto world = default_group();
        auto prepared = core_of(world).prepare(calls::all_reduce(*world, t(), {}));
        prepared.submit();
        prepared.submit();
        at::removeCallback(handle);
        all_reduce(t());
        for (const char* name :
             {"broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather", "scatter",
              "reduce_scatter", "reduce_scatter_tensor", "all_to_all_single", "all_to_all",
              "barrier", "all_reduce_coalesced", "all_gather_coalesced", "reduce_scatter_coalesced",
              rank == 0 ? "send" : "recv", rank == 0 ? "isend" : "irecv"})
          EXPECT_EQ(seen.count(std::string("native:") + name), 1U) << name;
        EXPECT_EQ(seen.count("native:all_reduce"), 4U);  // two of them prepared
        EXPECT_GE(observed_inputs, 20U);
        observed = nullptr;
      },
      "native");
}

// spec: H9 in torch's profiler
TEST(Profiling, TorchsProfilerSeesThem) {
  on_ranks(
      2,
      [](int) {
        torch::autograd::profiler::enableProfilerLegacy(
            torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::CPU));
        auto tensor = torch::ones({4});
        all_reduce(tensor);
        const auto lists = torch::autograd::profiler::disableProfilerLegacy();
        int found = 0;
        for (const auto& events : lists)
          for (const auto& event : events)
            found += std::string(event.name()) == "native:all_reduce" ? 1 : 0;
        EXPECT_GE(found, 1);
      },
      "native");
}

// spec: H8 that rank stops, the others wait
TEST(Breakpoint, StopsOneRank) {
  std::atomic<int> stopped{-1}, returned{0};
  const auto before = set_breakpoint_hook([&] {
    stopped = get_rank();
    EXPECT_EQ(returned.load(), 0);
  });
  on_ranks(3, [&](int rank) {
    breakpoint(1);
    EXPECT_EQ(stopped.load(), 1) << rank << " went on before";
    ++returned;
    barrier();
    returned = 0;
    barrier();
    breakpoint();  // rank 0
    EXPECT_EQ(stopped.load(), 0);
    ++returned;
    EXPECT_HAS(message_of<DistError>([] { breakpoint(3); }), "3");
    barrier();
  });
  set_breakpoint_hook([] { throw DistError("the hook failed"); });
  on_ranks(2, [](int rank) {
    if (rank == 1) return breakpoint(0);
    EXPECT_HAS(message_of<DistError>([] { breakpoint(0); }), "the hook failed");
  });
  set_breakpoint_hook(before);
}

// spec: H8 a rank that is stopped for longer than heartbeats may fail is not taken for dead
TEST(Breakpoint, HeartbeatsWaitToo) {
  NEEDS_ALL_WINGS();
  const auto file = std::string(::testing::TempDir()) + "breakpoint_" + std::to_string(::getpid());
  const auto ranks = [&](int rank) {
    init_process_group({.init_method = "file://" + file,
                        .timeout = muster::testing::kMustHappen,
                        .world_size = 3,
                        .rank = rank});
    breakpoint(1);
    auto tensor = torch::ones({1});
    all_reduce(tensor);
    if (tensor.item<int>() != 3) throw DistError("a wrong sum");
    destroy_process_group();
  };
  const auto context = spawn(ranks, {.nprocs = 3, .join = false});
  siginfo_t info{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(context->pids()[1]), &info, WSTOPPED), 0);
  EXPECT_EQ(info.si_status, SIGSTOP);
  EXPECT_FALSE(context->join(seconds(4)));  // longer than the limit of 2.5 s for a silent rank
  ::kill(context->pids()[1], SIGCONT);
  EXPECT_TRUE(context->join(muster::testing::kMustHappen));
  ::unlink(file.c_str());
}

// set_timeout and abort_process_group.
TEST(Groups, SetTimeout) {
  std::promise<void> seen;
  const auto over = seen.get_future().share();
  const auto ranks = [&, store = std::make_shared<HashStore>()](int rank) {
    init_process_group(
        {.timeout = std::chrono::minutes(30), .world_size = 2, .rank = rank, .store = store});
    if (rank == 1) return over.wait();
    set_timeout(milliseconds(100));
    EXPECT_EQ(default_group()->timeout(), milliseconds(100));
    const auto group = new_group({.ranks = {0}, .use_local_synchronization = true});
    set_timeout(seconds(5), group);
    EXPECT_EQ(group->timeout(), seconds(5));
    EXPECT_EQ(default_group()->timeout(), milliseconds(100));
    EXPECT_HAS(message_of<DistBackendError>([] { barrier(); }), "rank 1");
    seen.set_value();
  };
  spawn(ranks, {.nprocs = 2, .mode = SpawnMode::threads});
  EXPECT_HAS(message_of<DistError>([] { set_timeout(seconds(1)); }), "set_timeout");
}

TEST(Groups, Abort) {
  on_ranks(2, [](int rank) {
    const auto group = new_group();
    const auto said = message_of<DistBackendError>([&] {
      if (rank == 0) abort_process_group(group, "the loss is not a number");
      barrier({.group = group});
    });
    EXPECT_HAS(said, "the loss is not a number");
    EXPECT_HAS(said, "rank 0");
    EXPECT_THROW(barrier({.group = group}), DistBackendError);
    barrier();  // other groups are unaffected
  });
  EXPECT_HAS(message_of<DistError>([] { abort_process_group(); }), "abort_process_group");
}

}  // namespace
}  // namespace muster
