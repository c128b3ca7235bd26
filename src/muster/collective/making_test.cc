// Making and closing groups.
#include "muster/collective/communicator_test_job.h"

namespace muster::collective {
namespace {

using namespace communicator_test;

TEST(Making, GroupsOfEveryShape) {
  for (Wire wire : testing::kWires) {
    run_ranks(4, wire, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
      const Group world = make(fabric, {0, 1, 2, 3}, "world");
      const Group again = make(fabric, {0, 1, 2, 3}, "world");
      const Group backwards = make(fabric, {3, 2, 1, 0}, "backwards");
      const Group half = make(fabric, rank % 2 == 0 ? std::vector<int>{0, 2} : std::vector<int>{1, 3}, "half");
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

// Two threads of every rank make groups at the same time.
TEST(Making, GroupsFromTwoThreadsAtOnce) {
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

TEST(Making, AMissingMemberIsNamedAndDisturbsNobody) {
  run_ranks(3, Wire::loopback, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
    const Group world = make(fabric, {0, 1, 2}, "world");
    ASSERT_TRUE(world);
    if (rank != 2) {
      CommunicatorOptions options;
      options.name = "lame";
      options.timeout = rank == 0 ? Duration(milliseconds(100)) : Duration(std::chrono::seconds(60));  // the first member tells the others
      const auto made = Communicator::create(fabric, {0, 1, 2}, options);
      ASSERT_FALSE(made.ok());
      EXPECT_EQ(made.status().code(), Code::timed_out);
      EXPECT_EQ(made.status().ranks(), std::vector<int>{2}) << made.status().message();
      EXPECT_TRUE(contains(made.status().message(), "rank 2") && contains(made.status().message(), "'lame'")) << made.status().message();
      const Group pair = make(fabric, {1, 0}, "pair");
      ASSERT_TRUE(pair);
    }
    Values out(1);
    EXPECT_TRUE(world->run(all_reduce({1}, out), soon()).ok());
    EXPECT_EQ(out[0], 3);
  });
}

TEST(Making, WrongMembersAreRefused) {
  run_ranks(2, Wire::loopback, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
    for (const std::vector<int>& members : {std::vector<int>{}, {1 - rank}, {0, 1, 1}, {0, 1, 2}, {-1, 0, 1}}) {
      const auto made = Communicator::create(fabric, members, {});
      ASSERT_FALSE(made.ok());
      EXPECT_EQ(made.status().code(), Code::invalid_argument);
    }
  });
}

// The region's memory comes back with every group that is closed.
TEST(Making, ClosedGroupsGiveTheirRegionBack) {
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

// A process that drops a group after closing it, and then ends, says goodbye first: the progress thread must not be its last owner.
// spec: B10 destroy_process_group ends in good order
TEST(Making, ClosedGroupsAreHeldByTheirUserOnly) {
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
