// SPDX-License-Identifier: BSD-3-Clause
#include "backends/nccl/transfers.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cstdint>

#include "core/group/errors.h"

namespace muster::nccl {
namespace {

using collective::Op;
using collective::Reduce;

/// The type that NCCL reduces such elements as, and how many of it each has.
struct NcclElement {
  Type type = Type::uint8;
  std::size_t each = 1;
};
std::optional<NcclElement> element_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBool:
    case at::kByte: return NcclElement{Type::uint8, 1};
    case at::kChar: return NcclElement{Type::int8, 1};
    case at::kInt: return NcclElement{Type::int32, 1};
    case at::kLong: return NcclElement{Type::int64, 1};
    case at::kHalf: return NcclElement{Type::float16, 1};
    case at::kBFloat16: return NcclElement{Type::bfloat16, 1};
    case at::kFloat8_e4m3fn: return NcclElement{Type::float8_e4m3, 1};
    case at::kFloat8_e5m2: return NcclElement{Type::float8_e5m2, 1};
    case at::kFloat: return NcclElement{Type::float32, 1};
    case at::kDouble: return NcclElement{Type::float64, 1};
    case at::kComplexFloat: return NcclElement{Type::float32, 2};
    case at::kComplexDouble: return NcclElement{Type::float64, 2};
    default: return {};
  }
}

/// The operation on such elements. On bool, a sum is "or" and a product is "and".
NcclReduction reduction_of(Reduce reduce, at::ScalarType dtype) {
  switch (reduce) {
    case Reduce::product: return dtype == at::kBool ? NcclReduction::min : NcclReduction::product;
    case Reduce::min: return NcclReduction::min;
    case Reduce::max: return NcclReduction::max;
    case Reduce::avg: return NcclReduction::avg;
    default: return dtype == at::kBool ? NcclReduction::max : NcclReduction::sum;
  }
}

/// PREMUL_SUM's operation on one communicator, for the calls made while it lives.
class PremulSum {
 public:
  PremulSum(const NcclCommunicator& communicator, CommHandle handle, at::ScalarType dtype,
            double factor)
      : communicator_(communicator), handle_(handle) {
    constexpr int kHostMemory = 1;
    const auto real = c10::isComplexType(dtype) ? c10::toRealValueType(dtype) : dtype;
    const auto scalar = at::full({1}, factor, at::TensorOptions(real));
    communicator.check(
        communicator.library().functions().create_premul_sum(
            &reduction_, scalar.mutable_data_ptr(), element_of(real)->type, kHostMemory, handle),
        "ncclRedOpCreatePreMulSum");
  }
  ~PremulSum() {
    if (const auto destroy = communicator_.library().functions().destroy_reduction)
      destroy(reduction_, handle_);
  }
  PremulSum(const PremulSum&) = delete;
  NcclReduction reduction() const { return reduction_; }

 private:
  const NcclCommunicator& communicator_;
  const CommHandle handle_;
  NcclReduction reduction_ = NcclReduction::sum;
};

std::int64_t elements_of(const Slice& slice) {
  std::int64_t total = 0;
  for (const auto& tensor : slice) total += tensor.numel();
  return total;
}

bool is_dense(const Slice& slice) { return slice.size() == 1 && slice.front().is_contiguous(); }

/// Whether the slices are dense and lie one after another.
bool are_adjacent(const Slices& slices) {
  const char* next = nullptr;
  for (const auto& slice : slices) {
    if (!is_dense(slice)) return false;
    const auto* data = static_cast<const char*>(slice.front().const_data_ptr());
    if (next != nullptr && data != next) return false;
    next = data + slice.front().nbytes();
  }
  return true;
}

/// NCCL itself would refuse it only as it enqueues the call, which fails the group.
std::string why_no_float8(const NcclLibrary& library, c10::DeviceIndex device) {
  constexpr int kVersion = 22400, kCapability = 90;  // limit: the first with it
  if (library.version_code() < kVersion) return "from 2.24 on, and this is " + library.text();
  const int capability = library.compute_capability(device);
  if (capability == 0 || capability >= kCapability) return {};
  return "on GPUs from sm90 on, and this is sm" + std::to_string(capability);
}

}  // namespace

std::string why_not_reduced(const NcclLibrary& library, Reduce reduce, at::ScalarType dtype,
                            c10::DeviceIndex device) {
  const auto name = std::string(collective::name_of(reduce));
  if (reduce == Reduce::band || reduce == Reduce::bor || reduce == Reduce::bxor)
    return "NCCL has no " + name;
  const auto element = element_of(dtype);
  if (!element) return std::string("NCCL reduces no ") + c10::toString(dtype) + " tensors";
  if (element->type >= Type::float8_e4m3)
    if (const auto why = why_no_float8(library, device); !why.empty())
      return std::string("NCCL reduces ") + c10::toString(dtype) + " tensors " + why;
  if (reduce == Reduce::avg && dtype == at::kBool) return "NCCL has no AVG of Bool tensors";
  if (reduce != Reduce::premul_sum) return {};
  if (!c10::isFloatingType(dtype) && !c10::isComplexType(dtype))
    return std::string("NCCL has PREMUL_SUM for floating-point tensors only, not for ") +
           c10::toString(dtype);
  return library.need("ncclRedOpCreatePreMulSum").message();
}

NcclTransfer::DensePiece NcclTransfer::dense_input(const Slice& slice) {
  if (is_dense(slice)) return {slice.front().view({-1})};
  std::vector<at::Tensor> parts;
  for (const auto& tensor : slice) parts.push_back(tensor.reshape({-1}));
  return {at::cat(parts)};
}

NcclTransfer::DensePiece NcclTransfer::dense_output(const Slice& slice, bool filled) {
  if (is_dense(slice)) return {slice.front().view({-1})};
  if (slice.empty()) return {};
  auto flat =
      filled ? dense_input(slice).tensor : at::empty({elements_of(slice)}, slice.front().options());
  copies_back_.emplace_back(flat, slice);
  return {std::move(flat)};
}

bool NcclTransfer::is_even(const Slices& slices) const {
  return std::ranges::all_of(slices, [&](const Slice& slice) {
    return elements_of(slice) == elements_of(slices.front());
  });
}

NcclTransfer::DensePiece NcclTransfer::joined_inputs() {
  if (are_adjacent(plan_.inputs)) return {plan_.inputs.front().front()};
  std::vector<at::Tensor> parts;
  for (const auto& slice : plan_.inputs)
    for (const auto& tensor : slice) parts.push_back(tensor.reshape({-1}));
  return {at::cat(parts)};
}

NcclTransfer::DensePiece NcclTransfer::joined_outputs() {
  if (are_adjacent(plan_.outputs)) return {plan_.outputs.front().front()};
  const auto each = elements_of(plan_.outputs.front());
  const auto all = at::empty({each * plan_.size}, plan_.outputs.front().front().options());
  for (std::size_t i = 0; i < plan_.outputs.size(); ++i)
    copies_back_.emplace_back(all.narrow(0, static_cast<std::int64_t>(i) * each, each),
                              plan_.outputs[i]);
  return {all};
}

void NcclTransfer::prepare() {
  const auto& info = collective::info(plan_.op);
  if (plan_.op == Op::all_gather || plan_.op == Op::reduce_scatter) {
    even_ = is_even(info.lists_output ? plan_.outputs : plan_.inputs);
    if (even_) {
      inputs_.push_back(info.lists_input ? joined_inputs() : dense_input(plan_.inputs.front()));
      outputs_.push_back(info.lists_output ? joined_outputs()
                                           : dense_output(plan_.outputs.front(), false));
      return;
    }
  }
  for (const auto& slice : plan_.inputs) inputs_.push_back(dense_input(slice));
  for (const auto& slice : plan_.outputs)
    outputs_.push_back(dense_output(slice, plan_.op == Op::broadcast));
}

void NcclTransfer::finish() {
  for (const auto& [flat, slice] : copies_back_) {
    std::int64_t at = 0;
    for (const auto& tensor : slice) {
      tensor.copy_(flat.narrow(0, at, tensor.numel()).view(tensor.sizes()));
      at += tensor.numel();
    }
  }
}

void NcclTransfer::enqueue_reduction(const NcclCommunicator& communicator, CommHandle handle,
                                     StreamHandle stream) const {
  const auto& nccl = communicator.library().functions();
  const auto element = element_of(plan_.dtype).value_or(NcclElement{});
  const auto count = [&](const DensePiece& piece) {
    return static_cast<std::size_t>(piece.tensor.numel()) * element.each;
  };
  if (plan_.op == Op::reduce_scatter && even_
          ? count(outputs_[0]) == 0
          : plan_.op != Op::reduce_scatter && count(inputs_[0]) == 0)
    return;
  std::optional<PremulSum> premul;
  auto reduction = reduction_of(plan_.reduce, plan_.dtype);
  if (plan_.reduce == Reduce::premul_sum) {
    premul.emplace(communicator, handle, plan_.dtype, plan_.factor);
    reduction = premul->reduction();
  }
  if (plan_.op == Op::all_reduce) {
    communicator.check(nccl.all_reduce(inputs_[0].data(), outputs_[0].data(), count(inputs_[0]),
                                       element.type, reduction, handle, stream),
                       "ncclAllReduce");
  } else if (plan_.op == Op::reduce) {
    void* const output = outputs_.empty() ? nullptr : outputs_[0].data();
    communicator.check(nccl.reduce(inputs_[0].data(), output, count(inputs_[0]), element.type,
                                   reduction, plan_.root, handle, stream),
                       "ncclReduce");
  } else if (even_) {
    communicator.check(
        nccl.reduce_scatter(inputs_[0].data(), outputs_[0].data(), count(outputs_[0]), element.type,
                            reduction, handle, stream),
        "ncclReduceScatter");
  } else {
    for (int root = 0; root < plan_.size; ++root) {
      const auto& input = inputs_[static_cast<std::size_t>(root)];
      if (count(input) == 0) continue;
      void* const output = root == plan_.rank ? outputs_[0].data() : nullptr;
      communicator.check(nccl.reduce(input.data(), output, count(input), element.type, reduction,
                                     root, handle, stream),
                         "ncclReduce");
    }
  }
}

/// Sends and receives bytes; what has none is left out on both sides.
void NcclTransfer::enqueue_exchange(const NcclCommunicator& communicator, CommHandle handle,
                                    StreamHandle stream) const {
  const auto& nccl = communicator.library().functions();
  const auto send = [&](const DensePiece& piece, int peer) {
    if (piece.tensor.nbytes() == 0) return;
    communicator.check(
        nccl.send(piece.data(), piece.tensor.nbytes(), Type::uint8, peer, handle, stream),
        "ncclSend");
  };
  const auto receive = [&](const DensePiece& piece, int peer) {
    if (piece.tensor.nbytes() == 0) return;
    communicator.check(
        nccl.recv(piece.data(), piece.tensor.nbytes(), Type::uint8, peer, handle, stream),
        "ncclRecv");
  };
  const auto each_peer = [](const std::vector<DensePiece>& pieces, const auto& transfer) {
    for (std::size_t peer = 0; peer < pieces.size(); ++peer)
      transfer(pieces[peer], static_cast<int>(peer));
  };
  switch (plan_.op) {
    case Op::send: send(inputs_[0], plan_.root); break;
    case Op::recv: receive(outputs_[0], plan_.root); break;
    case Op::gather:
      send(inputs_[0], plan_.root);
      each_peer(outputs_, receive);
      break;
    case Op::scatter:
      each_peer(inputs_, send);
      receive(outputs_[0], plan_.root);
      break;
    default:
      each_peer(inputs_, send);
      each_peer(outputs_, receive);
      break;
  }
}

void NcclTransfer::enqueue(const NcclCommunicator& communicator, CommHandle handle,
                           StreamHandle stream) const {
  const auto& nccl = communicator.library().functions();
  const auto broadcast = [&](const void* from, const DensePiece& to, int root) {
    if (to.tensor.nbytes() == 0) return;
    communicator.check(
        nccl.broadcast(from, to.data(), to.tensor.nbytes(), Type::uint8, root, handle, stream),
        "ncclBroadcast");
  };
  switch (plan_.op) {
    case Op::all_reduce:
    case Op::reduce:
    case Op::reduce_scatter: enqueue_reduction(communicator, handle, stream); break;
    case Op::broadcast: broadcast(outputs_[0].data(), outputs_[0], plan_.root); break;
    case Op::all_gather:
      if (even_) {
        if (inputs_[0].tensor.nbytes() == 0) return;
        communicator.check(nccl.all_gather(inputs_[0].data(), outputs_[0].data(),
                                           inputs_[0].tensor.nbytes(), Type::uint8, handle, stream),
                           "ncclAllGather");
      } else {
        for (int root = 0; root < plan_.size; ++root)
          broadcast(inputs_[0].data(), outputs_[static_cast<std::size_t>(root)], root);
      }
      break;
    default: enqueue_exchange(communicator, handle, stream); break;
  }
}

}  // namespace muster::nccl
