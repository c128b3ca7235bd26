// SPDX-License-Identifier: BSD-3-Clause
// Groups of every kind, their ranks, and many groups at once.
#include <algorithm>
#include <random>
#include <thread>

#include "core/group/creation/creation_deadlock.h"
#include "core/group/group_core.h"
#include "core/group/job.h"
#include "core/group/testing/ranks.h"
#include "core/group/world.h"
#include "testing/seed.h"

namespace muster {
namespace {

using std::chrono::seconds;
using testing::message_of;
using testing::on_ranks;
using Ranks = std::vector<int>;

int sum_over(const Group& group, int mine) {
  auto tensor = torch::full({1}, mine, at::kInt);
  all_reduce(tensor, {.group = group});
  return tensor.item<int>();
}

// spec: D1 ranks=None: all ranks; timeout and backend are the new group's own
TEST(Groups, EveryArgumentOfNewGroup) {
  on_ranks(
      3,
      [](int rank) {
        const auto all = new_group();
        EXPECT_EQ(get_process_group_ranks(all), (Ranks{0, 1, 2}));
        EXPECT_EQ(get_backend(all), "gloo");
        EXPECT_EQ(sum_over(all, 1 << rank), 7);
        const auto tcp = new_group({.timeout = seconds(17), .backend = "tcp"});
        EXPECT_EQ(get_backend(tcp), "tcp");
        EXPECT_EQ(tcp->timeout(), seconds(17));
        EXPECT_EQ(sum_over(tcp, 1 << rank), 7);
        const auto per_device = new_group({.ranks = Ranks{0, 2}, .backend = "cpu:native"});
        if (rank != 1) {
          EXPECT_EQ(get_backend(per_device), "cpu:native");
          EXPECT_EQ(sum_over(per_device, 1 << rank), 5);
        }
      },
      "gloo");
}

// spec: D1 the group keeps the list's order if sorting is off
TEST(Groups, OrderOfTheList) {
  on_ranks(3, [](int rank) {
    const auto turned = new_group({.ranks = Ranks{2, 0}, .sort_ranks = false});
    EXPECT_EQ(turned->is_member(), rank != 1);
    if (rank == 1) return;
    EXPECT_EQ(get_process_group_ranks(turned), (Ranks{2, 0}));
    EXPECT_EQ(get_rank(turned), rank == 2 ? 0 : 1);
    EXPECT_EQ(sum_over(turned, 1 << rank), 5);
    EXPECT_HAS(message_of<DistError>([&] {
                 new_group({.ranks = Ranks{2, 2}, .sort_ranks = false});
               }),
               "names a rank twice");
  });
}

// spec: D1.mismatch a mismatch is an error naming both calls: other backend, other timeout
TEST(Groups, DifferentArgumentsAreNamed) {
  on_ranks(2, [](int rank) {
    auto said =
        message_of<DistError>([&] { new_group({.backend = rank == 0 ? "native" : "tcp"}); });
    EXPECT_HAS(said, "backend=native");
    EXPECT_HAS(said, "backend=tcp");
    said =
        message_of<DistError>([&] { new_group({.timeout = rank == 0 ? seconds(5) : seconds(6)}); });
    EXPECT_HAS(said, "timeout=5 s");
    EXPECT_HAS(said, "timeout=6 s");
    EXPECT_EQ(sum_over(new_group(), 1), 2);
  });
}

// spec: D2 only members call, also while others make groups of their own; D8 a non-member that
// calls gets a group of rank -1
TEST(Groups, OnlyMembersCall) {
  on_ranks(4, [](int rank) {
    const Ranks mine = rank % 2 == 0 ? Ranks{0, 2} : Ranks{1, 3};
    const auto group = new_group({.ranks = mine, .use_local_synchronization = true});
    EXPECT_EQ(sum_over(group, 1 << rank), rank % 2 == 0 ? 5 : 10);
    const auto not_mine = new_group(
        {.ranks = rank % 2 == 0 ? Ranks{1, 3} : Ranks{0, 2}, .use_local_synchronization = true});
    EXPECT_EQ(get_rank(not_mine), -1);
  });
}

// spec: D8 overlapping groups made in different orders by different members end in an error naming
// both
TEST(Groups, OverlappingGroupsInDifferentOrders) {
  on_ranks(3, [](int rank) {
    const Ranks pair{0, 1};
    const Ranks all{0, 1, 2};
    const auto said = message_of<DistError>([&] { new_group({.ranks = rank == 0 ? pair : all}); });
    EXPECT_HAS(said, "[0, 1]");
    EXPECT_HAS(said, "[0, 1, 2]");
  });
}

// spec: D8 overlapping groups made in different orders by different members end in an error naming
// both, never a hang: if only members call, also in a cycle of three
TEST(Groups, OverlappingGroupsInDifferentOrdersWhereOnlyMembersCall) {
  on_ranks(4, [](int rank) {
    // Ranks 0 and 3 wait for each other in two calls; ranks 0, 1 and 2 in a cycle.
    const Ranks first = rank == 0   ? Ranks{0, 1}
                        : rank == 1 ? Ranks{1, 2}
                        : rank == 2 ? Ranks{0, 2}
                                    : Ranks{0, 1, 3};
    const auto said = message_of<DistError>([&] {
      new_group({.ranks = first, .timeout = seconds(300), .use_local_synchronization = true});
    });
    EXPECT_HAS(said, "different orders");
    for (const auto* call :
         {"new_group(ranks=[0, 1],", "new_group(ranks=[1, 2],", "new_group(ranks=[0, 2],"})
      EXPECT_HAS(said, call);
    barrier();
  });
}

// spec: D8 a group that its members make alone against one that all ranks make ends in an error
// naming both, on every rank
TEST(Groups, MadeByItsMembersAgainstMadeByAll) {
  on_ranks(3, [](int rank) {
    const auto said = message_of<DistError>([&] {
      new_group(
          {.ranks = Ranks{0, 1}, .timeout = seconds(300), .use_local_synchronization = rank == 0});
    });
    EXPECT_HAS(said,
               "rank 0 waits in new_group(ranks=[0, 1], backend=cpu:native, timeout=5 min, "
               "use_local_synchronization)");
    EXPECT_HAS(said,
               "ranks 1, 2 wait in new_group(ranks=[0, 1], backend=cpu:native, timeout=5 min)");
    EXPECT_HAS(message_of<DistError>([] { barrier(); }),
               "use_local_synchronization");  // the default group is out of step
  });
}

// spec: F18 destroy throws a failure not yet shown, whenever it arrived; it does not repeat what a
// call has thrown
TEST(Groups, DestroyTellsWhatNobodyWasTold) {
  on_ranks(2, [](int rank) {
    for (int round = 0; round < 20; ++round) {
      const auto group = new_group();
      const bool told = round % 2 == 0;
      if (rank == 1) {
        abort_process_group(group, "rank 1 has had enough");
        barrier();
        EXPECT_NO_THROW(destroy_process_group(group));
        continue;
      }
      if (told) {
        const auto work = all_reduce(torch::ones({4}), {.group = group, .async_op = true});
        EXPECT_HAS(message_of<DistError>([&] { work->wait(); }), "has had enough");
      }
      barrier();
      if (told) {
        EXPECT_NO_THROW(destroy_process_group(group));
      } else {
        EXPECT_HAS(message_of<DistError>([&] { destroy_process_group(group); }), "has had enough");
      }
    }
  });
}

// spec: D8 which overlapping creations wait for each other for ever
TEST(CreationDeadlockDetector, FindsWhatCanNeverEnd) {
  using group::stuck_creations;
  using Waiting = std::vector<group::WaitingCreation>;
  const auto names = [](const Waiting& waiting) {
    std::vector<std::string> out;
    for (const auto& creation : stuck_creations(waiting))
      out.push_back(creation.name + "@" + std::to_string(creation.rank));
    return out;
  };
  // One creation waits for a rank that waits for nothing; another is blocked behind it.
  EXPECT_TRUE(names({{0, "a", "a", {0, 1}}, {2, "b", "b", {0, 2}}}).empty());
  // Two creations wait for each other; a third is blocked behind them.
  EXPECT_EQ(names({{0, "a", "a", {0, 1}}, {1, "b", "b", {0, 1, 2}}, {3, "c", "c", {0, 3}}}),
            (std::vector<std::string>{"a@0", "b@1", "c@3"}));
  // The same, but another thread of rank 1 is in a creation that can continue, and may enter "a"
  // afterwards.
  EXPECT_TRUE(names({{0, "a", "a", {0, 1}}, {1, "b", "b", {0, 1}}, {1, "d", "d", {1, 4}}}).empty());
  // Both ranks are in both creations, with two threads each.
  EXPECT_TRUE(names({{0, "a", "a", {0, 1}},
                     {0, "b", "b", {0, 1}},
                     {1, "a", "a", {0, 1}},
                     {1, "b", "b", {0, 1}}})
                  .empty());
  const auto said =
      group::describe_stuck({{0, "a", "new_group(A)", {0, 1}}, {1, "b", "new_group(B)", {0, 1}}});
  EXPECT_HAS(said, "rank 0 waits in new_group(A)");
  EXPECT_HAS(said, "rank 1 waits in new_group(B)");
}

// spec: D4 translation in both directions, get_process_group_ranks in group order, identity on the
// default group, throw for a non-member
TEST(Groups, TranslateRanks) {
  on_ranks(4, [](int) {
    const auto group = new_group({.ranks = Ranks{3, 0, 2}});
    EXPECT_EQ(get_process_group_ranks(group), (Ranks{0, 2, 3}));
    for (int position = 0; position < 3; ++position) {
      const int global = Ranks{0, 2, 3}[static_cast<std::size_t>(position)];
      EXPECT_EQ(get_global_rank(group, position), global);
      EXPECT_EQ(get_group_rank(group, global), position);
    }
    EXPECT_THROW(get_group_rank(group, 1), DistError);
    EXPECT_THROW(get_global_rank(group, 3), DistError);
    EXPECT_THROW(get_global_rank(group, -1), DistError);
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(get_group_rank(nullptr, rank), rank);
      EXPECT_EQ(get_global_rank(nullptr, rank), rank);
    }
    EXPECT_EQ(get_process_group_ranks(nullptr), (Ranks{0, 1, 2, 3}));
  });
}

// spec: D8 src and dst are ranks of the default group, group_src and group_dst of the group:
// broadcast, reduce, gather, scatter
TEST(Groups, RootsInBothNumberings) {
  on_ranks(4, [](int rank) {
    const auto group = new_group({.ranks = Ranks{1, 3}});
    if (rank % 2 == 0) return;
    const bool last = rank == 3;  // group rank 1
    const auto own = torch::full({2}, rank);
    for (const bool global : {true, false}) {
      const std::optional<int> in_default = global ? std::optional<int>(3) : std::nullopt;
      const std::optional<int> in_group = global ? std::nullopt : std::optional<int>(1);
      auto tensor = own.clone();
      broadcast(tensor, {.src = in_default, .group = group, .group_src = in_group});
      EXPECT_SAME(tensor, torch::full({2}, 3));
      tensor = own.clone();
      reduce(tensor, {.dst = in_default, .group = group, .group_dst = in_group});
      EXPECT_SAME(tensor, torch::full({2}, last ? 4 : 1));
      TensorList list;
      if (last) list = {torch::empty({2}, at::kLong), torch::empty({2}, at::kLong)};
      gather(own, {.gather_list = list, .dst = in_default, .group = group, .group_dst = in_group});
      if (last) {
        EXPECT_SAME(list[0], torch::full({2}, 1));
      }
      if (last) list = {torch::full({2}, 10), torch::full({2}, 11)};
      scatter(tensor,
              {.scatter_list = list, .src = in_default, .group = group, .group_src = in_group});
      EXPECT_SAME(tensor, torch::full({2}, last ? 11 : 10));
    }
    EXPECT_HAS(message_of<DistError>([&] { broadcast(own.clone(), {.src = 0, .group = group}); }),
               "rank 0 of the default group");
    EXPECT_HAS(
        message_of<DistError>([&] { broadcast(own.clone(), {.group = group, .group_src = 2}); }),
        "no rank 2");
    EXPECT_HAS(message_of<DistError>(
                   [&] { broadcast(own.clone(), {.src = 3, .group = group, .group_src = 1}); }),
               "exclude each other");
  });
}

// spec: D8 peers in both numberings: send, recv, isend, irecv, P2POp
TEST(Groups, PeersInBothNumberings) {
  on_ranks(4, [](int rank) {
    const auto group = new_group({.ranks = Ranks{1, 3}});
    if (rank % 2 == 0) return;
    auto got = torch::zeros({1}, at::kLong);
    const auto own = torch::full({1}, rank);
    if (rank == 1) {
      send(own, {.dst = 3, .group = group});
      send(own, {.group = group, .group_dst = 1});
      isend(own, {.dst = 3, .group = group})->wait();
      isend(own, {.group = group, .group_dst = 1})->wait();
    } else {
      EXPECT_EQ(recv(got, {.src = 1, .group = group}), 1);
      EXPECT_EQ(recv(got, {.group = group, .group_src = 0}), 1);
      irecv(got, {.src = 1, .group = group})->wait();
      const auto work = irecv(got, {.group = group, .group_src = 0});
      work->wait();
      EXPECT_EQ(work->source_rank(), 1);
      EXPECT_EQ(got.item<int>(), 1);
    }
    const int peer = rank == 1 ? 3 : 1;
    const int group_peer = rank == 1 ? 1 : 0;
    for (const auto& work :
         batch_isend_irecv({{isend, own, peer, group}, {irecv, got, peer, group}}))
      work->wait();
    EXPECT_EQ(got.item<int>(), peer);
    got.zero_();
    const std::vector<P2POp> in_group{{isend, own, std::nullopt, group, 5, group_peer},
                                      {irecv, got, std::nullopt, group, 5, group_peer}};
    for (const auto& work : batch_isend_irecv(in_group)) work->wait();
    EXPECT_EQ(got.item<int>(), peer);
    EXPECT_HAS(message_of<DistError>([&] {
                 batch_isend_irecv({{isend, own, peer, group, 0, group_peer}});
               }),
               "exclude each other");
    EXPECT_HAS(message_of<DistError>([&] {
                 batch_isend_irecv({{isend, own, std::nullopt, group}});
               }),
               "peer");
  });
}

// spec: D7.split_group split_group: order of the lists, members of none, of a group that is not the
// default one, its backends
TEST(Subgroups, SplitGroup) {
  on_ranks(5, [](int rank) {
    const auto half = split_group(nullptr, {{4, 0}, {1, 2}});
    if (rank == 3) {
      EXPECT_EQ(get_rank(half), -1);
      EXPECT_EQ(all_reduce(torch::ones({1}), {.group = half}), nullptr);
      return;
    }
    EXPECT_EQ(get_process_group_ranks(half),
              rank == 4 || rank == 0 ? (Ranks{4, 0}) : (Ranks{1, 2}));
    EXPECT_EQ(sum_over(half, 1 << rank), rank == 4 || rank == 0 ? 17 : 6);
    const auto alone =
        split_group(half, {{0}, {1}}, {.timeout = seconds(9), .backend = "cpu:native"});
    EXPECT_EQ(get_process_group_ranks(alone), Ranks{rank});
    EXPECT_EQ(alone->timeout(), seconds(9));
    EXPECT_EQ(sum_over(alone, rank), rank);
    destroy_process_group(alone);
    EXPECT_HAS(message_of<DistError>([&] {
                 split_group(half, {{0}, {1}}, {.backend = "tcp"});
               }),
               "'tcp' is not part of");
  });
}

// spec: D7 split_group: different lists are an error naming both calls, wrong ones are named
TEST(Subgroups, WrongSplitsAreNamed) {
  on_ranks(3, [](int rank) {
    const auto said = message_of<DistError>([&] {
      split_group(nullptr, rank == 2 ? std::vector<Ranks>{{0, 1}} : std::vector<Ranks>{{0, 2}});
    });
    EXPECT_HAS(said, "split_group([[0, 1]], backend");
    EXPECT_HAS(said, "split_group([[0, 2]], backend");
    EXPECT_HAS(message_of<DistError>([] { split_group(nullptr, {}); }), "empty");
    EXPECT_HAS(message_of<DistError>([] {
                 split_group(nullptr, {{0}, {0, 1}});
               }),
               "rank 0 is named twice");
    EXPECT_HAS(message_of<DistError>([] { split_group(nullptr, {{0, 3}}); }), "rank 3");
  });
}

// spec: D7 split_group has one deadline, its own, for all it does
TEST(Subgroups, SplitHasItsOwnDeadline) {
  testing::RankLatch over(1);
  on_ranks(2, [&](int rank) {
    if (rank == 1) {
      over.wait();
      EXPECT_THROW(barrier(), DistError);
      return;
    }
    const auto begin = std::chrono::steady_clock::now();
    try {
      split_group(nullptr, {{0, 1}}, {.timeout = std::chrono::milliseconds(300)});
      ADD_FAILURE() << "rank 1 was not waited for";
    } catch (const DistError& error) {
      EXPECT_EQ(error.code(), Code::timed_out) << error.what();
      EXPECT_EQ(error.ranks(), Ranks{1});
    }
    EXPECT_LT(std::chrono::steady_clock::now() - begin,
              seconds(30));  // the default group's timeout is 60 s
    over.count_down();
  });
}

// spec: D7.new_subgroups new_subgroups(group_size), and one group per host without a size;
// new_subgroups_by_enumeration
TEST(Subgroups, OfEqualSizeAndByEnumeration) {
  on_ranks(4, [](int rank) {
    const auto [mine, all] = new_subgroups(2);
    ASSERT_EQ(all.size(), 2u);
    EXPECT_EQ(all[static_cast<std::size_t>(rank / 2)], mine);
    EXPECT_EQ(get_rank(all[static_cast<std::size_t>(1 - rank / 2)]), -1);
    EXPECT_EQ(get_process_group_ranks(all[1]), (Ranks{2, 3}));
    EXPECT_EQ(sum_over(mine, 1 << rank), rank < 2 ? 3 : 12);
    EXPECT_HAS(message_of<DistError>([] { new_subgroups(3); }),
               "4 ranks cannot be divided into groups of 3");
    EXPECT_EQ(get_process_group_ranks(new_subgroups().first), (Ranks{0, 1, 2, 3}));
    const auto [listed, lists] = new_subgroups_by_enumeration({{3, 1}, {2}});
    EXPECT_EQ(lists.size(), 2u);
    EXPECT_EQ(get_rank(listed), rank == 0 ? -1 : rank == 3 ? 1 : 0);
    if (rank % 2 == 1) {
      EXPECT_EQ(sum_over(listed, rank), 4);
    }
    EXPECT_HAS(message_of<DistError>([] {
                 new_subgroups_by_enumeration({{0, 1}, {1, 2}});
               }),
               "rank 1 is named twice");
  });
}

// spec: D3 groups with overlapping membership used at the same time from several threads of every
// rank
TEST(Groups, ManyAtOnceFromSeveralThreads) {
  constexpr int kRanks = 8;
  constexpr int kGroups = 20;
  constexpr int kThreads = 4;
  const int operations = (testing::long_tests() ? 10000 : 400) / kGroups;  // on each group
  std::mt19937 random(static_cast<unsigned>(testing::test_seed()));
  std::vector<Ranks> members;
  for (int i = 0; i < kGroups; ++i) {
    Ranks ranks;
    for (int rank = 0; rank < kRanks; ++rank)
      if (random() % 2 == 0) ranks.push_back(rank);
    if (ranks.size() < 2) ranks = {i % kRanks, (i + 3) % kRanks};
    members.push_back(ranks);
  }
  on_ranks(kRanks, [&](int rank) {
    std::vector<Group> groups;
    for (const auto& ranks : members) groups.push_back(new_group({.ranks = ranks}));
    const auto work_through = [&](int thread) {
      // Every thread has its own groups; each rank uses them in a different order.
      std::vector<int> own;
      for (int i = thread; i < kGroups; i += kThreads)
        if (groups[static_cast<std::size_t>(i)]->is_member()) own.push_back(i);
      std::rotate(own.begin(),
                  own.begin() + (own.empty() ? 0 : rank % static_cast<int>(own.size())), own.end());
      for (int round = 0; round < operations; ++round) {
        std::vector<std::pair<int, at::Tensor>> started;
        std::vector<WorkRef> works;
        for (const int i : own) {
          auto tensor = torch::full({1 + (round * 37 + i) % 300}, 1 << rank, at::kInt);
          works.push_back(
              all_reduce(tensor, {.group = groups[static_cast<std::size_t>(i)], .async_op = true}));
          started.emplace_back(i, tensor);
        }
        for (const auto& work : works) work->wait();
        for (const auto& [i, tensor] : started) {
          int expected = 0;
          for (const int member : members[static_cast<std::size_t>(i)]) expected |= 1 << member;
          ASSERT_TRUE(tensor.eq(expected).all().item<bool>())
              << "group " << i << ", round " << round;
        }
      }
    };
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) threads.emplace_back(work_through, thread);
    for (auto& thread : threads) thread.join();
  });
}

// spec: D7 shrink_group with ranks to exclude: the new default group's ranks are renumbered, groups
// can be made in it
TEST(ShrinkGroup, OfLivingRanks) {
  on_ranks(4, [](int rank) {
    const auto odd = new_group({.ranks = Ranks{1, 3}});
    barrier();
    if (rank == 0) {
      EXPECT_HAS(message_of<DistError>([] { shrink_group({0}); }), "must not call it");
      EXPECT_HAS(message_of<DistError>([] { shrink_group({4}); }), "no rank 4");
      EXPECT_HAS(message_of<DistError>([] { shrink_group({1, 1}); }), "twice");
      EXPECT_HAS(message_of<DistBackendError>([] { barrier(); }), "shrunk");
      return;
    }
    const auto left = shrink_group({0});
    EXPECT_EQ(left, default_group());
    EXPECT_EQ(get_rank(), rank - 1);
    EXPECT_EQ(get_world_size(), 3);
    EXPECT_EQ(get_process_group_ranks(left), (Ranks{0, 1, 2}));
    EXPECT_EQ(sum_over(left, 1 << rank), 14);
    if (odd->is_member()) {
      EXPECT_THROW(all_reduce(torch::ones({1}), {.group = odd}), DistError);
    }
    auto got = torch::full({1}, get_rank());
    broadcast(got, {.src = 2});
    EXPECT_EQ(got.item<int>(), 2);
    if (get_rank() == 0) {
      EXPECT_EQ(recv(got), 2);
    } else if (get_rank() == 2) {
      send(got, {.dst = 0});
    }
    const auto pair = new_group({.ranks = Ranks{0, 2}});
    if (pair->is_member()) {
      EXPECT_EQ(sum_over(pair, rank), 4);
    }
    const auto all = new_group();
    if (get_rank() == 0) return;
    const auto smaller = shrink_group({0}, {.group = all, .timeout = seconds(60)});
    EXPECT_EQ(get_process_group_ranks(smaller), (Ranks{1, 2}));
    EXPECT_EQ(get_rank(smaller), rank - 2);
    EXPECT_EQ(sum_over(smaller, rank), 5);
  });
}

// spec: D7 grow_group: members keep their ranks, ranks that join get the next ones in the order of
// the list, and the old group goes on; lists that do not fit are refused
TEST(GrowGroup, RanksJoin) {
  on_ranks(4, [](int rank) {
    const auto pair = new_group({.ranks = Ranks{1, 2}});
    const auto refused = [&](const std::vector<int>& ranks) {
      return message_of<DistError>([&] { grow_group(ranks, {.group = pair}); });
    };
    if (rank == 1) {
      EXPECT_HAS(refused({2, 1, 3}), "must begin with those of group [1, 2], [1, 2]");
      EXPECT_HAS(refused({1, 2}), "at least one more");
      EXPECT_HAS(refused({1, 2, 4}), "0 to 3");
      EXPECT_HAS(refused({1, 2, 3, 3}), "rank 3 twice");
      EXPECT_HAS(refused({2, 3}), "rank 1, which must then not call it");
    }
    if (rank != 0) {
      const auto trio = grow_group({1, 2, 3}, {.group = pair});
      EXPECT_EQ(get_process_group_ranks(trio), (Ranks{1, 2, 3}));
      EXPECT_EQ(sum_over(trio, 1 << rank), 14);
    }
    const auto all = grow_group({1, 2, 3, 0}, {.group = rank == 0 ? nullptr : pair});
    EXPECT_EQ(get_rank(all), (rank + 3) % 4);
    EXPECT_EQ(sum_over(all, 1 << rank), 15);
    if (pair->is_member()) EXPECT_EQ(sum_over(pair, rank), 3);
  });
}

// After the default group is shrunk, errors and reports keep naming ranks by their original
// numbers, under the group's new name.
TEST(ShrinkGroup, ErrorsGoOnNamingFirstRanks) {
  testing::RankLatch over(2);
  on_ranks(4, [&](int rank) {
    barrier();
    if (rank == 0) {
      EXPECT_HAS(message_of<DistBackendError>([] { barrier(); }), "shrunk");
      return;
    }
    const auto left = shrink_group({0});
    EXPECT_EQ(left->name(), "default shrunk");
    EXPECT_EQ(core_of(left).first_rank_of(get_rank()), rank);
    const auto pair = new_group({.ranks = Ranks{0, 2}});
    EXPECT_EQ(pair->name(), "[0, 2] of default shrunk");
    EXPECT_HAS(message_of<DistError>([] { all_reduce(at::Tensor()); }),
               "all_reduce on rank " + std::to_string(rank) + " (group default shrunk)");
    auto got = torch::full({1}, rank);
    broadcast(got, {.src = 1});
    EXPECT_EQ(got.item<int>(), 2);
    const auto recorded = trace::read_trace(World::current().job("test")->recorder->path());
    ASSERT_TRUE(recorded.ok()) << recorded.status().message();
    EXPECT_EQ(recorded->latest()->name, "broadcast");
    EXPECT_EQ(recorded->latest()->peer, 2);  // trace files too are named by original rank
    EXPECT_EQ(recorded->group("default shrunk")->members, (Ranks{1, 2, 3}));
    if (rank == 2) {
      over.wait();
      EXPECT_THROW(barrier(), DistError);
      return;
    }
    try {
      all_reduce(torch::ones({4}), {.timeout = std::chrono::seconds(3)});
      ADD_FAILURE() << "rank 2 was not waited for";
    } catch (const DistError& error) {
      const std::string said = error.what();
      // The first rank to fail tells the others.
      EXPECT_EQ(error.ranks(), Ranks{2}) << said;
      EXPECT_HAS(said, "rank 2 has not entered this call");
      EXPECT_HAS(said, "group 'default shrunk'");
    }
    over.count_down();
  });
}

}  // namespace
}  // namespace muster
