// SPDX-License-Identifier: BSD-3-Clause
// Failures of a group on backend nccl: calls differ, a rank does not come, NCCL hangs or fails, or
// a process dies. NCCL is the stand-in (nccl_standin/standin.cc).
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "backends/nccl/nccl_backend.h"
#include "core/trace/reader.h"
#include "nccl_ranks.h"

namespace muster::testing {
namespace {

using deferred::on_device;
using std::chrono::milliseconds;
using std::chrono::seconds;

// spec: F18 different collectives, dtype, op, root, size on nccl: DistError on every rank, naming
// the two calls and ranks, at every debug level
TEST(NcclFailures, DifferentCallsAreNamedOnEveryRank) {
  struct Case {
    std::function<void(int)> call;
    std::vector<std::string> parts;
  };
  const std::vector<Case> cases{
      {[](int rank) { rank == 1 ? broadcast(some(rank), {.src = 0}) : all_reduce(some(rank)); },
       {"rank 0 called all_reduce(SUM, float32, 4 elements)",
        "rank 1 called broadcast(float32, 4 elements, root 0)"}},
      {[](int rank) { all_reduce(on_device(torch::ones({rank == 2 ? 5 : 4}), rank)); },
       {"rank 0 called all_reduce(SUM, float32, 4 elements)",
        "rank 2 called all_reduce(SUM, float32, 5 elements)"}},
      {[](int rank) { all_reduce(some(rank), {.op = rank == 0 ? ReduceOp::MAX : ReduceOp::MIN}); },
       {"rank 0 called all_reduce(MAX", "rank 1 called all_reduce(MIN"}},
      {[](int rank) { broadcast(some(rank), {.src = rank == 1 ? 1 : 0}); },
       {"root 0", "rank 1 called broadcast(float32, 4 elements, root 1)"}},
      {[](int rank) {
         all_reduce(on_device(torch::ones({4}, rank == 1 ? at::kDouble : at::kFloat), rank));
       },
       {"all_reduce(SUM, float32", "all_reduce(SUM, float64"}},
      // A call that one rank could not make.
      {[](int rank) {
         all_reduce(on_device(torch::ones({4}, at::kInt), rank),
                    {.op = rank == 0 ? ReduceOp::BAND : ReduceOp::SUM});
       },
       {}},
  };
  for (const auto level : {DebugLevel::OFF, DebugLevel::DETAIL}) {
    set_debug_level(level);
    for (const auto& one : cases) {
      on_failing_ranks(3, [&](int rank) {
        text_of([&] { all_reduce(some(rank)); });
        const auto first = text_of([&] { one.call(rank); });
        const auto text = !first.empty() && first.find("cannot do") == std::string::npos
                              ? first
                              : told([&] { all_reduce(some(rank)); });
        for (const auto& part : one.parts) EXPECT_HAS(text, part);
        EXPECT_HAS(text, "made different calls as number 2");
      });
    }
  }
  set_debug_level(DebugLevel::OFF);
}

// spec: F18 a skipped call that leaves identical ones is named at destroy on nccl
TEST(NcclFailures, ASkippedCallIsNamedAtDestroy) {
  std::atomic<int> named{0};
  on_nccl_ranks(2, [&](int rank) {
    for (int i = 0; i < 2 + (rank == 0 ? 1 : 0); ++i) {
      const auto tensor = some(rank);
      all_reduce(tensor, {.timeout = seconds(2)});
    }
    named += text_of([] { destroy_process_group(); }).empty() ? 0 : 1;
    init_process_group({.world_size = 1, .rank = 0, .store = std::make_shared<HashStore>()});
  });
  EXPECT_GE(named, 1);
}

// spec: B4.abort a timeout names the ranks that have not entered the call; the communicator is
// aborted and the process lives; A shrunk group goes on [D7]
TEST(NcclFailures, ATimeoutNamesTheRankThatDidNotEnter) {
  on_nccl_ranks(3, [](int rank) {
    all_reduce(some(rank));
    RankLatch* const done = [] {
      static RankLatch latch(2);
      return &latch;
    }();
    if (rank == 1) {
      done->wait();
      const auto text = told([&] { all_reduce(some(rank)); });
      EXPECT_HAS(text, "rank 1");
    } else {
      const auto work = all_reduce(some(rank), {.async_op = true, .timeout = milliseconds(300)});
      const auto text = told([&] { work->wait(); });
      for (const char* part : {"all_reduce number 2 on group default (backend nccl)",
                               "rank 1 had not entered the call within 300 ms"})
        EXPECT_HAS(text, part);
      EXPECT_NE(work->exception(), nullptr);
      done->count_down();
    }
    // The links of the group carry on.
    const auto group = shrink_group({}, {});
    const auto tensor = some(rank);
    all_reduce(tensor, {.group = group});
    EXPECT_SAME(tensor.cpu(), reduced(3, {4}, at::kFloat, ReduceOp::SUM));
  });
}

// spec: B4 a hang inside of NCCL ends at the deadline with a named error
TEST(NcclFailures, AHangInNcclEndsAtTheDeadline) {
  const Variable hang("NCCL_STANDIN_HANG", "1:2");
  on_failing_ranks(2, [](int rank) {
    all_reduce(some(rank));
    const auto work = all_reduce(some(rank), {.async_op = true, .timeout = milliseconds(300)});
    const auto text = told([&] { work->wait(); });
    EXPECT_HAS(text, "all_reduce number 2 on group default (backend nccl)");
    EXPECT_HAS(text, "NCCL had not carried it out within 300 ms");
    const auto later = text_of([&] { all_reduce(some(rank)); });
    EXPECT_HAS(later, "NCCL had not carried it out");
  });
}

// spec: A3 F18 two types that have one width differ, though the engine moves both as bytes
TEST(NcclFailures, AnotherFloat8IsAnotherCall) {
  on_failing_ranks(2, [](int rank) {
    const auto dtype = rank == 0 ? at::kFloat8_e4m3fn : at::kFloat8_e5m2;
    const auto tensor = on_device(values(rank, {4}, dtype), rank);
    const auto text = told([&] { all_reduce(tensor); });
    EXPECT_HAS(text, "made different calls");
    EXPECT_HAS(text, "whose tensors differ in type");
  });
}

// spec: B4.blocking_wait with TORCH_NCCL_BLOCKING_WAIT the wait throws, a synchronous call too
TEST(NcclFailures, WithBlockingWaitTheCallThrows) {
  const Variable hang("NCCL_STANDIN_HANG", "0:2"), blocking("TORCH_NCCL_BLOCKING_WAIT", "1");
  on_failing_ranks(2, [](int rank) {
    const auto tensor = some(rank);
    all_reduce(tensor);
    EXPECT_SAME(deferred::now(tensor), reduced(2, {4}, at::kFloat, ReduceOp::SUM))
        << "it was done on return";
    const auto text = text_of([&] { all_reduce(some(rank), {.timeout = milliseconds(300)}); });
    EXPECT_HAS(text, "within 300 ms");
  });
}

// spec: A3 an error that NCCL finds between calls is named on every rank
TEST(NcclFailures, AnAsynchronousErrorIsNamed) {
  const Variable error("NCCL_STANDIN_ASYNC_ERROR", "1:2");
  on_failing_ranks(2, [](int rank) {
    all_reduce(some(rank));
    const auto text = told([&] { all_reduce(some(rank)); });
    EXPECT_HAS(text, "NCCL reported an error to rank 1 during");
    EXPECT_HAS(text, "remote process exited or there was a network error");
  });
}

// spec: A3 a device that fails during a call is named on every rank, and no thread dies of it
TEST(NcclFailures, AFailedDeviceIsNamed) {
  on_failing_ranks(2, [](int rank) {
    all_reduce(some(rank));
    deferred::is_broken = true;
    const auto text = told([&] { all_reduce(some(rank)); });
    EXPECT_HAS(text, "its device reports: an illegal memory access was encountered");
  });
  deferred::is_broken = false;
}

/// The text that `work` throws, which must not be that of its deadline.
std::string thrown_by(const WorkRef& work) {
  const auto text = told([&] { work->wait(); });
  EXPECT_EQ(text.find("had not"), std::string::npos) << text;
  return text;
}

// spec: A3 an error that NCCL finds during a call ends it long before its deadline: every rank is
// told which rank found it and in which call, and lives; D7 the others go on in a shrunk group
TEST(NcclFailures, AnAsynchronousErrorDuringACallIsNamedAndTheOthersGoOn) {
  const Variable hang("NCCL_STANDIN_HANG", "1:2"), error("NCCL_STANDIN_ASYNC_ERROR", "1:2");
  on_failing_ranks(3, [](int rank) {
    all_reduce(some(rank));
    const auto text =
        thrown_by(all_reduce(some(rank), {.async_op = true, .timeout = std::chrono::hours(1)}));
    for (const char* part : {"NCCL reported an error to rank 1",
                             "during all_reduce number 2 on group default (backend nccl)",
                             "remote process exited or there was a network error"})
      EXPECT_HAS(text, part);
    if (rank == 1) return;
    const auto left = shrink_group({1}, {});
    const auto tensor = on_device(torch::full({4}, rank + 1.0), rank);
    all_reduce(tensor, {.group = left});
    EXPECT_SAME(tensor.cpu(), torch::full({4}, 4.0));
  });
}

// spec: A3 an error that NCCL finds during a message names the message's peer
TEST(NcclFailures, AnAsynchronousErrorOfAMessageNamesThePeer) {
  const Variable hang("NCCL_STANDIN_HANG", "0:1"), error("NCCL_STANDIN_ASYNC_ERROR", "0:1");
  on_failing_ranks(3, [](int rank) {
    const auto sent = rank == 2 ? isend(some(rank), {.dst = 0}) : nullptr;
    const auto text = rank == 0 ? thrown_by(irecv(some(rank), {.src = 2}))
                                : told([&] { all_reduce(some(rank)); });
    EXPECT_HAS(text, "NCCL reported an error to rank 0 during irecv on group default");
    EXPECT_HAS(text, "messages with rank 2: remote process exited");
  });
}

// A late rank and a communicator that is in progress for long are no failures.
TEST(NcclFailures, LateAndInProgressAreNoFailures) {
  const Variable late("NCCL_STANDIN_LATE", "1:2:100"), progress("NCCL_STANDIN_IN_PROGRESS", "300");
  on_nccl_ranks(2, [](int rank) {
    for (int i = 0; i < 3; ++i) {
      const auto tensor = some(rank);
      all_reduce(tensor);
      EXPECT_SAME(tensor.cpu(), reduced(2, {4}, at::kFloat, ReduceOp::SUM));
    }
  });
}

// spec: U2 abort ends what is in flight on nccl
TEST(NcclFailures, AbortEndsWhatIsInFlight) {
  const Variable hang("NCCL_STANDIN_HANG", "0:2");
  on_failing_ranks(2, [](int rank) {
    all_reduce(some(rank));
    const auto work = all_reduce(some(rank), {.async_op = true});
    if (rank == 0) core_of(default_group()).abort("enough of it");
    const auto text = told([&] { work->wait(); });
    EXPECT_HAS(text, "enough of it");
  });
}

// spec: B4.env with TORCH_NCCL_ASYNC_ERROR_HANDLING=0, which ends nothing in NCCL, tensors of a
// call that has failed are not freed while NCCL may use them
TEST(NcclFailures, WhatNcclMayUseIsNotFreed) {
  const Variable handling("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"), hang("NCCL_STANDIN_HANG", "0:2");
  on_failing_ranks(2, [](int rank) {
    all_reduce(some(rank));
    auto tensor = some(rank);
    auto work = all_reduce(tensor, {.async_op = true});
    const auto memory = tensor.storage().getWeakStorageImpl();
    if (rank == 0) core_of(default_group()).abort("enough of it");
    EXPECT_TRUE(comes_true([&] { return work->exception() != nullptr; }));
    work.reset();
    tensor.reset();
    if (rank == 0) {
      EXPECT_FALSE(memory.expired());
    }
  });
}

// spec: U2 abort ends a message and the collective that waits for it on a stream, which is revoked
TEST(NcclFailures, AbortEndsACollectiveBehindAMessage) {
  const Variable hang("NCCL_STANDIN_HANG", "1:2");
  on_failing_ranks(2, [](int rank) {
    static RankLatch ended(2), counted(2);
    all_reduce(some(rank));
    const auto exchange = [rank] {
      const auto tensor = some(rank);
      (rank == 0 ? isend(tensor, {.dst = 1}) : irecv(tensor, {.src = 0}))->wait();
      return tensor;
    };
    exchange().cpu();
    const auto tensor = exchange();  // does nothing on rank 1
    const auto work = all_reduce(tensor, {.async_op = true});
    barrier();
    const int before = standin_calls("ncclCommAbort");
    barrier();
    if (rank == 0) core_of(default_group()).abort("enough of it");
    EXPECT_HAS(told([&] { work->wait(); }), "enough of it");
    ended.count_down();
    ended.wait();
    EXPECT_EQ(standin_calls("ncclCommAbort") - before, 2) << "of the messages, one on each rank";
    counted.count_down();
    counted.wait();
  });
}

// Opening a communicator waits for ranks that never come no longer than the deadline.
TEST(NcclFailures, OpeningEndsAtTheDeadline) {
  on_failing_ranks(2, [](int rank) {
    static RankLatch waited(1);
    if (rank == 1) return waited.wait();
    const auto text = text_of([&] { all_reduce(some(rank), {.timeout = milliseconds(300)}); });
    EXPECT_HAS(text, "rank 1 had not entered the call within 300 ms");
    waited.count_down();
  });
  on_failing_ranks(2, [](int rank) {
    static RankLatch waited(1);
    if (rank == 1) return waited.wait();
    const auto work = isend(some(rank), {.dst = 1});
    core_of(default_group()).abort("that is all");
    const auto text = told([&] { work->wait(); });
    EXPECT_HAS(text, "that is all");
    waited.count_down();
  });
}

// spec: B4.env TORCH_NCCL_ASYNC_ERROR_HANDLING and TORCH_NCCL_BLOCKING_WAIT, and the old names
TEST(NcclFailures, TheVariablesAreRead) {
  const Variable unset("TORCH_NCCL_ASYNC_ERROR_HANDLING", std::nullopt);
  const auto read = [] { return nccl::Environment::read(); };
  EXPECT_EQ(read().handling, nccl::ErrorHandling::unset);
  EXPECT_FALSE(read().blocking_wait);
  EXPECT_FALSE(read().may_share_devices);
  {
    const Variable shared("NCCL_MULTI_RANK_GPU_ENABLE", "1");
    EXPECT_TRUE(read().may_share_devices);
    const Variable wrong("NCCL_MULTI_RANK_GPU_ENABLE", "maybe");
    EXPECT_HAS(text_of(read), "NCCL_MULTI_RANK_GPU_ENABLE");
  }
  {
    const Variable wait("TORCH_NCCL_BLOCKING_WAIT", "1");
    EXPECT_EQ(read().handling, nccl::ErrorHandling::abort) << "its waits throw";
  }
  {
    const Variable old("NCCL_ASYNC_ERROR_HANDLING", "0"), wait("NCCL_BLOCKING_WAIT", "1");
    EXPECT_EQ(read().handling, nccl::ErrorHandling::none);
    EXPECT_TRUE(read().blocking_wait);
    const Variable now("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3");
    EXPECT_EQ(read().handling, nccl::ErrorHandling::end);
  }
  const Variable wrong("TORCH_NCCL_ASYNC_ERROR_HANDLING", "maybe");
  EXPECT_HAS(text_of(read), "TORCH_NCCL_ASYNC_ERROR_HANDLING");
}

// spec: B4.env torch's variables that ask for what the backend does not do are refused by name, and
// the others that it does not read are named: none is ignored in silence
TEST(NcclFailures, VariablesOfTorchAreNotIgnored) {
  const auto read = [] { return text_of([] { nccl::Environment::read(); }); };
  for (const char* name : {"NCCL_COMM_BLOCKING", "TORCH_NCCL_NAN_CHECK",
                           "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"}) {
    {
      const Variable asks(name, "1");
      EXPECT_HAS(read(), std::string("cannot do what ") + name + "=1 asks for");
    }
    const Variable other(name, "0");
    EXPECT_EQ(read(), "");
  }
  const auto before = nccl::Environment::unused();  // the machine's own
  const Variable dump("TORCH_NCCL_A_DUMP", "1"), none("TORCH_NCCL_NOTHING", ""),
      blocking("TORCH_NCCL_BLOCKING_WAIT", "0"), blocks("TORCH_NCCL_USE_COMM_NONBLOCKING", "0"),
      beat("TORCH_NCCL_A_BEAT", "x");
  EXPECT_EQ(read(), "") << "torch's default is no reason to refuse";
  auto now = nccl::Environment::unused();
  EXPECT_TRUE(std::ranges::is_sorted(now));
  std::erase_if(now, [&](const auto& name) { return std::ranges::count(before, name) > 0; });
  EXPECT_EQ(now, (std::vector<std::string>{"TORCH_NCCL_A_BEAT", "TORCH_NCCL_A_DUMP"}));
}

// spec: B4.env B13 TORCH_NCCL_HIGH_PRIORITY gives every group streams of high priority
TEST(NcclFailures, AVariableGivesHighPriority) {
  use_standin();
  const auto library = nccl::NcclLibrary::open(NCCL_STANDIN);
  ASSERT_TRUE(library.ok());
  const auto is_high = [&] { return nccl::NcclSettings(**library, nullptr).is_high_priority(); };
  EXPECT_FALSE(is_high());
  const Variable priority("TORCH_NCCL_HIGH_PRIORITY", "1");
  EXPECT_TRUE(is_high());
}

// spec: H9 the flight recorder has rows of nccl's calls like those of native
TEST(NcclFailures, CallsAreInTheFlightRecorder) {
  on_nccl_ranks(2, [](int rank) {
    all_reduce(some(rank));
    all_reduce(some(rank), {.async_op = true})->wait();
    const auto trace = trace::read_trace(core_of(default_group()).parts().recorder->path());
    ASSERT_TRUE(trace.ok());
    int rows = 0;
    for (const auto& call : trace->records)
      rows += call.name == "all_reduce" && call.sequence > 0 &&
              trace->groups[call.group].name.find("on deferred") != std::string::npos;
    EXPECT_EQ(rows, 2);
  });
}

}  // namespace
}  // namespace muster::testing
