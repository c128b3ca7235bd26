/// Whether the tensors and the memory of a call fit one another. Pure: `Call` notes what it finds,
/// and `Call::explain` looks again for the words.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "muster/collective/communicator.h"

namespace muster::group {

/// `whole` is one part per member, each shaped like `part`.
bool holds_parts(const at::Tensor& whole, const at::Tensor& part, int members);
/// Those parts, as views.
std::vector<at::Tensor> parts_of(const at::Tensor& whole, const at::Tensor& part, int members);

/// Dimension 0 can be cut into such pieces, or into equal ones where `sizes` is empty.
bool splits_fit(const at::Tensor& tensor, const std::vector<std::int64_t>& sizes, int members);

/// Every list has as many tensors as `tensors`, so that none is taken for another, and this
/// member's own tensors of the same lengths.
bool lists_fit(const std::vector<at::Tensor>& tensors,
               const std::vector<std::vector<at::Tensor>>& lists, int rank);

/// A side with more or fewer slices than it must have.
struct WrongNumber {
  bool output = false;
  bool lists = false;   ///< one for each member
  bool needed = false;  ///< false: the side belongs to the root alone
  std::size_t wanted = 0, came = 0;
};
std::optional<WrongNumber> find_wrong_number(const collective::Args& args, int rank, int size);

/// Two slices that must be equally long, in bytes; once the numbers are right.
struct Unequal {
  const char* what;
  std::size_t first, second;
};
std::optional<Unequal> find_unequal(const collective::Args& args, int rank);

}  // namespace muster::group
