// SPDX-License-Identifier: BSD-3-Clause
/// Differentiable collectives: torch.distributed.nn.functional's, in namespace muster::nn.
///
/// They return their results and do not modify their inputs. Backward is a collective too: every
/// member that called forward must run backward through the same calls. Gradients equal torch's and
/// are differentiable again:
///
///   forward                                 backward, of the gradients of its results
///   all_reduce(op)                          all_reduce(op): right for SUM and AVG
///   broadcast(src)                          reduce(SUM) to src, zeros elsewhere
///   reduce(dst, op)                         broadcast from dst
///   gather(dst), scatter(src)               scatter from dst, gather to src
///   all_gather, all_gather_into_tensor      reduce_scatter(SUM), reduce_scatter_tensor(SUM)
///   reduce_scatter(op)                      all_gather
///   all_to_all, all_to_all_single           the same in the opposite direction
///
/// All are synchronous. A null group is the default group; `src` and `dst` are ranks of the default
/// group. A non-member gets its input back, or no tensors. Errors are those of group/collectives.h,
/// thrown from forward or backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "muster/clock.h"
#include "muster/collectives.h"
#include "muster/op.h"
#include "muster/process_group.h"

namespace muster::parallel {
struct BackwardFrame;  // callbacks of a language binding
}

namespace muster::nn {

struct FunctionalOptions {
  Group group = nullptr;
  std::optional<Duration> timeout = {};  ///< for forward and backward; default: the group's
  /// The frame of backward, for bindings to other languages.
  std::shared_ptr<const parallel::BackwardFrame> _frame = {};
};

struct ReductionOptions {
  ReduceOp op = ReduceOp::SUM;
  Group group = nullptr;
  std::optional<Duration> timeout = {};
  std::shared_ptr<const parallel::BackwardFrame> _frame = {};
};

at::Tensor all_reduce(const at::Tensor& tensor, const ReductionOptions& options = {});

/// Every member's tensor has the same number of elements.
at::Tensor broadcast(const at::Tensor& tensor, int src, const FunctionalOptions& options = {});

/// Returns the result on dst and the input's values elsewhere.
at::Tensor reduce(const at::Tensor& tensor, int dst, const ReductionOptions& options = {});

/// Returns one tensor per member, of equal sizes. On ranks other than dst they are zeros; include
/// them in the loss so that backward reaches them.
TensorList gather(const at::Tensor& tensor, int dst = 0, const FunctionalOptions& options = {});

/// `tensors` holds one tensor per member, of equal sizes; on ranks other than src their values are
/// ignored.
at::Tensor scatter(const TensorList& tensors, int src = 0, const FunctionalOptions& options = {});

/// Returns one tensor per member, of equal sizes.
TensorList all_gather(const at::Tensor& tensor, const FunctionalOptions& options = {});

/// Fills `output_tensor` with the members' tensors, concatenated along dimension 0 or stacked along
/// a new one. The result shares its memory.
at::Tensor all_gather_into_tensor(const at::Tensor& output_tensor, const at::Tensor& input_tensor,
                                  const FunctionalOptions& options = {});

/// Member r's output receives the reduction of all members' input_list[r]; sizes may differ between
/// r. The result shares the memory of `output`.
at::Tensor reduce_scatter(const at::Tensor& output, const TensorList& input_list,
                          const ReductionOptions& options = {});

/// Sends input_tensor_list[r] to member r and receives output_tensor_list[r] from it; sizes may
/// differ. The results are the tensors of output_tensor_list.
TensorList all_to_all(const TensorList& output_tensor_list, const TensorList& input_tensor_list,
                      const FunctionalOptions& options = {});

/// Splits dimension 0 among the members as given; empty split sizes mean equal parts. The result
/// shares the memory of `output`.
at::Tensor all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                             const std::vector<std::int64_t>& output_split_sizes = {},
                             const std::vector<std::int64_t>& input_split_sizes = {},
                             const FunctionalOptions& options = {});

}  // namespace muster::nn
