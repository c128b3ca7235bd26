// SPDX-License-Identifier: BSD-3-Clause
// Error messages of refused calls: what was expected, what was given, what to do.
#include <string>

#include "core/collective/call.h"
#include "core/group/call/call.h"
#include "core/group/call/given_tensors.h"
#include "core/group/call/tensor_class.h"
#include "core/group/errors.h"
#include "core/group/resolve.h"

namespace muster {
namespace {

using group::invalid;

std::string shape(const at::Tensor& tensor) { return c10::str(tensor.sizes()); }

[[noreturn]] void explain_parts(const at::Tensor& whole, const at::Tensor& part, int members) {
  if (!whole.defined() || !part.defined()) invalid("a tensor is undefined; give it storage first");
  invalid("a tensor of shape " + shape(whole) + " cannot hold " + std::to_string(members) +
          " parts of shape " + shape(part) +
          ", one per member: neither concatenated along dimension 0 nor stacked along a new "
          "first dimension");
}

[[noreturn]] void explain_splits(const at::Tensor& tensor, const std::vector<std::int64_t>& sizes,
                                 int members, const std::string& side) {
  if (!tensor.defined()) invalid(side + " is undefined; give it storage first");
  if (tensor.dim() == 0)
    invalid(side + " has no dimension 0 to be split; give a tensor of at least one dimension");
  const auto rows = std::to_string(tensor.size(0));
  if (sizes.empty())
    invalid(side + " has " + rows + " rows, which " + std::to_string(members) +
            " members cannot share equally; give " + side + "_split_sizes");
  if (sizes.size() != static_cast<std::size_t>(members))
    invalid(side + "_split_sizes has " + std::to_string(sizes.size()) + " entries; give " +
            std::to_string(members) + ", one per member of the group");
  invalid(side + "_split_sizes " + c10::str(at::IntArrayRef(sizes)) +
          " must not be negative and must sum to the " + rows + " rows of the tensor");
}

[[noreturn]] void explain_lists(bool output, const std::vector<TensorList>& lists,
                                const TensorList& tensors, int rank) {
  for (std::size_t i = 0; i < lists.size(); ++i) {
    if (lists[i].size() != tensors.size())
      invalid(std::string(output ? "output" : "input") + "_tensor_lists[" + std::to_string(i) +
              "] has " + std::to_string(lists[i].size()) + " tensors, but the list of " +
              (output ? "input" : "output") + " tensors has " + std::to_string(tensors.size()) +
              "; the numbers must be equal");
  }
  const auto& mine = lists[static_cast<std::size_t>(rank)];
  std::size_t i = 0;
  while (!tensors[i].defined() || !mine[i].defined() || tensors[i].numel() == mine[i].numel()) ++i;
  invalid("tensor " + std::to_string(i) + " of this rank has " +
          std::to_string(tensors[i].numel()) + " elements and its place on the other side " +
          std::to_string(mine[i].numel()) + "; give both the same shape");
}

[[noreturn]] void explain_kind(const std::string& which, const at::Tensor& tensor) {
  if (!tensor.defined()) invalid(which + "is undefined; give it storage first");
  if (const auto what = group::foreign_class_of(tensor); !what.empty()) invalid(which + what);
  if (tensor.layout() != at::kStrided)
    invalid(which + "is " + c10::str(tensor.layout()) +
            "; only dense tensors can be communicated (call to_dense()), except that all_reduce "
            "takes sparse COO");
  if (tensor.is_nested()) invalid(which + "is nested; send its values() and its offsets() instead");
  invalid(which + "is quantized; send its int_repr() and its parameters instead");
}

[[noreturn]] void explain_difference(const std::string& which, const at::Tensor& tensor,
                                     const at::Tensor& first) {
  if (tensor.scalar_type() != first.scalar_type())
    invalid(which + "is " + c10::toString(tensor.scalar_type()) +
            ", but another tensor of the same call is " + c10::toString(first.scalar_type()) +
            "; all must have one dtype");
  if (tensor.device() != first.device())
    invalid(which + "is on " + tensor.device().str() +
            ", but another tensor of the same call is on " + first.device().str() +
            "; move them to one device");
  invalid(which +
          "is an expanded view, several of whose elements are one place in memory; pass "
          "contiguous() or clone() of it instead");
}

[[noreturn]] void explain_number(const group::WrongNumber& wrong, int root) {
  const std::string list = wrong.output ? "output" : "input";
  if (!wrong.needed)
    invalid("only rank " + std::to_string(root) + " of the group, the root, takes the list of " +
            list + " tensors; give none here, got " + std::to_string(wrong.came));
  invalid("expected " + std::to_string(wrong.wanted) + " " + list + " tensor" +
          (wrong.lists ? "s, one per member of the group," : "") + " and got " +
          std::to_string(wrong.came) + (wrong.lists ? "; give a list as long as the group" : ""));
}

[[noreturn]] void explain_reduction(const collective::Args& args, at::ScalarType type) {
  std::string why;
  if (!is_reducible(args.dtype))
    invalid(std::string(collective::name_of(args.reduce)) + " is not defined on " +
            c10::toString(type) +
            ": elements of this type can be moved but not reduced; convert the tensor to another "
            "type first (to())");
  collective::reduce_supports(args.reduce, args.dtype, &why);
  invalid(why);
}

}  // namespace

void Call::explain() const {
  const int rank = group_->rank(), members = group_->size();
  const std::string which = std::string(culprit_.output ? "output" : "input") + " tensor " +
                            std::to_string(culprit_.index) + " ";
  switch (problem_) {
    case Problem::none:
    case Problem::not_a_member: break;
    case Problem::no_such_rank:
      group::group_rank(*group_, culprit_.keyword, culprit_.global, culprit_.local);
      break;
    case Problem::peer_is_self:
      invalid("the peer is rank " + std::to_string(rank) +
              " of the group, this process itself; copy the tensor instead");
    case Problem::negative_tag:
      invalid("tag " + std::to_string(record.traced.tag) + " is negative; tags count from 0");
    case Problem::reserved_tag:
      invalid("needs a tag below 2^62 and got " + std::to_string(record.traced.tag));
    case Problem::no_tensors: invalid("the list of tensors is empty; give it at least one");
    case Problem::lists_differ: {
      const bool outputs = output_args_.form == group::GivenTensors::Form::lists;
      const auto& one = outputs ? input_args_ : output_args_;
      explain_lists(outputs, *(outputs ? output_args_ : input_args_).lists,
                    TensorList(one.tensors, one.tensors + one.count), rank);
    }
    case Problem::whole_and_part: {
      const group::GivenTensors& side =
          output_args_.form == group::GivenTensors::Form::parts ? output_args_ : input_args_;
      explain_parts(*side.tensors, *side.part, members);
    }
    case Problem::splits: {
      const group::GivenTensors& side = culprit_.output ? output_args_ : input_args_;
      explain_splits(*side.tensors, *side.sizes, members, culprit_.output ? "output" : "input");
    }
    case Problem::kind: explain_kind(which, *culprit_.tensor);
    case Problem::difference: explain_difference(which, *culprit_.tensor, *like_);
    case Problem::number: explain_number(*group::find_wrong_number(args, rank, members), args.root);
    case Problem::elements: {
      const auto wrong = *group::find_unequal(args, rank);
      const std::size_t width = size_of(args.dtype);
      invalid(std::string(wrong.what) + " must have the same number of elements; they have " +
              std::to_string(wrong.first / width) + " and " + std::to_string(wrong.second / width) +
              "; give both the same shape");
    }
    case Problem::memory: invalid(collective::validate(args, rank, members).message());
    case Problem::reduction: explain_reduction(args, like_type_);
  }
  invalid("the call cannot be made");
}

}  // namespace muster
