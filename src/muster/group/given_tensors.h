/// What a function was given for one side of its call, as it was given: no tensor is held.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <vector>

namespace muster {

using TensorList = std::vector<at::Tensor>;
/// What one member gives to, or gets from, one other: usually one tensor; the coalesced forms have
/// several, which travel back to back.
using Slice = c10::SmallVector<at::Tensor, 1>;
using Slices = c10::SmallVector<Slice, 1>;

namespace group {

struct GivenTensors {
  enum class Form : std::uint8_t { nothing, tensor, list, parts, splits, coalesced, lists };

  Form form = Form::nothing;
  const at::Tensor* tensors = nullptr;  ///< the first of `count`
  std::size_t count = 0;
  const at::Tensor* part = nullptr;                  ///< parts: shaped like each
  const std::vector<std::int64_t>* sizes = nullptr;  ///< splits: rows; empty: equal ones
  const std::vector<TensorList>* lists = nullptr;

  /// Whether it is one piece of memory.
  bool is_one() const {
    return form == Form::tensor || form == Form::parts || form == Form::splits;
  }
  /// For a group of so many members, as a backend that works on tensors has them.
  Slices slices(int members) const;
};

}  // namespace group
}  // namespace muster
