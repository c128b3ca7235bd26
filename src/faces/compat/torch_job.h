// SPDX-License-Identifier: BSD-3-Clause
/// The engine of a job of stock torch: met over torch's store, shared by the groups of one process.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/group/job.h"
#include "muster/clock.h"
#include "muster/process_group.h"

namespace muster::compat {

/// Thread-safe.
class TorchJob : public std::enable_shared_from_this<TorchJob> {
 public:
  ~TorchJob();
  TorchJob(const TorchJob&) = delete;
  TorchJob& operator=(const TorchJob&) = delete;

  /// Every rank calls it, with a store that is the job's own; blocks until all have come. Throws
  /// muster's exceptions.
  static std::shared_ptr<TorchJob> open(const c10::intrusive_ptr<c10d::Store>& store,
                                        const std::string& name, int rank, int size,
                                        Duration timeout);
  /// The job of stock torch's default group, of which a process has one at a time; null if that
  /// group is on another backend.
  static std::shared_ptr<TorchJob> of_default_group();
  void make_default();

  /// The group of all ranks.
  const Group& world() const { return world_; }
  /// `ranks` of the job, in group order. Blocks until all of them have come.
  Group make_group(std::string name, std::vector<int> ranks, Duration timeout);

  struct Left {
    std::shared_ptr<TorchJob> job;  ///< another one where the group of all ranks was shrunk, which
                                    ///< then ends, and this job with it
    Group group;
  };
  /// Creates the group of the members of `old` without `exclude` (positions in `old`; these must
  /// not call it) and without the dead. All remaining members call it.
  Left shrink(const Group& old, const std::vector<int>& exclude, Duration timeout);

  /// Keeps the group until the job ends. Stock torch lets every member destroy its groups at any
  /// time and in any order, so destroying one must not wait for the others.
  void retire(Group group);
  /// The orderly end, which all ranks call; waits for them at most `limit`. Failures are logged:
  /// the job is over in any case. A second call does nothing.
  void close(Duration limit);
  bool is_open() const;

 private:
  explicit TorchJob(std::shared_ptr<group::Job> job) : job_(std::move(job)) {}

  const std::shared_ptr<group::Job> job_;
  Group world_;               // set before others see the job
  mutable std::mutex mutex_;  // guards the following
  bool closed_ = false;
  std::vector<Group> retired_;
};

}  // namespace muster::compat
