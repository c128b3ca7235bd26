// SPDX-License-Identifier: BSD-3-Clause
#include "faces/compat/torch_error.h"

#include <c10/core/TensorOptions.h>
#include <algorithm>
#include <initializer_list>
#include <numeric>

namespace muster::compat {
namespace {

std::string by(const std::string& call, const std::string& words) {
  return "ProcessGroupGloo::" + call + ": " + words;
}

/// `words` where `wrong`.
std::string when(bool wrong, const std::string& call, const std::string& words) {
  return wrong ? by(call, words) : std::string();
}

std::string first_of(std::initializer_list<std::string> texts) {
  const auto found = std::find_if(texts.begin(), texts.end(),
                                  [](const std::string& text) { return !text.empty(); });
  return found == texts.end() ? std::string() : *found;
}

std::string round(at::IntArrayRef sizes) {
  std::string text = c10::str(sizes);
  text.front() = '(';
  text.back() = ')';
  return text;
}

std::string unlike(const std::string& call, const std::string& what, std::size_t index,
                   const std::string& expected, const std::string& got) {
  return by(call, "invalid tensor " + what + " at index " + std::to_string(index) + " (expected " +
                      expected + ", got " + got + ")");
}

/// Every tensor against the layout, type and sizes of `like`.
std::string alike(const std::string& call, const Tensors& tensors, const at::Tensor& like) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i];
    if (!tensor.defined() || !like.defined()) continue;
    if (tensor.layout() != like.layout())
      return unlike(call, "layout", i, c10::str(like.layout()), c10::str(tensor.layout()));
    if (tensor.dtype() != like.dtype() || tensor.device() != like.device())
      return unlike(call, "type", i, c10::str(like.options()), c10::str(tensor.options()));
    if (tensor.sizes() != like.sizes())
      return unlike(call, "size", i, round(like.sizes()), round(tensor.sizes()));
  }
  return {};
}
std::string alike(const std::string& call, const Tensors& tensors) {
  return tensors.empty() ? std::string() : alike(call, tensors, tensors.front());
}

std::string root_tensor(const std::string& call, std::int64_t index, const Tensors& tensors) {
  const bool there = index >= 0 && index < static_cast<std::int64_t>(tensors.size());
  return when(!there, call, "invalid root tensor: " + std::to_string(index));
}

/// The root's lists: `side` is "output" or "input".
std::string for_all_members(const std::string& call, const std::string& side,
                            const std::vector<Tensors>& lists, int size) {
  const auto members = std::to_string(size);
  if (lists.size() != 1)
    return by(call, "requires a single-element " + side + " list containing a list with " +
                        members + " tensors.");
  const auto length = lists.front().size();
  return when(length != static_cast<std::size_t>(size), call,
              "Incorrect " + side + " list size " + std::to_string(length) + ". " +
                  (side == "input" ? "Input" : "Output") + " list size should be " + members +
                  ", same as size of the process group.");
}

}  // namespace

std::string GlooWords::root(const std::string& call, std::int64_t root) const {
  return when(root < 0 || root >= size_, call, "invalid root rank: " + std::to_string(root));
}

std::string GlooWords::broadcast(const Tensors& tensors, std::int64_t root_rank,
                                 std::int64_t index) const {
  return first_of({root("broadcast", root_rank), root_tensor("broadcast", index, tensors),
                   alike("broadcast", tensors)});
}

std::string GlooWords::allreduce(const Tensors& tensors, bool only_sums) const {
  const char* const call = "allreduce";
  const auto is_sparse = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.layout() == at::kSparse;
  };
  const bool sparse = !tensors.empty() && is_sparse(tensors.front());
  const bool other_layout = !tensors.empty() && tensors.front().defined() && !sparse &&
                            tensors.front().layout() != at::kStrided;
  return first_of({when(tensors.empty(), call, "requires non-empty tensor list"),
                   when(other_layout, call, "unsupported layout"), alike(call, tensors),
                   when(sparse && !only_sums, call,
                        "unsupported reduction operation (allreduce of sparse tensors only works "
                        "with ReduceOp.SUM)")});
}

std::string GlooWords::allreduce_coalesced(const Tensors& tensors) const {
  const char* const call = "allreduce_coalesced";
  const bool strided = std::all_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided;
  });
  const bool same_type = std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.options().type_equal(tensors.front().options());
  });
  return first_of({when(tensors.empty(), call, "requires non-empty tensor list"),
                   when(!same_type, call, "tensors must all have the same type"),
                   when(!strided, call, "unsupported layout")});
}

std::string GlooWords::reduce(const Tensors& tensors, std::int64_t root_rank,
                              std::int64_t index) const {
  return first_of({root("reduce", root_rank), root_tensor("reduce", index, tensors),
                   when(tensors.size() != 1, "reduce", "requires a single-element tensor list")});
}

std::string GlooWords::allgather(const std::vector<Tensors>& outputs, const Tensors& inputs) const {
  const char* const call = "allgather";
  if (inputs.empty()) return by(call, "requires non-empty input tensor list");
  if (outputs.size() != inputs.size())
    return by(call, "requires input/output tensor lists to have the same length");
  const std::size_t length = inputs.size() * static_cast<std::size_t>(size_);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].size() != length)
      return by(call, "invalid output tensor list at index " + std::to_string(i) +
                          " (expected length " + std::to_string(length) + ", got " +
                          std::to_string(outputs[i].size()) + ")");
  }
  std::string text = alike(call, inputs);
  for (const auto& list : outputs) text = first_of({text, alike(call, list, inputs.front())});
  return text;
}

std::string GlooWords::allgather_coalesced(const std::vector<Tensors>& outputs,
                                           const Tensors& inputs) const {
  const char* const call = "allgather_coalesced";
  if (inputs.empty()) return by(call, "requires non-empty input tensor list");
  if (outputs.size() != static_cast<std::size_t>(size_))
    return by(call, "output lists should be equal to world size");
  for (const auto& list : outputs) {
    if (list.size() != inputs.size())
      return by(call, "invalid output size: (expected length " + std::to_string(inputs.size()) +
                          ", got " + std::to_string(list.size()) + ")");
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (list[i].numel() != inputs[i].numel())
        return by(call, "invalid size of output tensor at index " + std::to_string(i) +
                            " (expected length " + round(inputs[i].sizes()) + ", got " +
                            round(list[i].sizes()) + ")");
    }
  }
  return {};
}

std::string GlooWords::gather(const std::vector<Tensors>& outputs, const Tensors& inputs,
                              std::int64_t root_rank) const {
  const char* const call = "gather";
  std::string text =
      first_of({root(call, root_rank),
                when(inputs.size() != 1, call, "requires a single-element input tensor list")});
  if (!text.empty()) return text;
  if (root_rank != rank_) return when(!outputs.empty(), call, "requires empty output on non-root");
  text = for_all_members(call, "output", outputs, size_);
  if (!text.empty()) return text;
  return alike(call, outputs.front(), inputs.front());
}

std::string GlooWords::scatter(const Tensors& outputs, const std::vector<Tensors>& inputs,
                               std::int64_t root_rank) const {
  const char* const call = "scatter";
  std::string text =
      first_of({root(call, root_rank),
                when(outputs.size() != 1, call, "requires a single-element output tensor list")});
  if (!text.empty()) return text;
  if (root_rank != rank_) return when(!inputs.empty(), call, "requires empty input on non-root");
  text = for_all_members(call, "input", inputs, size_);
  if (!text.empty()) return text;
  return alike(call, inputs.front(), outputs.front());
}

std::string GlooWords::reduce_scatter(const Tensors& outputs,
                                      const std::vector<Tensors>& inputs) const {
  if (outputs.size() != 1) return "reduce_scatter only supports 1 output";
  const bool one_each =
      inputs.size() == 1 && inputs.front().size() == static_cast<std::size_t>(size_);
  return one_each ? "" : "invalid input tensor list size, must be world size";
}

std::string GlooWords::alltoall(const Tensors& outputs, const Tensors& inputs) const {
  const auto of_side = [&](const char* side, const Tensors& tensors) {
    const auto length = tensors.size();
    return when(length != static_cast<std::size_t>(size_), "alltoall",
                std::string(side) + " tensor list size " + std::to_string(length) +
                    " does not match world size " + std::to_string(size_));
  };
  return first_of({of_side("input", inputs), of_side("output", outputs)});
}

std::string GlooWords::alltoall_base(const at::Tensor& tensor,
                                     const std::vector<std::int64_t>& splits) const {
  if (!tensor.defined() || tensor.dim() == 0) return {};
  if (splits.empty())
    return tensor.size(0) % size_ == 0 ? ""
                                       : "Tensor's dim 0 does not divide equally across group size";
  if (splits.size() != static_cast<std::size_t>(size_))
    return "Number of tensor splits not equal to group size";
  const auto sum = std::accumulate(splits.begin(), splits.end(), std::int64_t{0});
  return sum == tensor.size(0) ? "" : "Split sizes doesn't match total dim 0 size";
}

std::string GlooWords::message(const Tensors& tensors) const {
  return tensors.size() == 1 ? "" : "ProcessGroupGloo::send takes a single tensor";
}

}  // namespace muster::compat
