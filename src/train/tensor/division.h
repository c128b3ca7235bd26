// SPDX-License-Identifier: BSD-3-Clause
/// How layers are divided over a group. This folder implements muster/tensor_parallel.h on the
/// collectives of muster/functional.h: regions.cc has the autograd functions, and each layer is a
/// file above them. It may include parallel/ and what stands below; its tests run ranks as threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "muster/process_group.h"
#include "train/mesh/chunk.h"

namespace muster::tensor_parallel {

using parallel::Chunk;
using parallel::chunk_of;

/// The group, or the default group for null. Throws DistError naming `who` on a non-member.
Group member_group(const Group& group, std::string_view who);

/// Parameters of a layer on this rank: copies, in the given dtype and on the given device.
struct ParameterOptions {
  std::optional<at::ScalarType> dtype;
  std::optional<at::Device> device;
};
at::Tensor whole_parameter(const at::Tensor& whole, const ParameterOptions& options);
/// This rank's part of `whole` along `dim`, declared by set_tensor_parallel_part().
at::Tensor divided_parameter(const at::Tensor& whole, std::int64_t dim, const Group& group,
                             const ParameterOptions& options);

/// "[2, 3]".
std::string text_of(at::IntArrayRef sizes);
/// Throws DistError if the input's last dimension is not `expected`; `hint` ends the message.
void check_last_dimension(const at::Tensor& input, std::int64_t expected, const std::string& who,
                          std::string_view hint = {});
/// Throws DistError if an element is not in [0, size). Does not wait for an accelerator, on which a
/// wrong one fails torch's assertion.
void check_indices(const at::Tensor& indices, std::int64_t size, std::string_view who,
                   std::string_view what);

}  // namespace muster::tensor_parallel
