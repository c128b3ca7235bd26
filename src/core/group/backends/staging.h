// SPDX-License-Identifier: BSD-3-Clause
/// Copies of one call's tensors that the CPU can work on: of those of accelerators, and of those
/// that are not one piece of memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/group/call/call.h"

namespace muster::group {

/// Copies between accelerator tensors and host memory, for calls carried out by the CPU: in the
/// order of the stream that was current on the tensors' device at construction. If the device
/// supports it, host memory is pinned and copies to the device are only enqueued; otherwise every
/// copy is complete on return. Any thread may use it, one at a time.
class DeviceCopies {
 public:
  explicit DeviceCopies(c10::Device device);

  /// Host memory for `elements` elements.
  at::Tensor host_memory(std::int64_t elements, at::ScalarType dtype);
  /// `host` may be read after the next wait_for_host().
  void to_host(const at::Tensor& host, const at::Tensor& tensor);
  void wait_for_host();
  /// Work enqueued later on the stream, or on a stream that joins afterwards, sees the values.
  /// `host` may be freed immediately.
  void to_device(const at::Tensor& tensor, const at::Tensor& host);
  /// Orders later work on the caller's current stream after all copies enqueued so far.
  void join() const;

  c10::Stream stream() const { return stream_; }
  /// The device, if copies to it are only enqueued; a future of the call must wait for it.
  std::vector<c10::Device> asynchronous() const;

 private:
  const c10::Stream stream_;
  bool pins_;              // false once pinned memory was refused
  bool enqueued_ = false;  // copies to the host since the last wait
  std::optional<c10::Event> copied_;
};

/// Copies one call's tensors to spans and back: the memory of a call whose tensors are not all
/// dense and on the CPU. A slice that is one dense CPU tensor is used directly. Any other slice is
/// copied to a flat buffer, which is pinned host memory for accelerator tensors.
class Staging {
 public:
  /// Sets the memory in `args`. `at_root` tells whether this member is the call's root.
  Staging(const CallTensors& tensors, collective::Args& args, bool at_root);

  /// Copies the inputs again, for another run.
  void refill();
  bool copies_back() const { return !copies_back_.empty(); }
  /// Call after success. Copies flat outputs back into the tensors; `quiet` does not mark them as
  /// written for autograd. On an accelerator, the copies are enqueued on the stream that was
  /// current when the call was made.
  void finish(bool quiet);
  /// The accelerator's copies, or null for CPU tensors.
  const DeviceCopies* device() const { return device_.get(); }

 private:
  void copy_back();
  void copy_in(const at::Tensor& flat, const Slice& slice);
  at::Tensor flat_like(const Slice& slice);
  ConstBytes stage_input(const Slice& slice);
  MutableBytes stage_output(const Slice& slice, bool filled);

  std::unique_ptr<DeviceCopies> device_;
  std::vector<std::pair<at::Tensor, Slice>> copies_in_;
  std::vector<std::pair<at::Tensor, Slice>> copies_back_;
};

}  // namespace muster::group
