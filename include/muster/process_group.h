// SPDX-License-Identifier: BSD-3-Clause
/// A set of ranks that communicate. Groups are made by `init.h` and `subgroups.h`, and passed to
/// every call as `group`. Source: torch.distributed.ProcessGroup.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "muster/clock.h"
#include "muster/status.h"

namespace muster {

/// Thread-safe. Owned by shared_ptr (`Group`); the job also holds it until it is destroyed. A
/// non-member process also holds a ProcessGroup: its rank and size are -1, and calls on it do
/// nothing.
class ProcessGroup {
 public:
  virtual ~ProcessGroup() = default;
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;

  bool is_member() const { return rank_ >= 0; }
  /// This process's rank; -1 on a non-member. So is `size()`.
  int rank() const { return rank_; }
  int size() const { return is_member() ? static_cast<int>(ranks_.size()) : -1; }
  const std::string& name() const { return name_; }
  /// Ranks of the default group, in group order.
  const std::vector<int>& ranks() const { return ranks_; }
  /// The backend text the group was created with.
  const std::string& backend() const { return backend_; }
  /// Timeout of calls that give none. Setting it affects later calls of this process only.
  Duration timeout() const { return timeout_.load(std::memory_order_relaxed); }
  void set_timeout(Duration timeout) { timeout_.store(timeout, std::memory_order_relaxed); }

  /// Convert between ranks of the default group and of this group. Throw DistError naming a rank
  /// that is not there.
  int group_rank_of(int global_rank) const;
  int global_rank_of(int group_rank) const;

  /// Why the group can no longer be used, with the ranks at fault; ok while it can. Never blocks.
  Status failure() const;

 protected:
  ProcessGroup(std::string name, std::vector<int> ranks, int rank, std::string backend,
               Duration timeout);

 private:
  const std::string name_;
  const std::vector<int> ranks_;
  const int rank_;
  const std::string backend_;
  std::atomic<Duration> timeout_;
};
using Group = std::shared_ptr<ProcessGroup>;

}  // namespace muster
