// SPDX-License-Identifier: BSD-3-Clause
/// Starts and ends the job and its default group, and creates further groups.
#pragma once

#include <c10/core/Device.h>

#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "muster/backend_name.h"
#include "muster/clock.h"
#include "muster/process_group.h"
#include "muster/store.h"

namespace muster {

struct InitProcessGroupOptions {
  /// Default: native for CPU tensors; nccl for CUDA tensors if there are a GPU and the library.
  std::optional<std::string> backend = {};
  /// Default if `store` is null: "env://". In a rank that is a thread of `spawn`, the default joins
  /// the other ranks of that spawn. With backend mpi, and neither RANK nor MASTER_ADDR in the
  /// environment, ranks and addresses come from MPI.
  std::optional<std::string> init_method = {};
  /// Default: 30 minutes; 10 minutes if nccl is the only backend.
  std::optional<Duration> timeout = {};
  int world_size = -1;
  int rank = -1;
  /// Excludes `init_method`; requires `rank` and `world_size`.
  std::shared_ptr<Store> store = nullptr;
  /// Separates jobs that share one address, file or store.
  std::string group_name = {};
  /// Must belong to a backend of the group; options for any other backend throw DistBackendError.
  std::shared_ptr<ProcessGroupOptions> pg_options = nullptr;
  /// The device of this rank's tensors. Backend nccl then connects the ranks at once rather than in
  /// their first call, and its barriers use the device. Every rank gives one, or none does.
  std::optional<at::Device> device_id = {};
  /// True calls use_shared_allocator(). Default: MUSTER_SHARE_MEMORY, or false if it is not set.
  std::optional<bool> share_memory = {};
  /// How long a rank of another host may be silent before it counts as failed; zero: for ever. A
  /// rank of this host fails within 3 s of its process being stopped, and never for want of a core.
  /// Default: MUSTER_HEARTBEAT_TIMEOUT, or 10 s if it is not set.
  std::optional<Duration> heartbeat_timeout = {};
};

/// The default group and the groups made from it: the only global state of the API. One scope
/// belongs to the process. If ranks are threads, each rank's thread binds its own (`spawn` does
/// so). Objects capture their group at construction and never look it up again. Thread-safe.
class WorldScope {
 public:
  /// The calling thread's scope if one is bound, otherwise the process's. Never null.
  static const std::shared_ptr<WorldScope>& current();

  /// Binds `scope` to the calling thread for the lifetime of this object; null binds none. For
  /// helper threads of a rank that is a thread, which make calls on its default group.
  class Binding {
   public:
    explicit Binding(std::shared_ptr<WorldScope> scope);
    ~Binding();
    Binding(const Binding&) = delete;
    Binding& operator=(const Binding&) = delete;

   private:
    const std::shared_ptr<WorldScope> scope_;
    const std::shared_ptr<WorldScope>* const before_;
  };

  WorldScope(const WorldScope&) = delete;
  WorldScope& operator=(const WorldScope&) = delete;

 protected:
  WorldScope() = default;
  ~WorldScope() = default;
};

/// Creates the default group. Blocks until every rank has joined. One timeout covers all of it;
/// when it expires, the error names the ranks that did not join. A second call without
/// destroy_process_group in between throws DistError. If ranks are threads, each thread calls it,
/// bound to its own WorldScope (`spawn` binds it).
void init_process_group(const InitProcessGroupOptions& options = {});

/// Destroys one group, or all of them if `group` is null or the default group. Every member must
/// call it. After everything is torn down, it throws the first problem not yet reported: a call
/// that some member made and another skipped, or a failure that no call and no Work of this process
/// has shown. init_process_group may be called again afterwards.
void destroy_process_group(const Group& group = nullptr);

/// Records why this process is about to exit without destroy_process_group. When it exits, the
/// other ranks' calls fail with "rank 2 failed: <why>". Only the first reason counts. Without one,
/// the other ranks see the reason `std::terminate` was called, or the exit status if it is not 0.
/// Thread-safe.
void note_failure(const std::string& why);

/// Whether there is a default group.
bool is_initialized();
/// The default group.
Group default_group();

/// This process's rank in `group` and the size of `group` (null: the default group); both are -1 on
/// a non-member.
int get_rank(const Group& group = nullptr);
int get_world_size(const Group& group = nullptr);
/// The requested backend in lower case; if none was requested, "cpu:native" or
/// "cpu:native,cuda:nccl". Throws DistError on a non-member.
std::string get_backend(const Group& group = nullptr);

/// An optional list of ranks: `new_group({.ranks = {0, 1}})`. Without a list (`{}`, `std::nullopt`)
/// it means all ranks. An empty vector is an empty list.
class Ranks {
 public:
  Ranks() = default;
  Ranks(std::nullopt_t) {}
  Ranks(std::initializer_list<int> list) : list_(list) {}
  Ranks(std::vector<int> list) : list_(std::move(list)) {}
  Ranks(std::optional<std::vector<int>> list) : list_(std::move(list)) {}

  bool has_value() const { return list_.has_value(); }
  /// Requires has_value().
  const std::vector<int>& value() const { return *list_; }
  /// The list, or `all` if there is none.
  std::vector<int> value_or(std::vector<int> all) const { return list_.value_or(std::move(all)); }

 private:
  std::optional<std::vector<int>> list_;
};

struct NewGroupOptions {
  Ranks ranks = {};  ///< ranks of the default group; default: all
  /// Applies to the creation and to the group's calls. Default: 30 minutes; 10 minutes if nccl is
  /// the only backend.
  std::optional<Duration> timeout = {};
  std::optional<std::string> backend = {};                    ///< default: the default group's
  std::shared_ptr<ProcessGroupOptions> pg_options = nullptr;  ///< as in init_process_group
  bool use_local_synchronization = false;                     ///< only members call new_group
  std::optional<at::Device> device_id = {};                   ///< as in init_process_group
  bool sort_ranks = true;  ///< false: group ranks follow the order of `ranks`
};

/// Creates a group. All ranks of the default group call it, in the same order and with the same
/// ranks; a mismatch throws on all of them and names both calls. Group ranks follow the sorted
/// ranks, or `ranks` as given if `sort_ranks` is false. A process that is not in `ranks` gets a
/// group whose rank is -1.
Group new_group(const NewGroupOptions& options = {});

/// Convert between ranks of the default group and of `group`. Throw DistError if the rank is not a
/// member.
int get_group_rank(const Group& group, int global_rank);
int get_global_rank(const Group& group, int group_rank);
/// Ranks of the default group, in group order.
std::vector<int> get_process_group_ranks(const Group& group);

}  // namespace muster
