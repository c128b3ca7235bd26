// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/call/call_builder.h"

#include <ATen/MemoryOverlap.h>

#include <algorithm>

#include "core/collective/call.h"
#include "core/collective/control.h"
#include "core/group/call/given_tensors.h"
#include "core/group/call/tensor_class.h"

namespace muster {

using group::GivenTensors;

namespace {

/// Above this number of pairs, the engine's check, which sorts, is faster than comparing all pairs.
constexpr std::size_t kMaxPairs = 40;

bool apart(ConstBytes a, ConstBytes b) {
  return a.empty() || b.empty() || a.data() + a.size() <= b.data() ||
         b.data() + b.size() <= a.data();
}

/// The memory from the first to the last of consecutive slices.
template <class T>
ConstBytes span_of(const collective::SliceList<T>& slices) {
  if (slices.empty()) return {};
  const ConstBytes last = slices[slices.size() - 1];
  return {slices.front().data(), last.data() + last.size()};
}

/// Whether several elements share memory. Tests contiguity first, which is cheap.
bool overlaps_itself(const at::Tensor& tensor) {
  return !tensor.is_contiguous() && at::has_internal_overlap(tensor) == at::MemOverlap::Yes;
}

std::size_t bytes_of(const at::Tensor& tensor) {
  return static_cast<std::size_t>(tensor.numel()) * tensor.element_size();
}

}  // namespace

bool CallBuilder::note(Problem problem, bool output, std::size_t index, const at::Tensor& tensor) {
  if (call_.problem_ == Problem::none)
    call_.culprit_ = {.output = output, .index = index, .tensor = &tensor};
  note(problem);
  return false;
}

void CallBuilder::note_rank(std::string_view keyword, std::optional<int> global,
                            std::optional<int> local) {
  note(Problem::no_such_rank);
  call_.culprit_.keyword = keyword;
  call_.culprit_.global = global;
  call_.culprit_.local = local;
}

void CallBuilder::root(std::string_view keyword, std::optional<int> global,
                       std::optional<int> local, std::optional<int> fallback) {
  if (call_.problem_ != Problem::none) return;
  if (!global && !local) global = fallback;
  const auto& ranks = call_.group_->ranks();
  if (global.has_value() == local.has_value()) return note_rank(keyword, global, local);
  const int place =
      local ? *local
            : static_cast<int>(std::find(ranks.begin(), ranks.end(), *global) - ranks.begin());
  if (place < 0 || place >= call_.group_->size()) return note_rank(keyword, global, local);
  call_.args.root = place;
  call_.record.traced.peer = call_.group_->first_rank_of(place);
}

void CallBuilder::peer(std::string_view keyword, std::optional<int> global,
                       std::optional<int> local, std::int64_t tag) {
  root(keyword, global, local);
  if (call_.args.root == call_.group_->rank()) note(Problem::peer_is_self);
  this->tag(tag);
}

void CallBuilder::tag(std::int64_t tag) {
  call_.args.tag = static_cast<std::uint64_t>(tag);
  call_.record.traced.tag = tag;
  if (tag < 0) return note(Problem::negative_tag);
  if (call_.args.tag >= collective::kFirstReservedTag) note(Problem::reserved_tag);
}

bool CallBuilder::check_tensor_slowly(const at::Tensor& tensor, bool output, std::size_t index) {
  if (call_.problem_ != Problem::none) return false;
  if (!group::is_one_array(tensor) || !group::foreign_class_of(tensor).empty())
    return note(Problem::kind, output, index, tensor);
  call_.dense_ = call_.dense_ && group::is_dense_cpu(tensor);
  if (call_.like_ == nullptr) {
    set_first_tensor(tensor, tensor.scalar_type());
    call_.device_ = tensor.device().type();
  }
  if (tensor.scalar_type() != call_.like_->scalar_type() ||
      tensor.device() != call_.like_->device() || (output && overlaps_itself(tensor)))
    return note(Problem::difference, output, index, tensor);
  return true;
}

void CallBuilder::push(const at::Tensor& tensor, bool output) {
  if (!call_.dense_) return push_length(bytes_of(tensor), output);
  if (output) {
    call_.args.outputs.push_back(group::dense_mutable_bytes(tensor));
  } else {
    call_.args.inputs.push_back(group::dense_bytes(tensor));
  }
}

/// Used if the memory is not known before staging.
void CallBuilder::push_length(std::size_t bytes, bool output) {
  if (output) {
    call_.args.outputs.push_back({static_cast<std::byte*>(nullptr), bytes});
  } else {
    call_.args.inputs.push_back({static_cast<const std::byte*>(nullptr), bytes});
  }
}

void CallBuilder::in_place(const at::Tensor& tensor) {
  if (call_.problem_ != Problem::none) return;
  const bool reads = call_.args.op != Op::broadcast;
  const bool writes = call_.args.op != Op::reduce || call_.at_root();
  if (reads)
    call_.input_args_ = {.form = GivenTensors::Form::tensor, .tensors = &tensor, .count = 1};
  if (writes)
    call_.output_args_ = {.form = GivenTensors::Form::tensor, .tensors = &tensor, .count = 1};
  if (!check_tensor(tensor, !reads, 0)) return;
  if (!call_.dense_) [[unlikely]] {
    if (writes && !check_tensor(tensor, true, 0)) return;
    if (reads) push_length(bytes_of(tensor), false);
    if (writes) push_length(bytes_of(tensor), true);
    call_.args.each = bytes_of(tensor);
  } else if (writes) {
    const auto memory = group::dense_mutable_bytes(tensor);
    call_.args.outputs.push_back(memory);
    if (reads) call_.args.inputs.push_back(memory);
    call_.args.each = memory.size();
  } else {
    call_.args.inputs.push_back(group::dense_bytes(tensor));
    call_.args.each = call_.args.inputs.front().size();
  }
  call_.record.traced.bytes = call_.args.each;
  call_.args.checked = true;
}

void CallBuilder::in_place_coalesced(const TensorList& tensors) {
  if (tensors.empty()) return note(Problem::no_tensors);
  if (call_.args.op != Op::broadcast) coalesced(tensors, false);
  coalesced(tensors, true);
}

void CallBuilder::add_input(const at::Tensor& tensor) {
  if (call_.problem_ != Problem::none) return;
  call_.input_args_ = {.form = GivenTensors::Form::tensor, .tensors = &tensor, .count = 1};
  if (check_tensor(tensor, false, 0)) push(tensor, false);
}

void CallBuilder::add_output(const at::Tensor& tensor) {
  if (call_.problem_ != Problem::none) return;
  call_.output_args_ = {.form = GivenTensors::Form::tensor, .tensors = &tensor, .count = 1};
  if (check_tensor(tensor, true, 0)) push(tensor, true);
}

void CallBuilder::list(const TensorList& tensors, bool output) {
  if (call_.problem_ != Problem::none) return;
  side(output) = {
      .form = GivenTensors::Form::list, .tensors = tensors.data(), .count = tensors.size()};
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!check_tensor(tensors[i], output, i)) return;
    push(tensors[i], output);
  }
}

void CallBuilder::add_input_parts(const at::Tensor& whole, const at::Tensor& part) {
  if (!fits(whole, part, false)) return;
  push_parts(whole, false);
  call_.record.traced.shape = {part.sizes().data(), part.sizes().size()};
  add_output(part);
}

void CallBuilder::add_output_parts(const at::Tensor& whole, const at::Tensor& part) {
  if (!fits(whole, part, true)) return;
  add_input(part);
  push_parts(whole, true);
}

bool CallBuilder::fits(const at::Tensor& whole, const at::Tensor& part, bool output) {
  if (call_.problem_ != Problem::none) return false;
  side(output) = {.form = GivenTensors::Form::parts, .tensors = &whole, .count = 1, .part = &part};
  if (whole.defined() && (!group::is_one_array(whole) || !group::foreign_class_of(whole).empty()))
    return note(Problem::kind, output, 0, whole);
  return group::holds_parts(whole, part, call_.group_->size()) ||
         note(Problem::whole_and_part, output, 0, whole);
}

void CallBuilder::push_parts(const at::Tensor& whole, bool output) {
  if (call_.problem_ != Problem::none || !check_tensor(whole, output, 0)) return;
  const std::size_t length = bytes_of(whole) / call_.members();
  push_pieces(whole, output, [length](std::size_t) { return length; });
}

/// Appends consecutive pieces, `length(member)` bytes for each member.
template <class Length>
void CallBuilder::push_pieces(const at::Tensor& tensor, bool output, Length length) {
  if (!call_.dense_) {
    for (std::size_t member = 0; member < call_.members(); ++member)
      push_length(length(member), output);
  } else if (output) {
    std::byte* at = group::dense_mutable_bytes(tensor).data();
    for (std::size_t member = 0; member < call_.members(); at += length(member++))
      call_.args.outputs.push_back({at, length(member)});
  } else {
    const std::byte* at = group::dense_bytes(tensor).data();
    for (std::size_t member = 0; member < call_.members(); at += length(member++))
      call_.args.inputs.push_back({at, length(member)});
  }
}

void CallBuilder::exchange_splits(const at::Tensor& output, const at::Tensor& input,
                                  const std::vector<std::int64_t>& output_sizes,
                                  const std::vector<std::int64_t>& input_sizes) {
  splits(input, input_sizes, false);
  splits(output, output_sizes, true);
}

void CallBuilder::splits(const at::Tensor& tensor, const std::vector<std::int64_t>& sizes,
                         bool output) {
  if (call_.problem_ != Problem::none) return;
  side(output) = {
      .form = GivenTensors::Form::splits, .tensors = &tensor, .count = 1, .sizes = &sizes};
  if (!group::splits_fit(tensor, sizes, call_.group_->size())) {
    note(Problem::splits, output, 0, tensor);
    return;
  }
  if (!check_tensor(tensor, output, 0)) return;
  const auto rows = static_cast<std::size_t>(tensor.size(0));
  const std::size_t row = rows == 0 ? 0 : bytes_of(tensor) / rows;
  push_pieces(tensor, output, [&](std::size_t member) {
    return row * (sizes.empty() ? rows / call_.members() : static_cast<std::size_t>(sizes[member]));
  });
}

/// A slice of several tensors is never one piece of memory.
void CallBuilder::coalesced(const TensorList& tensors, bool output) {
  if (call_.problem_ != Problem::none) return;
  side(output) = {
      .form = GivenTensors::Form::coalesced, .tensors = tensors.data(), .count = tensors.size()};
  std::size_t bytes = 0;
  for (const auto& tensor : tensors) {
    if (!check_tensor(tensor, output, 0)) return;
    bytes += bytes_of(tensor);
  }
  call_.dense_ = call_.dense_ && tensors.size() == 1;
  call_.dense_ ? push(tensors.front(), output) : push_length(bytes, output);
}

void CallBuilder::lists(const std::vector<TensorList>& lists, bool output) {
  if (call_.problem_ != Problem::none) return;
  side(output) = {.form = GivenTensors::Form::lists, .lists = &lists};
  for (std::size_t i = 0; i < lists.size(); ++i) {
    std::size_t bytes = 0;
    for (const auto& tensor : lists[i]) {
      if (!check_tensor(tensor, output, i)) return;
      bytes += bytes_of(tensor);
    }
    call_.dense_ = call_.dense_ && lists[i].size() == 1;
    call_.dense_ ? push(lists[i].front(), output) : push_length(bytes, output);
  }
}

bool CallBuilder::same_lists(const TensorList& tensors, const std::vector<TensorList>& lists) {
  if (call_.problem_ != Problem::none) return false;
  if (tensors.empty()) note(Problem::no_tensors);
  if (!group::lists_fit(tensors, lists, call_.group_->rank())) note(Problem::lists_differ);
  return call_.problem_ == Problem::none;
}

void CallBuilder::add_input_coalesced(const TensorList& tensors,
                                      const std::vector<TensorList>& each) {
  call_.input_args_ = {.form = GivenTensors::Form::lists, .lists = &each};
  call_.output_args_ = {
      .form = GivenTensors::Form::coalesced, .tensors = tensors.data(), .count = tensors.size()};
  if (!same_lists(tensors, each)) return;
  lists(each, false);
  coalesced(tensors, true);
}

void CallBuilder::add_output_coalesced(const std::vector<TensorList>& each,
                                       const TensorList& tensors) {
  call_.input_args_ = {
      .form = GivenTensors::Form::coalesced, .tensors = tensors.data(), .count = tensors.size()};
  call_.output_args_ = {.form = GivenTensors::Form::lists, .lists = &each};
  if (!same_lists(tensors, each)) return;
  coalesced(tensors, false);
  lists(each, true);
}

void CallBuilder::add_input_memory(at::ScalarType type, ConstBytes memory) {
  call_.like_type_ = type;
  call_.args.dtype = group::to_dtype(type);
  call_.record.traced.dtype = static_cast<std::uint8_t>(call_.args.dtype);
  call_.args.inputs.push_back(memory);
}

void CallBuilder::add_output_memory(MutableBytes memory) { call_.args.outputs.push_back(memory); }

void CallBuilder::reduces(const ReduceOp& op) {
  call_.args.reduce = collective::engine_reduce(op);
  call_.args.factor = op.factor();
}

/// Whether no output overlaps another output or an input; false if there are too many pairs to
/// check.
bool CallBuilder::memory_is_apart() const {
  const auto& in = call_.args.inputs;
  const auto& out = call_.args.outputs;
  if (call_.input_args_.is_one() && call_.output_args_.is_one())
    return apart(span_of(in), span_of(out));
  if (out.size() * in.size() + out.size() * (out.size() - 1) / 2 > kMaxPairs) return false;
  for (std::size_t i = 0; i < out.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (!apart(out[i], out[j])) return false;
    }
    for (const ConstBytes slice : in) {
      if (!apart(out[i], slice)) return false;
    }
  }
  return true;
}

/// The engine's check, which sorts the slices.
bool CallBuilder::memory_is_valid() const {
  return collective::validate(call_.args, call_.group_->rank(), call_.group_->size()).ok();
}

void CallBuilder::check() {
  if (call_.problem_ != Problem::none) return;
  if (!call_.args.checked) {  // not in place
    if (group::find_wrong_number(call_.args, call_.group_->rank(), call_.group_->size()))
      return note(Problem::number);
    if (group::find_unequal(call_.args, call_.group_->rank())) return note(Problem::elements);
    const std::size_t first = !call_.args.inputs.empty()    ? call_.args.inputs.front().size()
                              : !call_.args.outputs.empty() ? call_.args.outputs.front().size()
                                                            : 0;
    std::uint64_t in = 0, out = 0;
    std::size_t unlike = 0;
    for (const auto& slice : call_.args.inputs) in += slice.size(), unlike |= slice.size() ^ first;
    for (const auto& slice : call_.args.outputs)
      out += slice.size(), unlike |= slice.size() ^ first;
    if (unlike == 0) call_.args.each = first;
    call_.record.traced.bytes = std::max(in, out);
    if (call_.dense_) {
      call_.args.checked = memory_is_apart() || memory_is_valid();
      if (!call_.args.checked) return note(Problem::memory);
    }
  }
  if (!collective::info(call_.args.op).reduces || call_.like_type_ == at::ScalarType::Undefined)
    return;
  const bool sums =
      call_.args.reduce == collective::Reduce::sum ||
      call_.args.reduce == collective::Reduce::avg;  // supported for every reducible type
  if (!is_reducible(call_.args.dtype)) {
    // A library may reduce accelerators' tensors of more types: backends say so (`supports`).
    if (call_.device_ == c10::DeviceType::CPU) note(Problem::reduction);
  } else if (!sums && !collective::reduce_supports(call_.args.reduce, call_.args.dtype, nullptr)) {
    note(Problem::reduction);
  }
}

}  // namespace muster
