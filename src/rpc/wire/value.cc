// SPDX-License-Identifier: BSD-3-Clause
#include "muster/rpc_value.h"
#include "rpc/wire/tensor_wire.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>

#include <limits>
#include <utility>

#include "core/group/errors.h"
#include "rpc/agent/inbox.h"

namespace muster::rpc {
namespace {

constexpr std::uint32_t kNoTensor = ~std::uint32_t{0};

/// Distance in elements from the first to the last element of a tensor, plus one; -1 on overflow.
std::int64_t extent_of(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::int64_t last = 0;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return 0;
    std::int64_t step = 0;
    if (__builtin_mul_overflow(sizes[d] - 1, strides[d], &step) ||
        __builtin_add_overflow(last, step, &last))
      return -1;
  }
  return last == std::numeric_limits<std::int64_t>::max() ? -1 : last + 1;
}

/// The number of elements; -1 on overflow, even if a size is zero, because torch multiplies all
/// sizes.
std::int64_t elements_of(at::IntArrayRef sizes) {
  std::int64_t elements = 1;
  bool none = false;
  for (const auto size : sizes) {
    none = none || size == 0;
    if (size != 0 && __builtin_mul_overflow(elements, size, &elements)) return -1;
  }
  return none ? 0 : elements;
}

/// Numbers packed below a byte, and those that mean nothing without a scale, have no form here.
bool travels(at::ScalarType type) { return !c10::isQIntType(type) && !c10::isBitsType(type); }

Status misfit(const TensorHead& head, const std::string& why) {
  std::string sizes;
  for (const auto size : head.sizes) sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
  return Status(Code::internal, "a tensor of type " + std::to_string(head.dtype) + ", sizes [" +
                                    sizes + "] and " + std::to_string(head.bytes) +
                                    " bytes: " + why);
}

TensorIn new_memory(std::size_t bytes) {
  TensorIn memory;
  memory.memory = c10::Storage(c10::Storage::use_byte_size_t(), bytes, allocate_or_reuse(bytes),
                               c10::GetCPUAllocator(), /*resizable=*/true);
  memory.data = MutableBytes(static_cast<std::byte*>(memory.memory.mutable_data()), bytes);
  return memory;
}

/// Creates a tensor without a size yet. (Creating an empty tensor and replacing its memory takes a
/// microsecond more.)
at::Tensor over_memory(c10::Storage memory, at::ScalarType type) {
  return at::detail::make_tensor<c10::TensorImpl>(std::move(memory),
                                                  c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                  at::scalarTypeToTypeMeta(type));
}

[[noreturn]] void refuse(const std::string& what) {
  group::invalid("a tensor that is an argument or result of a call " + what);
}

}  // namespace

std::shared_ptr<ValueDelivery> ValueDelivery::take() {
  if (on_outcome.empty()) return nullptr;
  auto taken = std::make_shared<ValueDelivery>(agent, peer);
  taken->on_outcome = std::exchange(on_outcome, {});
  taken->arrived = arrived;
  return taken;
}

void ValueOutput::put_tensor(const at::Tensor& tensor) {
  auto position = kNoTensor;
  if (tensor.defined()) {
    position = static_cast<std::uint32_t>(value_.tensors.size());
    value_.tensors.push_back(tensor);
  }
  put(&position, sizeof position);
}

at::Tensor ValueInput::get_tensor() {
  std::uint32_t position = 0;
  get(&position, sizeof position);
  if (position == kNoTensor) return {};
  if (position >= value_.tensors.size())
    throw ValueError("it names tensor " + std::to_string(position) + " of " +
                     std::to_string(value_.tensors.size()));
  return value_.tensors[position];
}

TensorOut describe_tensor(const at::Tensor& given, const DeviceMapping& device) {
  TensorOut out;
  if (!given.defined()) {
    out.head.flags = TensorHead::kUndefined;
    return out;
  }
  if (given.layout() != at::kStrided) refuse("is not strided; make it dense first (to_dense)");
  if (given.is_quantized()) refuse("is quantized; send its int_repr and scale");
  if (!travels(given.scalar_type()))
    refuse(std::string("is of type ") + c10::toString(given.scalar_type()) +
           ", which does not travel; send it as bytes (view as uint8)");
  at::Device there = at::kCPU;
  at::Tensor tensor = given;
  if (!given.is_cpu()) {
    const at::NoGradGuard no_grad;
    there = device(given.device());
    tensor = tensor.to(at::kCPU);
    out.ours = true;
  }
  if (tensor.is_conj() || tensor.is_neg()) {
    const at::NoGradGuard no_grad;
    tensor = tensor.resolve_conj().resolve_neg();
    out.ours = true;
  }
  out.head.dtype = static_cast<std::uint8_t>(tensor.scalar_type());
  out.head.device_type = static_cast<std::uint8_t>(there.type());
  out.head.device_index = static_cast<std::uint8_t>(there.has_index() ? there.index() + 1 : 0);
  if (given.requires_grad()) out.head.flags |= TensorHead::kRequiresGrad;
  const auto elements = given.numel();
  auto extent = extent_of(given.sizes(), given.strides());
  const bool has_holes = extent > elements;
  const auto& shape =
      has_holes ? given : tensor;  // the resolved tensor may have another memory order
  out.head.sizes.assign(shape.sizes().begin(), shape.sizes().end());
  out.head.strides.assign(shape.strides().begin(), shape.strides().end());
  if (has_holes) {
    // Only the tensor's own elements are sent: the memory between them belongs to other tensors.
    const at::NoGradGuard no_grad;
    out.head.flags |= TensorHead::kElementOrder;
    tensor = tensor.contiguous();
    out.ours = true;
    extent = elements;
  } else {
    extent = extent_of(tensor.sizes(), tensor.strides());
  }
  out.head.bytes = static_cast<std::uint64_t>(extent) * tensor.element_size();
  if (out.head.bytes > 0)
    out.data = ConstBytes(static_cast<const std::byte*>(tensor.const_data_ptr()), out.head.bytes);
  out.source = std::move(tensor);
  return out;
}

void make_ours(TensorOut& tensor) {
  if (tensor.ours || tensor.data.empty()) return;
  TensorIn copy = new_memory(tensor.data.size());
  std::memcpy(copy.data.data(), tensor.data.data(), tensor.data.size());
  tensor.data = copy.data;
  tensor.source = over_memory(std::move(copy.memory), at::kByte);
  tensor.ours = true;
}

Result<TensorIn> allocate_tensor(const TensorHead& head) {
  if (head.dtype >= static_cast<std::uint8_t>(at::ScalarType::NumOptions) ||
      head.dtype == static_cast<std::uint8_t>(at::ScalarType::Undefined))
    return misfit(head, "there is no such type");
  const auto type = static_cast<at::ScalarType>(head.dtype);
  if (!travels(type)) return misfit(head, "tensors of this type do not travel");
  if (head.device_type >= static_cast<std::uint8_t>(at::COMPILE_TIME_MAX_DEVICE_TYPES))
    return misfit(head, "there is no such device");
  const auto elements = elements_of(head.sizes);
  const auto extent = extent_of(head.sizes, head.strides);
  const auto wide = static_cast<std::int64_t>(c10::elementSize(type));
  if (elements < 0 || extent < 0) return misfit(head, "no memory is as large");
  const bool in_order = (head.flags & TensorHead::kElementOrder) != 0;
  std::int64_t bytes = 0;
  if (__builtin_mul_overflow(in_order ? elements : extent, wide, &bytes) ||
      static_cast<std::uint64_t>(bytes) != head.bytes)
    return misfit(head, "its sizes ask for another number of bytes");
  // The receiver allocates the full strided extent, so that must stay in proportion to the bytes
  // sent.
  constexpr std::int64_t kMostSpread = std::int64_t{1} << 20;  // limit: a stride that is a mistake
  if (in_order && (extent <= elements || elements == 0 || extent / kMostSpread > elements))
    return misfit(head, "its strides do not fit");
  try {
    return new_memory(static_cast<std::size_t>(bytes));
  } catch (const std::exception& error) {
    return Status(Code::exhausted, misfit(head, error.what()).message());
  }
}

at::Tensor assemble_tensor(const TensorHead& head, TensorIn memory) {
  const auto type = static_cast<at::ScalarType>(head.dtype);
  at::Tensor tensor = over_memory(std::move(memory.memory), type);
  if ((head.flags & TensorHead::kElementOrder) != 0) {
    const at::NoGradGuard no_grad;
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous(head.sizes);
    tensor = at::empty_strided(head.sizes, head.strides, tensor.options()).copy_(tensor);
  } else {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(head.sizes, head.strides);
  }
  const auto device_type = static_cast<at::DeviceType>(head.device_type);
  if (device_type != at::kCPU) {
    const auto index = static_cast<c10::DeviceIndex>(static_cast<int>(head.device_index) - 1);
    tensor = tensor.to(at::Device(device_type, index));
  }
  if ((head.flags & TensorHead::kRequiresGrad) != 0 &&
      (at::isFloatingType(type) || at::isComplexType(type)))
    tensor.set_requires_grad(true);
  return tensor;
}

}  // namespace muster::rpc
