// SPDX-License-Identifier: BSD-3-Clause
/// The collectives, with torch's names. Python's keyword arguments are fields of an options struct.
///
/// Every member calls each collective, in the same order. A call is synchronous: the result is
/// there on return. With `async_op` it returns a Work immediately. On a process that is not a
/// member of `group`, the call returns null and leaves the tensors unchanged.
///
/// A null `group` is the default group. `src` and `dst` are ranks of the default group; `group_src`
/// and `group_dst` are ranks of `group`. Give one of the two. If `timeout` is absent, the group's
/// applies. Tensors may have any shape and need not be contiguous. Every dtype can be moved;
/// docs/user/groups.md lists the twelve that can be reduced.
///
/// Errors: DistError for what the caller must change; DistBackendError for what failed at run time,
/// with the ranks at fault.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "muster/clock.h"
#include "muster/op.h"
#include "muster/process_group.h"
#include "muster/work.h"

namespace muster {

/// How the values of a call travel; for tensors of float32, float16 and bfloat16, and for SUM and
/// AVG. In int8 and int4, 128 values share a scale: with m the largest magnitude among them, a
/// value arrives to within m / 252 and m / 13.9. bf16 keeps x to within |x| / 256. NaN and infinite
/// values arrive as they are. Sums are made in float32. An all_reduce rounds on the way to the rank
/// that sums, and on the way back. All ranks, also the sender, take the values of the same bytes,
/// so all have the same bits. Every rank gives the same compression. Ranks that share the memory of
/// one host make the ordinary call, which is exact, and faster there.
enum class Compression : std::uint8_t { none, bf16, int8, int4 };

struct BroadcastOptions {
  std::optional<int> src = {};
  Group group = nullptr;
  bool async_op = false;
  std::optional<int> group_src = {};
  std::optional<Duration> timeout = {};
  Compression compression = Compression::none;
};
/// Copies the root's values to all members. Every member's tensor has the same number of elements.
WorkRef broadcast(const at::Tensor& tensor, const BroadcastOptions& options);

struct AllReduceOptions {
  ReduceOp op = ReduceOp::SUM;
  Group group = nullptr;
  bool async_op = false;
  std::optional<Duration> timeout = {};
  Compression compression = Compression::none;
  /// Error feedback, with `compression` of a float32 tensor: a tensor like the reduced one, zeros
  /// at first. It is added to the values, and when the call has ended it holds what this rank's
  /// rounding has lost, so that a later call makes up for it. Ranks need not all give one. Until
  /// that call has ended no other may be given the same tensor, which is refused.
  std::optional<at::Tensor> feedback = {};
};
/// Reduces in place. Every rank gets bitwise identical results.
WorkRef all_reduce(const at::Tensor& tensor, const AllReduceOptions& options = {});

struct ReduceOptions {
  std::optional<int> dst = {};
  ReduceOp op = ReduceOp::SUM;
  Group group = nullptr;
  bool async_op = false;
  std::optional<int> group_dst = {};
  std::optional<Duration> timeout = {};
};
/// Reduces in place on dst; other ranks' tensors are unchanged.
WorkRef reduce(const at::Tensor& tensor, const ReduceOptions& options);

struct CollectiveOptions {
  Group group = nullptr;
  bool async_op = false;
  std::optional<Duration> timeout = {};
  Compression compression = Compression::none;
};
/// tensor_list[r] receives the tensor of rank r. Sizes may differ between ranks.
WorkRef all_gather(const TensorList& tensor_list, const at::Tensor& tensor,
                   const CollectiveOptions& options = {});
/// Every rank's input has the same size. The output is the inputs concatenated along dimension 0 or
/// stacked along a new first dimension.
WorkRef all_gather_into_tensor(const at::Tensor& output_tensor, const at::Tensor& input_tensor,
                               const CollectiveOptions& options = {});

struct GatherOptions {
  TensorList gather_list = {};  ///< on dst, one tensor per member, of equal sizes; elsewhere empty
  std::optional<int> dst = {};  ///< default without group_dst: 0
  Group group = nullptr;
  bool async_op = false;
  std::optional<int> group_dst = {};
  std::optional<Duration> timeout = {};
};
/// Gathers the tensors of all members, which have equal sizes, in gather_list on dst.
WorkRef gather(const at::Tensor& tensor, const GatherOptions& options = {});

struct ScatterOptions {
  TensorList scatter_list = {};  ///< on src, one tensor per member, of equal sizes; elsewhere empty
  std::optional<int> src = {};   ///< default without group_src: 0
  Group group = nullptr;
  bool async_op = false;
  std::optional<int> group_src = {};
  std::optional<Duration> timeout = {};
};
/// Copies scatter_list[r] of src to the tensor of rank r.
WorkRef scatter(const at::Tensor& tensor, const ScatterOptions& options = {});

struct ReduceScatterOptions {
  ReduceOp op = ReduceOp::SUM;
  Group group = nullptr;
  bool async_op = false;
  std::optional<Duration> timeout = {};
  Compression compression = Compression::none;
};
/// The output of rank r receives the reduction of every rank's input_list[r]. Sizes may differ
/// between r.
WorkRef reduce_scatter(const at::Tensor& output, const TensorList& input_list,
                       const ReduceScatterOptions& options = {});
/// The input is one part per member, concatenated along dimension 0 or stacked along a first
/// dimension.
WorkRef reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input,
                              const ReduceScatterOptions& options = {});

struct AllToAllSingleOptions {
  /// Rows of dimension 0 received from each member; empty: equal parts.
  std::vector<std::int64_t> output_split_sizes = {};
  /// Rows of dimension 0 sent to each member; empty: equal parts.
  std::vector<std::int64_t> input_split_sizes = {};
  Group group = nullptr;
  bool async_op = false;
  std::optional<Duration> timeout = {};
};
/// Splits the input along dimension 0, sends piece r to rank r, and concatenates the received
/// pieces in rank order in the output.
WorkRef all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                          const AllToAllSingleOptions& options = {});
/// Sends input_tensor_list[r] to rank r and receives output_tensor_list[r] from it. Sizes may
/// differ.
WorkRef all_to_all(const TensorList& output_tensor_list, const TensorList& input_tensor_list,
                   const CollectiveOptions& options = {});

struct BarrierOptions {
  Group group = nullptr;
  bool async_op = false;
  /// Indexes of this process's accelerators, of which the first is used: its backend makes the
  /// barrier, on that device. Ignored if the group has no backend for accelerators.
  std::vector<int> device_ids = {};
  std::optional<Duration> timeout = {};
};
/// Returns, or its Work completes, once all members have called it.
WorkRef barrier(const BarrierOptions& options = {});

/// Reduces several tensors of one dtype in one operation.
WorkRef all_reduce_coalesced(const TensorList& tensors, const AllReduceOptions& options = {});
/// output_tensor_lists[r][i] receives input_tensor_list[i] of rank r.
WorkRef all_gather_coalesced(const std::vector<TensorList>& output_tensor_lists,
                             const TensorList& input_tensor_list,
                             const CollectiveOptions& options = {});
/// output_tensors[i] of rank r receives the reduction of every rank's input_tensor_lists[r][i].
WorkRef reduce_scatter_coalesced(const TensorList& output_tensors,
                                 const std::vector<TensorList>& input_tensor_lists,
                                 const ReduceScatterOptions& options = {});

class Call;
class GroupCore;

/// A call that is checked once and submitted repeatedly, like MPI's persistent requests. It holds
/// the tensors. Each must keep its storage and shape (no `set_`, no `resize_`), because its memory
/// is looked up only once. On the native backend, repeated synchronous calls on contiguous tensors
/// allocate no memory. Movable. Not thread-safe.
class PreparedCall {
 public:
  /// A call that does nothing, as on a non-member.
  PreparedCall() = default;
  PreparedCall(PreparedCall&&) noexcept = default;
  PreparedCall& operator=(PreparedCall&&) noexcept = default;

  /// Repeats the call with the tensors' current contents. Returns as the function it was prepared
  /// for. Wait for a returned Work before the next submit.
  WorkRef submit();

 private:
  friend class GroupCore;
  PreparedCall(std::shared_ptr<GroupCore> group, std::shared_ptr<Call> call, bool stays)
      : group_(std::move(group)), call_(std::move(call)), stays_(stays) {}

  std::shared_ptr<GroupCore> group_;
  std::shared_ptr<Call> call_;
  bool stays_ = false;  // submitting does not modify the call
};

/// Prepare the call of the function of that name. Throw what it would throw for invalid arguments;
/// every member prepares and submits the same calls in the same order.
PreparedCall prepare_broadcast(const at::Tensor& tensor, const BroadcastOptions& options);
PreparedCall prepare_all_reduce(const at::Tensor& tensor, const AllReduceOptions& options = {});
PreparedCall prepare_all_gather_into_tensor(const at::Tensor& output_tensor,
                                            const at::Tensor& input_tensor,
                                            const CollectiveOptions& options = {});
PreparedCall prepare_reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input,
                                           const ReduceScatterOptions& options = {});

}  // namespace muster
