// The only lock held while waiting for other ranks: the drive lock during an inline call. The bound
// is counted on a clock that only the wait advances.
#include "core/collective/queue/inline_call.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "core/collective/testing/communicator_job.h"
#include "core/tunables/tunables.h"

namespace muster::collective {
namespace {

using namespace communicator_test;

class StillClock final : public Clock {
 public:
  TimePoint now() const override { return time; }
  TimePoint time{seconds(1)};
};

/// A transfer without a reply.
struct Unanswered final : transport::Transfer {
  void end() {
    status_ = Status(Code::aborted, "taken back");
    done_.store(true);
  }
};

/// A group of two whose other member never arrives.
class LonelyChannel final : public transport::Channel {
 public:
  explicit LonelyChannel(transport::Fabric& fabric) : fabric_(fabric) {}
  std::uint32_t id() const override { return 1; }
  std::span<const int> members() const override { return members_; }
  int rank() const override { return 0; }
  transport::Fabric& fabric() override { return fabric_; }
  transport::TransferRef send(int, std::uint64_t, ConstBytes,
                              const transport::Fingerprint&) override {
    return std::make_shared<Unanswered>();
  }
  transport::TransferRef receive(int, std::uint64_t, MutableBytes, const transport::Fingerprint&,
                                 bool) override {
    return std::make_shared<Unanswered>();
  }
  void cancel(const transport::TransferRef& transfer) override {
    static_cast<Unanswered&>(*transfer).end();
  }
  void begin(const transport::Fingerprint&) override {}
  void compare(int, const transport::Fingerprint&) override {}
  Status failure() const override { return {}; }
  void fail(Status) override {}
  std::vector<int> awaited() const override { return {1}; }

 private:
  transport::Fabric& fabric_;
  const std::vector<int> members_{0, 1};
};

/// Waits in it always use up their time limit.
class LonelyFabric final : public transport::Fabric {
 public:
  int rank() const override { return 0; }
  int world_size() const override { return 2; }
  const Clock& clock() const override { return clock_; }
  std::span<const int> hosts() const override { return hosts_; }
  shm::HostRegion* region() override { return nullptr; }
  transport::Channel& bootstrap() override { return channel_; }
  transport::Channel& agreements() override { return channel_; }
  Result<std::shared_ptr<transport::Channel>> open(std::uint32_t, std::vector<int>) override {
    return Status(Code::unsupported, "a fabric of a test");
  }
  std::uint32_t next_channel_id() const override { return 0; }
  bool poll() override { return false; }
  bool wait(const std::function<bool()>& done, TimePoint deadline) override {
    on_wait(deadline - clock_.time);
    clock_.time = deadline;
    return done();
  }
  void wake() override {}
  Status death_of(int) const override { return {}; }
  void declare_dead(int, Status) override {}
  void suspend_heartbeats(bool) override {}

  std::function<void(Duration limit)> on_wait;

 private:
  StillClock clock_;
  const std::vector<int> hosts_{0, 1};
  LonelyChannel channel_{*this};
};

class IdleDriver final : public Driver {
 public:
  explicit IdleDriver(std::shared_ptr<transport::Fabric> fabric) : fabric_(std::move(fabric)) {}
  std::shared_ptr<transport::Fabric> fabric() override { return fabric_; }
  void advance() override {}
  void check_deadlines(TimePoint) override {}
  bool busy() override { return false; }
  bool has_driver() override { return false; }
  TimePoint next_deadline() override { return TimePoint::max(); }
  bool drive_until(const std::function<bool()>&, TimePoint) override { return false; }
  void poll_between_compute() override {}
  void notify_progress_thread() override {}

 private:
  const std::shared_ptr<transport::Fabric> fabric_;
};

TEST(InlineCall, HoldsTheDriveLockForARoundTripAtMost) {
  const auto fabric = std::make_shared<LonelyFabric>();
  const GroupContext group{
      fabric, std::shared_ptr<transport::Channel>(fabric, &fabric->bootstrap()), "test"};
  CollectiveQueue queue(group, nullptr, Selection(Medium::network, 2).bounds());
  IdleDriver driver(fabric);
  const auto is_held = [&queue] { return !queue.with_control([](Control&) {}); };
  std::vector<Duration> waits;
  fabric->on_wait = [&](Duration limit) {
    waits.push_back(limit);
    EXPECT_TRUE(is_held());
  };

  const Values in{1};
  Values out{0};
  const Args args = all_reduce(in, out);
  CallRecord record(TimePoint::max());
  InlineCall call(queue, args, record);
  ASSERT_TRUE(call.holds_lock());
  ASSERT_TRUE(call.check_notes());
  EXPECT_FALSE(call.run_bounded(driver)) << "the other member has not come";
  ASSERT_EQ(waits.size(), 1u) << "it waits once, then gives the lock back";
  EXPECT_LE(waits.front(), tunables().round_trip);
  EXPECT_TRUE(is_held());
  call.release_lock();
  EXPECT_FALSE(is_held());
}

TEST(InlineCall, ADeadlineEndsItsTurnEarlier) {
  const auto fabric = std::make_shared<LonelyFabric>();
  const GroupContext group{
      fabric, std::shared_ptr<transport::Channel>(fabric, &fabric->bootstrap()), "test"};
  CollectiveQueue queue(group, nullptr, Selection(Medium::network, 2).bounds());
  IdleDriver driver(fabric);
  Duration waited{};
  fabric->on_wait = [&](Duration limit) { waited += limit; };
  const Values in{1};
  Values out{0};
  const Args args = all_reduce(in, out);
  CallRecord record(group.now() + std::chrono::microseconds(3));
  InlineCall call(queue, args, record);
  ASSERT_TRUE(call.holds_lock());
  EXPECT_FALSE(call.run_bounded(driver));
  EXPECT_EQ(waited, std::chrono::microseconds(3));
}

}  // namespace
}  // namespace muster::collective
