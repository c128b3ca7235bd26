/// Copies between accelerator tensors and host memory, for calls carried out by the CPU.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <optional>
#include <vector>

namespace muster::group {

/// Copies in the order of the stream that was current on the tensors' device at construction. If
/// the device supports it, host memory is pinned and copies to the device are only enqueued;
/// otherwise every copy is complete on return. Any thread may use it, one at a time.
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

}  // namespace muster::group
