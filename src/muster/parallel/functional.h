/// Collectives that gradients flow through: torch.distributed.nn.functional's, in namespace
/// muster::nn.
///
/// They return their results and leave their inputs alone. Backward is a collective too: every
/// member of the group that called forward must come to backward, through the same calls. Gradients
/// are torch's, of every order:
///
///   forward                                 backward, of the gradients of its results
///   all_reduce(op)                          all_reduce(op): right for SUM and AVG
///   broadcast(src)                          reduce(SUM) to src, zeros elsewhere
///   reduce(dst, op)                         broadcast from dst
///   gather(dst), scatter(src)               scatter from dst, gather to src
///   all_gather, all_gather_into_tensor      reduce_scatter(SUM), reduce_scatter_tensor(SUM)
///   reduce_scatter(op)                      all_gather
///   all_to_all, all_to_all_single           the same, the other way
///
/// They are synchronous. A null group is the default group; `src` and `dst` are ranks of the
/// default group. A process that is not a member gets its input back, or no tensors. Errors are
/// those of the calls in group/collectives.h, from forward or from backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "muster/base/clock.h"
#include "muster/group/collectives.h"
#include "muster/group/process_group.h"
#include "muster/group/reduce_op.h"
#include "muster/parallel/backward_frame.h"

namespace muster::nn {

struct CallOptions {
  Group group = nullptr;
  std::optional<Duration> timeout = {};  ///< of forward and of backward; absent: the group's
  parallel::BackwardFrame _frame = {};   ///< of backward, for bindings of other languages
};

struct ReductionOptions {
  ReduceOp op = ReduceOp::SUM;
  Group group = nullptr;
  std::optional<Duration> timeout = {};
  parallel::BackwardFrame _frame = {};
};

at::Tensor all_reduce(const at::Tensor& tensor, const ReductionOptions& options = {});

/// As many elements everywhere.
at::Tensor broadcast(const at::Tensor& tensor, int src, const CallOptions& options = {});

/// The result is on dst; elsewhere it is the input's values.
at::Tensor reduce(const at::Tensor& tensor, int dst, const ReductionOptions& options = {});

/// One tensor for each member, of equal sizes; off dst they are zeros, which belong into the loss
/// so that backward comes to them.
TensorList gather(const at::Tensor& tensor, int dst = 0, const CallOptions& options = {});

/// `tensors`: one for each member, of equal sizes; off src their values do not matter.
at::Tensor scatter(const TensorList& tensors, int src = 0, const CallOptions& options = {});

/// One tensor for each member, of equal sizes.
TensorList all_gather(const at::Tensor& tensor, const CallOptions& options = {});

/// Fills `output_tensor` with the members' tensors, concatenated along dimension 0 or stacked along
/// a new one; the result shares its memory.
at::Tensor all_gather_into_tensor(const at::Tensor& output_tensor, const at::Tensor& input_tensor,
                                  const CallOptions& options = {});

/// input_list[r] of all members, reduced, becomes the output of member r; sizes may differ between
/// r. The result shares the memory of `output`.
at::Tensor reduce_scatter(const at::Tensor& output, const TensorList& input_list,
                          const ReductionOptions& options = {});

/// input_tensor_list[r] becomes output_tensor_list[me] of member r; sizes may differ. The results
/// are the tensors of output_tensor_list.
TensorList all_to_all(const TensorList& output_tensor_list, const TensorList& input_tensor_list,
                      const CallOptions& options = {});

/// Rows of dimension 0 go to the members as the splits say, empty ones for equal parts. The result
/// shares the memory of `output`.
at::Tensor all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                             const std::vector<std::int64_t>& output_split_sizes = {},
                             const std::vector<std::int64_t>& input_split_sizes = {},
                             const CallOptions& options = {});

}  // namespace muster::nn
