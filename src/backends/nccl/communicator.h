// SPDX-License-Identifier: BSD-3-Clause
/// One of NCCL's communicators.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backends/nccl/library.h"
#include "core/group/errors.h"
#include "muster/backend_name.h"
#include "muster/clock.h"

namespace muster::nccl {

/// NCCL has found an error in the background and reports it to the thread that makes a call.
class AsyncError : public DistBackendError {
 public:
  AsyncError(const std::string& what, std::string explanation)
      : DistBackendError(what + ": " + explanation, Code::internal),
        explanation_(std::move(explanation)) {}
  /// The text without the call, as `async_error` gives it.
  const std::string& explanation() const { return explanation_; }

 private:
  std::string explanation_;
};

/// A group's settings of its communicators.
class NcclSettings {
 public:
  /// `given`: may be null, or of another backend. Throws DistError naming a field that the library
  /// lacks, or that cannot be.
  NcclSettings(const NcclLibrary& library, const ProcessGroupOptions* given);
  bool is_high_priority() const { return given_.is_high_priority_stream; }
  /// Refers to this object.
  Config config() const;

 private:
  ProcessGroupNCCL::Options given_;
  bool is_later_ = false;  // a field of Config::kLater is set
};

/// Non-blocking: NCCL's functions return before they are done, and the communicator is polled, so
/// that a wait for a peer that never comes can be given up. Thread-safe: no two threads are in an
/// NCCL function with one communicator at once, since NCCL cannot abort one that is in use.
class NcclCommunicator {
 public:
  /// Polled between looks at the communicator; ends the wait by throwing.
  using GiveUp = std::function<void()>;

  /// `device`: where its buffers are; of this process, and the current device while it is made.
  NcclCommunicator(std::shared_ptr<const NcclLibrary> library, c10::Device device,
                   std::shared_ptr<const NcclSettings> settings)
      : library_(std::move(library)), device_(device), settings_(std::move(settings)) {}
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;

  /// An id for a new communicator. Throws DistBackendError.
  static UniqueId unique_id(const NcclLibrary& library);
  /// Every member calls it once with the same ids. Several need ncclCommInitRankScalable. Returns
  /// when all have.
  void open(std::vector<UniqueId> ids, int ranks, int rank, const GiveUp& give_up);
  /// Every member of `parent` calls it, with nothing in flight and in the same place among its
  /// calls. Those with one `color` get a communicator, in the order of `key`; those with
  /// `kNoColor` none. Needs ncclCommSplit. Returns when all have called it.
  static constexpr int kNoColor = -1;
  void open_by_split(NcclCommunicator& parent, int color, int key, const GiveUp& give_up);
  /// The members of `parent`, which `stop` has stopped, that are not among `excluded` (its ranks)
  /// call it: they get a communicator in the same order.
  void open_by_shrink(NcclCommunicator& parent, std::vector<int> excluded, const GiveUp& give_up);
  /// Growing has four steps, with nothing in flight. One member of the parent makes an id. All of
  /// them begin a communicator of `ranks` members, in which they keep their places; `id` is null on
  /// those that did not make it. Those that join begin only then: NCCL refuses one that comes
  /// first. Then all of them finish; `parent` is null on one that joins. Needs ncclCommGetUniqueId
  /// and ncclCommGrow: without them, each throws DistBackendError with the version that has them.
  UniqueId growth_id();
  void begin_growth(NcclCommunicator& parent, int ranks, const UniqueId* id);
  void begin_joining(const UniqueId& id, int ranks, int rank);
  void finish_growth(NcclCommunicator* parent, const GiveUp& give_up);
  /// Takes over what `opened` has opened, on the same device.
  void take(NcclCommunicator& opened);
  /// Runs `enqueue`, which calls NCCL's functions in between ncclGroupStart and ncclGroupEnd, and
  /// returns when NCCL has enqueued everything. `what` begins the error's text.
  using Enqueue = std::function<void(CommHandle)>;
  void run(const std::string& what, const Enqueue& enqueue, const GiveUp& give_up);
  /// Throws DistBackendError if `result` is an error. For use in `Enqueue`.
  void check(ErrorCode result, const char* function) const;

  /// The error that NCCL has found in the background. Empty: there is none, or a thread is in NCCL,
  /// whose call throws `AsyncError`.
  std::string async_error();
  /// Whether `open_by_shrink` may be tried with this as the parent. False while a thread is in
  /// NCCL.
  bool can_shrink();
  /// Until when aborts wait for threads that are in NCCL, and then for NCCL to end: a few seconds
  /// each (nccl_abort_grace).
  struct AbortLimits {
    TimePoint threads, end;
    static AbortLimits from_now();
    /// One communicator may have used up the time: a thread that looks at the next one is not taken
    /// for one that NCCL keeps.
    TimePoint of_next_thread() const;
  };
  /// Begins to end everything in flight, so that survivors can shrink it. The function that it
  /// returns waits for that; false: the communicator must be aborted instead, for NCCL lacks
  /// ncclCommRevoke or ncclCommShrink, or has not revoked it by the limit.
  [[nodiscard]] std::function<bool()> begin_revoke(const AbortLimits& limits);
  /// Ends everything in flight on all of them, as one group of NCCL. An abort ends once the other
  /// members abort too, so one after another in different orders would wait for each other. A
  /// communicator that is in use at the limit is left alone for ever, and NCCL goes on with the
  /// others on a thread of its own. Returns whether NCCL uses the memory of no call any more.
  static bool abort_together(const std::vector<NcclCommunicator*>& communicators) {
    return begin_abort(communicators, AbortLimits::from_now())();
  }
  /// Begins that. The function that it returns waits for NCCL to end.
  [[nodiscard]] static std::function<bool()> begin_abort(
      const std::vector<NcclCommunicator*>& communicators, const AbortLimits& limits);
  void abort() { abort_together({this}); }
  /// A thread that has not come back from NCCL uses it: it must not be destroyed, ever.
  bool is_abandoned() const { return abandoned_; }

  const NcclLibrary& library() const { return *library_; }
  c10::Device device() const { return device_; }

 private:
  bool try_run(const std::string& what, const Enqueue& enqueue, const GiveUp& give_up);
  void poll(const std::string& what, const GiveUp& give_up);
  /// The lock, which another thread may hold for as long as NCCL keeps it.
  std::unique_lock<std::timed_mutex> hold(const GiveUp& give_up);
  /// Returns the handle to abort; this object no longer uses it. Null: nothing, or a thread is in
  /// NCCL.
  CommHandle take_to_abort(TimePoint limit);
  using Derive = std::function<ErrorCode(CommHandle parent, CommHandle* made, Config* config)>;
  void open_from(NcclCommunicator& parent, const char* function, const Derive& derive,
                 const GiveUp& give_up);
  void need(const char* function) const;
  /// NCCL's name of the error, its last details, and the library and version that say so.
  std::string explanation(ErrorCode code) const;
  [[noreturn]] void fail(const std::string& what, ErrorCode code) const;

  const std::shared_ptr<const NcclLibrary> library_;
  const c10::Device device_;
  const std::shared_ptr<const NcclSettings> settings_;
  // Held while in an NCCL function with handle_; a thread that issues operations takes the lock of
  // the device first. Guards the following three. Timed, because a thread may never return from
  // NCCL.
  std::timed_mutex mutex_;
  CommHandle handle_ = nullptr;  // null: not opened yet, or aborted
  bool aborted_ = false;         // no call any more
  bool revoked_ = false;         // no call but a shrink
  // With all members; otherwise a plain destroy would wait for them.
  std::atomic<bool> connected_{false};
  std::atomic<bool> abandoned_{false};  // a thread is in NCCL for ever, so handle_ is never freed
};

/// While it lives, its thread may ask for the state of CUDA's events although a graph is captured,
/// which would otherwise end the capture. For one thread, and nested as scopes are.
class QueriesDuringCapture {
 public:
  QueriesDuringCapture();
  ~QueriesDuringCapture();
  QueriesDuringCapture(const QueriesDuringCapture&) = delete;

 private:
  int mode_;  // the thread's own, to be restored
};

}  // namespace muster::nccl
