// SPDX-License-Identifier: BSD-3-Clause
/// The room that a device has for NCCL's kernels. A kernel takes its place when it reaches the head
/// of its stream and keeps it until its peers have come and it is done, so kernels that wait for
/// each other from outside the room and from within it wait for ever. NCCL 2.25's page on
/// communicators: "Launching multiple communication operations (on different streams) might work
/// provided they can fit within the GPU"; https://github.com/NVIDIA/nccl/issues/522: "Using
/// different CUDA streams does not guarantee operations will run concurrently."
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

namespace muster::standin {

/// One per device and process. Thread-safe.
class DeviceRoom {
 public:
  static DeviceRoom& of(int device);

  /// Takes a place among `places`, in the order of requests; 0: there is room for all. Blocks until
  /// there is one, or `is_aborted()` holds, which is polled. Whether it was taken.
  bool enter(int places, const std::function<bool()>& is_aborted);
  void leave();
  int running();
  int waiting();

 private:
  std::mutex mutex_;  // guards the following
  std::condition_variable changed_;
  std::deque<std::uint64_t> queue_;  // kernels that wait, by number
  std::uint64_t last_ = 0;
  int running_ = 0;
};

}  // namespace muster::standin
