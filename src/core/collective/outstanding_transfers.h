/// The transfers that a running collective has posted, in slots that can be waited for one by one.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/base/bytes.h"
#include "core/transport/channel/channel.h"
#include "muster/status.h"

namespace muster::collective {

/// A failed transfer fails the channel, which ends all others. So waiting for `all_done` always
/// ends, and no buffer is in use afterwards.
class OutstandingTransfers {
 public:
  static constexpr int kSlots = 28;  // limit: bits of `used_`

  explicit OutstandingTransfers(transport::Channel& channel)
      : channel_(channel), heard_(channel.members().size()) {}

  void begin(const transport::Fingerprint& call) {
    call_ = call;
    status_ = Status();
  }
  void send(int slot, int member, std::uint64_t tag, ConstBytes data) {
    post(slot, member, false, [&] { return channel_.send(member, tag, data, call_); });
  }
  void receive(int slot, int member, std::uint64_t tag, MutableBytes data) {
    post(slot, member, true, [&] { return channel_.receive(member, tag, data, call_); });
  }

  /// Whether this slot has no outstanding transfer; called often.
  bool done(int slot) {
    TransferSlot& entry = slots_[static_cast<std::size_t>(slot)];
    for (; entry.settled < entry.posted.size(); ++entry.settled) {
      const Posted& posted = entry.posted[entry.settled];
      if (!posted.transfer->done()) return false;
      settle(posted);
    }
    entry.posted.clear();
    entry.settled = 0;
    used_ &= ~(1u << slot);
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

  /// Job ranks that the open receives wait for; if there are none, those of the open sends.
  std::vector<int> awaited() const;
  /// The latest call in a message from this member; sequence 0 if there is none.
  const transport::Fingerprint& heard(int member) const {
    return heard_[static_cast<std::size_t>(member)];
  }

 private:
  struct Posted {
    transport::TransferRef transfer;
    int member;
    bool receives;
  };
  struct TransferSlot {
    std::vector<Posted> posted;
    std::size_t settled = 0;
  };

  /// Creates the entry first: a posted transfer must be known here.
  template <class Start>
  void post(int slot, int member, bool receives, Start start) {
    auto& posted = slots_[static_cast<std::size_t>(slot)].posted;
    posted.push_back({nullptr, member, receives});
    try {
      posted.back().transfer = start();
    } catch (...) {
      posted.pop_back();
      throw;
    }
    used_ |= 1u << slot;
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
  std::array<TransferSlot, kSlots> slots_;
  std::uint32_t used_ = 0;  // one bit per non-empty slot
  static_assert(kSlots <= 32);
  std::vector<transport::Fingerprint> heard_;
};

}  // namespace muster::collective
