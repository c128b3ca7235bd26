// SPDX-License-Identifier: BSD-3-Clause
/// Builds a `Call`. A few forms cover all operations: in place; one tensor, a list, or the parts of
/// one tensor on either side; splits; coalesced lists; a root; a message. The first problem is
/// recorded in the call; later steps do nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "core/group/call/call.h"
#include "core/group/call/dense_tensor.h"

namespace muster {

class CallBuilder {
 public:
  explicit CallBuilder(Call& call) : call_(call) {}

  void root(std::string_view keyword, std::optional<int> global, std::optional<int> local,
            std::optional<int> fallback = {});
  void peer(std::string_view keyword, std::optional<int> global, std::optional<int> local,
            std::int64_t tag);
  /// A message's tag; used alone for a receive from any rank.
  void tag(std::int64_t tag);
  /// The call does not mark its outputs as written for autograd, as torch's backends do not if they
  /// copy nothing.
  void keeps_versions() { call_.keeps_versions_ = true; }

  // The tensors, inputs before outputs. Each function sets one whole side.
  void in_place(const at::Tensor& tensor);
  void in_place_coalesced(const TensorList& tensors);
  void add_input(const at::Tensor& tensor);
  void add_output(const at::Tensor& tensor);
  void add_input(const TensorList& tensors) { list(tensors, false); }
  void add_output(const TensorList& tensors) { list(tensors, true); }
  /// Each member's part of `whole` has the shape of `part`; parts are concatenated along dimension
  /// 0 or stacked along a new one. Sets both sides: one is `whole`, the other `part`.
  void add_input_parts(const at::Tensor& whole, const at::Tensor& part);
  void add_output_parts(const at::Tensor& whole, const at::Tensor& part);
  /// Splits dimension 0 of each tensor into pieces of the given sizes; empty: equal pieces.
  void exchange_splits(const at::Tensor& output, const at::Tensor& input,
                       const std::vector<std::int64_t>& output_sizes,
                       const std::vector<std::int64_t>& input_sizes);
  /// `lists` has one list per member with as many tensors as `tensors`.
  void add_input_coalesced(const TensorList& tensors, const std::vector<TensorList>& lists);
  void add_output_coalesced(const std::vector<TensorList>& lists, const TensorList& tensors);
  /// Memory instead of tensors, for a SpanBackend.
  void add_input_memory(at::ScalarType type, ConstBytes memory);
  void add_output_memory(MutableBytes memory);
  void reduces(const ReduceOp& op);
  /// Call last.
  void check();

 private:
  group::GivenTensors& side(bool output) { return output ? call_.output_args_ : call_.input_args_; }
  void note(Problem problem) {
    if (call_.problem_ == Problem::none) call_.problem_ = problem;
  }
  bool note(Problem problem, bool output, std::size_t index, const at::Tensor& tensor);
  void note_rank(std::string_view keyword, std::optional<int> global, std::optional<int> local);
  /// Checks one tensor. The first one sets dtype and device; later ones must match.
  bool check_tensor(const at::Tensor& tensor, bool output, std::size_t index) {
    if (group::is_dense_cpu(tensor)) [[likely]] {
      const at::ScalarType type = tensor.scalar_type();
      if (call_.like_type_ == type && call_.device_ == c10::DeviceType::CPU) return true;
      if (call_.like_type_ == at::ScalarType::Undefined) {
        set_first_tensor(tensor, type);
        return true;
      }
    }
    return check_tensor_slowly(tensor, output, index);
  }
  void set_first_tensor(const at::Tensor& tensor, at::ScalarType type) {
    call_.like_ = &tensor;
    call_.like_type_ = type;
    call_.args.dtype = group::to_dtype(type);
    call_.record.traced.dtype = static_cast<std::uint8_t>(call_.args.dtype);
    call_.record.traced.shape = {tensor.sizes().data(), tensor.sizes().size()};
  }
  bool check_tensor_slowly(const at::Tensor& tensor, bool output, std::size_t index);
  void push(const at::Tensor& tensor, bool output);
  void push_length(std::size_t bytes, bool output);
  template <class Length>
  void push_pieces(const at::Tensor& tensor, bool output, Length length);
  void push_parts(const at::Tensor& whole, bool output);
  bool fits(const at::Tensor& whole, const at::Tensor& part, bool output);
  void list(const TensorList& tensors, bool output);
  void splits(const at::Tensor& tensor, const std::vector<std::int64_t>& sizes, bool output);
  void lists(const std::vector<TensorList>& lists, bool output);
  void coalesced(const TensorList& tensors, bool output);
  bool same_lists(const TensorList& tensors, const std::vector<TensorList>& lists);
  bool memory_is_apart() const;
  bool memory_is_valid() const;

  Call& call_;
};

}  // namespace muster
