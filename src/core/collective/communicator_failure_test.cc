// SPDX-License-Identifier: BSD-3-Clause
// Deadlines, disagreements, ends.
#include <fstream>

#include "core/collective/testing/communicator_job.h"
#include "testing/limits.h"
#include "testing/scratch_folder.h"

namespace muster::collective {
namespace {

using namespace communicator_test;

TEST(Failure, ADeadlineNamesTheMissingRank) {
  for (bool region : {false, true}) {
    std::barrier gate(3);
    with_group(
        3, Wire::region,
        [&](int rank, Communicator& group) {
          Values out(1);
          ASSERT_TRUE(group.run(all_reduce({1}, out), soon()).ok());
          if (rank != 1) {
            const TimePoint began = steady_clock().now();
            const Status late = group.run(all_reduce({1}, out), in(seconds(2)));
            EXPECT_LT(steady_clock().now() - began, seconds(10));
            EXPECT_EQ(late.code(), Code::timed_out) << late.message();
            EXPECT_EQ(late.ranks(), std::vector<int>{1}) << late.message();
            EXPECT_TRUE(contains(late.message(),
                                 "all_reduce(SUM, int64, 1 element), call 2 of group 'test'"))
                << late.message();
            EXPECT_TRUE(contains(late.message(), "rank 1")) << late.message();
          }
          gate.arrive_and_wait();
          if (rank == 1) {
            // In a region, all data of the missed call is there; afterwards the rank learns that
            // others waited for it.
            Status next = group.run(all_reduce({1}, out), soon());
            if (next.ok()) next = group.run(all_reduce({1}, out), soon());
            EXPECT_EQ(next.code(), Code::timed_out) << next.message();
            EXPECT_TRUE(contains(next.message(), "rank 1")) << next.message();
          }
          EXPECT_FALSE(group.failure().ok());
        },
        region);
  }
}

// spec: F18 ranks that call different collectives, or the same with different dtype, op, root or
// size: every rank fails, both calls named
TEST(Failure, DifferentCallsAreNamedOnEveryRank) {
  struct Case {
    const char* what;
    std::function<Args(Values&in, Values&out)> usual, odd;
    const char* usual_text;
    const char* odd_text;
  };
  const auto sum = [](Values& in, Values& out) { return all_reduce(in, out); };
  const std::vector<Case> cases{
      {"operation", sum, [](Values&, Values& out) { return broadcast(out, 0); }, "all_reduce(",
       "broadcast("},
      {"dtype", sum,
       [](Values& in, Values& out) {
         Args args = all_reduce(in, out);
         args.dtype = DType::float64;
         return args;
       },
       "int64", "float64"},
      {"reduction", sum, [](Values& in, Values& out) { return all_reduce(in, out, Reduce::max); },
       "SUM", "MAX"},
      {"size", sum,
       [](Values& in, Values& out) {
         Args args = all_reduce(in, out);
         args.inputs[0] = args.inputs[0].first(8);
         args.outputs[0] = args.outputs[0].first(8);
         return args;
       },
       "4 elements", "1 element)"},
      {"root, each waiting for the other", [](Values&, Values& out) { return broadcast(out, 0); },
       [](Values&, Values& out) { return broadcast(out, 1); }, "root 0", "root 1"},
  };
  for (bool region : {false, true}) {
    for (const Case& each : cases) {
      // The odd rank is 0, so with different roots 0 waits for 1 and 1 for 0.
      with_group(
          3, Wire::region,
          [&](int rank, Communicator& group) {
            Values in(4, 1), out(4);
            const TimePoint began = steady_clock().now();
            Status status = group.run((rank == 0 ? each.odd : each.usual)(in, out), soon());
            if (status.ok())
              status = group.close(soon());  // it had returned before the mismatch
                                             // was known
            EXPECT_LT(steady_clock().now() - began, seconds(10));
            EXPECT_EQ(status.code(), Code::mismatch)
                << each.what << " on rank " << rank << ": " << status.message();
            EXPECT_TRUE(contains(status.message(), each.usual_text) &&
                        contains(status.message(), each.odd_text))
                << each.what << ": " << status.message();
          },
          region);
    }
  }
}

// With its own size the odd rank exchanges with the root, or the root with all, while the others
// use a tree: messages arrive that no rank waits for.
// spec: F18 different sizes, where they choose different algorithms
TEST(Failure, DifferentSizesThatChooseDifferentAlgorithmsAreNamed) {
  constexpr int kRanks = 8;
  const testing::ScratchFolder scratch;
  std::ofstream(scratch.file("tuning")) << "version = 1\nnetwork.gather.8 = tree <= 256, "
                                           "direct\nnetwork.scatter.8 = tree <= 256, direct\n";
  const Variable tuning("MUSTER_TUNING", scratch.file("tuning"));
  for (const Op op : {Op::gather, Op::scatter}) {
    for (int odd = 0; odd < kRanks; ++odd) {
      with_group(kRanks, Wire::loopback, [&](int rank, Communicator& group) {
        const std::size_t count = rank == odd ? 8 : 4;
        Values mine(count), all(kRanks * count);
        Status status = group.run(pieces(op, mine, all, 0, group), soon());
        if (status.ok())
          status = group.close(soon());  // it had returned before the mismatch was
                                         // known
        EXPECT_EQ(status.code(), Code::mismatch)
            << "rank " << rank << ", rank " << odd << " is odd: " << status.message();
        EXPECT_TRUE(contains(status.message(), "4 elements") &&
                    contains(status.message(), "8 elements"))
            << status.message();
      });
    }
  }
}

// spec: F18 sizes may differ where the operation lets them, but all must give the same ones
TEST(Failure, DifferentSplitsAreNamed) {
  with_group(2, Wire::loopback, [](int rank, Communicator& group) {
    Values mine(3), a(rank == 0 ? 3 : 2), b(3);
    Args args;
    args.op = Op::all_gather;
    args.dtype = DType::int64;
    args.inputs = {bytes(mine)};
    args.outputs = {bytes(a), bytes(b)};
    if (rank == 1) args.outputs[1] = bytes(b);
    const Status status = group.run(args, soon());
    EXPECT_EQ(status.code(), Code::mismatch) << status.message();
    EXPECT_TRUE(contains(status.message(), "6 elements in all") &&
                contains(status.message(), "5 elements in all"))
        << status.message();
  });
}

// spec: F18 a skipped call that leaves identical ones is named at destroy
TEST(Failure, ASkippedLastCallIsNamedAtClose) {
  for (bool region : {false, true}) {
    with_group(
        3, Wire::region,
        [](int rank, Communicator& group) {
          Values value(1);
          // The root of a broadcast completes at once, so only the comparison at the end shows that
          // rank 2 skipped the call.
          ASSERT_TRUE(group.run(broadcast(value, 0), soon()).ok());
          Status status;
          if (rank != 2) status = group.run(broadcast(value, 0), soon());
          if (status.ok()) status = group.close(soon());
          EXPECT_EQ(status.code(), Code::mismatch) << status.message();
          EXPECT_EQ(status.ranks(), std::vector<int>{2}) << status.message();
          EXPECT_TRUE(contains(status.message(), "rank 2")) << status.message();
        },
        region);
  }
}

// spec: F18 a skipped call is named while another rank still waits in it
TEST(Failure, ASkippedCallIsNamedWhileOthersWaitInIt) {
  std::barrier gate(3);
  with_group(3, Wire::loopback, [&](int rank, Communicator& group) {
    Values out(1);
    ASSERT_TRUE(group.run(all_reduce({1}, out), soon()).ok());
    gate.arrive_and_wait();
    const TimePoint began = steady_clock().now();
    const Status status = rank == 2
                              ? group.close(in(muster::testing::kMustHappen))
                              : group.run(all_reduce({1}, out), in(muster::testing::kMustHappen));
    EXPECT_LT(steady_clock().now() - began, seconds(20));
    EXPECT_EQ(status.code(), Code::mismatch) << status.message();
    EXPECT_EQ(status.ranks(), std::vector<int>{2}) << status.message();
    EXPECT_TRUE(contains(status.message(), "skipped a call")) << status.message();
  });
}

TEST(Failure, AnAbortEndsTheCallsOfAllMembers) {
  for (Wire wire : testing::kWires) {
    std::barrier gate(3);
    with_group(3, wire, [&](int rank, Communicator& group) {
      Values out(1);
      ASSERT_TRUE(group.run(all_reduce({1}, out), soon()).ok());
      gate.arrive_and_wait();
      if (rank == 1) group.abort("the test wants it");
      const Status status = group.run(all_reduce({1}, out), in(muster::testing::kMustHappen));
      EXPECT_FALSE(status.ok());
      EXPECT_EQ(status.ranks(), std::vector<int>{1}) << status.message();
      EXPECT_TRUE(contains(status.message(), "the test wants it")) << status.message();
    });
  }
}

// A forked child has the parent's memory, including shared regions: none of its calls may reach the
// group.
TEST(Failure, AForkedChildCannotUseItsParentsGroups) {
  for (Wire wire : {Wire::loopback, Wire::region, Wire::shm}) {
    std::barrier gate(2);
    with_group(2, wire, [&](int rank, Communicator& group) {
      Values out(3);
      ASSERT_TRUE(group.run(all_reduce({1, 2, 3}, out), soon()).ok());
      gate.arrive_and_wait();
      if (rank == 0) {
        const pid_t child = ::fork();
        ASSERT_GE(child, 0);
        if (child == 0) {
          const Values in{7, 7, 7};
          const bool collective = group.run(all_reduce(in, out), soon()).code() == Code::aborted;
          const bool started =
              group.start(all_reduce(in, out), soon())->wait(soon()).code() == Code::aborted;
          const bool sends =
              group.send(1, 0, bytes(in), DType::int64, soon())->wait(soon()).code() ==
              Code::aborted;
          group.refuse(Op::barrier);
          group.abort("a child's wish");
          ::_exit(collective && started && sends && group.close(soon()).ok() ? 0 : 1);
        }
        int result = -1;
        EXPECT_EQ(::waitpid(child, &result, 0), child);
        EXPECT_TRUE(WIFEXITED(result) && WEXITSTATUS(result) == 0) << result;
      }
      gate.arrive_and_wait();
      ASSERT_TRUE(group.run(all_reduce({4, 5, 6}, out), soon()).ok());
      EXPECT_EQ(out, (Values{8, 10, 12}));
    });
  }
}

TEST(Failure, ADeadRankIsNamedByAllSurvivors) {
  struct Case {
    Op op;
    int victim;
    std::size_t count;
  };
  // In the tree of four ranks, rank 2 forwards what rank 3 sends or receives.
  const Variable forced("MUSTER_ALGORITHM", "gather:tree,scatter:tree,reduce:direct");
  std::vector<Case> cases{{Op::all_reduce, 3, 30'000}};
  for (const int victim : {0, 3}) {
    for (const std::size_t count : {12'000, 100'000})
      cases.push_back({Op::reduce, victim, count});  // uses ready-to-receive; several chunks
  }
  for (const Op op : {Op::gather, Op::scatter}) {
    for (const int victim : {0, 2, 3}) {
      for (const std::size_t count : {1, 30'000}) cases.push_back({op, victim, count});
    }
  }
  for (Wire wire : {Wire::loopback, Wire::region}) {
    for (const Case& each : cases) {
      testing::RankThreadsOptions options;
      options.ranks = 4;
      options.wire = wire;
      options.hub = transport::make_loopback_hub(4, wire == Wire::region, 4);
      std::barrier gate(4);
      run_ranks(options, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
        const Group group = make(fabric, all_of(4), "test");
        ASSERT_TRUE(group);
        Values in(each.count, 1), out(each.count), all(4 * each.count, 1);
        Args call = each.op == Op::gather || each.op == Op::scatter
                        ? pieces(each.op, in, all, 0, *group)
                        : all_reduce(in, out);
        if (each.op == Op::reduce) {
          call.op = Op::reduce;
          call.root = 0;
          if (rank != 0) call.outputs.clear();
        }
        for (int round = 0; round < 5; ++round) ASSERT_TRUE(group->run(call, soon()).ok());
        gate.arrive_and_wait();
        if (rank == each.victim) {
          options.hub->kill(rank);
          return;
        }
        Status status;
        while (status.ok()) status = group->run(call, soon());
        const std::string dead = "rank " + std::to_string(each.victim);
        EXPECT_EQ(status.code(), Code::peer_failed) << status.message();
        EXPECT_EQ(status.ranks(), std::vector<int>{each.victim}) << status.message();
        EXPECT_TRUE(contains(status.message(), std::string(info(each.op).name) + "(") &&
                    contains(status.message(), "group 'test'") && contains(status.message(), dead))
            << status.message();
      });
    }
  }
}

TEST(Failure, InvalidCallsAreFoundBeforeAnythingIsSent) {
  with_group(2, Wire::loopback, [](int rank, Communicator& group) {
    Values in(4), out(4);
    const auto expect = [&](Args args, Code code, const std::vector<std::string>& parts) {
      const Status status = group.run(args, soon());
      EXPECT_EQ(status.code(), code) << status.message();
      for (const auto& part : parts)
        EXPECT_TRUE(contains(status.message(), part)) << status.message() << " lacks " << part;
      EXPECT_EQ(group.start(args, soon())->wait(soon()).code(), code);
    };
    Args args = all_reduce(in, out);
    args.outputs[0] = args.outputs[0].first(24);
    expect(args, Code::invalid_argument, {"all_reduce", "24", "32", "group 'test'"});
    args = all_reduce(in, out);
    args.inputs.clear();
    expect(args, Code::invalid_argument, {"1 input", "got 0"});
    args = all_reduce(in, out);
    args.inputs[0] = args.inputs[0].first(12);
    expect(args, Code::invalid_argument, {"12 bytes", "int64"});
    args = all_reduce(in, out);
    args.inputs[0] = std::as_bytes(std::span(out)).first(24);
    args.outputs[0] = args.outputs[0].subspan(8);
    expect(args, Code::invalid_argument, {"overlapping"});
    args = all_reduce(in, out);
    args.dtype = DType::complex64;
    args.reduce = Reduce::max;
    expect(args, Code::unsupported, {"MAX", "complex64"});
    expect(broadcast(out, 2), Code::invalid_argument, {"broadcast", "root", "got 2"});
    args = broadcast(out, 0);
    args.op = Op::all_to_all;
    args.inputs = {bytes(std::as_const(in))};
    expect(args, Code::invalid_argument, {"2 inputs", "got 1"});
    args = Args();
    args.op = Op::reduce_scatter;
    args.dtype = DType::int64;
    args.inputs = {bytes(std::as_const(in)), bytes(std::as_const(in))};
    args.outputs = {bytes(out).first(8)};
    expect(args, Code::invalid_argument, {"reduce_scatter", "8 bytes", "32"});
    EXPECT_EQ(group.sequence(), 0u);
    ASSERT_TRUE(group.run(all_reduce({rank}, out = Values(1)), soon()).ok())
        << "the group is as good as new";
  });
}

}  // namespace
}  // namespace muster::collective
