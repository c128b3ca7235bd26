/// Finds makings of groups that wait for each other for ever: members that make overlapping groups
/// in different orders.
///
/// While a rank waits in a making of which only the members know (`use_local_synchronization`), it
/// shows in the store what it waits in. A making is stuck when one of its members is not in it and
/// all that this member is in are stuck themselves. Another thread of that member might still come;
/// so makings count as stuck only when nothing of the picture has changed for a while. Who finds
/// that tells all members.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "muster/base/clock.h"
#include "muster/base/status.h"
#include "muster/store/store.h"

namespace muster::group {

/// One rank's waiting in one making.
struct WaitingMaking {
  int rank = -1;
  std::string name;  ///< of the group, the same on all its members
  std::string call;  ///< as the user made it
  std::vector<int> members;
  bool in_default_group = false;  ///< it waits in a call of the default group
  friend bool operator==(const WaitingMaking&, const WaitingMaking&) = default;
};

/// Those of `waiting` that can never end, unless a rank makes a further group from another thread.
std::vector<WaitingMaking> stuck_makings(const std::vector<WaitingMaking>& waiting);

/// What is wrong with them, as a sentence that names every call.
std::string describe_stuck(const std::vector<WaitingMaking>& stuck);

/// The makings that this rank waits in. Thread-safe.
class MakingOrder {
 public:
  class Making;
  explicit MakingOrder(int world_size) : world_size_(world_size) {}

  /// `store` may be null: then nothing is found.
  Making begin(std::shared_ptr<store::Store> store, WaitingMaking mine);

 private:
  friend class Making;
  const int world_size_;
  std::mutex mutex_;
  std::vector<WaitingMaking> mine_;  // those that are shown
};

class MakingOrder::Making {
 public:
  Making(MakingOrder& order, std::shared_ptr<store::Store> store, WaitingMaking mine);
  ~Making();
  Making(const Making&) = delete;
  Making& operator=(const Making&) = delete;

  /// Called often while the making waits; a failure (Code::mismatch, naming the calls) where it is
  /// stuck.
  Status look();
  /// Whether others have found it stuck by now: its failure is then the reason for whatever else
  /// went wrong with it.
  Status verdict();
  /// Whether, where it is stuck, others wait in the default group: that one cannot go on then.
  bool stops_default_group() const { return stops_default_group_; }

 private:
  Status look_around();
  Status show();
  std::vector<WaitingMaking> waiting_of(std::vector<int> ranks);

  MakingOrder& order_;
  const std::shared_ptr<store::Store> store_;
  const WaitingMaking mine_;
  TimePoint next_look_;
  bool shown_ = false;
  bool stops_default_group_ = false;
  std::vector<WaitingMaking> stuck_;  // as of the last look
  TimePoint stuck_since_{};
};

}  // namespace muster::group
