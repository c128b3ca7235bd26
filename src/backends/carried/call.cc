// SPDX-License-Identifier: BSD-3-Clause
#include "backends/carried/call.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <span>
#include <string>

#include "backends/carried/library.h"
#include "backends/carried/ordered_floats.h"
#include "core/collective/kernels/kernels.h"
#include "core/tunables/tunables.h"

namespace muster::carried {
namespace {

using collective::Args;
using collective::Op;
using collective::Reduce;

/// Address of empty memory: MPI takes null for other things.
std::byte nothing[1];

const std::byte* address(ConstBytes bytes) { return bytes.empty() ? nothing : bytes.data(); }
std::byte* address(MutableBytes bytes) { return bytes.empty() ? nothing : bytes.data(); }

void copy_bytes(std::byte* out, const std::byte* in, std::size_t bytes) {
  if (bytes > 0 && out != in) std::memcpy(out, in, bytes);
}

/// The first byte of the slices if they follow each other in memory; null otherwise.
template <class Slices>
auto start_of(const Slices& slices) -> decltype(slices[0].data()) {
  decltype(slices[0].data()) start = nullptr, end = nullptr;
  for (const auto& slice : slices) {
    if (slice.empty()) continue;
    if (start == nullptr) start = slice.data();
    if (end != nullptr && end != slice.data()) return nullptr;
    end = slice.data() + slice.size();
  }
  return start;
}

CarriedReduction bool_operation(Reduce reduce) {
  switch (reduce) {
    case Reduce::product:
    case Reduce::min:
    case Reduce::band:
    case Reduce::avg: return CarriedReduction::band;
    case Reduce::bxor: return CarriedReduction::bxor;
    default: return CarriedReduction::bor;
  }
}

CarriedReduction operation(Reduce reduce) {
  switch (reduce) {
    case Reduce::product: return CarriedReduction::product;
    case Reduce::min: return CarriedReduction::min;
    case Reduce::max: return CarriedReduction::max;
    case Reduce::band: return CarriedReduction::band;
    case Reduce::bor: return CarriedReduction::bor;
    case Reduce::bxor: return CarriedReduction::bxor;
    default: return CarriedReduction::sum;
  }
}

}  // namespace

Carrier carrier_of(DType dtype) {
  switch (size_of(dtype)) {
    case 1: return {.element = Element::uint8};
    case 2: return {.element = Element::uint16};
    case 4: return {.element = Element::uint32};
    case 8: return {.element = Element::uint64};
    default: return {.element = Element::uint64, .per_element = 2};
  }
}

Carrier carrier_of(DType dtype, Reduce reduce, bool passes_nan_on) {
  Carrier carrier;
  carrier.op = operation(reduce);
  switch (dtype) {
    case DType::boolean:
      carrier.op = bool_operation(reduce);
      carrier.normalises = true;
      break;
    case DType::int8: carrier.element = Element::int8; break;
    case DType::int16: carrier.element = Element::int16; break;
    case DType::int32: carrier.element = Element::int32; break;
    case DType::int64: carrier.element = Element::int64; break;
    case DType::float16:
    case DType::bfloat16:
      carrier.widens = true;
      carrier.element = Element::float32;
      break;
    case DType::complex64: carrier.per_element = 2; [[fallthrough]];
    case DType::float32: carrier.element = Element::float32; break;
    case DType::complex128: carrier.per_element = 2; [[fallthrough]];
    case DType::float64: carrier.element = Element::float64; break;
    default: break;
  }
  const bool is_double = carrier.element == Element::float64;
  if (!passes_nan_on && (is_double || carrier.element == Element::float32) &&
      (carrier.op == CarriedReduction::min || carrier.op == CarriedReduction::max)) {
    carrier.orders = true;
    carrier.element = is_double ? Element::int64 : Element::int32;
  }
  return carrier;
}

Status failed(const CallLibrary& library, std::string_view call, int code) {
  if (code == kCountTooLarge)
    return Status(Code::unsupported,
                  std::string(call) + ": " + library.version() +
                      " counts elements in ints, and there are more than 2147483647; split the "
                      "tensor, or use an MPI library with MPI 4");
  return Status(Code::internal, std::string(call) + " failed: " + library.error_text(code) + " (" +
                                    library.version() + ")");
}

Status check_counts(const CallLibrary& library, const Args& args) {
  if (library.has_large_counts()) return {};
  constexpr std::size_t kLargest = std::numeric_limits<int>::max();
  const bool reduces = collective::info(args.op).reduces;
  const auto per_element = static_cast<std::size_t>(
      (reduces ? carrier_of(args.dtype, args.reduce) : carrier_of(args.dtype)).per_element);
  std::size_t inputs = 0, outputs = 0;
  for (const ConstBytes input : args.inputs) inputs += input.size();
  for (const MutableBytes output : args.outputs) outputs += output.size();
  std::size_t count = std::max(inputs, outputs);
  if (!collective::is_message(args.op)) count = elements_in(count, args.dtype) * per_element;
  if (count <= kLargest) return {};
  return failed(library, collective::info(args.op).name, kCountTooLarge);
}

bool is_left_to_library(const Args& args, int rank) {
  const auto is_one_piece = [](const auto& slices) {
    return start_of(slices) != nullptr ||
           std::ranges::all_of(slices, [](const auto& slice) { return slice.empty(); });
  };
  if (!is_one_piece(args.inputs) || !is_one_piece(args.outputs)) return false;
  const auto mine = static_cast<std::size_t>(rank);
  switch (args.op) {
    case Op::broadcast:
    case Op::gather:
    case Op::scatter: return true;
    case Op::all_gather:  // in place and uneven, the member's own slice is copied first
      return args.outputs[mine].data() != args.inputs[0].data();
    case Op::all_to_all: return args.inputs[mine].data() != args.outputs[mine].data();
    default: return false;
  }
}

std::byte* CarriedCall::Scratch::get(std::size_t bytes) {
  if (bytes == 0) return nothing;
  if (bytes > size_) {
    memory_ = nullptr;  // its contents are not needed
    memory_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
    size_ = bytes;
  }
  return memory_.get();
}

void CarriedCall::Scratch::trim() {
  if (size_ <= tunables().kept_scratch) return;
  memory_ = nullptr;
  size_ = 0;
}

Status CarriedCall::begin(const Args& args, std::uint64_t sequence) {
  args_ = &args;
  is_direct_ = tags_.any() && DirectAllReduce::takes(args, size_);
  if (is_direct_) return begin_direct(sequence);
  carrier_ = collective::info(args.op).reduces
                 ? carrier_of(args.dtype, args.reduce, library_.passes_nan_on())
                 : carrier_of(args.dtype);
  result_ = nullptr;
  request_.ints.clear();
  int code = 0;
  switch (args.op) {
    case Op::barrier: code = comm_.barrier(request_); break;
    case Op::broadcast: code = broadcast(); break;
    case Op::all_reduce: code = all_reduce(); break;
    case Op::reduce: code = reduce(); break;
    case Op::all_gather: code = all_gather(); break;
    case Op::gather: code = gather(); break;
    case Op::scatter: code = scatter(); break;
    case Op::reduce_scatter: code = reduce_scatter(); break;
    case Op::all_to_all: code = all_to_all(); break;
    default: return Status(Code::internal, "a message is no collective");
  }
  if (code == 0) return {};
  return failed(library_, collective::info(args.op).name, code);
}

/// With a factor, what each member gives is scaled first.
Status CarriedCall::begin_direct(std::uint64_t sequence) {
  const ConstBytes in = args_->inputs[0];
  const std::byte* from = in.data();
  if (scales() && !in.empty()) {
    std::byte* const scaled = scaled_.get(in.size());
    if (args_->dtype == DType::boolean) {
      std::memset(scaled, 0, in.size());
      if (args_->factor != 0.0) std::memcpy(scaled, from, in.size());
    } else {
      collective::scale(scaled, from, elements_in(in.size(), args_->dtype), args_->dtype,
                        args_->factor);
    }
    from = scaled;
  }
  return direct_.begin(*args_, from, tags_.reduction(sequence));
}

std::optional<Status> CarriedCall::test() {
  if (is_direct_) {
    auto ended = direct_.test();
    // A call that failed may have messages under way, whose memory stays.
    if (ended && ended->ok()) trim();
    return ended;
  }
  bool done = false;
  if (const int code = library_.test(request_, done, nullptr); code != 0)
    return failed(library_, collective::info(args_->op).name, code);
  if (!done) return {};
  finish();
  return Status();
}

template <class Slices>
void CarriedCall::lay_out(CarriedLayout& layout, const Slices& slices) const {
  layout.counts.clear();
  layout.places.clear();
  layout.bytes = 0;
  layout.even = true;
  for (const auto& slice : slices) {
    layout.counts.push_back(elements(slice.size()));
    layout.places.push_back(elements(layout.bytes));
    layout.bytes += slice.size();
    layout.even = layout.even && slice.size() == slices[0].size();
  }
}

/// The inputs, one after another: in their own memory if they are so.
const std::byte* CarriedCall::packed_inputs(bool must_copy) {
  const std::byte* const start = start_of(args_->inputs);
  std::size_t bytes = 0;
  for (const ConstBytes input : args_->inputs) bytes += input.size();
  if (bytes == 0) return nothing;
  if (start != nullptr && !must_copy) return start;
  std::byte* const packed = in_.get(bytes);
  std::size_t at = 0;
  for (const ConstBytes input : args_->inputs) {
    copy_bytes(packed + at, input.data(), input.size());
    at += input.size();
  }
  return packed;
}

std::byte* CarriedCall::place_for_outputs(const CarriedLayout& layout) {
  if (layout.bytes == 0) return nothing;
  if (std::byte* const start = start_of(args_->outputs)) return start;
  return result_ = out_.get(layout.bytes);
}

void CarriedCall::convert(std::byte* out, ConstBytes in) {
  const std::size_t count = elements_in(in.size(), args_->dtype);
  const std::byte* from = in.data();
  if (count == 0) return;
  if (carrier_.normalises) {
    const std::byte* const inputs[] = {from};
    if (scales() && args_->factor == 0.0) {
      std::memset(out, 0, in.size());
    } else {
      collective::reduce_complete(out, inputs, count, args_->dtype, Reduce::bor);
    }
    return;
  }
  if (scales()) {
    std::byte* const to = carrier_.widens ? scaled_.get(in.size()) : out;
    collective::scale(to, from, count, args_->dtype, args_->factor);
    from = to;
  }
  if (carrier_.widens) {
    collective::widen(reinterpret_cast<float*>(out), from, count, args_->dtype);
  } else {
    copy_bytes(out, from, in.size());
  }
  if (!carrier_.orders) return;
  const bool largest = carrier_.op == CarriedReduction::max;
  if (carrier_.element == Element::int64)
    order_floats<double>(out, count, largest);
  else
    order_floats<float>(out, count, largest);
}

void CarriedCall::restore_order(std::byte* data, Count count) const {
  if (!carrier_.orders) return;
  if (carrier_.element == Element::int64)
    restore_floats<double>(data, static_cast<std::size_t>(count));
  else
    restore_floats<float>(data, static_cast<std::size_t>(count));
}

void CarriedCall::divide(std::byte* data, Count count) const {
  if (!averages() || carrier_.normalises || count == 0) return;
  const DType dtype = carrier_.widens ? DType::float32 : args_->dtype;
  collective::finish_average(data, static_cast<std::size_t>(count / carrier_.per_element), dtype,
                             size_);
}

int CarriedCall::broadcast() {
  const MutableBytes data = args_->outputs[0];
  return comm_.broadcast(address(data), elements(data.size()), carrier_.element, args_->root,
                         request_);
}

int CarriedCall::all_reduce() {
  const ConstBytes in = args_->inputs[0];
  std::byte* const out = address(args_->outputs[0]);
  const Count count = elements(in.size());
  if (!carrier_.converts() && !scales())
    return comm_.all_reduce(address(in), out, count, carrier_.element, carrier_.op, request_);
  std::byte* to = out;
  if (carrier_.widens) to = result_ = in_.get(static_cast<std::size_t>(count) * sizeof(float));
  convert(to, in);
  return comm_.all_reduce(to, to, count, carrier_.element, carrier_.op, request_);
}

int CarriedCall::reduce() {
  const ConstBytes in = args_->inputs[0];
  const Count count = elements(in.size());
  const bool root = at_root();
  std::byte* out = root ? address(args_->outputs[0]) : nullptr;
  const std::byte* from = address(in);
  if (carrier_.converts() || scales()) {
    std::byte* to = out;
    if (carrier_.widens) {
      to = in_.get(static_cast<std::size_t>(count) * sizeof(float));
      if (root) out = result_ = to;
    } else if (!root) {
      to = in_.get(in.size());
    }
    convert(to, in);
    from = to;
  }
  return comm_.reduce(from, out, count, carrier_.element, carrier_.op, args_->root, request_);
}

int CarriedCall::all_gather() {
  const ConstBytes in = args_->inputs[0];
  lay_out(received_, args_->outputs);
  std::byte* const out = place_for_outputs(received_);
  const bool in_place = result_ == nullptr && !in.empty() &&
                        in.data() == args_->outputs[static_cast<std::size_t>(rank_)].data();
  const std::byte* const from = in_place ? nullptr : address(in);
  if (received_.even)
    return comm_.all_gather(from, out, received_.counts[0], carrier_.element, request_);
  // As an all_to_all that sends everybody the same: Intel MPI's MPI_Iallgatherv hangs on some long
  // uneven slices, and whether a member gathers in place is not known alike on all of them.
  // MPI does not let it send from the memory that it receives into.
  const std::byte* sends = from;
  if (in_place) {
    std::byte* const copy = in_.get(in.size());
    std::memcpy(copy, in.data(), in.size());
    sends = copy;
  }
  sent_.counts.assign(received_.counts.size(), elements(in.size()));
  sent_.places.assign(received_.counts.size(), Count{0});
  return comm_.all_to_all_uneven(sends, sent_.counts.data(), sent_.places.data(), out,
                                 received_.counts.data(), received_.places.data(), carrier_.element,
                                 request_);
}

int CarriedCall::gather() {
  const ConstBytes in = args_->inputs[0];
  std::byte* out = nothing;
  bool in_place = false;
  if (at_root()) {
    lay_out(received_, args_->outputs);
    out = place_for_outputs(received_);
    in_place = result_ == nullptr && !in.empty() &&
               in.data() == args_->outputs[static_cast<std::size_t>(rank_)].data();
  }
  return comm_.gather(in_place ? nullptr : address(in), out, elements(in.size()), carrier_.element,
                      args_->root, request_);
}

int CarriedCall::scatter() {
  const MutableBytes out = args_->outputs[0];
  const std::byte* in = nothing;
  bool in_place = false;
  if (at_root()) {
    in = packed_inputs(false);
    const ConstBytes mine = args_->inputs[static_cast<std::size_t>(rank_)];
    in_place = in == start_of(args_->inputs) && !mine.empty() && mine.data() == out.data();
  }
  return comm_.scatter(in, in_place ? nullptr : address(out), elements(out.size()),
                       carrier_.element, args_->root, request_);
}

int CarriedCall::reduce_scatter() {
  const MutableBytes out = args_->outputs[0];
  lay_out(sent_, args_->inputs);
  const ConstBytes mine = args_->inputs[static_cast<std::size_t>(rank_)];
  const bool overlaps = !mine.empty() && mine.data() == out.data();
  const std::byte* in = nullptr;
  std::byte* to = address(out);
  if (carrier_.converts() || scales()) {
    const std::size_t width = carrier_.widens ? sizeof(float) : size_of(args_->dtype);
    std::byte* const converted = in_.get(elements_in(sent_.bytes, args_->dtype) * width);
    for (std::size_t i = 0; i < args_->inputs.size(); ++i) {
      const auto before = static_cast<std::size_t>(sent_.places[i] / carrier_.per_element);
      convert(converted + before * width, args_->inputs[i]);
    }
    in = converted;
    if (carrier_.widens) to = result_ = out_.get(elements_in(out.size(), args_->dtype) * width);
  } else {
    in = packed_inputs(overlaps);
  }
  return comm_.reduce_scatter(in, to, sent_.counts.data(), carrier_.element, carrier_.op, request_);
}

/// Always with lists of counts: whether all are equal is not known alike on every member.
int CarriedCall::all_to_all() {
  lay_out(sent_, args_->inputs);
  lay_out(received_, args_->outputs);
  const auto me = static_cast<std::size_t>(rank_);
  const ConstBytes kept = args_->inputs[me];
  const bool overlaps = !kept.empty() && kept.data() == args_->outputs[me].data();
  const std::byte* const in = packed_inputs(overlaps);
  std::byte* const out = place_for_outputs(received_);
  return comm_.all_to_all_uneven(in, sent_.counts.data(), sent_.places.data(), out,
                                 received_.counts.data(), received_.places.data(), carrier_.element,
                                 request_);
}

void CarriedCall::finish() {
  const Args& args = *args_;
  const collective::OpInfo& row = collective::info(args.op);
  if (row.reduces && (args.op != Op::reduce || at_root())) {
    const MutableBytes out = args.outputs[0];
    const Count count = elements(out.size());
    restore_order(result_ != nullptr ? result_ : out.data(), count);
    divide(result_ != nullptr ? result_ : out.data(), count);
    if (result_ != nullptr && count > 0)
      collective::narrow(out.data(), reinterpret_cast<const float*>(result_),
                         static_cast<std::size_t>(count), args.dtype);
  } else if (row.lists_output && result_ != nullptr) {
    std::size_t at = 0;
    for (const MutableBytes out : args.outputs) {
      copy_bytes(out.data(), result_ + at, out.size());
      at += out.size();
    }
  }
  result_ = nullptr;
  trim();
}

void CarriedCall::trim() {
  in_.trim();
  out_.trim();
  scaled_.trim();
  direct_.trim();
}

}  // namespace muster::carried
