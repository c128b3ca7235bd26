#include "muster/group/validate.h"

#include <ATen/MemoryOverlap.h>

#include <string>

#include "muster/group/errors.h"
#include "muster/group/scalar_type.h"

namespace muster::group {
namespace {

template <class Visit>
void each_tensor(const Request& request, Visit visit) {
  for (const auto* side : {&request.inputs, &request.outputs})
    for (std::size_t slice = 0; slice < side->size(); ++slice)
      for (const auto& tensor : (*side)[slice])
        visit(side == &request.inputs ? "input" : "output", slice, tensor);
}

std::int64_t elements(const Slice& slice) {
  std::int64_t sum = 0;
  for (const auto& tensor : slice) sum += tensor.numel();
  return sum;
}

std::string tensor_text(const char* side, std::size_t slice) {
  return std::string(side) + " tensor " + std::to_string(slice) + " ";
}

[[noreturn]] void refuse_kind(const char* side, std::size_t slice, const at::Tensor& tensor) {
  const auto which = tensor_text(side, slice);
  if (!tensor.defined()) invalid(which + "is undefined; give it storage first");
  if (tensor.layout() != at::kStrided)
    invalid(which + "is " + c10::str(tensor.layout()) +
            "; only dense tensors can be communicated (to_dense()), and all_reduce takes sparse "
            "COO ones");
  invalid(which + "is quantized; send its int_repr() and its parameters instead");
}

[[noreturn]] void refuse_difference(const char* side, std::size_t slice, const at::Tensor& tensor,
                                    const at::Tensor& first) {
  const auto which = tensor_text(side, slice) + "is ";
  if (tensor.scalar_type() != first.scalar_type())
    invalid(which + c10::toString(tensor.scalar_type()) +
            ", but another tensor of the same call is " + c10::toString(first.scalar_type()) +
            "; all must have one dtype");
  if (tensor.device() != first.device())
    invalid(which + "on " + tensor.device().str() + ", but another tensor of the same call is on " +
            first.device().str() + "; move them to one device");
  invalid(which +
          "an expanded view, several of whose elements are one place in memory; give contiguous() "
          "or clone() to be written");
}

/// Several of its elements in one place. Contiguous memory is asked first: that costs nothing.
bool overlaps_itself(const at::Tensor& tensor) {
  return !tensor.is_contiguous() && at::has_internal_overlap(tensor) == at::MemOverlap::Yes;
}

// What is wrong is put in words only where something is: this runs in every call.
void check_kinds(const Request& request) {
  each_tensor(request, [&](const char* side, std::size_t slice, const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_quantized()) [[unlikely]]
      refuse_kind(side, slice, tensor);
  });
  const auto* first = representative(request);
  if (first == nullptr) return;
  each_tensor(request, [&](const char* side, std::size_t slice, const at::Tensor& tensor) {
    const bool differs =
        tensor.scalar_type() != first->scalar_type() || tensor.device() != first->device();
    if (differs || (side[0] == 'o' && overlaps_itself(tensor))) [[unlikely]]
      refuse_difference(side, slice, tensor, *first);
  });
}

void check_lengths(const Request& request, int rank, int size) {
  const auto& rule = collective::info(request.op);
  const auto expect = [&](const char* list, const Slices& slices, bool lists, bool needed) {
    if (!needed) {
      if (!slices.empty())
        invalid("only rank " + std::to_string(request.root) +
                " of the group, the root, takes the list of " + list +
                " tensors; give none here, got " + std::to_string(slices.size()));
      return;
    }
    const auto wanted = lists ? static_cast<std::size_t>(size) : 1;
    if (slices.size() != wanted)
      invalid("expected " + std::to_string(wanted) + " " + list + " tensor" +
              (lists ? "s, one per member of the group," : "") + " and got " +
              std::to_string(slices.size()) + (lists ? "; give a list as long as the group" : ""));
  };
  const bool at_root = rank == request.root;
  switch (request.op) {
    case Op::barrier: break;
    case Op::send: expect("input", request.inputs, false, true); break;
    case Op::recv:
    case Op::broadcast: expect("output", request.outputs, false, true); break;
    default:
      expect("input", request.inputs, rule.lists_input, request.op != Op::scatter || at_root);
      expect("output", request.outputs, rule.lists_output,
             !(request.op == Op::gather || request.op == Op::reduce) || at_root);
  }
}

void same_elements(const char* what, const Slice& a, const Slice& b) {
  if (elements(a) != elements(b))
    invalid(std::string(what) + " must have as many elements; they have " +
            std::to_string(elements(a)) + " and " + std::to_string(elements(b)) +
            "; give both the same shape");
}

void check_sizes(const Request& request, int rank) {
  const auto me = static_cast<std::size_t>(rank);
  const bool at_root = rank == request.root;
  switch (request.op) {
    case Op::all_reduce:
      same_elements("input and output", request.inputs[0], request.outputs[0]);
      break;
    case Op::reduce:
      if (at_root) same_elements("input and output", request.inputs[0], request.outputs[0]);
      break;
    case Op::all_gather:
      same_elements("the input and this rank's place in the output", request.inputs[0],
                    request.outputs[me]);
      break;
    case Op::gather:
      for (const auto& slice : request.outputs)
        same_elements("the input and each tensor of gather_list", request.inputs[0], slice);
      break;
    case Op::scatter:
      for (const auto& slice : request.inputs)
        same_elements("each tensor of scatter_list and the output", slice, request.outputs[0]);
      break;
    case Op::reduce_scatter:
      same_elements("this rank's part of the input and the output", request.inputs[me],
                    request.outputs[0]);
      break;
    case Op::all_to_all:
      same_elements("this rank's own part of the input and of the output", request.inputs[me],
                    request.outputs[me]);
      break;
    default: break;
  }
}

void check_rank_in(const char* what, int value, int size) {
  if (value < 0 || value >= size)
    invalid(std::string(what) + " " + std::to_string(value) +
            " is not a rank of the group, whose ranks are 0 to " + std::to_string(size - 1));
}

}  // namespace

const at::Tensor* representative(const Request& request) {
  for (const auto* side : {&request.inputs, &request.outputs})
    for (const auto& slice : *side)
      if (!slice.empty()) return &slice.front();
  return nullptr;
}

void validate(const Request& request, int rank, int size) {
  const auto& rule = collective::info(request.op);
  if (rule.rooted) check_rank_in("root", request.root, size);
  if (collective::is_message(request.op)) {
    const bool any = request.op == Op::recv && request.peer == kAnyRank;
    if (!any) check_rank_in(request.op == Op::send ? "dst" : "src", request.peer, size);
    if (request.peer == rank)
      invalid("the peer is rank " + std::to_string(rank) +
              " of the group, this process itself; copy the tensor instead");
    if (request.tag < 0)
      invalid("tag " + std::to_string(request.tag) + " is negative; tags count from 0");
  }
  check_kinds(request);
  check_lengths(request, rank, size);
  check_sizes(request, rank);
  const auto* tensor = representative(request);
  std::string why;
  if (rule.reduces && tensor != nullptr && !is_reducible(to_dtype(tensor->scalar_type())))
    invalid(std::string(collective::name_of(request.reduce_op.engine())) + " is not defined on " +
            c10::toString(tensor->scalar_type()) +
            ": elements of this type can be moved but not reduced; convert the tensor to another "
            "type first (to())");
  if (rule.reduces && tensor != nullptr &&
      !collective::reduce_supports(request.reduce_op.engine(), to_dtype(tensor->scalar_type()),
                                   &why))
    invalid(why);
}

}  // namespace muster::group
