/// Starting and ending the job, its default group, and making further groups.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "muster/base/clock.h"
#include "muster/group/pg_options.h"
#include "muster/group/process_group.h"
#include "muster/group/ranks.h"
#include "muster/group/store.h"

namespace muster {

struct InitProcessGroupOptions {
  std::optional<std::string> backend =
      {};  ///< absent: native for CPU tensors, nccl for CUDA tensors where the build has it
  std::optional<std::string> init_method =
      {};  ///< absent, and no store: "env://"; in ranks that are threads of `spawn`, each other
  std::optional<Duration> timeout = {};  ///< absent: 30 minutes, 10 for nccl
  int world_size = -1;
  int rank = -1;
  std::shared_ptr<Store> store = nullptr;  ///< excludes init_method; needs rank and world_size
  std::string group_name = {};  ///< keeps jobs apart that share one address, file or store
  std::shared_ptr<ProcessGroupOptions> pg_options =
      nullptr;  ///< for a backend of the group's; any other throws, naming it
  std::optional<bool> share_memory =
      {};  ///< calls use_shared_allocator(); absent: what MUSTER_SHARE_MEMORY says, else no
};

/// Makes the default group. Blocks until every rank has joined; at the timeout, one for everything
/// that is done here, throws naming those that did not. A second call without destroy_process_group
/// throws. Where ranks are threads each of them calls it, bound to a WorldScope of its own (`spawn`
/// sees to it).
void init_process_group(const InitProcessGroupOptions& options = {});

/// Ends one group, or all of them where `group` is null or the default group; every member calls
/// it. What a member called and another skipped, or a failure that no call and no Work of this
/// process has shown yet, is thrown after everything is taken down. init_process_group may be
/// called again afterwards.
void destroy_process_group(const Group& group = nullptr);

/// Why this process is about to end without destroy_process_group. The other ranks are told when it
/// does, and their calls fail with "rank 2 failed: <why>". The first reason counts. Without one
/// they are told what `std::terminate` was called for, or the exit status where it is not 0.
/// Thread-safe.
void note_failure(const std::string& why);

bool is_initialized();
/// The default group.
Group default_group();

/// -1 for a non-member.
int get_rank(const Group& group = nullptr);
int get_world_size(const Group& group = nullptr);
/// The lower-case name that was asked for; where none was, "cpu:native" or "cpu:native,cuda:nccl".
/// Members only.
std::string get_backend(const Group& group = nullptr);

struct NewGroupOptions {
  Ranks ranks = {};  ///< of the default group; left out: all
  std::optional<Duration> timeout =
      {};  ///< absent: 30 minutes, 10 for nccl; for making the group too
  std::optional<std::string> backend = {};                    ///< absent: the default group's
  std::shared_ptr<ProcessGroupOptions> pg_options = nullptr;  ///< as in init_process_group
  bool use_local_synchronization = false;                     ///< only members call it
  bool sort_ranks = true;  ///< false: the group's order is that of `ranks`
};

/// All ranks of the default group call it, in the same order, with the same ranks; a difference
/// throws on all, naming both calls. The group's order is that of the sorted ranks, or with
/// `sort_ranks` false of the ranks as they are given. A process that is not in `ranks` gets a group
/// of rank -1.
Group new_group(const NewGroupOptions& options = {});

/// Throw DistError where the rank is not a member.
int get_group_rank(const Group& group, int global_rank);
int get_global_rank(const Group& group, int group_rank);
/// In group order.
std::vector<int> get_process_group_ranks(const Group& group);

}  // namespace muster
