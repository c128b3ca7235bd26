// SPDX-License-Identifier: BSD-3-Clause
/// Tensors of this rank as parts of whole ones, for both languages.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format/plan/box.h"
#include "checkpoint/format/plan/division.h"

namespace muster::checkpoint {

/// A rank's part of a tensor. The elements of `tensor`, row-major, are those of `boxes`, one box
/// behind the other.
struct CheckpointItem {
  std::string name;
  at::Tensor tensor;
  shards::Extent sizes;  ///< of the whole tensor
  std::vector<shards::Box> boxes;
  bool is_number = false;  ///< a whole number of Python's, as an int64 without dimensions
};

/// The whole tensor.
CheckpointItem whole_item(std::string name, const at::Tensor& tensor);
/// The box at `offsets`, of the tensor's sizes. A box without elements is nothing.
CheckpointItem box_item(std::string name, const at::Tensor& tensor, shards::Extent sizes,
                        shards::Extent offsets);
/// As many row-major elements of the whole as `tensor` has, from `first` on.
CheckpointItem stretch_item(std::string name, const at::Tensor& tensor, const shards::Extent& sizes,
                            std::int64_t first);
/// A parameter of a module: its stretch where FSDP has sharded it, its box in a tensor-parallel
/// layer, both where FSDP has sharded such a box, else the whole. Throws DistError where FSDP has
/// gathered it now.
CheckpointItem parameter_item(std::string name, const at::Tensor& parameter);
/// Something of an optimizer's that belongs to a parameter: divided as the parameter is where it
/// has as many elements in the same shape, else whole.
CheckpointItem state_item(std::string name, const at::Tensor& tensor, const at::Tensor& parameter);

/// The sizes of the whole that a parameter of a module is a part of.
shards::Extent whole_sizes(const at::Tensor& parameter);

/// As a checkpoint has it. Throws DistError naming the tensor where it is not dense or of a type
/// that checkpoints do not have.
shards::Shard shard_of(const CheckpointItem& item);
/// The same bytes as U8 with a last dimension of the bytes of an element: how the first versions
/// and files of safetensors have the types that safetensors does not name.
shards::Shard as_bytes(const CheckpointItem& item);

/// The type of a stored tensor; Undefined for a name that torch has no type for.
at::ScalarType scalar_type_of(std::string_view dtype);

}  // namespace muster::checkpoint
