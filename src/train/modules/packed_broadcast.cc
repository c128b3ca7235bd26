// SPDX-License-Identifier: BSD-3-Clause
#include "train/modules/packed_broadcast.h"

#include <ATen/TensorUtils.h>
#include <ATen/core/grad_mode.h>
#include <torch/types.h>
#include <algorithm>
#include <cstring>
#include <utility>

#include "core/group/call/call_builder.h"
#include "core/group/call/dense_tensor.h"
#include "core/group/errors.h"
#include "core/group/group_core.h"
#include "core/tunables/tunables_fixed.h"
#include "muster/collectives.h"
#include "muster/shared_memory.h"

namespace muster::parallel {
at::Tensor unset_memory(std::int64_t elements, const at::TensorOptions& options) {
  if (options.device().is_cpu()) {
    try {
      return empty_shared({elements}, options);
    } catch (const DistError& error) {
      if (error.code() != Code::exhausted) throw;
    }
  }
  return at::empty({elements}, options);
}

at::Tensor flat_memory(std::int64_t elements, const at::TensorOptions& options) {
  return unset_memory(elements, options).zero_();
}

at::Tensor shaped_like(const at::Tensor& flat, std::int64_t at, const at::Tensor& like) {
  const auto strides = like.is_non_overlapping_and_dense()
                           ? like.strides().vec()
                           : at::detail::defaultStrides(like.sizes());
  return at::empty({0}, flat.options())
      .set_(flat.storage(), flat.storage_offset() + at, like.sizes(), strides);
}

namespace {

/// Tensors up to this size are packed: copying twice costs less than a separate message.
constexpr std::size_t kSmallTensor = fixed::kLeastMessage;
/// Alignment of each piece, sufficient for any dtype.
constexpr std::int64_t kAlignment = 16;

bool is_small(const at::Tensor& tensor) { return tensor.nbytes() <= kSmallTensor; }
bool is_packed(const at::Tensor& tensor) { return tensor.is_cpu() && is_small(tensor); }

std::int64_t room_for(const at::Tensor& tensor) {
  return (static_cast<std::int64_t>(tensor.nbytes()) + kAlignment - 1) / kAlignment * kAlignment;
}

/// The piece of `memory` from byte `at` that holds the tensor's elements.
at::Tensor piece_of(const at::Tensor& memory, std::int64_t at, const at::Tensor& tensor) {
  return memory.narrow(0, at, static_cast<std::int64_t>(tensor.nbytes()))
      .view(tensor.scalar_type())
      .view(tensor.sizes());
}

void pack(const at::Tensor& tensor, const at::Tensor& memory, std::int64_t at) {
  if (group::is_dense_cpu(tensor)) {
    std::memcpy(memory.data_ptr<std::uint8_t>() + at, tensor.const_data_ptr(), tensor.nbytes());
  } else {
    piece_of(memory, at, tensor).copy_(tensor);
  }
}

/// detach() shares the source's version counter; variable_data() has its own.
at::Tensor written(const at::Tensor& tensor, PackedBroadcast::Autograd autograd) {
  return autograd == PackedBroadcast::Autograd::notify ? tensor.detach() : tensor.variable_data();
}

void unpack(const at::Tensor& tensor, const at::Tensor& memory, std::int64_t at,
            PackedBroadcast::Autograd autograd) {
  if (!group::is_dense_cpu(tensor)) {
    written(tensor, autograd).copy_(piece_of(memory, at, tensor));
    return;
  }
  std::memcpy(tensor.data_ptr(), memory.const_data_ptr<std::uint8_t>() + at, tensor.nbytes());
  if (autograd == PackedBroadcast::Autograd::notify) group::mark_written(tensor);
}

}  // namespace

void PackedBroadcast::send_from(const Group& group, int root,
                                const std::vector<at::Tensor>& tensors, Autograd autograd) {
  const at::NoGradGuard no_grad;
  std::vector<WorkRef> works;
  const auto send = [&](const TensorList& like) {
    Call call(*group, Op::broadcast, "broadcast", {}, true);
    CallBuilder build(call);
    build.root("src", {}, root);
    build.in_place_coalesced(like);
    build.check();
    works.push_back(core_of(group).submit(call));
  };
  std::int64_t bytes = 0;
  // Each of one dtype and device, in order of appearance, because ranks number devices differently.
  std::vector<TensorList> on_devices;
  for (const at::Tensor& tensor : tensors) {
    if (is_packed(tensor)) {
      bytes += room_for(tensor);
    } else if (is_small(tensor)) {
      const auto alike = [&](const TensorList& slice) {
        return slice[0].scalar_type() == tensor.scalar_type() &&
               slice[0].device() == tensor.device();
      };
      const auto slice = std::find_if(on_devices.begin(), on_devices.end(), alike);
      (slice != on_devices.end() ? *slice : on_devices.emplace_back())
          .push_back(written(tensor, autograd));
    } else {
      send({written(tensor, autograd)});
    }
  }
  for (const TensorList& slice : on_devices) send(slice);
  if (bytes > 0) {
    if (!memory_.defined() || memory_.numel() != bytes) memory_ = at::empty({bytes}, at::kByte);
    const auto each = [&](const auto& visit) {
      std::int64_t at = 0;
      for (const at::Tensor& tensor : tensors) {
        if (!is_packed(tensor)) continue;
        if (tensor.numel() > 0) visit(tensor, at);
        at += room_for(tensor);
      }
    };
    if (group->rank() == root)
      each([&](const at::Tensor& tensor, std::int64_t at) { pack(tensor, memory_, at); });
    broadcast(memory_, {.group = group, .group_src = root});
    if (group->rank() != root)
      each([&](const at::Tensor& tensor, std::int64_t at) {
        unpack(tensor, memory_, at, autograd);
      });
  }
  for (const WorkRef& work : works) work->wait();
}

}  // namespace muster::parallel
