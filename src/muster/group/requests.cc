#include "muster/group/requests.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "muster/group/errors.h"
#include "muster/group/resolve.h"

namespace muster::requests {
namespace {

using group::group_rank;
using group::invalid;

Slices one(const at::Tensor& tensor) {
  Slices slices(1);
  slices[0].push_back(tensor);
  return slices;
}

Slices each(const TensorList& tensors) {
  Slices slices(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) slices[i].push_back(tensors[i]);
  return slices;
}

/// Coalesced: what each member gives or gets are the tensors of a list.
Slice all_of(const TensorList& tensors) { return {tensors.begin(), tensors.end()}; }

Slices each_of(const std::vector<TensorList>& lists) {
  Slices slices;
  slices.reserve(lists.size());
  for (const auto& tensors : lists) slices.push_back(all_of(tensors));
  return slices;
}

std::string shape(const at::Tensor& tensor) { return c10::str(tensor.sizes()); }

/// `whole` as one part per member: parts shaped like `part`, concatenated along dimension 0 or
/// stacked along a new one.
Slices members_of(const at::Tensor& whole, const at::Tensor& part, int members) {
  if (!whole.defined() || !part.defined()) invalid("a tensor is undefined; give it storage first");
  Slices slices;
  slices.reserve(static_cast<std::size_t>(members));
  const auto wanted = part.sizes();
  const auto have = whole.sizes();
  const bool stacked =
      have.size() == wanted.size() + 1 && have[0] == members && have.slice(1) == wanted;
  const bool concatenated = !stacked && !wanted.empty() && have.size() == wanted.size() &&
                            have[0] == members * wanted[0] && have.slice(1) == wanted.slice(1);
  if (!stacked && !concatenated &&
      (whole.numel() != members * part.numel() || !whole.is_contiguous())) {
    invalid("a tensor of shape " + shape(whole) + " does not hold " + std::to_string(members) +
            " parts of shape " + shape(part) +
            ", one per member, neither concatenated along dimension 0 nor stacked along a new "
            "first dimension");
  }
  const auto flat = stacked || concatenated ? whole : whole.view({-1});
  const auto rows = concatenated ? wanted[0] : part.numel();
  for (int member = 0; member < members; ++member)
    slices.push_back({stacked ? whole.select(0, member) : flat.narrow(0, member * rows, rows)});
  return slices;
}

/// Dimension 0 of `tensor` in pieces of `sizes` rows, or in equal pieces where `sizes` is empty.
Slices split(const at::Tensor& tensor, std::vector<std::int64_t> sizes, int members,
             const std::string& side) {
  if (!tensor.defined()) invalid(side + " is undefined; give it storage first");
  if (tensor.dim() == 0)
    invalid(side + " has no dimension 0 to be split; give a tensor of at least one dimension");
  const auto rows = tensor.size(0);
  if (sizes.empty()) {
    if (rows % members != 0)
      invalid(side + " has " + std::to_string(rows) + " rows, which " + std::to_string(members) +
              " members cannot share equally; give " + side + "_split_sizes");
    sizes.assign(static_cast<std::size_t>(members), rows / members);
  }
  if (sizes.size() != static_cast<std::size_t>(members))
    invalid(side + "_split_sizes has " + std::to_string(sizes.size()) + " entries; give " +
            std::to_string(members) + ", one per member of the group");
  const auto sum = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  for (const auto size : sizes)
    if (size < 0 || sum != rows)
      invalid(side + "_split_sizes " + c10::str(at::IntArrayRef(sizes)) +
              " must not be negative and must sum to the " + std::to_string(rows) +
              " rows of the tensor");
  Slices slices;
  std::int64_t at = 0;
  for (const auto size : sizes) {
    slices.push_back({tensor.narrow(0, at, size)});
    at += size;
  }
  return slices;
}

void need_tensors(const TensorList& tensors) {
  if (tensors.empty()) invalid("the list of tensors is empty; give it at least one");
}

/// Coalesced: every list of `lists` has as many tensors as `like`, so that none is taken for
/// another.
void need_same_length(const char* what, const std::vector<TensorList>& lists,
                      const TensorList& like) {
  for (std::size_t i = 0; i < lists.size(); ++i)
    if (lists[i].size() != like.size())
      invalid(std::string(what) + " " + std::to_string(i) + " has " +
              std::to_string(lists[i].size()) + " tensors and the other side " +
              std::to_string(like.size()) + "; give every member's list the same tensors");
}
void need_same_elements(const TensorList& a, const TensorList& b) {
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    if (a[i].defined() && b[i].defined() && a[i].numel() != b[i].numel())
      invalid("tensor " + std::to_string(i) + " of this rank has " + std::to_string(a[i].numel()) +
              " elements and its place on the other side " + std::to_string(b[i].numel()) +
              "; give both the same shape");
}

}  // namespace

Request broadcast(const ProcessGroup& group, at::Tensor tensor, const BroadcastOptions& options) {
  const int root = group_rank(group, "src", options.src, options.group_src);
  return {.op = Op::broadcast,
          .name = "broadcast",
          .outputs = one(tensor),
          .root = root,
          .async_op = options.async_op,
          .quiet = true,
          .timeout = options.timeout};
}

Request all_reduce(const ProcessGroup&, at::Tensor tensor, const AllReduceOptions& options) {
  return {.op = Op::all_reduce,
          .name = "all_reduce",
          .inputs = one(tensor),
          .outputs = one(tensor),
          .reduce_op = options.op,
          .async_op = options.async_op,
          .quiet = true,
          .timeout = options.timeout};
}

Request reduce(const ProcessGroup& group, at::Tensor tensor, const ReduceOptions& options) {
  const int root = group_rank(group, "dst", options.dst, options.group_dst);
  return {.op = Op::reduce,
          .name = "reduce",
          .inputs = one(tensor),
          .outputs = group.rank() == root ? one(tensor) : Slices{},
          .reduce_op = options.op,
          .root = root,
          .async_op = options.async_op,
          .quiet = true,
          .timeout = options.timeout};
}

Request all_gather(const ProcessGroup&, const TensorList& tensor_list, const at::Tensor& tensor,
                   const CollectiveOptions& options) {
  return {.op = Op::all_gather,
          .name = "all_gather",
          .inputs = one(tensor),
          .outputs = each(tensor_list),
          .async_op = options.async_op,
          .timeout = options.timeout};
}

Request all_gather_into_tensor(const ProcessGroup& group, at::Tensor output_tensor,
                               const at::Tensor& input_tensor, const CollectiveOptions& options) {
  return {.op = Op::all_gather,
          .name = "all_gather_into_tensor",
          .inputs = one(input_tensor),
          .outputs = members_of(output_tensor, input_tensor, group.size()),
          .async_op = options.async_op,
          .timeout = options.timeout};
}

Request gather(const ProcessGroup& group, const at::Tensor& tensor, const GatherOptions& options) {
  const int root = group_rank(group, "dst", options.dst, options.group_dst, 0);
  return {.op = Op::gather,
          .name = "gather",
          .inputs = one(tensor),
          .outputs = each(options.gather_list),
          .root = root,
          .async_op = options.async_op,
          .timeout = options.timeout};
}

Request scatter(const ProcessGroup& group, at::Tensor tensor, const ScatterOptions& options) {
  const int root = group_rank(group, "src", options.src, options.group_src, 0);
  return {.op = Op::scatter,
          .name = "scatter",
          .inputs = each(options.scatter_list),
          .outputs = one(tensor),
          .root = root,
          .async_op = options.async_op,
          .quiet = true,
          .timeout = options.timeout};
}

Request reduce_scatter(const ProcessGroup&, at::Tensor output, const TensorList& input_list,
                       const ReduceScatterOptions& options) {
  return {.op = Op::reduce_scatter,
          .name = "reduce_scatter",
          .inputs = each(input_list),
          .outputs = one(output),
          .reduce_op = options.op,
          .async_op = options.async_op,
          .timeout = options.timeout};
}

Request reduce_scatter_tensor(const ProcessGroup& group, at::Tensor output, const at::Tensor& input,
                              const ReduceScatterOptions& options) {
  return {.op = Op::reduce_scatter,
          .name = "reduce_scatter_tensor",
          .inputs = members_of(input, output, group.size()),
          .outputs = one(output),
          .reduce_op = options.op,
          .async_op = options.async_op,
          .timeout = options.timeout};
}

Request all_to_all_single(const ProcessGroup& group, at::Tensor output, const at::Tensor& input,
                          const AllToAllSingleOptions& options) {
  return {.op = Op::all_to_all,
          .name = "all_to_all_single",
          .inputs = split(input, options.input_split_sizes, group.size(), "input"),
          .outputs = split(output, options.output_split_sizes, group.size(), "output"),
          .async_op = options.async_op,
          .quiet = true,
          .timeout = options.timeout};
}

Request all_to_all(const ProcessGroup&, const TensorList& output_tensor_list,
                   const TensorList& input_tensor_list, const CollectiveOptions& options) {
  return {.op = Op::all_to_all,
          .name = "all_to_all",
          .inputs = each(input_tensor_list),
          .outputs = each(output_tensor_list),
          .async_op = options.async_op,
          .timeout = options.timeout};
}

Request barrier(const ProcessGroup&, const BarrierOptions& options) {
  return {.op = Op::barrier,
          .name = "barrier",
          .async_op = options.async_op,
          .timeout = options.timeout};
}

Request all_reduce_coalesced(const ProcessGroup&, const TensorList& tensors,
                             const AllReduceOptions& options) {
  need_tensors(tensors);
  return {.op = Op::all_reduce,
          .name = "all_reduce_coalesced",
          .inputs = {all_of(tensors)},
          .outputs = {all_of(tensors)},
          .reduce_op = options.op,
          .async_op = options.async_op,
          .timeout = options.timeout};
}

Request all_gather_coalesced(const ProcessGroup& group,
                             const std::vector<TensorList>& output_tensor_lists,
                             const TensorList& input_tensor_list,
                             const CollectiveOptions& options) {
  need_tensors(input_tensor_list);
  need_same_length("output_tensor_lists", output_tensor_lists, input_tensor_list);
  const auto me = static_cast<std::size_t>(group.rank());
  if (me < output_tensor_lists.size())
    need_same_elements(input_tensor_list, output_tensor_lists[me]);
  return {.op = Op::all_gather,
          .name = "all_gather_coalesced",
          .inputs = {all_of(input_tensor_list)},
          .outputs = each_of(output_tensor_lists),
          .async_op = options.async_op,
          .timeout = options.timeout};
}

Request reduce_scatter_coalesced(const ProcessGroup& group, const TensorList& output_tensors,
                                 const std::vector<TensorList>& input_tensor_lists,
                                 const ReduceScatterOptions& options) {
  need_tensors(output_tensors);
  need_same_length("input_tensor_lists", input_tensor_lists, output_tensors);
  const auto me = static_cast<std::size_t>(group.rank());
  if (me < input_tensor_lists.size()) need_same_elements(output_tensors, input_tensor_lists[me]);
  return {.op = Op::reduce_scatter,
          .name = "reduce_scatter_coalesced",
          .inputs = each_of(input_tensor_lists),
          .outputs = {all_of(output_tensors)},
          .reduce_op = options.op,
          .async_op = options.async_op,
          .timeout = options.timeout};
}

}  // namespace muster::requests
