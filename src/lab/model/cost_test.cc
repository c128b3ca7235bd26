// SPDX-License-Identifier: BSD-3-Clause
// The cost model, compared with times computed by hand.
#include "lab/model/cost.h"

#include <gtest/gtest.h>

#include "lab/model/schedule.h"

namespace muster::collective::plan {
namespace {

constexpr double kFar = 8192, kNear = 1024,
                 kAdd = 65536;  // seconds per byte: powers of two, so that sums are exact
constexpr Machine kMachine{.overhead = 1,
                           .latency = 100,
                           .host_latency = 10,
                           .bandwidth = 1 / kFar,
                           .host_bandwidth = 1 / kNear,
                           .reduction = 1 / kAdd};

TEST(Cost, OfOneHostARank) {
  const auto cost = [](Op op, Algorithm algorithm, double bytes, int ranks) {
    return predict(op, algorithm, bytes, kMachine, {ranks, 1});
  };
  EXPECT_DOUBLE_EQ(cost(Op::barrier, Algorithm::dissemination, 0, 5), 3 * (2 + 100));
  EXPECT_DOUBLE_EQ(cost(Op::all_gather, Algorithm::ring, 4, 4), 3 * (2 + 100 + kFar));
  EXPECT_DOUBLE_EQ(cost(Op::all_gather, Algorithm::bruck, 4, 4), 2 * (2 + 100) + 3 * kFar);
  EXPECT_DOUBLE_EQ(cost(Op::all_gather, Algorithm::direct, 4, 4), 6 + 100 + 3 * kFar);
  EXPECT_DOUBLE_EQ(cost(Op::all_reduce, Algorithm::bruck, 8, 4),
                   2 * (2 + 100) + 3 * 8 * (kFar + kAdd));
  EXPECT_DOUBLE_EQ(cost(Op::all_reduce, Algorithm::slices, 8, 4),
                   2 * (6 + 100) + 6 * 2 * kFar + 3 * 2 * kAdd);
  EXPECT_DOUBLE_EQ(cost(Op::all_reduce, Algorithm::ring, 8, 4),
                   6 * (2 + 100) + 6 * 2 * kFar + 3 * 2 * kAdd);
  EXPECT_DOUBLE_EQ(cost(Op::gather, Algorithm::direct, 4, 4), 3 + 100 + 3 * kFar);
  EXPECT_DOUBLE_EQ(cost(Op::scatter, Algorithm::direct, 4, 4), 3 + 100 + 3 * kFar);
  EXPECT_DOUBLE_EQ(cost(Op::all_to_all, Algorithm::direct, 4, 4), 6 + 100 + 3 * kFar);
  EXPECT_DOUBLE_EQ(cost(Op::reduce, Algorithm::direct, 2, 3), 2 + 100 + 2 * 2 * (kFar + kAdd));
  EXPECT_DOUBLE_EQ(cost(Op::broadcast, Algorithm::tree, 1, 1), 0);
}

TEST(Cost, OfTreesAndChainsFollowsTheMessages) {
  const auto cost = [](Algorithm algorithm, double bytes, int ranks) {
    return predict(Op::broadcast, algorithm, bytes, kMachine, {ranks, 1});
  };
  // The root first serves rank 2, which then serves rank 3. A message costs its sender 1 + bytes,
  // and arrives 100 + 1 later.
  EXPECT_DOUBLE_EQ(cost(Algorithm::tree, 1, 4), 2 * (1 + kFar + 100 + 1));
  EXPECT_DOUBLE_EQ(cost(Algorithm::chain, 1, 4), 3 * (1 + kFar + 100 + 1));
  // In four chunks: behind the first, the root sends each to two ranks. In a chain every rank
  // receives and sends each once, but the network is slower.
  const double chunk = static_cast<double>(fixed::kFragmentBytes) * kFar;
  EXPECT_DOUBLE_EQ(cost(Algorithm::tree, 4.0 * fixed::kFragmentBytes, 4),
                   2 * (1 + chunk + 100 + 1) + 3 * 2 * chunk);
  EXPECT_DOUBLE_EQ(cost(Algorithm::chain, 4.0 * fixed::kFragmentBytes, 4),
                   3 * (1 + chunk + 100 + 1) + 3 * chunk);
}

TEST(Cost, OfPiecesAlongATreeFollowsTheMessages) {
  for (const Op op : {Op::gather, Op::scatter}) {
    const auto cost = [op](double bytes, Crew crew) {
      return predict(op, Algorithm::tree, bytes, kMachine, crew);
    };
    // Two pieces to rank 2, one of which goes on to rank 3; the root's direct path to rank 1 is
    // shorter.
    EXPECT_DOUBLE_EQ(cost(4, {4, 1}), 2 * (1 + 100 + 1) + (2 + 1) * kFar);
    // Rank 2 is on another host, rank 3 on the same host as rank 2.
    EXPECT_DOUBLE_EQ(cost(4, {4, 2}), (1 + 100 + 1 + 2 * kFar) + (1 + 10 + 1 + kNear));
    EXPECT_DOUBLE_EQ(cost(3, {3, 3}), (1 + kNear) + (1 + kNear) + 10 + 1)
        << "both are the root's own";
    EXPECT_DOUBLE_EQ(cost(1, {1, 1}), 0);
  }
}

TEST(Cost, RanksOfAHostShareItsNetwork) {
  const Crew crew{4, 2};
  // Around the ring, one rank of each host sends to another host and one stays inside.
  EXPECT_DOUBLE_EQ(predict(Op::all_gather, Algorithm::ring, 4, kMachine, crew),
                   3 * (2 + 100 + kFar + kNear));
  // Both ranks send one piece to each of the other host's ranks, and one to each other.
  EXPECT_DOUBLE_EQ(predict(Op::all_to_all, Algorithm::direct, 4, kMachine, crew),
                   6 + 100 + 4 * kFar + kNear);
  // All on one host.
  EXPECT_DOUBLE_EQ(predict(Op::all_gather, Algorithm::ring, 4, kMachine, {4, 4}),
                   3 * (2 + 10 + kNear));
  EXPECT_DOUBLE_EQ(predict(Op::broadcast, Algorithm::chain, 1, kMachine, {3, 3}),
                   2 * (1 + kNear + 10 + 1));
}

TEST(Cost, ByHostsEachByteLeavesAHostOnce) {
  const auto cost = [](Op op, double bytes, Crew crew) {
    return predict(op, Algorithm::hosts, bytes, kMachine, crew);
  };
  // Three hosts of two ranks, six pieces of two bytes. A rank receives its neighbour's parts of
  // three pieces and adds them; then both ranks of a host send two sums to others and add two.
  const double parts = 10 + 3 * (2 + 2 * kNear + 2 * kAdd), away = 2 * (2 + 2 * 2 * kFar),
               sums = 100 + away + 2 * 2 * kAdd, spread = 10 + 3 * (2 + 2 * kNear);
  EXPECT_DOUBLE_EQ(cost(Op::reduce_scatter, 12, {6, 2}), parts + sums);
  EXPECT_DOUBLE_EQ(cost(Op::all_reduce, 12, {6, 2}), parts + sums + 100 + away + spread);
  EXPECT_DOUBLE_EQ(cost(Op::all_gather, 12, {6, 2}), 100 + away + spread);
  // The four ranks of the hosts but the root's own three bytes each, and send the root the results.
  const double fewer_parts = 10 + 2 * (2 + 3 * kNear + 3 * kAdd),
               fewer_sums = 100 + 2 * (2 + 2 * 3 * kFar) + 2 * 3 * kAdd;
  EXPECT_DOUBLE_EQ(cost(Op::reduce, 12, {6, 2}),
                   fewer_parts + fewer_sums + 100 + 4 * (2 + 3 * kFar));
  // Between two hosts both own pieces.
  EXPECT_DOUBLE_EQ(cost(Op::reduce, 12, {4, 2}), 10 + 2 * (2 + 3 * kNear + 3 * kAdd) + 100 +
                                                     (2 + 2 * 3 * kFar) + 3 * kAdd + 100 +
                                                     2 * (2 + 3 * kFar));
  // The root sends the four ranks of other hosts three bytes each; both ranks of a host pass theirs
  // on to the other one, and to each other what they have.
  EXPECT_DOUBLE_EQ(cost(Op::broadcast, 12, {6, 2}),
                   100 + 4 * (2 + 3 * kFar) + 100 + (2 + 2 * 3 * kFar) + 10 + 2 * (2 + 3 * kNear));
  // Twice the bytes in twice the rounds: the network is the bottleneck of each.
  const double chunk = static_cast<double>(fixed::kHostChunk);
  Machine quick = kMachine;
  quick.reduction = 1 / kNear;
  const auto quickly = [&](double rounds) {
    return predict(Op::all_reduce, Algorithm::hosts, 6 * chunk * rounds, quick, {6, 2});
  };
  EXPECT_DOUBLE_EQ(quickly(8), quickly(4) + 4 * 2 * 2 * (2 + 2 * chunk * kFar));
  // In a reduce the root's network receives results while it sends sums.
  const auto reduced = [&](double rounds) {
    return predict(Op::reduce, Algorithm::hosts, 4 * chunk * rounds, quick, {6, 2});
  };
  EXPECT_DOUBLE_EQ(reduced(8), reduced(4) + 4 * 4 * (2 + chunk * kFar));
}

TEST(Cost, ChunksToARootFollowEachOther) {
  // Three ranks, four chunks each: latency is paid once, the root's two messages per chunk and its
  // work for each.
  const double bytes = 4.0 * static_cast<double>(direct_chunk_bytes(3));
  EXPECT_NEAR(predict(Op::reduce, Algorithm::direct, bytes, kMachine, {3, 1}) /
                  (100 + 4 * 2 + 2 * bytes * (kFar + kAdd)),
              1, 1e-12);
}

TEST(Cost, ChunksOfSlicesFollowEachOther) {
  // Two ranks of two hosts, slices of four chunks: latency is paid once for all. After the first
  // chunk the sums are made while the network carries others.
  const double chunk = static_cast<double>(fixed::kHostChunk);
  EXPECT_NEAR(predict(Op::all_reduce, Algorithm::slices, 8 * chunk, kMachine, {2, 1}) /
                  (2 * 100 + 2 * 2 + 2 * chunk * kFar + 4 * chunk * kAdd + 3 * 2 * 2),
              1, 1e-12);
}

// The textbook ranking of these algorithms: few steps win for small calls, few bytes for large
// ones.
TEST(Cost, RanksAlgorithmsBySize) {
  const Machine machine;
  for (const int ranks : {8, 64, 1000}) {
    const auto faster = [&](Op op, Algorithm a, Algorithm b, double bytes) {
      return predict(op, a, bytes, machine, {ranks, 1}) <
             predict(op, b, bytes, machine, {ranks, 1});
    };
    EXPECT_TRUE(faster(Op::all_reduce, Algorithm::bruck, Algorithm::ring, 8));
    EXPECT_TRUE(faster(Op::all_reduce, Algorithm::bruck, Algorithm::slices, 8));
    EXPECT_TRUE(faster(Op::all_reduce, Algorithm::slices, Algorithm::bruck, 1e8));
    EXPECT_TRUE(faster(Op::broadcast, Algorithm::tree, Algorithm::chain, 8));
    EXPECT_TRUE(faster(Op::broadcast, Algorithm::chain, Algorithm::tree, 1e9));
    EXPECT_TRUE(faster(Op::all_gather, Algorithm::bruck, Algorithm::ring, 64));
    EXPECT_EQ(faster(Op::gather, Algorithm::tree, Algorithm::direct, 64), ranks > 8);
    EXPECT_EQ(faster(Op::scatter, Algorithm::tree, Algorithm::direct, 64), ranks > 8);
  }
}

// One host stands for all.
TEST(Cost, OfAHundredThousandRanks) {
  const Machine machine;
  for (int op = 0; op < kCollectives; ++op) {
    for (const Algorithm algorithm : algorithms_of(Medium::network, static_cast<Op>(op))) {
      const double seconds = predict(static_cast<Op>(op), algorithm, 1e6, machine, {100'000, 8});
      EXPECT_GT(seconds, machine.latency);
      EXPECT_LT(seconds, 1e4) << info(static_cast<Op>(op)).name;
    }
  }
}

}  // namespace
}  // namespace muster::collective::plan
