/// Maps torch's scalar types to the engine's element types.
#pragma once

#include <c10/core/ScalarType.h>

#include "core/base/dtype.h"

namespace muster::group {

/// Types the engine cannot reduce become `raw8` to `raw64` by width. torch has no other 16-byte
/// type.
inline DType to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kBool: return DType::boolean;
    case at::kByte: return DType::uint8;
    case at::kChar: return DType::int8;
    case at::kShort: return DType::int16;
    case at::kInt: return DType::int32;
    case at::kLong: return DType::int64;
    case at::kHalf: return DType::float16;
    case at::kBFloat16: return DType::bfloat16;
    case at::kFloat: return DType::float32;
    case at::kDouble: return DType::float64;
    case at::kComplexFloat: return DType::complex64;
    case at::kComplexDouble: return DType::complex128;
    default: break;
  }
  switch (c10::elementSize(type)) {
    case 1: return DType::raw8;
    case 2: return DType::raw16;
    case 4: return DType::raw32;
    default: return DType::raw64;
  }
}

}  // namespace muster::group
