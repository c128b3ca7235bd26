// SPDX-License-Identifier: BSD-3-Clause
/// The contract for a backend, which carries out a group's calls, and the registration of backends
/// from outside muster, by a program or by a plugin library. docs/user/how-to-add-a-backend.md
/// walks through it.
///
/// Threads: the group calls a backend from any number of threads at once. Every call it submits has
/// passed its checks, except refused calls.
///
/// Order: collectives must complete in the order they were submitted. Point-to-point messages may
/// overtake collectives.
///
/// Ownership: the group holds its backends until it is destroyed, with or without a prior `close`.
/// A Work may outlive the group and the backend and must hold whatever it needs.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "muster/backend_name.h"
#include "muster/clock.h"
#include "muster/op.h"
#include "muster/status.h"
#include "muster/store.h"
#include "muster/work.h"

namespace muster {

/// Fixed properties of a backend.
struct BackendCapabilities {
  /// The name the backend was requested by, in lower case. The backend owns the memory.
  std::string_view name = {};
  bool scaled_sums = false;  ///< supports AVG and PREMUL_SUM
  /// All members are on one host and read each other's memory, so tensors in shared memory are not
  /// copied.
  bool shares_memory = false;
};

/// The outcome of a backend's calls so far.
struct BackendState {
  Status failure = {};  ///< why the group is unusable; ok while it is usable
  /// Whether a call or a Work has shown `failure` to the user. Otherwise destroying the group
  /// throws it.
  bool failure_was_shown = true;
  std::uint64_t collectives = 0;  ///< submitted so far, if the backend numbers them
};

/// Declarations about the calling thread that a backend may exploit.
enum class BackendScope : std::uint8_t {
  /// The thread makes progress on the calls it starts: it polls `Work::is_completed` from time to
  /// time and eventually waits for each.
  manual_progress,
  /// Small messages the thread sends may be held back and sent together, at the latest when the
  /// scope ends or the thread waits.
  coalesce_sends,
};

/// The data that one member exchanges with one other: usually one tensor; several, back to back,
/// for coalesced calls.
using Slice = c10::SmallVector<at::Tensor, 1>;
using Slices = c10::SmallVector<Slice, 1>;

/// One call, as a backend gets it. Ranks in it are group ranks. It belongs to the caller: copy what
/// is needed after `submit` returns.
class BackendCall {
 public:
  virtual Op op() const = 0;
  /// Name of the function that the user called.
  virtual std::string_view name() const = 0;
  virtual ReduceOp reduce_op() const = 0;
  /// Root of broadcast, reduce, gather and scatter; otherwise -1.
  virtual int root() const = 0;
  /// Peer of send and recv; -1: any rank, and for other operations.
  virtual int peer() const = 0;
  /// Tag of send and recv.
  virtual std::int64_t tag() const = 0;
  /// True if `submit` should return before the call completes.
  virtual bool is_async() const = 0;
  virtual bool is_refused() const = 0;
  /// The collective's number in the group, from 1; 0 for a message.
  virtual std::uint64_t number() const = 0;
  virtual TimePoint deadline() const = 0;
  /// The tensors: one slice per member if the operation lists them on that side, otherwise one
  /// slice. In place, both sides have the same tensor. A broadcast has only outputs; a reduce has
  /// outputs on the root only. A refused call has none.
  virtual const Slices& inputs() const = 0;
  virtual const Slices& outputs() const = 0;

 protected:
  ~BackendCall() = default;
};

/// Entirely inline, so that a plugin needs no symbol of the program that loads it.
class ProcessGroupBackend {
 public:
  virtual ~ProcessGroupBackend() = default;

  /// Called for every submitted call; must only return a stored value.
  virtual const BackendCapabilities& capabilities() const = 0;
  /// Whether the backend supports `op` on such tensors. On false, sets `*why` to what is missing,
  /// phrased as the end of a sentence.
  virtual bool supports(Op op, at::ScalarType dtype, c10::DeviceType device,
                        std::string* why) const = 0;
  /// Carries out one call. A synchronous call is complete on return and may return null; a receive
  /// from any rank always returns a Work. Failures are thrown, with the ranks at fault. The call's
  /// timeout (`BackendCall::deadline`) must be honoured. If `BackendCall::is_refused`, this member
  /// could not make the call: the backend counts it, tells the members that would wait for it, and
  /// never blocks.
  virtual WorkRef submit(BackendCall& call) = 0;
  /// Starts a scope on the calling thread. It ends when the returned object is destroyed, on the
  /// same thread. Null if the backend does not use it.
  virtual std::shared_ptr<void> scope(BackendScope kind) = 0;

  /// Never blocks.
  virtual BackendState state() const = 0;
  /// Orderly shutdown, called once by every member: waits for calls in flight and detects calls
  /// that some member skipped. Returns by the deadline.
  virtual Status close(TimePoint deadline) = 0;
  /// Fails everything in flight with `reason`, tells the other members, and makes every later call
  /// fail. May be called from any thread, also during `submit` or `close`; never blocks.
  virtual void abort(const std::string& reason) = 0;
};

/// Arguments of a function of the extended form.
struct DistributedBackendOptions {
  std::shared_ptr<Store> store;  ///< private to this group
  int group_rank = -1;
  int group_size = 0;
  Duration timeout{};
  std::string group_id;                    ///< equal on all members, unique to the group
  std::vector<int> global_ranks_in_group;  ///< ranks of the default group, indexed by group rank
};

/// Makes the backend of one group. Called on every member; may block until all members have
/// arrived. Exceptions propagate to the caller that creates the group.
using BackendCreator = std::function<std::shared_ptr<ProcessGroupBackend>(
    const std::shared_ptr<Store>& store, int rank, int world_size, Duration timeout)>;
using ExtendedBackendCreator = std::function<std::shared_ptr<ProcessGroupBackend>(
    const DistributedBackendOptions& options,
    const std::shared_ptr<ProcessGroupOptions>& pg_options)>;

/// The interface through which a plugin library registers its backends.
class BackendRegistrar {
 public:
  virtual ~BackendRegistrar() = default;
  virtual void add(const std::string& name, ExtendedBackendCreator func,
                   const std::vector<std::string>& devices) = 0;
};

/// Version of the plugin interface; a plugin and the program that loads it must agree on it. A
/// plugin exports, with C linkage,
///     // returns kBackendPluginAbi
///     unsigned muster_backend_plugin_abi();
///     void muster_register_backends(muster::BackendRegistrar& registrar);
/// It links with LibTorch and needs no library of muster: everything it receives works through
/// virtual calls.
inline constexpr unsigned kBackendPluginAbi = 3;

/// Loads a plugin library, which registers its backends and stays loaded until the process exits.
/// Returns the backends' names. Throws DistError if the library cannot be loaded, is no plugin, or
/// was built for another plugin interface version.
std::vector<std::string> load_backend_plugin(const std::string& path);

}  // namespace muster
