/// Between tensors on an accelerator and memory of the host, for calls that the CPU carries out.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <optional>
#include <vector>

namespace muster::group {

/// Works in the order of the stream that was its maker's current one on the tensors' device. Where
/// the device can, host memory is pinned and copies to the device are only enqueued; else every
/// copy is done on return. Any thread may use it, one at a time.
class DeviceCopies {
 public:
  explicit DeviceCopies(c10::Device device);

  /// Memory of the host for so many elements.
  at::Tensor host_memory(std::int64_t elements, at::ScalarType dtype);
  /// The host may read `host` after the next wait_for_host().
  void to_host(const at::Tensor& host, const at::Tensor& tensor);
  void wait_for_host();
  /// The tensor has the values for whatever follows on the stream, or on one that has joined since.
  /// `host` may be let go at once.
  void to_device(const at::Tensor& tensor, const at::Tensor& host);
  /// What the caller's current stream is given from now on comes after all copies that were
  /// enqueued so far.
  void join() const;

  c10::Stream stream() const { return stream_; }
  /// The device, where copies to it are only enqueued: what a future of the call must wait for.
  std::vector<c10::Device> asynchronous() const;

 private:
  const c10::Stream stream_;
  bool pins_;              // until pinned memory was refused
  bool enqueued_ = false;  // to the host, since it was last waited for
  std::optional<c10::Event> copied_;
};

}  // namespace muster::group
