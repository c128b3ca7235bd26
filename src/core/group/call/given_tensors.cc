// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/call/given_tensors.h"

#include <algorithm>
#include <numeric>

#include "core/group/call/dense_tensor.h"

namespace muster::group {

Slices GivenTensors::slices(int members) const {
  Slices slices;
  const auto one = [&](const at::Tensor& tensor) {
    slices.emplace_back();
    slices.back().push_back(tensor);
  };
  const at::Tensor* const first = tensors;
  switch (form) {
    case Form::nothing: break;
    case Form::tensor:
    case Form::list:
      slices.reserve(count);
      for (std::size_t i = 0; i < count; ++i) one(first[i]);
      break;
    case Form::parts:
      for (const auto& part : parts_of(*first, *part, members)) one(part);
      break;
    case Form::splits: {
      std::int64_t at = 0;
      for (int member = 0; member < members; ++member) {
        const std::int64_t rows =
            sizes->empty() ? first->size(0) / members : (*sizes)[static_cast<std::size_t>(member)];
        one(first->narrow(0, at, rows));
        at += rows;
      }
      break;
    }
    case Form::coalesced: slices.emplace_back(first, first + count); break;
    case Form::lists:
      for (const auto& list : *lists) slices.emplace_back(list.begin(), list.end());
  }
  return slices;
}

namespace {

enum class Layout : std::uint8_t { none, stacked, concatenated, flat };

Layout layout_of(const at::Tensor& whole, const at::Tensor& part, int members) {
  const auto wanted = part.sizes();
  const auto have = whole.sizes();
  if (have.size() == wanted.size() + 1 && have[0] == members && have.slice(1) == wanted)
    return Layout::stacked;
  if (!wanted.empty() && have.size() == wanted.size() && have[0] == members * wanted[0] &&
      have.slice(1) == wanted.slice(1))
    return Layout::concatenated;
  return whole.numel() == members * part.numel() && whole.is_contiguous() ? Layout::flat
                                                                          : Layout::none;
}

}  // namespace

bool holds_parts(const at::Tensor& whole, const at::Tensor& part, int members) {
  if (!whole.defined() || !part.defined()) return false;
  if (is_dense_cpu(whole)) [[likely]]
    return whole.numel() == members * part.numel();
  return layout_of(whole, part, members) != Layout::none;
}

std::vector<at::Tensor> parts_of(const at::Tensor& whole, const at::Tensor& part, int members) {
  const Layout layout = layout_of(whole, part, members);
  const auto flat = layout == Layout::flat ? whole.view({-1}) : whole;
  const auto rows = layout == Layout::concatenated ? part.size(0) : part.numel();
  std::vector<at::Tensor> parts;
  parts.reserve(static_cast<std::size_t>(members));
  for (int member = 0; member < members; ++member) {
    parts.push_back(layout == Layout::stacked ? whole.select(0, member)
                                              : flat.narrow(0, member * rows, rows));
  }
  return parts;
}

bool splits_fit(const at::Tensor& tensor, const std::vector<std::int64_t>& sizes, int members) {
  if (!tensor.defined() || tensor.dim() == 0) return false;
  if (sizes.empty()) return tensor.size(0) % members == 0;
  return sizes.size() == static_cast<std::size_t>(members) &&
         std::ranges::all_of(sizes, [](std::int64_t size) { return size >= 0; }) &&
         std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}) == tensor.size(0);
}

bool lists_fit(const std::vector<at::Tensor>& tensors,
               const std::vector<std::vector<at::Tensor>>& lists, int rank) {
  if (std::ranges::any_of(lists, [&](const auto& list) { return list.size() != tensors.size(); }))
    return false;
  const auto me = static_cast<std::size_t>(rank);
  if (me >= lists.size()) return true;
  return std::ranges::equal(tensors, lists[me], [](const at::Tensor& a, const at::Tensor& b) {
    return !a.defined() || !b.defined() || a.numel() == b.numel();
  });
}

std::optional<WrongNumber> find_wrong_number(const collective::Args& args, int rank, int size) {
  using collective::Op;
  const auto& row = collective::info(args.op);
  const bool at_root = !row.rooted || rank == args.root;
  const auto find = [&](bool output, std::size_t came, bool lists,
                        bool needed) -> std::optional<WrongNumber> {
    const auto wanted = !needed ? 0 : lists ? static_cast<std::size_t>(size) : 1;
    if (came == wanted) return std::nullopt;
    return WrongNumber{output, lists, needed, wanted, came};
  };
  const bool reads = args.op != Op::barrier && args.op != Op::recv && args.op != Op::broadcast;
  if (auto wrong = find(false, args.inputs.size(), row.lists_input,
                        reads && (args.op != Op::scatter || at_root)))
    return wrong;
  const bool writes = args.op != Op::barrier && args.op != Op::send;
  const bool of_root = args.op == Op::gather || args.op == Op::reduce;
  return find(true, args.outputs.size(), row.lists_output, writes && (!of_root || at_root));
}

std::optional<Unequal> find_unequal(const collective::Args& args, int rank) {
  using collective::Op;
  const auto me = static_cast<std::size_t>(rank);
  const auto& in = args.inputs;
  const auto& out = args.outputs;
  const auto differ = [](const char* what, std::size_t first,
                         std::size_t second) -> std::optional<Unequal> {
    if (first == second) return std::nullopt;
    return Unequal{what, first, second};
  };
  switch (args.op) {
    case Op::all_reduce: return differ("input and output", in[0].size(), out[0].size());
    case Op::reduce:
      return out.empty() ? std::nullopt : differ("input and output", in[0].size(), out[0].size());
    case Op::all_gather:
      return differ("the input and this rank's place in the output", in[0].size(), out[me].size());
    case Op::gather:
      for (const auto& slice : out) {
        if (auto wrong =
                differ("the input and each tensor of gather_list", in[0].size(), slice.size()))
          return wrong;
      }
      return std::nullopt;
    case Op::scatter:
      for (const auto& slice : in) {
        if (auto wrong =
                differ("each tensor of scatter_list and the output", slice.size(), out[0].size()))
          return wrong;
      }
      return std::nullopt;
    case Op::reduce_scatter:
      return differ("this rank's part of the input and the output", in[me].size(), out[0].size());
    case Op::all_to_all:
      return differ("this rank's own part of the input and of the output", in[me].size(),
                    out[me].size());
    default: return std::nullopt;
  }
}

}  // namespace muster::group
