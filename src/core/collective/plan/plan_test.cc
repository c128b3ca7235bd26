// SPDX-License-Identifier: BSD-3-Clause
// Plans are executed symbolically: a block is the set of ranks whose contribution it holds.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "core/collective/plan/hosts_plan.h"
#include "core/collective/plan/plan.h"
#include "core/collective/select/selection.h"
#include "core/collective/testing/host_layouts.h"

namespace muster::collective::plan {
namespace {

constexpr int kLargest = 64;
constexpr int kManyHosts = 9;  // ranks; they can be put on hosts in 256 ways

// spec: F5 uneven sizes, F16 zero elements: slices cover every element once, whatever the count
TEST(Slices, CoverEverythingOnce) {
  for (int parts = 1; parts <= kLargest; ++parts) {
    for (std::size_t count : {0u, 1u, 2u, 7u, 63u, 64u, 65u, 1021u}) {
      std::size_t at = 0;
      for (int index = 0; index < parts; ++index) {
        const Slice slice = slice_of(count, parts, index);
        ASSERT_EQ(slice.begin, at) << parts << " parts of " << count;
        ASSERT_LE(slice.count, count / parts + 1);
        at = slice.end();
      }
      ASSERT_EQ(at, count);
    }
  }
}

TEST(Slices, ARootThatReducesAloneHoldsLittle) {
  for (const int size : {1, 2, 9}) EXPECT_EQ(direct_chunk_bytes(size), 256u * 1024) << size;
  for (const int size : {10, 17, 64, 513}) {
    const std::size_t chunk = direct_chunk_bytes(size),
                      all = 2 * chunk * static_cast<std::size_t>(size - 1);
    EXPECT_LE(all, 4u * 1024 * 1024) << size;
    EXPECT_GT(all, 3u * 1024 * 1024) << size;
    EXPECT_EQ(chunk % 64, 0u) << size;
  }
  EXPECT_EQ(direct_chunk_bytes(100'000), 4u * 1024);
}

TEST(Slices, ARootSendsReadyToReceiveForTwoMessages) {
  for (const int size : {3, 9, 32}) {
    for (const std::size_t bytes : {std::size_t{0}, fixed::kEagerBytes, 2 * fixed::kEagerBytes + 1})
      EXPECT_FALSE(direct_uses_rtr(bytes, size)) << bytes;
    for (const std::size_t bytes : {fixed::kEagerBytes + 1, 2 * fixed::kEagerBytes})
      EXPECT_TRUE(direct_uses_rtr(bytes, size)) << bytes;
  }
  for (const int size : {1, 2, 64})
    EXPECT_FALSE(direct_uses_rtr(2 * fixed::kEagerBytes, size)) << size;
}

TEST(Slices, NothingGoesInOneMessage) {
  EXPECT_EQ(messages_for(0, 0), 1u);
  EXPECT_EQ(messages_for(8, 8), 1u);
  EXPECT_EQ(messages_for(9, 8), 2u);
}

TEST(Slices, ChunksCoverEverythingOnce) {
  for (std::size_t count : {0u, 1u, 7u, 8u, 9u, 100u}) {
    std::size_t at = 0;
    for (std::size_t index = 0; index < chunks_in(count, 8); ++index) {
      const Slice chunk = chunk_of(count, 8, index);
      ASSERT_EQ(chunk.begin, at);
      ASSERT_GT(chunk.count, 0u);
      at = chunk.end();
    }
    ASSERT_EQ(at, count);
    ASSERT_EQ(chunk_of(count, 8, chunks_in(count, 8)).count, 0u);
  }
}

TEST(HostsPlan, NamesTheOthersOfAHostAndOtherHosts) {
  for (int size = 1; size <= kManyHosts; ++size) {
    for (const auto& first_ranks : all_hosts(size)) {
      for (int rank = 0; rank < size; ++rank) {
        const HostsPlan plan(rank, size, first_ranks);
        ASSERT_EQ(plan.first(plan.host()) + plan.place(), rank);
        ASSERT_EQ(plan.neighbour(plan.place()), rank);
        std::vector<int> places{plan.place()}, hosts{plan.host()};
        for (int i = 0; i + 1 < plan.ranks_here(); ++i) places.push_back(plan.other_place(i));
        for (int i = 0; i + 1 < plan.hosts(); ++i) hosts.push_back(plan.other_host(i));
        for (auto* all : {&places, &hosts}) {
          std::ranges::sort(*all);
          for (std::size_t i = 0; i < all->size(); ++i) ASSERT_EQ((*all)[i], static_cast<int>(i));
        }
      }
    }
  }
}

/// The same as `handled_by`, computed from `handler`.
std::vector<int> handled_by(const HostsPlan& plan, int place) {
  std::vector<int> owners;
  for (int piece = 0; piece < plan.pieces(); ++piece) {
    const int owner = plan.owner_of(piece);
    if (plan.handler(plan.host(), owner) == plan.neighbour(place)) owners.push_back(owner);
  }
  return owners;
}

TEST(HostsPlan, EachPieceIsHandledByOneRankOfEachHost) {
  for (int size = 1; size <= kManyHosts; ++size) {
    for (const auto& first_ranks : all_hosts(size)) {
      for (int root = -1; root < size; ++root) {
        for (int rank = 0; rank < size; ++rank) {
          const HostsPlan plan(rank, size, first_ranks, root);
          if (!plan.owns(plan.host())) continue;
          for (int place = 0; place < plan.ranks_here(); ++place) {
            std::vector<int> owners;
            owners.reserve(static_cast<std::size_t>(size));
            for (int i = 0; i < plan.handled_by(place); ++i)
              owners.push_back(plan.handled_by(place, i));
            ASSERT_EQ(owners, handled_by(plan, place)) << hosts_text(size, first_ranks);
            ASSERT_EQ(owners[static_cast<std::size_t>(plan.own_index(place))],
                      plan.neighbour(place));
            ASSERT_LE(plan.handled_by(place), plan.handled_by(0)) << "memory is sized by it";
            ASSERT_GE(plan.handled_by(place), plan.handled_by(0) - 1) << "all do the same work";
          }
        }
      }
    }
  }
}

TEST(HostsPlan, OnHostsOfTheSameSizeTheRankAtTheOwnersPlaceHandlesAPiece) {
  for (const int per_host : {1, 2, 3, 4, 6, 12}) {
    const auto first_ranks = even_hosts(12, per_host);
    for (int root = -1; root < 12; ++root) {
      const HostsPlan plan(0, 12, first_ranks, root);
      for (int piece = 0; piece < plan.pieces(); ++piece) {
        const int owner = plan.owner_of(piece);
        for (int host = 0; host < plan.hosts(); ++host)
          ASSERT_EQ(plan.handler(host, owner), host * per_host + owner % per_host);
      }
    }
  }
}

TEST(HostsPlan, ABroadcastHasAPieceForEachRankOfTheOtherHosts) {
  for (const auto& first_ranks : all_hosts(kManyHosts)) {
    for (int root = 0; root < kManyHosts; ++root) {
      const HostsPlan plan(0, kManyHosts, first_ranks, root);
      std::vector<int> pieces;
      for (int owner = 0; owner < kManyHosts; ++owner) {
        if (plan.host_of(owner) == plan.host_of(root)) continue;
        pieces.push_back(plan.piece_of(owner));
        ASSERT_EQ(plan.owner_of(pieces.back()), owner);
      }
      ASSERT_EQ(static_cast<int>(pieces.size()), plan.pieces());
      for (std::size_t i = 0; i < pieces.size(); ++i) ASSERT_EQ(pieces[i], static_cast<int>(i));
    }
  }
}

TEST(HostsPlan, APieceIsCutSoThatHostsAndWiresHaveSomethingToDo) {
  constexpr std::size_t kKiB = 1024;
  const auto chunk_bytes = [](int ranks, int per_host, std::size_t piece) {
    return HostsPlan(0, ranks, even_hosts(ranks, per_host)).chunk_bytes(piece);
  };
  EXPECT_EQ(chunk_bytes(8, 2, 1024 * kKiB), 32 * kKiB);
  EXPECT_EQ(chunk_bytes(8, 2, 128 * kKiB), 32 * kKiB);
  EXPECT_EQ(chunk_bytes(8, 2, 96 * kKiB), 24 * kKiB) << "four rounds";
  EXPECT_EQ(chunk_bytes(160, 2, 1024 * kKiB) / 1024, 25u) << "each rank takes a buffer";
  EXPECT_EQ(chunk_bytes(4096, 2, 1024 * kKiB), 16 * kKiB);
  EXPECT_EQ(chunk_bytes(2, 2, 0), 16 * kKiB);
  EXPECT_EQ(chunk_bytes(8, 1, 96 * kKiB), 32 * kKiB) << "nothing to do within a host";
  EXPECT_EQ(chunk_bytes(4096, 1, 128 * kKiB), 16 * kKiB);
}

// spec: X4.connections over a long way a member has as much on the wire as that takes, and not more
TEST(HostsPlan, OverALongWayChunksAreAsLongAsItTakes) {
  constexpr std::size_t kKiB = 1024, kInFlight = 40 * kKiB * kKiB;
  const auto chunk_bytes = [](int ranks, int per_host, std::size_t piece, std::size_t in_flight) {
    return HostsPlan(0, ranks, even_hosts(ranks, per_host)).chunk_bytes(piece, in_flight);
  };
  for (const int per_host : {1, 2}) {
    for (const std::size_t piece : {0 * kKiB, 1 * kKiB, 96 * kKiB, 128 * kKiB})
      EXPECT_EQ(chunk_bytes(4, per_host, piece, kInFlight), chunk_bytes(4, per_host, piece, 0))
          << piece << ": four rounds have all of it on the wire";
    EXPECT_EQ(chunk_bytes(4, per_host, 4096 * kKiB, kInFlight), 1024 * kKiB) << "four rounds";
  }
  EXPECT_EQ(chunk_bytes(2, 1, kInFlight * kKiB, kInFlight), kInFlight / 4);
  EXPECT_EQ(chunk_bytes(6, 1, kInFlight * kKiB, kInFlight), kInFlight / 4 / 5) << "to five others";
  EXPECT_EQ(chunk_bytes(8, 4, kInFlight * kKiB, kInFlight), kInFlight / 4 / 4);
  EXPECT_EQ(chunk_bytes(4, 1, kInFlight, 64 * kKiB), 32 * kKiB) << "not less than on a short way";
}

// spec: X4.connections as over other algorithms, and no chunk cuts an element
TEST(DirectReduce, OverALongWayChunksAreAsLongAsItTakes) {
  constexpr std::size_t kMiB = 1024 * 1024, kInFlight = 40 * kMiB;
  EXPECT_EQ(direct_chunk(64 * kMiB, 2, kInFlight), 20 * kMiB);
  EXPECT_EQ(direct_chunk(2 * kMiB, 2, kInFlight), kMiB) << "two rounds";
  EXPECT_EQ(direct_chunk(64 * kMiB, 2, 0), direct_chunk_bytes(2));
  EXPECT_EQ(direct_chunk(100, 2, kInFlight), 100u);
  EXPECT_EQ(direct_chunk(0, 2, kInFlight), 0u);
  for (int size = 2; size <= kLargest; ++size) {
    for (const std::size_t bytes : {kMiB + 4, 3 * kMiB - 16, 64 * kMiB + 48}) {
      for (const std::size_t in_flight : {std::size_t{0}, 8 * kMiB, kInFlight})
        ASSERT_EQ(direct_chunk(bytes, size, in_flight) % 64, 0u) << bytes << ", " << size;
    }
  }
}

TEST(RingPlan, EveryRankEndsWithEveryBlock) {
  for (int size = 1; size <= kLargest; ++size) {
    std::vector<std::set<int>> held(size);
    for (int rank = 0; rank < size; ++rank) held[rank] = {rank};
    for (int step = 0; step < size - 1; ++step) {
      auto next = held;
      for (int rank = 0; rank < size; ++rank) {
        const RingPlan plan{rank, size};
        const RingPlan from{plan.previous(), size};
        ASSERT_EQ(from.next(), rank);
        ASSERT_EQ(from.sent_block(step), plan.received_block(step));
        ASSERT_TRUE(held[from.rank].contains(from.sent_block(step)))
            << "rank " << from.rank << " sends what it does not have yet";
        ASSERT_TRUE(next[rank].insert(plan.received_block(step)).second) << "a block came twice";
      }
      held = std::move(next);
    }
    for (int rank = 0; rank < size; ++rank)
      ASSERT_EQ(held[rank].size(), static_cast<std::size_t>(size));
    ASSERT_EQ((RingPlan{0, size}.steps()), size - 1);
  }
}

// spec: X4.order a ring goes in the order that is given, and every rank ends with every block
TEST(RingPlan, GoesInAnOrderThatIsGiven) {
  const std::vector<std::uint8_t> order{2, 0, 4, 1, 3};
  const int size = static_cast<int>(order.size());
  std::vector<std::set<int>> held(order.size());
  for (int rank = 0; rank < size; ++rank) held[static_cast<std::size_t>(rank)] = {rank};
  for (std::size_t place = 0; place < order.size(); ++place) {
    const RingPlan plan{order[place], size, order};
    EXPECT_EQ(plan.next(), order[(place + 1) % order.size()]);
    EXPECT_EQ((RingPlan{plan.next(), size, order}.previous()), plan.rank);
  }
  for (int step = 0; step < size - 1; ++step) {
    for (int rank = 0; rank < size; ++rank) {
      const RingPlan plan{rank, size, order}, from{plan.previous(), size, order};
      ASSERT_EQ(from.sent_block(step), plan.received_block(step));
      if (step == 0) {
        ASSERT_EQ(from.sent_block(0), from.rank);
      } else {
        ASSERT_EQ(from.sent_block(step), from.received_block(step - 1));
      }
      ASSERT_TRUE(held[static_cast<std::size_t>(rank)].insert(plan.received_block(step)).second);
    }
  }
  for (const auto& blocks : held) EXPECT_EQ(blocks.size(), order.size());
}

TEST(ChainPlan, GoesAroundTheRingFromTheRoot) {
  const std::vector<std::uint8_t> order{2, 0, 4, 1, 3};
  const int size = static_cast<int>(order.size());
  for (const bool ordered : {false, true}) {
    const std::span<const std::uint8_t> given = ordered ? order : std::span<const std::uint8_t>();
    for (int root = 0; root < size; ++root) {
      int rank = root;
      for (int number = 1; number < size; ++number) {
        const ChainPlan plan{rank, size, root, given};
        ASSERT_EQ(plan.children(), 1);
        ASSERT_EQ(plan.child(0), (RingPlan{rank, size, given}.next()));
        ASSERT_EQ((ChainPlan{plan.child(0), size, root, given}.parent()), rank);
        rank = plan.child(0);
      }
      EXPECT_EQ((ChainPlan{rank, size, root, given}.children()), 0);
      EXPECT_EQ((ChainPlan{root, size, root, given}.parent()), -1);
    }
  }
}

TEST(PairwisePlan, EveryPairMeetsOnce) {
  for (int size = 1; size <= kLargest; ++size) {
    std::set<std::pair<int, int>> met;
    for (int rank = 0; rank < size; ++rank) {
      const PairwisePlan plan{rank, size};
      for (int step = 1; step <= plan.steps(); ++step) {
        ASSERT_NE(plan.target(step), rank);
        ASSERT_EQ((PairwisePlan{plan.target(step), size}.source(step)), rank);
        ASSERT_TRUE(met.emplace(rank, plan.target(step)).second);
      }
    }
    ASSERT_EQ(met.size(), static_cast<std::size_t>(size) * (size - 1));
  }
}

TEST(BruckPlan, EveryRankEndsWithEveryBlockInItsPlace) {
  for (int size = 1; size <= kLargest; ++size) {
    std::vector<std::vector<int>> held(size);  // by rank: the owner of the block at each position
    for (int rank = 0; rank < size; ++rank) held[rank] = {rank};
    for (int step = 0; step < BruckPlan{0, size}.steps(); ++step) {
      auto next = held;
      for (int rank = 0; rank < size; ++rank) {
        const BruckPlan plan{rank, size};
        const BruckPlan from{plan.source(step), size};
        ASSERT_EQ(from.target(step), rank);
        ASSERT_EQ(held[rank].size(), static_cast<std::size_t>(plan.distance(step)));
        for (int i = 0; i < plan.count(step); ++i) next[rank].push_back(held[from.rank].at(i));
      }
      held = std::move(next);
    }
    for (int rank = 0; rank < size; ++rank) {
      ASSERT_EQ(held[rank].size(), static_cast<std::size_t>(size));
      for (int position = 0; position < size; ++position)
        ASSERT_EQ(held[rank][position], (BruckPlan{rank, size}.owner(position)));
    }
  }
}

// spec: F13 barrier
TEST(DisseminationPlan, NoRankLeavesBeforeAllHaveArrived) {
  for (int size = 1; size <= kLargest; ++size) {
    std::vector<std::set<int>> known(size);
    for (int rank = 0; rank < size; ++rank) known[rank] = {rank};
    for (int step = 0; step < DisseminationPlan{0, size}.steps(); ++step) {
      auto next = known;
      for (int rank = 0; rank < size; ++rank) {
        const int from = DisseminationPlan{rank, size}.source(step);
        ASSERT_EQ((DisseminationPlan{from, size}.target(step)), rank);
        next[rank].insert(known[from].begin(), known[from].end());
      }
      known = std::move(next);
    }
    for (int rank = 0; rank < size; ++rank)
      ASSERT_EQ(known[rank].size(), static_cast<std::size_t>(size));
  }
}

TEST(TreePlan, ReachesEveryRankOnceFromEveryRoot) {
  for (int size = 1; size <= kLargest; ++size) {
    for (int root = 0; root < size; ++root) {
      std::vector<int> depth(size, -1);
      depth[root] = 0;
      ASSERT_EQ((TreePlan{root, size, root}.parent()), -1);
      std::vector<int> reached{root};
      for (std::size_t at = 0; at < reached.size(); ++at) {
        const TreePlan plan{reached[at], size, root};
        for (int index = 0; index < plan.children(); ++index) {
          const int child = plan.child(index);
          ASSERT_EQ(depth[child], -1) << "rank " << child << " was reached twice";
          ASSERT_EQ((TreePlan{child, size, root}.parent()), plan.rank);
          depth[child] = depth[plan.rank] + 1;
          ASSERT_LE(depth[child], doubling_steps(size));
          reached.push_back(child);
        }
      }
      ASSERT_EQ(reached.size(), static_cast<std::size_t>(size)) << "root " << root;
    }
  }
}

TEST(TreePlan, ASubtreeIsARunOfRanks) {
  for (int size = 1; size <= kLargest; ++size) {
    for (int root = 0; root < size; ++root) {
      ASSERT_EQ((TreePlan{root, size, root}.subtree()), size);
      for (int rank = 0; rank < size; ++rank) {
        const TreePlan plan{rank, size, root};
        int next = rank + 1;
        for (int index = plan.children() - 1; index >= 0; --index) {  // the smallest is adjacent
          ASSERT_EQ(plan.child(index), wrap(next, size));
          ASSERT_EQ(plan.below(index).rank, plan.child(index));
          next += plan.below(index).subtree();
        }
        ASSERT_EQ(next - rank, plan.subtree());
      }
    }
  }
}

TEST(Plans, CostNothingAtAHundredThousandRanks) {
  constexpr int size = 100'000;
  EXPECT_EQ((BruckPlan{99'999, size}.steps()), 17);
  EXPECT_EQ((DisseminationPlan{5, size}.target(16)), 65541);
  EXPECT_EQ((TreePlan{7, size, 7}.children()), 17);
  EXPECT_EQ((TreePlan{65'543, size, 7}.subtree()), 100'000 - 65'536);
  EXPECT_EQ((RingPlan{0, size}.received_block(99'998)), 1);
}

}  // namespace
}  // namespace muster::collective::plan
