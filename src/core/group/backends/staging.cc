// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/backends/staging.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

#include "core/group/call/dense_tensor.h"

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

namespace {

bool is_dense_cpu(const Slice& slice) {
  return slice.size() == 1 && group::is_dense_cpu(slice.front());
}

/// Calls visit(flat part with the piece's shape, piece) for each piece.
template <class Visit>
void each_part(const at::Tensor& flat, const Slice& slice, Visit visit) {
  std::int64_t at = 0;
  for (const auto& piece : slice) {
    visit(flat.narrow(0, at, piece.numel()).view(piece.sizes()), piece);
    at += piece.numel();
  }
}

}  // namespace

Staging::Staging(const CallTensors& tensors, collective::Args& args, bool at_root) {
  const Slice& slice = (tensors.inputs.empty() ? tensors.outputs : tensors.inputs).front();
  if (!slice.empty() && !slice.front().is_cpu())
    device_ = std::make_unique<DeviceCopies>(slice.front().device());
  args.inputs.clear();
  args.outputs.clear();
  // In place: one filled buffer for both sides.
  const bool in_place =
      args.op == Op::all_reduce || (args.op == Op::reduce && !tensors.outputs.empty());
  for (const auto& output : tensors.outputs)
    args.outputs.push_back(stage_output(output, in_place || (args.op == Op::broadcast && at_root)));
  if (in_place) {
    args.inputs.push_back(args.outputs.front());
  } else {
    for (const auto& input : tensors.inputs) args.inputs.push_back(stage_input(input));
  }
  if (device_) device_->wait_for_host();
}

void Staging::copy_in(const at::Tensor& flat, const Slice& slice) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView uncounted;  // `flat` is nobody else's
  each_part(flat, slice, [this](const at::Tensor& part, const at::Tensor& piece) {
    device_ ? device_->to_host(part, piece) : static_cast<void>(part.copy_(piece));
  });
}

at::Tensor Staging::flat_like(const Slice& slice) {
  std::int64_t elements = 0;
  for (const auto& tensor : slice) elements += tensor.numel();
  if (device_) return device_->host_memory(elements, slice.front().scalar_type());
  return at::empty({elements}, slice.front().options().requires_grad(false).memory_format(
                                   at::MemoryFormat::Contiguous));
}

ConstBytes Staging::stage_input(const Slice& slice) {
  if (slice.empty()) return {};
  if (is_dense_cpu(slice)) return dense_bytes(slice.front());
  const auto memory = flat_like(slice);
  copy_in(memory, slice);
  copies_in_.emplace_back(memory, slice);
  return dense_bytes(memory);
}

MutableBytes Staging::stage_output(const Slice& slice, bool filled) {
  if (slice.empty()) return {};
  if (is_dense_cpu(slice)) return dense_mutable_bytes(slice.front());
  const auto memory = flat_like(slice);
  if (filled) {
    copy_in(memory, slice);
    copies_in_.emplace_back(memory, slice);
  }
  copies_back_.emplace_back(memory, slice);
  return dense_mutable_bytes(memory);
}

void Staging::refill() {
  for (const auto& [flat, slice] : copies_in_) copy_in(flat, slice);
  if (device_) device_->wait_for_host();
}

void Staging::copy_back() {
  const at::NoGradGuard no_grad;
  for (const auto& [flat, slice] : copies_back_)
    each_part(flat, slice, [this](const at::Tensor& part, const at::Tensor& piece) {
      // A tensor of inference mode has no version to count. This thread need not be in that mode,
      // where torch would refuse to write.
      std::optional<at::AutoDispatchBelowADInplaceOrView> uncounted;
      if (piece.is_inference()) uncounted.emplace();
      device_ ? device_->to_device(piece, part) : static_cast<void>(piece.copy_(part));
    });
}

void Staging::finish(bool quiet) {
  if (copies_back_.empty()) return;
  if (!quiet) return copy_back();
  const at::AutoDispatchBelowADInplaceOrView uncounted;
  copy_back();
}

}  // namespace muster::group
