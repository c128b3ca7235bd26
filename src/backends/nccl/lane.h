// SPDX-License-Identifier: BSD-3-Clause
/// A communicator of NCCL that is opened when it is first used, and its stream.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "backends/nccl/communicator.h"
#include "backends/nccl/nccl_work.h"

namespace muster::nccl {

/// Calls are enqueued in the order of `submit`. All members must open it, and NCCL connects them in
/// their first call, which waits for all of them; that happens on a thread of its own, so that
/// members may begin lanes in different orders. Afterwards calls are enqueued by the thread that
/// makes them. Thread-safe.
class Lane {
 public:
  /// Opens the communicator, on the thread of that.
  using Opening = std::function<void(NcclCommunicator&, const NcclCommunicator::GiveUp&)>;

  /// Fails the group. Returns why it has failed, which may be an earlier reason: an aborted
  /// communicator says nothing of it.
  using OnError = std::function<std::exception_ptr(const std::exception&)>;

  Lane(std::shared_ptr<const NcclLibrary> library, c10::Device device,
       const std::shared_ptr<const NcclSettings>& settings, Opening opening,
       NcclCommunicator::GiveUp give_up, OnError on_error);
  /// Waits for its thread, which must have been given up or be about to end.
  ~Lane();

  /// Has its thread open the communicator now, ahead of the first call.
  void open();
  /// Enqueues `work`, or fails it.
  void submit(std::shared_ptr<NcclWork> work);
  c10::Device device() const { return communicator_.device(); }
  std::string async_error();
  /// Waits until it is open, or `give_up` throws. Its use beside calls is the caller's care.
  NcclCommunicator& opened(const NcclCommunicator::GiveUp& give_up);
  NcclCommunicator& communicator() { return communicator_; }

 private:
  void open_and_launch();
  void launch(NcclWork& work);

  NcclCommunicator communicator_;
  const c10::Stream stream_;
  const Opening opening_;
  const NcclCommunicator::GiveUp give_up_;
  const OnError on_error_;

  // Held while a call is enqueued by its own thread. `open_` is set once `waiting_` is empty, so no
  // call overtakes those that `opener_` enqueues.
  std::mutex mutex_;
  bool open_ = false;
  std::deque<std::shared_ptr<NcclWork>> waiting_;  // until it is open
  std::thread opener_;
};

}  // namespace muster::nccl
