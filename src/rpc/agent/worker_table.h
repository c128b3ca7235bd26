// SPDX-License-Identifier: BSD-3-Clause
/// The introductions that workers send each other when they join, and the table of their names.
#pragma once

#include <exception>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "muster/clock.h"
#include "muster/rpc_options.h"
#include "muster/status.h"

namespace muster::rpc {

/// Device maps are in it because replies use the caller's.
struct Introduction {
  std::string name;
  std::map<std::string, DeviceMap> device_maps;  ///< by callee
};

std::string introduce(const std::string& name, const RpcBackendOptions& options);
/// Throws DistError if the text sent by `rank` is malformed.
Introduction read_introduction(const std::string& text, int rank);

// A job's workers by name and id, and errors that name them. Immutable.

class WorkerTable {
 public:
  /// `names[rank]`. Throws if a name is invalid or duplicate.
  WorkerTable(const std::vector<std::string>& names, int self);

  int self_id() const { return self_; }
  const WorkerInfo& self() const { return at(self_); }
  const WorkerInfo& at(int id) const { return workers_[static_cast<std::size_t>(id)]; }
  std::span<const WorkerInfo> all() const { return workers_; }
  int size() const { return static_cast<int>(workers_.size()); }
  bool contains(int id) const { return id >= 0 && id < size(); }
  /// Throws DistError listing the workers if there is no such worker.
  const WorkerInfo& find(const To& to) const;

  /// "worker 'ps' (rank 3)".
  std::string describe(int id) const;
  std::exception_ptr loss_error(int peer, const std::string& call, const Status& why) const;
  std::exception_ptr timeout_error(int peer, const std::string& call, Duration timeout) const;

 private:
  const int self_;
  std::vector<WorkerInfo> workers_;
  std::map<std::string, int, std::less<>> by_name_;
};

}  // namespace muster::rpc
