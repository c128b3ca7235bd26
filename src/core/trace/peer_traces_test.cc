// SPDX-License-Identifier: BSD-3-Clause
#include "core/trace/peer_traces.h"

#include <gtest/gtest.h>

#include "core/store/factory.h"
#include "core/trace/analysis.h"
#include "testing/limits.h"
#include "testing/scratch_folder.h"

namespace muster::trace {
namespace {

/// Two ranks on two hosts: each has traces of its own, they share a store.
class TwoHosts : public ::testing::Test {
 protected:
  TwoHosts() {
    for (const int rank : {0, 1}) {
      recorders_[rank] =
          *Recorder::create({"a job", rank, 2, 64, folder_.file("host" + std::to_string(rank))});
      group_ = recorders_[rank]->add_group("default", std::vector<int>{0, 1}, rank);
    }
  }
  void call(int rank, std::uint64_t sequence, bool ends) {
    const auto now = steady_clock().now();
    const auto ticket = recorders_[rank]->begin(
        group_, {.name = "all_reduce", .sequence = sequence, .bytes = 16}, now);
    if (ends) recorders_[rank]->end(ticket, now);
  }
  /// Whether rank 0 comes to hear that rank 1 has made `calls` calls: after exactly one change
  /// since the last time, rank 1 publishes once.
  bool hears(const PeerTraces& peer_traces, std::uint64_t calls) {
    const std::string key = "trace/1";
    if (!store_->wait(std::span(&key, 1), muster::testing::kMustHappen)) return false;
    const auto job = peer_traces.look();
    static_cast<void>(store_->delete_key(key));
    return job.rank(1) != nullptr && job.rank(1)->calls == calls;
  }

  testing::ScratchFolder folder_;
  std::shared_ptr<store::Store> store_ = store::make_hash_store();
  std::shared_ptr<Recorder> recorders_[2];
  std::uint16_t group_ = 0;
};

TEST_F(TwoHosts, TheOtherHostsLastCallComesThroughTheStore) {
  call(1, 1, true);
  call(0, 1, true);
  call(0, 2, false);
  PeerTraces mine(recorders_[0], store_, {1}), theirs(recorders_[1], store_, {0});
  const std::string key = "trace/1";
  ASSERT_TRUE(store_->wait(std::span(&key, 1), muster::testing::kMustHappen).ok());
  const std::vector<int> members = {0, 1};
  const auto report = report_peers(mine.look(), "default", 2, members, 0, {1});
  EXPECT_EQ(report.missing, std::vector<int>{1});
  EXPECT_NE(report.text.find("rank 1's last call there is number 1, all_reduce, completed"),
            std::string::npos)
      << report.text;
  EXPECT_NE(mine.tell("default", std::vector<int>{1}).find("rank 1's last call"),
            std::string::npos);
  ASSERT_TRUE(hears(mine, 1));
  call(1, 2, false);
  EXPECT_TRUE(hears(mine, 2));
  mine.stop();
  EXPECT_EQ(mine.look().rank(1), nullptr);  // the store is let go
  EXPECT_NE(mine.look().rank(0), nullptr);
}

TEST_F(TwoHosts, RanksOfOneHostPublishNothing) {
  const PeerTraces mine(recorders_[0], store_, {});
  call(0, 1, true);
  EXPECT_NE(mine.look().rank(0), nullptr);
  EXPECT_EQ(*store_->num_keys(), 0);
}

}  // namespace
}  // namespace muster::trace
