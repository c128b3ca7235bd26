#include "muster/checkpoint/items.h"

#include <torch/types.h>

#include <utility>

#include "muster/group/errors.h"
#include "muster/parallel/sharded_unit.h"

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
};

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
  const auto part = parallel::sharded_part(parameter);
  if (!part) return whole_item(std::move(name), parameter);
  return stretch_item(std::move(name), parameter, part->sizes, part->first);
}

CheckpointItem state_item(std::string name, const at::Tensor& tensor, const at::Tensor& parameter) {
  const auto part = parallel::sharded_part(parameter);
  if (!part || tensor.sizes() != parameter.sizes()) return whole_item(std::move(name), tensor);
  return stretch_item(std::move(name), tensor, part->sizes, part->first);
}

shards::Shard shard_of(const CheckpointItem& item) {
  const at::Tensor& tensor = item.tensor;
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_quantized() ||
      tensor.is_nested() || tensor.is_meta())
    refuse(item.name, "is not dense: sparse, quantized, nested and meta tensors are not saved");
  for (const auto& [type, name] : kTypes)
    if (type == tensor.scalar_type()) return {item.name, std::string(name), item.sizes, item.boxes};
  shards::Shard shard{item.name, "U8", item.sizes, item.boxes};
  const auto width = static_cast<std::int64_t>(tensor.element_size());
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
  return at::ScalarType::Undefined;
}

}  // namespace muster::checkpoint
