#include "muster/group/backends/staging.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "muster/group/plain_tensor.h"
#include "muster/group/scalar_type.h"

namespace muster::group {
namespace {

bool is_plain(const Slice& slice) { return slice.size() == 1 && group::is_plain(slice.front()); }

/// Calls visit(part of the flat tensor in the piece's shape, piece) for each piece.
template <class Visit>
void each_part(const at::Tensor& flat, const Slice& slice, Visit visit) {
  std::int64_t at = 0;
  for (const auto& piece : slice) {
    visit(flat.narrow(0, at, piece.numel()).view(piece.sizes()), piece);
    at += piece.numel();
  }
}

}  // namespace

Staging::Staging(Request& request, bool at_root)
    : quiet_(request.quiet),
      inputs_(std::move(request.inputs)),
      outputs_(std::move(request.outputs)) {
  args_->op = request.op;
  args_->reduce = request.reduce_op.engine();
  args_->factor = request.reduce_op.factor();
  args_->root = request.root;
  if (!inputs_.empty() || !outputs_.empty()) {
    const auto& slice = inputs_.empty() ? outputs_.front() : inputs_.front();
    if (!slice.empty()) {
      args_->dtype = to_dtype(slice.front().scalar_type());
      if (!slice.front().is_cpu()) device_ = std::make_unique<DeviceCopies>(slice.front().device());
    }
  }
  // In place: one buffer, filled, for both sides.
  const bool in_place =
      request.op == Op::all_reduce || (request.op == Op::reduce && !outputs_.empty());
  for (const auto& slice : outputs_)
    args_->outputs.push_back(
        stage_output(slice, in_place || (request.op == Op::broadcast && at_root)));
  if (in_place) {
    args_->inputs.push_back(args_->outputs.front());
  } else {
    for (const auto& slice : inputs_) args_->inputs.push_back(stage_input(slice));
  }
  if (device_) device_->wait_for_host();
}

void Staging::copy_in(const at::Tensor& flat, const Slice& slice) {
  const at::NoGradGuard no_grad;
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
  if (is_plain(slice)) return plain_bytes(slice.front());
  const auto memory = flat_like(slice);
  copy_in(memory, slice);
  copies_in_.emplace_back(memory, slice);
  return plain_bytes(memory);
}

MutableBytes Staging::stage_output(const Slice& slice, bool filled) {
  if (slice.empty()) return {};
  if (is_plain(slice)) return plain_mutable_bytes(slice.front());
  const auto memory = flat_like(slice);
  if (filled) {
    copy_in(memory, slice);
    copies_in_.emplace_back(memory, slice);
  }
  copies_back_.emplace_back(memory, slice);
  return plain_mutable_bytes(memory);
}

void Staging::refill() {
  for (const auto& [flat, slice] : copies_in_) copy_in(flat, slice);
  if (device_) device_->wait_for_host();
}

void Staging::copy_back() {
  const at::NoGradGuard no_grad;
  for (const auto& [flat, slice] : copies_back_)
    each_part(flat, slice, [this](const at::Tensor& part, const at::Tensor& piece) {
      device_ ? device_->to_device(piece, part) : static_cast<void>(piece.copy_(part));
    });
}

void Staging::finish() {
  if (quiet_) {
    if (copies_back_.empty()) return;
    const at::AutoDispatchBelowADInplaceOrView uncounted;
    return copy_back();
  }
  if (!copies_back_.empty()) copy_back();
  for (const auto& slice : outputs_)
    for (const auto& tensor : slice)
      if (is_plain(slice)) mark_written(tensor);
}

std::vector<at::Tensor> Staging::outputs() const {
  std::vector<at::Tensor> tensors;
  for (const auto& slice : outputs_) tensors.insert(tensors.end(), slice.begin(), slice.end());
  return tensors;
}

}  // namespace muster::group
