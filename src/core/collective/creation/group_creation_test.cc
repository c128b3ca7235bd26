// SPDX-License-Identifier: BSD-3-Clause
// Creation and closing of groups.
#include "core/collective/creation/group_creation.h"
#include "core/collective/select/tuning.h"
#include "core/collective/testing/communicator_job.h"
#include "core/tunables/tunables.h"
#include "testing/limits.h"

namespace muster::collective {
namespace {

using namespace communicator_test;

// The placement from which every member computes the selection of a proposed group.
TEST(GroupCreation, EveryMemberComputesTheSamePlacement) {
  using Hosts = std::vector<int>;  // their first ranks
  for (Wire wire : testing::kWiresAndHosts) {
    run_ranks(6, wire, [&](int, std::shared_ptr<transport::Fabric> fabric) {
      const auto placement = [&](std::vector<int> members) {
        const GroupPlacement found = placement_of(*fabric, members);
        return std::pair(found.first_ranks, found.per_core);
      };
      const auto crowd = [&](int ranks) { return (ranks + fabric->cores() - 1) / fabric->cores(); };
      if (wire == Wire::hosts) {
        EXPECT_EQ(placement({0, 1, 2, 3, 4, 5}), std::pair(Hosts{0, 2, 4}, 1));
        EXPECT_EQ(placement({0, 1, 2, 4, 5}), std::pair(Hosts{0, 2, 3}, 1));
        EXPECT_EQ(placement({2, 3}), std::pair(Hosts{0}, crowd(2)));
        EXPECT_EQ(placement({0, 2, 4}), std::pair(Hosts{0, 1, 2}, 1));
        EXPECT_EQ(placement({0, 2, 1}), std::pair(Hosts{}, 1)) << "a host comes twice";
      } else if (wire == Wire::mixed) {
        EXPECT_EQ(placement({0, 2, 4, 1, 3, 5}), std::pair(Hosts{0, 3}, 1));
        EXPECT_EQ(placement({1, 3, 5}), std::pair(Hosts{0}, crowd(3)));
      } else if (wire != Wire::loopback) {
        EXPECT_EQ(placement({0, 1, 2, 3, 4, 5}), std::pair(Hosts{0}, crowd(6)));
        EXPECT_EQ(placement({4}), std::pair(Hosts{0}, 1));
      }
    });
  }
}

TEST(GroupCreation, GroupsOfEveryShape) {
  for (Wire wire : testing::kWires) {
    run_ranks(4, wire, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
      const Group world = make(fabric, {0, 1, 2, 3}, "world");
      const Group again = make(fabric, {0, 1, 2, 3}, "world");
      const Group backwards = make(fabric, {3, 2, 1, 0}, "backwards");
      const Group half =
          make(fabric, rank % 2 == 0 ? std::vector<int>{0, 2} : std::vector<int>{1, 3}, "half");
      const Group alone = make(fabric, {rank}, "alone");
      ASSERT_TRUE(world && again && backwards && half && alone);
      EXPECT_EQ(backwards->rank(), 3 - rank);
      EXPECT_EQ(half->rank(), rank / 2);
      EXPECT_NE(world->channel().id(), again->channel().id());
      const auto sum = [&](Communicator& group) {
        Values out(1);
        EXPECT_TRUE(group.run(all_reduce({1 << rank}, out), soon()).ok());
        return out[0];
      };
      EXPECT_EQ(sum(*backwards), 15);
      EXPECT_EQ(sum(*half), rank % 2 == 0 ? 5 : 10);
      EXPECT_EQ(sum(*again), 15);
      EXPECT_EQ(sum(*alone), 1 << rank);
      EXPECT_EQ(sum(*world), 15);
      for (const Group& group : {half, alone, world, backwards, again}) {
        const Status closed = group->close(soon());
        EXPECT_TRUE(closed.ok()) << closed.message();
        Values out(1);
        EXPECT_EQ(group->run(all_reduce({1}, out), soon()).code(), Code::aborted);
      }
    });
  }
}

TEST(GroupCreation, AProposalIsCommittedWithoutWaiting) {
  for (Wire wire : testing::kWires) {
    GroupProposal told;
    std::barrier all(3);
    run_ranks(3, wire, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
      const std::vector<int> members{2, 0, 1};
      CommunicatorOptions options;
      options.name = "proposed";
      const GroupProposal mine = Communicator::propose(*fabric, members, options);
      EXPECT_EQ(mine.channel != 0, rank == 2) << "the first member's, nobody else's";
      if (rank == 2) told = mine;
      all.arrive_and_wait();
      const auto accept = [&] { return Communicator::commit(fabric, members, told, options); };
      // The others come when the first has long begun its call.
      if (rank != 2) all.arrive_and_wait();
      const auto group = accept();
      ASSERT_TRUE(group.ok()) << group.status().message();
      const Values in{1 << rank};
      Values out(1);
      const auto sum = (*group)->start(all_reduce(in, out), soon());
      if (rank == 2) all.arrive_and_wait();
      EXPECT_TRUE(sum->wait(soon()).ok());
      EXPECT_EQ(out[0], 7);
      EXPECT_EQ((*group)->rank(), (rank + 1) % 3);
      EXPECT_TRUE((*group)->close(soon()).ok());
      EXPECT_FALSE(accept().ok()) << "a proposal is good for one group";
    });
  }
}

/// Messages that rank 0 sends for an all_reduce of 8 MiB between two hosts, in groups that are made
/// in each way. `trip`: how long a round trip takes one more connection.
std::vector<std::uint64_t> messages_over_links(Duration trip) {
  constexpr std::uint32_t kStrands = 3;
  tunables_detail::in_force.strand_trip = trip;
  tunables_detail::in_force.most_strands = kStrands;
  std::vector<std::uint64_t> sent;
  std::array<GroupProposal, 2> proposed;
  std::barrier all(2);
  run_ranks(2, Wire::mixed, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
    const std::vector<int> members{0, 1};
    const CommunicatorOptions options{.name = "proposed"};
    const Group made = make(fabric, members, "made");
    ASSERT_TRUE(made);
    proposed[static_cast<std::size_t>(rank)] = Communicator::propose(*fabric, members, options);
    all.arrive_and_wait();
    const GroupProposal proposal = Communicator::settle(*fabric, members, proposed);
    const auto committed = Communicator::commit(fabric, members, proposal, options);
    const auto part = Communicator::split(made, {{1, 0}}, {.name = "part"});
    ASSERT_TRUE(committed.ok() && part.ok());
    for (const Group& group : {made, *committed, *part}) {
      const Values in(1024 * 1024, rank + 1);
      Values out(in.size());
      const auto before = fabric->traffic().messages;
      EXPECT_TRUE(group->run(all_reduce(in, out), soon()).ok());
      if (rank == 0) sent.push_back(fabric->traffic().messages - before);
      EXPECT_EQ(out, Values(in.size(), 3));
    }
    for (const Group& group : {*part, *committed, made}) EXPECT_TRUE(group->close(soon()).ok());
  });
  tunables_detail::in_force.strand_trip = default_tunables().strand_trip;
  tunables_detail::in_force.most_strands = default_tunables().most_strands;
  return sent;
}

// spec: X4.connections the members of a group over a long way agree on what is in flight, however
// it is made
TEST(GroupCreation, OverALongWayCallsHaveMoreOnTheWire) {
  const auto near = messages_over_links(std::chrono::hours(1)),
             far = messages_over_links(Duration(1));
  ASSERT_EQ(near.size(), 3u);
  ASSERT_EQ(far.size(), 3u);
  for (std::size_t way = 0; way < near.size(); ++way) {
    EXPECT_GE(near[way], 2 * 4 * 1024 * 1024 / fixed::kHostChunk) << way;
    EXPECT_LE(far[way], 32u) << way << ": four rounds of sums, and four of results";
  }
}

// spec: X4.connections the longest link counts, whichever member knows of it
TEST(GroupCreation, TheLongestLinkOfAllCounts) {
  run_ranks(3, Wire::loopback, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
    for (int who = 0; who < 3; ++who) {
      const auto agreed = agree(
          *fabric, {2, 0, 1}, "far", static_cast<std::uint64_t>(who), soon(),
          []() -> Result<GroupDescriptor> {
            return GroupDescriptor{kNoSegment, {}};
          },
          {}, {}, [&] { return LinkReport{.strands = rank == who ? 7u : 2u, .hops = {}}; });
      ASSERT_TRUE(agreed.ok()) << agreed.status().message();
      EXPECT_EQ(agreed->descriptor.strands, 7u) << "rank " << who;
    }
  });
}

TEST(GroupCreation, OnOneHostNoWayIsLong) {
  tunables_detail::in_force.strand_trip = Duration(1);
  run_ranks(4, Wire::mixed, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
    const Group world = make(fabric, {0, 1, 2, 3}, "world");
    ASSERT_TRUE(world);
    EXPECT_EQ(report_links(*fabric, std::vector{rank % 2, rank % 2 + 2}).strands, 1u);
    Values out(1);
    EXPECT_TRUE(world->run(all_reduce({1}, out), soon()).ok());
    EXPECT_GT(report_links(*fabric, all_of(4)).strands, 1u);
    EXPECT_TRUE(world->close(soon()).ok());
  });
  tunables_detail::in_force.strand_trip = default_tunables().strand_trip;
}

// Segments of cancelled proposals are freed: the region has room for far fewer.
TEST(GroupCreation, CancelledProposalsFreeTheirSegment) {
  run_ranks(2, Wire::region, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
    if (rank != 0) return;
    ASSERT_NE(fabric->region(), nullptr);
    const GroupProposal first = Communicator::propose(*fabric, {0, 1}, {});
    Communicator::cancel(*fabric, first);
    for (int i = 0; i < 1000; ++i) {
      const GroupProposal proposal = Communicator::propose(*fabric, {0, 1}, {});
      ASSERT_EQ(proposal.segment, first.segment);
      ASSERT_NE(proposal.channel, first.channel);
      Communicator::cancel(*fabric, proposal);
    }
    Communicator::cancel(*fabric, GroupProposal{});  // an empty proposal: no-op
  });
}

// If the region is full, the proposal says so, and the group runs over links on all members.
TEST(GroupCreation, ProposalsWithAFullRegionUseLinks) {
  GroupProposal told;
  std::barrier all(2);
  run_ranks(2, Wire::region, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
    std::vector<GroupProposal> taken;
    for (; rank == 0; taken.push_back(told)) {
      told = Communicator::propose(*fabric, {0, 1}, {});
      ASSERT_NE(told.channel, 0u);
      if (told.segment == kNoSegment) break;
    }
    all.arrive_and_wait();
    const auto group = Communicator::commit(fabric, {0, 1}, told, {});
    ASSERT_TRUE(group.ok()) << group.status().message();
    Values out(1);
    EXPECT_TRUE((*group)->run(all_reduce({1}, out), soon()).ok());
    EXPECT_EQ(out[0], 2);
    EXPECT_TRUE((*group)->close(soon()).ok());
    for (const GroupProposal& proposal : taken) Communicator::cancel(*fabric, proposal);
  });
}

// Only the first member can distribute a tuning, and a tuning does not fit into a proposal.
TEST(GroupCreation, TunedGroupsAreNotProposed) {
  run_ranks(2, Wire::region, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
    CommunicatorOptions options;
    auto tuning = std::make_shared<Tuning>();
    tuning->forced = {{Op::all_reduce, Algorithm::shares}};
    options.tuning = tuning;
    EXPECT_EQ(Communicator::propose(*fabric, {rank, 1 - rank}, options).channel, 0u);
  });
}

// A member dies between the report and the reply.
TEST(GroupCreation, UndeliveredDescriptorsAreReleased) {
  testing::RankThreadsOptions options;
  options.ranks = 2;
  options.wire = Wire::region;
  options.hub = transport::make_loopback_hub(2, true, 2);
  run_ranks(options, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
    std::vector<GroupDescriptor> taken_back;
    const auto describe_group = [&]() -> Result<GroupDescriptor> {
      options.hub->kill(1);
      fabric->wait([&] { return !fabric->death_of(1).ok(); }, soon());
      return GroupDescriptor{7, {}};
    };
    const auto agreed =
        agree(*fabric, {0, 1}, "cut", 0, soon(), describe_group,
              [&](const GroupDescriptor& descriptor) { taken_back.push_back(descriptor); });
    EXPECT_FALSE(agreed.ok());
    if (rank != 0) return;
    EXPECT_EQ(agreed.status().ranks(), std::vector<int>{1}) << agreed.status().message();
    ASSERT_EQ(taken_back.size(), 1u);
    EXPECT_EQ(taken_back[0].segment, 7u);
  });
}

// A waiting thread runs its idle callbacks, which may end the wait.
TEST(GroupCreation, AWaitingThreadRunsIdleCallbacks) {
  for (Wire wire : testing::kWires) {
    std::barrier all(2);
    run_ranks(2, wire, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
      const Group group = make(fabric, {0, 1}, "looking");
      ASSERT_TRUE(group);
      if (rank == 0) {
        int looks = 0;
        auto looking = group->on_idle([&] {
          if (++looks == 2) group->abort("there is no hope");
        });
        const auto elsewhere = group->on_idle([] {});
        Values out(1);
        const Status ended = group->run(all_reduce({1}, out), TimePoint::max());
        EXPECT_TRUE(contains(ended.message(), "there is no hope")) << ended.message();
        looking.reset();
        EXPECT_FALSE(group->run(all_reduce({1}, out), TimePoint::max()).ok());
        EXPECT_EQ(looks, 2);
      }
      all.arrive_and_wait();
      EXPECT_EQ(group->close(soon()).ok(), false);
    });
  }
}

// Two threads of every rank create groups concurrently.
TEST(GroupCreation, GroupsFromTwoThreadsAtOnce) {
  run_ranks(3, Wire::loopback, [&](int, std::shared_ptr<transport::Fabric> fabric) {
    const auto loop = [&](const std::string& name) {
      for (int i = 0; i < 20; ++i) {
        const Group group = make(fabric, {0, 1, 2}, name);
        ASSERT_TRUE(group);
        Values out(1);
        const Status status = group->run(all_reduce({1}, out), soon());
        ASSERT_TRUE(status.ok()) << status.message();
        ASSERT_EQ(out[0], 3);
        ASSERT_TRUE(group->close(soon()).ok());
      }
    };
    std::thread other([&] { loop("one"); });
    loop("two");
    other.join();
  });
}

TEST(GroupCreation, AMissingMemberIsNamedWithoutDisturbingOthers) {
  run_ranks(3, Wire::loopback, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
    const Group world = make(fabric, {0, 1, 2}, "world");
    ASSERT_TRUE(world);
    if (rank != 2) {
      CommunicatorOptions options;
      options.name = "lame";
      options.timeout =
          rank == 0 ? Duration(std::chrono::seconds(2))
                    : Duration(muster::testing::kMustHappen);  // the first member tells the others
      const auto made = Communicator::create(fabric, {0, 1, 2}, options);
      ASSERT_FALSE(made.ok());
      EXPECT_EQ(made.status().code(), Code::timed_out);
      EXPECT_EQ(made.status().ranks(), std::vector<int>{2}) << made.status().message();
      EXPECT_TRUE(contains(made.status().message(), "rank 2") &&
                  contains(made.status().message(), "'lame'"))
          << made.status().message();
      const Group pair = make(fabric, {1, 0}, "pair");
      ASSERT_TRUE(pair);
    }
    Values out(1);
    EXPECT_TRUE(world->run(all_reduce({1}, out), soon()).ok());
    EXPECT_EQ(out[0], 3);
  });
}

TEST(GroupCreation, WrongMembersAreRefused) {
  run_ranks(2, Wire::loopback, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
    for (const std::vector<int>& members :
         {std::vector<int>{}, {1 - rank}, {0, 1, 1}, {0, 1, 2}, {-1, 0, 1}}) {
      const auto made = Communicator::create(fabric, members, {});
      ASSERT_FALSE(made.ok());
      EXPECT_EQ(made.status().code(), Code::invalid_argument);
    }
  });
}

// Every closed group frees its segment of the region.
TEST(GroupCreation, ClosedGroupsFreeTheirSegment) {
  run_ranks(2, Wire::region, [&](int, std::shared_ptr<transport::Fabric> fabric) {
    for (int i = 0; i < 50; ++i) {
      const Group group = make(fabric, {0, 1}, "passing");
      ASSERT_TRUE(group);
      Values out(1);
      ASSERT_TRUE(group->run(all_reduce({i}, out), soon()).ok());
      ASSERT_TRUE(group->close(soon()).ok());
    }
  });
}

// A process that closes and drops a group and then exits must send its close message first: the
// progress thread must not be the group's last owner.
// spec: B10 destroy_process_group ends in good order
TEST(GroupCreation, ClosedGroupsAreHeldOnlyByTheirUser) {
  run_ranks(3, Wire::loopback, [&](int, std::shared_ptr<transport::Fabric> fabric) {
    for (int i = 0; i < 100; ++i) {
      Group group = make(fabric, {0, 1, 2}, "dropped");
      ASSERT_TRUE(group);
      Values out(1);
      ASSERT_TRUE(group->start(all_reduce({i}, out), soon())->wait(soon()).ok());
      ASSERT_TRUE(group->close(soon()).ok());
      const std::weak_ptr<Communicator> held = group;
      group.reset();
      EXPECT_TRUE(held.expired());
    }
  });
}

}  // namespace
}  // namespace muster::collective
