#include "muster/group/collectives.h"

#include <numeric>
#include <string>
#include <utility>

#include "muster/group/errors.h"
#include "muster/group/resolve.h"

namespace muster {
namespace {

using group::acting;
using group::invalid;

std::vector<Slice> one(const at::Tensor& tensor) { return {{tensor}}; }

std::vector<Slice> each(const TensorList& tensors) {
  std::vector<Slice> slices;
  slices.reserve(tensors.size());
  for (const auto& tensor : tensors) slices.push_back({tensor});
  return slices;
}

std::string shape(const at::Tensor& tensor) { return c10::str(tensor.sizes()); }

/// `whole` as one part per member: parts shaped like `part`, concatenated along dimension 0 or stacked along a new one.
std::vector<Slice> members_of(const at::Tensor& whole, const at::Tensor& part, int members, std::string_view call) {
  if (!whole.defined() || !part.defined()) invalid(std::string(call) + ": a tensor is undefined; give it storage first");
  std::vector<Slice> slices;
  slices.reserve(static_cast<std::size_t>(members));
  const auto wanted = part.sizes();
  const auto have = whole.sizes();
  const bool stacked = have.size() == wanted.size() + 1 && have[0] == members && have.slice(1) == wanted;
  const bool concatenated =
      !stacked && !wanted.empty() && have.size() == wanted.size() && have[0] == members * wanted[0] && have.slice(1) == wanted.slice(1);
  if (!stacked && !concatenated && (whole.numel() != members * part.numel() || !whole.is_contiguous())) {
    invalid(std::string(call) + ": a tensor of shape " + shape(whole) + " does not hold " + std::to_string(members) + " parts of shape " +
            shape(part) + ", neither concatenated along dimension 0 nor stacked along a new first dimension");
  }
  const auto flat = stacked || concatenated ? whole : whole.view({-1});
  const auto rows = concatenated ? wanted[0] : part.numel();
  for (int member = 0; member < members; ++member)
    slices.push_back({stacked ? whole.select(0, member) : flat.narrow(0, member * rows, rows)});
  return slices;
}

/// Dimension 0 of `tensor` in pieces of `sizes` rows, or in equal pieces where `sizes` is empty.
std::vector<Slice> split(const at::Tensor& tensor, std::vector<std::int64_t> sizes, int members, const std::string& side) {
  const auto call = "all_to_all_single: " + side;
  if (!tensor.defined()) invalid(call + " is undefined; give it storage first");
  if (tensor.dim() == 0) invalid(call + " has no dimension 0 to be split");
  const auto rows = tensor.size(0);
  if (sizes.empty()) {
    if (rows % members != 0)
      invalid(call + " has " + std::to_string(rows) + " rows, which " + std::to_string(members) + " members cannot share equally; give " +
              side + "_split_sizes");
    sizes.assign(static_cast<std::size_t>(members), rows / members);
  }
  if (sizes.size() != static_cast<std::size_t>(members))
    invalid(call + "_split_sizes has " + std::to_string(sizes.size()) + " entries; the group has " + std::to_string(members) + " members");
  const auto sum = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  for (const auto size : sizes)
    if (size < 0 || sum != rows)
      invalid(call + "_split_sizes " + c10::str(at::IntArrayRef(sizes)) + " must not be negative and must sum to the " +
              std::to_string(rows) + " rows of the tensor");
  std::vector<Slice> slices;
  std::int64_t at = 0;
  for (const auto size : sizes) {
    slices.push_back({tensor.narrow(0, at, size)});
    at += size;
  }
  return slices;
}

void need_tensors(bool empty, std::string_view call) {
  if (empty) invalid(std::string(call) + " needs at least one tensor, and got an empty list");
}

}  // namespace

WorkRef broadcast(at::Tensor tensor, const BroadcastOptions& options) {
  const auto group = acting(options.group, "broadcast");
  if (!group) return nullptr;
  const int root = group::group_rank(*group, "broadcast", "src", options.src, options.group_src);
  return group->submit({.op = Op::broadcast,
                        .name = "broadcast",
                        .outputs = one(tensor),
                        .root = root,
                        .async_op = options.async_op,
                        .timeout = options.timeout});
}

WorkRef all_reduce(at::Tensor tensor, const AllReduceOptions& options) {
  const auto group = acting(options.group, "all_reduce");
  if (!group) return nullptr;
  return group->submit({.op = Op::all_reduce,
                        .name = "all_reduce",
                        .inputs = one(tensor),
                        .outputs = one(tensor),
                        .reduce_op = options.op,
                        .async_op = options.async_op,
                        .timeout = options.timeout});
}

WorkRef reduce(at::Tensor tensor, const ReduceOptions& options) {
  const auto group = acting(options.group, "reduce");
  if (!group) return nullptr;
  const int root = group::group_rank(*group, "reduce", "dst", options.dst, options.group_dst);
  return group->submit({.op = Op::reduce,
                        .name = "reduce",
                        .inputs = one(tensor),
                        .outputs = group->rank() == root ? one(tensor) : std::vector<Slice>{},
                        .reduce_op = options.op,
                        .root = root,
                        .async_op = options.async_op,
                        .timeout = options.timeout});
}

WorkRef all_gather(const TensorList& tensor_list, const at::Tensor& tensor, const CollectiveOptions& options) {
  const auto group = acting(options.group, "all_gather");
  if (!group) return nullptr;
  return group->submit({.op = Op::all_gather,
                        .name = "all_gather",
                        .inputs = one(tensor),
                        .outputs = each(tensor_list),
                        .async_op = options.async_op,
                        .timeout = options.timeout});
}

WorkRef all_gather_into_tensor(at::Tensor output_tensor, const at::Tensor& input_tensor, const CollectiveOptions& options) {
  const auto group = acting(options.group, "all_gather_into_tensor");
  if (!group) return nullptr;
  return group->submit({.op = Op::all_gather,
                        .name = "all_gather_into_tensor",
                        .inputs = one(input_tensor),
                        .outputs = members_of(output_tensor, input_tensor, group->size(), "all_gather_into_tensor"),
                        .async_op = options.async_op,
                        .timeout = options.timeout});
}

WorkRef gather(const at::Tensor& tensor, const GatherOptions& options) {
  const auto group = acting(options.group, "gather");
  if (!group) return nullptr;
  const int root = group::group_rank(*group, "gather", "dst", options.dst, options.group_dst, 0);
  return group->submit({.op = Op::gather,
                        .name = "gather",
                        .inputs = one(tensor),
                        .outputs = each(options.gather_list),
                        .root = root,
                        .async_op = options.async_op,
                        .timeout = options.timeout});
}

WorkRef scatter(at::Tensor tensor, const ScatterOptions& options) {
  const auto group = acting(options.group, "scatter");
  if (!group) return nullptr;
  const int root = group::group_rank(*group, "scatter", "src", options.src, options.group_src, 0);
  return group->submit({.op = Op::scatter,
                        .name = "scatter",
                        .inputs = each(options.scatter_list),
                        .outputs = one(tensor),
                        .root = root,
                        .async_op = options.async_op,
                        .timeout = options.timeout});
}

WorkRef reduce_scatter(at::Tensor output, const TensorList& input_list, const ReduceScatterOptions& options) {
  const auto group = acting(options.group, "reduce_scatter");
  if (!group) return nullptr;
  return group->submit({.op = Op::reduce_scatter,
                        .name = "reduce_scatter",
                        .inputs = each(input_list),
                        .outputs = one(output),
                        .reduce_op = options.op,
                        .async_op = options.async_op,
                        .timeout = options.timeout});
}

WorkRef reduce_scatter_tensor(at::Tensor output, const at::Tensor& input, const ReduceScatterOptions& options) {
  const auto group = acting(options.group, "reduce_scatter_tensor");
  if (!group) return nullptr;
  return group->submit({.op = Op::reduce_scatter,
                        .name = "reduce_scatter_tensor",
                        .inputs = members_of(input, output, group->size(), "reduce_scatter_tensor"),
                        .outputs = one(output),
                        .reduce_op = options.op,
                        .async_op = options.async_op,
                        .timeout = options.timeout});
}

WorkRef all_to_all_single(at::Tensor output, const at::Tensor& input, const AllToAllSingleOptions& options) {
  const auto group = acting(options.group, "all_to_all_single");
  if (!group) return nullptr;
  return group->submit({.op = Op::all_to_all,
                        .name = "all_to_all_single",
                        .inputs = split(input, options.input_split_sizes, group->size(), "input"),
                        .outputs = split(output, options.output_split_sizes, group->size(), "output"),
                        .async_op = options.async_op,
                        .timeout = options.timeout});
}

WorkRef all_to_all(const TensorList& output_tensor_list, const TensorList& input_tensor_list, const CollectiveOptions& options) {
  const auto group = acting(options.group, "all_to_all");
  if (!group) return nullptr;
  return group->submit({.op = Op::all_to_all,
                        .name = "all_to_all",
                        .inputs = each(input_tensor_list),
                        .outputs = each(output_tensor_list),
                        .async_op = options.async_op,
                        .timeout = options.timeout});
}

WorkRef barrier(const BarrierOptions& options) {
  const auto group = acting(options.group, "barrier");
  if (!group) return nullptr;
  return group->submit({.op = Op::barrier, .name = "barrier", .async_op = options.async_op, .timeout = options.timeout});
}

WorkRef all_reduce_coalesced(const TensorList& tensors, const AllReduceOptions& options) {
  const auto group = acting(options.group, "all_reduce_coalesced");
  if (!group) return nullptr;
  need_tensors(tensors.empty(), "all_reduce_coalesced");
  return group->submit({.op = Op::all_reduce,
                        .name = "all_reduce_coalesced",
                        .inputs = {tensors},
                        .outputs = {tensors},
                        .reduce_op = options.op,
                        .async_op = options.async_op,
                        .timeout = options.timeout});
}

WorkRef all_gather_coalesced(const std::vector<TensorList>& output_tensor_lists, const TensorList& input_tensor_list,
                             const CollectiveOptions& options) {
  const auto group = acting(options.group, "all_gather_coalesced");
  if (!group) return nullptr;
  need_tensors(input_tensor_list.empty(), "all_gather_coalesced");
  return group->submit({.op = Op::all_gather,
                        .name = "all_gather_coalesced",
                        .inputs = {input_tensor_list},
                        .outputs = output_tensor_lists,
                        .async_op = options.async_op,
                        .timeout = options.timeout});
}

WorkRef reduce_scatter_coalesced(const TensorList& output_tensors, const std::vector<TensorList>& input_tensor_lists,
                                 const ReduceScatterOptions& options) {
  const auto group = acting(options.group, "reduce_scatter_coalesced");
  if (!group) return nullptr;
  need_tensors(output_tensors.empty(), "reduce_scatter_coalesced");
  return group->submit({.op = Op::reduce_scatter,
                        .name = "reduce_scatter_coalesced",
                        .inputs = input_tensor_lists,
                        .outputs = {output_tensors},
                        .reduce_op = options.op,
                        .async_op = options.async_op,
                        .timeout = options.timeout});
}

}  // namespace muster
