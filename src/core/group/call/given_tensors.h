/// The arguments for one side of a call, as passed by the caller; does not hold tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <vector>

#include "muster/backend.h"
#include "muster/work.h"

namespace muster {

namespace group {

struct GivenTensors {
  enum class Form : std::uint8_t { nothing, tensor, list, parts, splits, coalesced, lists };

  Form form = Form::nothing;
  const at::Tensor* tensors = nullptr;  ///< first of `count`
  std::size_t count = 0;
  const at::Tensor* part = nullptr;  ///< parts: has the shape of each part
  /// Splits: rows per piece; empty: equal pieces.
  const std::vector<std::int64_t>* sizes = nullptr;
  const std::vector<TensorList>* lists = nullptr;

  /// Whether the side is one contiguous piece of memory.
  bool is_one() const {
    return form == Form::tensor || form == Form::parts || form == Form::splits;
  }
  /// The slices for a group of `members`, for a backend that works on tensors.
  Slices slices(int members) const;
};

}  // namespace group
}  // namespace muster
