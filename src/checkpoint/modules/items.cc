// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/modules/items.h"

#include <torch/types.h>

#include <optional>
#include <utility>

#include "core/group/errors.h"
#include "muster/tensor_parallel.h"
#include "train/fsdp/sharded_unit.h"

namespace muster::checkpoint {
namespace {

struct TypeName {
  at::ScalarType type;
  std::string_view name;
};
constexpr TypeName kTypes[] = {
    {at::kBool, "BOOL"},
    {at::kByte, "U8"},
    {at::kChar, "I8"},
    {at::kShort, "I16"},
    {at::kInt, "I32"},
    {at::kLong, "I64"},
    {at::kUInt16, "U16"},
    {at::kUInt32, "U32"},
    {at::kUInt64, "U64"},
    {at::kHalf, "F16"},
    {at::kBFloat16, "BF16"},
    {at::kFloat, "F32"},
    {at::kDouble, "F64"},
    {at::kComplexFloat, "C64"},
    {at::kFloat8_e5m2, "F8_E5M2"},
    {at::kFloat8_e4m3fn, "F8_E4M3"},
    {at::kFloat8_e8m0fnu, "F8_E8M0"},
    // These have no name in safetensors (checkpoint/format/files/safetensors.h).
    {at::kComplexHalf, "C32"},
    {at::kComplexDouble, "C128"},
    {at::kFloat8_e4m3fnuz, "F8_E4M3FNUZ"},
    {at::kFloat8_e5m2fnuz, "F8_E5M2FNUZ"},
    {at::ScalarType::Float4_e2m1fn_x2, "F4_E2M1X2"},
};
/// A number of Python's in a tensor.
constexpr std::string_view kNumber = "INT";

/// The boxes of the whole parameter that a rank's parameter consists of, in the order of its
/// memory.
struct Place {
  shards::Extent sizes;
  std::vector<shards::Box> boxes;
};

/// None for a parameter that is whole. A parameter of a tensor-parallel layer is a box of the
/// whole, and FSDP may have sharded that box.
std::optional<Place> place_of(const at::Tensor& parameter) {
  const auto shard = parallel::sharded_part(parameter);
  const auto part = tensor_parallel_part(parameter);
  if (!shard && !part) return {};
  const shards::Extent held = shard ? shard->sizes : parameter.sizes().vec();
  Place place{part ? part->sizes : held, {}};
  if (shard && shard->offsets) {
    if (parameter.numel() > 0) place.boxes = {{*shard->offsets, parameter.sizes().vec()}};
  } else if (shard)
    place.boxes = shards::boxes_of_stretch(held, shard->first, parameter.numel());
  else if (parameter.numel() > 0)
    place.boxes = {shards::box_of(held)};
  for (shards::Box& box : place.boxes)
    for (std::size_t d = 0; part && d < part->offsets.size(); ++d)
      box.offsets[d] += part->offsets[d];
  return place;
}

[[noreturn]] void refuse(const std::string& name, const std::string& why) {
  group::invalid("checkpoint: tensor '" + name + "' " + why);
}

}  // namespace

CheckpointItem whole_item(std::string name, const at::Tensor& tensor) {
  const shards::Extent sizes = tensor.sizes().vec();
  return {std::move(name), tensor.detach(), sizes, {shards::box_of(sizes)}};
}

CheckpointItem box_item(std::string name, const at::Tensor& tensor, shards::Extent sizes,
                        shards::Extent offsets) {
  shards::Box box{std::move(offsets), tensor.sizes().vec()};
  if (!box.is_within(sizes))
    refuse(name, "is " + shards::text_of(box.sizes) + " at " + shards::text_of(box.offsets) +
                     ", which is no part of " + shards::text_of(sizes));
  std::vector<shards::Box> boxes;
  if (tensor.numel() > 0 || shards::element_count(sizes) == 0) boxes.push_back(std::move(box));
  return {std::move(name), tensor.detach(), std::move(sizes), std::move(boxes)};
}

CheckpointItem stretch_item(std::string name, const at::Tensor& tensor, const shards::Extent& sizes,
                            std::int64_t first) {
  const auto elements = shards::element_count(sizes);
  if (!elements || first < 0 || first > *elements || tensor.numel() > *elements - first)
    refuse(name, "has " + std::to_string(tensor.numel()) + " elements from number " +
                     std::to_string(first) + " on, which are not in " + shards::text_of(sizes));
  auto boxes = shards::boxes_of_stretch(sizes, first, tensor.numel());
  return {std::move(name), tensor.detach(), sizes, std::move(boxes)};
}

CheckpointItem parameter_item(std::string name, const at::Tensor& parameter) {
  auto place = place_of(parameter);
  if (!place) return whole_item(std::move(name), parameter);
  return {std::move(name), parameter.detach(), std::move(place->sizes), std::move(place->boxes)};
}

CheckpointItem state_item(std::string name, const at::Tensor& tensor, const at::Tensor& parameter) {
  auto place = place_of(parameter);
  if (!place || tensor.sizes() != parameter.sizes()) return whole_item(std::move(name), tensor);
  return {std::move(name), tensor.detach(), std::move(place->sizes), std::move(place->boxes)};
}

shards::Extent whole_sizes(const at::Tensor& parameter) {
  if (auto part = tensor_parallel_part(parameter)) return std::move(part->sizes);
  const auto stretch = parallel::sharded_part(parameter);
  return stretch ? stretch->sizes : parameter.sizes().vec();
}

shards::Shard shard_of(const CheckpointItem& item) {
  const at::Tensor& tensor = item.tensor;
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_quantized() ||
      tensor.is_nested() || tensor.is_meta())
    refuse(item.name, "is not dense: sparse, quantized, nested and meta tensors are not saved");
  if (item.is_number) return {item.name, std::string(kNumber), item.sizes, item.boxes};
  for (const auto& [type, name] : kTypes)
    if (type == tensor.scalar_type()) return {item.name, std::string(name), item.sizes, item.boxes};
  refuse(item.name, std::string("is of the type ") + c10::toString(tensor.scalar_type()) +
                        ", which checkpoints do not have: save it as another type");
}

shards::Shard as_bytes(const CheckpointItem& item) {
  shards::Shard shard{item.name, "U8", item.sizes, item.boxes};
  const auto width = static_cast<std::int64_t>(item.tensor.element_size());
  shard.sizes.push_back(width);
  for (auto& box : shard.boxes) {
    box.offsets.push_back(0);
    box.sizes.push_back(width);
  }
  return shard;
}

at::ScalarType scalar_type_of(std::string_view dtype) {
  for (const auto& [type, name] : kTypes)
    if (name == dtype) return type;
  return dtype == kNumber ? at::kLong : at::ScalarType::Undefined;
}

}  // namespace muster::checkpoint
