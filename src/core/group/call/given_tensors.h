// SPDX-License-Identifier: BSD-3-Clause
/// The arguments for one side of a call, as passed by the caller, and checks of whether those of
/// both sides fit together.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/collective/communicator.h"
#include "muster/backend.h"
#include "muster/work.h"

namespace muster {

// The arguments for one side of a call, as passed by the caller; does not hold tensors.

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

// Checks whether the tensors and memory of a call fit together. Pure functions: `Call` records the
// result, and `Call::explain` checks again to describe it.

namespace muster::group {

/// Whether `whole` consists of one part per member, each shaped like `part`.
bool holds_parts(const at::Tensor& whole, const at::Tensor& part, int members);
/// Those parts, as views of `whole`.
std::vector<at::Tensor> parts_of(const at::Tensor& whole, const at::Tensor& part, int members);

/// Whether dimension 0 can be cut into pieces of `sizes`, or into equal ones if `sizes` is empty.
bool splits_fit(const at::Tensor& tensor, const std::vector<std::int64_t>& sizes, int members);

/// Whether every list has as many tensors as `tensors`, and this member's list has tensors of the
/// same lengths.
bool lists_fit(const std::vector<at::Tensor>& tensors,
               const std::vector<std::vector<at::Tensor>>& lists, int rank);

/// A side with a wrong number of slices.
struct WrongNumber {
  bool output = false;
  bool lists = false;   ///< the side has one slice per member
  bool needed = false;  ///< false: only the root has this side
  std::size_t wanted = 0, came = 0;
};
std::optional<WrongNumber> find_wrong_number(const collective::Args& args, int rank, int size);

/// Two slices, in bytes, that should be equally long. Checked after their numbers.
struct Unequal {
  const char* what;
  std::size_t first, second;
};
std::optional<Unequal> find_unequal(const collective::Args& args, int rank);

}  // namespace muster::group
