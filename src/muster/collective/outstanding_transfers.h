/// The transfers that a running collective has posted, in lanes that can be waited for one by one.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/base/status.h"
#include "muster/transport/channel.h"

namespace muster::collective {

/// A transfer that fails, fails the channel: then all others end too, so that waiting for
/// `all_done` always ends and leaves every buffer quiet.
class OutstandingTransfers {
 public:
  static constexpr int kLanes = 20;

  explicit OutstandingTransfers(transport::Channel& channel)
      : channel_(channel), heard_(channel.members().size()) {}

  void begin(const transport::Fingerprint& call) {
    call_ = call;
    status_ = Status();
  }
  void send(int lane, int member, std::uint64_t tag, ConstBytes data) {
    post(lane, member, false, [&] { return channel_.send(member, tag, data, call_); });
  }
  void receive(int lane, int member, std::uint64_t tag, MutableBytes data) {
    post(lane, member, true, [&] { return channel_.receive(member, tag, data, call_); });
  }

  /// Whether nothing of this lane is under way; asked often.
  bool done(int lane) {
    Lane& mine = lanes_[static_cast<std::size_t>(lane)];
    for (; mine.settled < mine.posted.size(); ++mine.settled) {
      const Posted& posted = mine.posted[mine.settled];
      if (!posted.transfer->done()) return false;
      settle(posted);
    }
    mine.posted.clear();
    mine.settled = 0;
    used_ &= ~(1u << lane);
    return true;
  }
  bool all_done() {
    bool all = true;
    for (std::uint32_t left = used_; left != 0; left &= left - 1)
      all = done(std::countr_zero(left)) && all;
    return all;
  }
  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }

  /// Job ranks of the members that the open receives, else the open sends, wait for.
  std::vector<int> awaited() const;
  /// The latest call that a message of this member told of; sequence 0 where none has come.
  const transport::Fingerprint& heard(int member) const {
    return heard_[static_cast<std::size_t>(member)];
  }

 private:
  struct Posted {
    transport::TransferRef transfer;
    int member;
    bool receives;
  };
  struct Lane {
    std::vector<Posted> posted;
    std::size_t settled = 0;
  };

  /// The place first: a transfer that has been posted must be known here.
  template <class Start>
  void post(int lane, int member, bool receives, Start start) {
    auto& posted = lanes_[static_cast<std::size_t>(lane)].posted;
    posted.push_back({nullptr, member, receives});
    try {
      posted.back().transfer = start();
    } catch (...) {
      posted.pop_back();
      throw;
    }
    used_ |= 1u << lane;
  }
  void settle(const Posted& posted) {
    if (posted.transfer->status().ok()) {
      if (posted.receives)
        heard_[static_cast<std::size_t>(posted.member)] = posted.transfer->fingerprint();
      return;
    }
    if (!status_.ok()) return;
    status_ = posted.transfer->status();
    if (!channel_.failed()) channel_.fail(status_);
  }

  transport::Channel& channel_;
  transport::Fingerprint call_;
  Status status_;
  std::array<Lane, kLanes> lanes_;
  std::uint32_t used_ = 0;  // a bit for each lane with something in it
  static_assert(kLanes <= 32);
  std::vector<transport::Fingerprint> heard_;
};

}  // namespace muster::collective
