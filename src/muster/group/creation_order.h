/// Finds creations of groups that wait for each other for ever: members that make overlapping
/// groups in different orders.
///
/// While a rank waits in a creation of which only the members know (`use_local_synchronization`),
/// it shows in the store what it waits in. A creation is stuck when one of its members is not in it
/// and all that this member is in are stuck themselves. Another thread of that member might still
/// come; so creations count as stuck only when nothing of the picture has changed for a while. Who
/// finds that tells all members.
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

/// One rank's waiting in one creation.
struct WaitingCreation {
  int rank = -1;
  std::string name;  ///< of the group, the same on all its members
  std::string call;  ///< as the user made it
  std::vector<int> members;
  bool in_default_group = false;  ///< it waits in a call of the default group
  friend bool operator==(const WaitingCreation&, const WaitingCreation&) = default;
};

/// Those of `waiting` that can never end, unless a rank makes a further group from another thread.
std::vector<WaitingCreation> stuck_creations(const std::vector<WaitingCreation>& waiting);

/// What is wrong with them, as a sentence that names every call.
std::string describe_stuck(const std::vector<WaitingCreation>& stuck);

/// The creations that this rank waits in. Thread-safe.
class CreationOrder {
 public:
  class Creation;
  explicit CreationOrder(int world_size) : world_size_(world_size) {}

  /// `store` may be null: then nothing is found.
  Creation begin(std::shared_ptr<store::Store> store, WaitingCreation mine);

 private:
  friend class Creation;
  const int world_size_;
  std::mutex mutex_;
  std::vector<WaitingCreation> mine_;  // those that are shown
};

class CreationOrder::Creation {
 public:
  Creation(CreationOrder& order, std::shared_ptr<store::Store> store, WaitingCreation mine);
  ~Creation();
  Creation(const Creation&) = delete;
  Creation& operator=(const Creation&) = delete;

  /// Called often while the creation waits; a failure (Code::mismatch, naming the calls) where it
  /// is stuck.
  Status look();
  /// Whether others have found it stuck by now: its failure is then the reason for whatever else
  /// went wrong with it.
  Status verdict();
  /// Whether, where it is stuck, others wait in the default group: that one cannot go on then.
  bool stops_default_group() const { return stops_default_group_; }

 private:
  Status look_around();
  Status show();
  std::vector<WaitingCreation> waiting_of(std::vector<int> ranks);

  CreationOrder& order_;
  const std::shared_ptr<store::Store> store_;
  const WaitingCreation mine_;
  TimePoint next_look_;
  bool shown_ = false;
  bool stops_default_group_ = false;
  std::vector<WaitingCreation> stuck_;  // as of the last look
  TimePoint stuck_since_{};
};

}  // namespace muster::group
