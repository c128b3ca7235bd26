// SPDX-License-Identifier: BSD-3-Clause
/// Detects deadlocked group creations: members that create overlapping groups in different orders.
///
/// While a rank waits in a creation that only the members know of (`use_local_synchronization`), it
/// publishes the creation in the store. A creation is stuck if one of its members is not in it and
/// all creations this member is in are stuck. Another thread of that member might still arrive, so
/// creations count as stuck only after nothing has changed for 4 s. The rank that detects this
/// tells all members.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "muster/clock.h"
#include "muster/key_value_store.h"
#include "muster/status.h"

namespace muster::group {

/// One rank that waits in one creation.
struct WaitingCreation {
  int rank = -1;
  std::string name;  ///< the group's name, equal on all members
  std::string call;  ///< the user's call
  std::vector<int> members;
  bool in_default_group = false;  ///< waits in a call of the default group
  friend bool operator==(const WaitingCreation&, const WaitingCreation&) = default;
};

/// The entries of `waiting` that can never complete, unless a rank creates another group from
/// another thread.
std::vector<WaitingCreation> stuck_creations(const std::vector<WaitingCreation>& waiting);

/// An error message that names every call.
std::string describe_stuck(const std::vector<WaitingCreation>& stuck);

/// The creations that this rank waits in. Thread-safe.
class CreationDeadlockDetector {
 public:
  class Creation;
  explicit CreationDeadlockDetector(int world_size) : world_size_(world_size) {}

  /// If `store` is null, nothing is detected.
  Creation begin(std::shared_ptr<store::Store> store, WaitingCreation mine);

 private:
  friend class Creation;
  const int world_size_;
  // Guards `mine_`. Held while the list is stored, so that the store never keeps an older one.
  std::mutex mutex_;
  std::vector<WaitingCreation> mine_;  // published creations
};

class CreationDeadlockDetector::Creation {
 public:
  Creation(CreationDeadlockDetector& detector, std::shared_ptr<store::Store> store,
           WaitingCreation mine);
  ~Creation();
  Creation(const Creation&) = delete;
  Creation& operator=(const Creation&) = delete;

  /// Call often while the creation waits. Fails (Code::mismatch, naming the calls) if it is stuck.
  Status poll();
  /// Fails if another rank has found this creation stuck; that failure is then the cause of any
  /// other error of the creation.
  Status verdict();
  /// Whether, in the deadlock, other ranks wait in the default group, which then cannot continue.
  bool stops_default_group() const { return stops_default_group_; }

 private:
  Status detect();
  Status publish();
  std::vector<WaitingCreation> waiting_of(std::vector<int> ranks);

  CreationDeadlockDetector& detector_;
  const std::shared_ptr<store::Store> store_;
  const WaitingCreation mine_;
  TimePoint next_poll_;
  bool published_ = false;
  bool stops_default_group_ = false;
  std::vector<WaitingCreation> stuck_;  // at the last check
  TimePoint stuck_since_{};
};

}  // namespace muster::group
