/// The collectives, with torch's names and keywords: keyword arguments are fields of an options
/// struct.
///
/// Every member calls them, in the same order. They are synchronous: the result is there on return;
/// with `async_op` they return a Work at once. A process that is not a member of `group` gets no
/// Work and its tensors stay as they are. `group` null is the default group; `src` and `dst` are
/// ranks of the default group, `group_src` and `group_dst` ranks of `group` (give one of the two).
/// `timeout` absent is the group's. Tensors may be any shape, also not contiguous; every dtype can
/// be moved, the twelve of docs/user/groups.md can be reduced. Errors: DistError for what the
/// caller must change, DistBackendError for what failed, with the ranks at fault.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "muster/base/clock.h"
#include "muster/group/call.h"
#include "muster/group/process_group.h"
#include "muster/group/reduce_op.h"
#include "muster/group/work.h"

namespace muster {

struct BroadcastOptions {
  std::optional<int> src = {};
  Group group = nullptr;
  bool async_op = false;
  std::optional<int> group_src = {};
  std::optional<Duration> timeout = {};
};
/// The root's values go to all; as many elements everywhere.
WorkRef broadcast(const at::Tensor& tensor, const BroadcastOptions& options);

struct AllReduceOptions {
  ReduceOp op = ReduceOp::SUM;
  Group group = nullptr;
  bool async_op = false;
  std::optional<Duration> timeout = {};
};
/// In place; the same bits on every rank.
WorkRef all_reduce(const at::Tensor& tensor, const AllReduceOptions& options = {});

struct ReduceOptions {
  std::optional<int> dst = {};
  ReduceOp op = ReduceOp::SUM;
  Group group = nullptr;
  bool async_op = false;
  std::optional<int> group_dst = {};
  std::optional<Duration> timeout = {};
};
/// In place on dst; elsewhere the tensor is left as it was.
WorkRef reduce(const at::Tensor& tensor, const ReduceOptions& options);

struct CollectiveOptions {
  Group group = nullptr;
  bool async_op = false;
  std::optional<Duration> timeout = {};
};
/// tensor_list[r] becomes the tensor of rank r; sizes may differ between ranks.
WorkRef all_gather(const TensorList& tensor_list, const at::Tensor& tensor,
                   const CollectiveOptions& options = {});
/// The same size on every rank. The output is the inputs concatenated along dimension 0, or stacked
/// along a new first dimension.
WorkRef all_gather_into_tensor(const at::Tensor& output_tensor, const at::Tensor& input_tensor,
                               const CollectiveOptions& options = {});

struct GatherOptions {
  TensorList gather_list = {};  ///< on dst one tensor per member, of equal sizes; elsewhere empty
  std::optional<int> dst = {};  ///< absent, and no group_dst: 0
  Group group = nullptr;
  bool async_op = false;
  std::optional<int> group_dst = {};
  std::optional<Duration> timeout = {};
};
WorkRef gather(const at::Tensor& tensor, const GatherOptions& options = {});

struct ScatterOptions {
  TensorList scatter_list = {};  ///< on src one tensor per member, of equal sizes; elsewhere empty
  std::optional<int> src = {};   ///< absent, and no group_src: 0
  Group group = nullptr;
  bool async_op = false;
  std::optional<int> group_src = {};
  std::optional<Duration> timeout = {};
};
WorkRef scatter(const at::Tensor& tensor, const ScatterOptions& options = {});

struct ReduceScatterOptions {
  ReduceOp op = ReduceOp::SUM;
  Group group = nullptr;
  bool async_op = false;
  std::optional<Duration> timeout = {};
};
/// input_list[r] of all ranks, reduced, becomes the output of rank r; sizes may differ between r.
WorkRef reduce_scatter(const at::Tensor& output, const TensorList& input_list,
                       const ReduceScatterOptions& options = {});
/// The input is the members' parts concatenated along dimension 0, or stacked along a first
/// dimension.
WorkRef reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input,
                              const ReduceScatterOptions& options = {});

struct AllToAllSingleOptions {
  std::vector<std::int64_t> output_split_sizes =
      {};  ///< rows of dimension 0 that come from each member; empty: equal parts
  std::vector<std::int64_t> input_split_sizes =
      {};  ///< rows that go to each member; empty: equal parts
  Group group = nullptr;
  bool async_op = false;
  std::optional<Duration> timeout = {};
};
WorkRef all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                          const AllToAllSingleOptions& options = {});
/// input_tensor_list[r] becomes output_tensor_list[me] of rank r; sizes may differ.
WorkRef all_to_all(const TensorList& output_tensor_list, const TensorList& input_tensor_list,
                   const CollectiveOptions& options = {});

struct BarrierOptions {
  Group group = nullptr;
  bool async_op = false;
  std::vector<int> device_ids = {};  ///< of no meaning to backends of the CPU
  std::optional<Duration> timeout = {};
};
WorkRef barrier(const BarrierOptions& options = {});

/// Several tensors of one dtype as one message.
WorkRef all_reduce_coalesced(const TensorList& tensors, const AllReduceOptions& options = {});
/// output_tensor_lists[r][i] becomes input_tensor_list[i] of rank r.
WorkRef all_gather_coalesced(const std::vector<TensorList>& output_tensor_lists,
                             const TensorList& input_tensor_list,
                             const CollectiveOptions& options = {});
/// input_tensor_lists[r][i] of all ranks, reduced, becomes output_tensors[i] of rank r.
WorkRef reduce_scatter_coalesced(const TensorList& output_tensors,
                                 const std::vector<TensorList>& input_tensor_lists,
                                 const ReduceScatterOptions& options = {});

}  // namespace muster
