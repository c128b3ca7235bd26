#include "core/group/backends/device_copies.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace muster::group {

DeviceCopies::DeviceCopies(c10::Device device)
    : stream_(c10::impl::VirtualGuardImpl(device.type()).getStream(device)),
      pins_(at::getAccelerator(false) == device.type()) {}

at::Tensor DeviceCopies::host_memory(std::int64_t elements, at::ScalarType dtype) {
  const auto options = at::TensorOptions(dtype).device(at::kCPU);
  if (pins_ && elements > 0) {
    try {
      return at::empty({elements}, options.pinned_memory(true));
    } catch (const c10::Error&) {
      pins_ = false;  // not supported by the device's implementation
    }
  }
  return at::empty({elements}, options);
}

void DeviceCopies::to_host(const at::Tensor& host, const at::Tensor& tensor) {
  const c10::StreamGuard guard(stream_);
  host.copy_(tensor, pins_);
  enqueued_ = pins_;
}

void DeviceCopies::wait_for_host() {
  if (!std::exchange(enqueued_, false)) return;
  c10::impl::VirtualGuardImpl(stream_.device_type()).synchronizeStream(stream_);
}

void DeviceCopies::to_device(const at::Tensor& tensor, const at::Tensor& host) {
  const c10::StreamGuard guard(stream_);
  tensor.copy_(host, pins_);
  if (!pins_) return;
  if (!copied_) copied_.emplace(stream_.device_type());
  copied_->record(stream_);
}

void DeviceCopies::join() const {
  if (!copied_) return;
  const c10::impl::VirtualGuardImpl guards(stream_.device_type());
  const auto current = guards.getStream(stream_.device());
  if (current != stream_) copied_->block(current);
}

std::vector<c10::Device> DeviceCopies::asynchronous() const {
  return pins_ ? std::vector<c10::Device>{stream_.device()} : std::vector<c10::Device>{};
}

}  // namespace muster::group
