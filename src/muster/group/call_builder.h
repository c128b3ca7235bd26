/// How a `Call` is built: a few forms of signature serve all operations. In place; one tensor, a
/// list, or the parts of one tensor in or out; splits; coalesced lists; a root; a message. The
/// first problem is noted in the call, and what follows does nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "muster/group/call.h"
#include "muster/group/plain_tensor.h"
#include "muster/group/scalar_type.h"

namespace muster {

class CallBuilder {
 public:
  explicit CallBuilder(Call& call) : call_(call) {}

  void root(std::string_view keyword, std::optional<int> global, std::optional<int> local,
            std::optional<int> fallback = {});
  void peer(std::string_view keyword, std::optional<int> global, std::optional<int> local,
            std::int64_t tag);
  /// Of a message; all that a receive from any rank says of its sender.
  void tag(std::int64_t tag);
  /// It writes without a word to autograd, as torch's backends do wherever they copy nothing.
  void writes_quietly() { call_.quiet_ = true; }

  // Its tensors; inputs before outputs. Each is the whole of that side.
  void in_place(const at::Tensor& tensor);
  void in_place_coalesced(const TensorList& tensors);
  void give(const at::Tensor& tensor);
  void get(const at::Tensor& tensor);
  void give(const TensorList& tensors) { list(tensors, false); }
  void get(const TensorList& tensors) { list(tensors, true); }
  /// Every member's part of `whole` is shaped like `part`: concatenated along dimension 0 or
  /// stacked along a new one. Gives one and gets the other.
  void give_parts(const at::Tensor& whole, const at::Tensor& part);
  void get_parts(const at::Tensor& whole, const at::Tensor& part);
  /// Dimension 0 of each in pieces of so many rows, or in equal ones where none are given.
  void exchange_splits(const at::Tensor& output, const at::Tensor& input,
                       const std::vector<std::int64_t>& output_sizes,
                       const std::vector<std::int64_t>& input_sizes);
  /// `lists` has a list like `tensors` for each member.
  void give_coalesced(const TensorList& tensors, const std::vector<TensorList>& lists);
  void get_coalesced(const std::vector<TensorList>& lists, const TensorList& tensors);
  /// Memory instead of tensors, for backends that take it.
  void give_memory(at::ScalarType type, ConstBytes memory);
  void get_memory(MutableBytes memory);
  void reduces(const ReduceOp& op);
  /// Once all is said.
  void check();

 private:
  group::GivenTensors& side(bool output) { return output ? call_.get_ : call_.give_; }
  void note(Problem problem) {
    if (call_.problem_ == Problem::none) call_.problem_ = problem;
  }
  bool note(Problem problem, bool output, std::size_t index, const at::Tensor& tensor);
  void note_rank(std::string_view keyword, std::optional<int> global, std::optional<int> local);
  /// The first tensor gives dtype and device; the others must agree.
  bool take(const at::Tensor& tensor, bool output, std::size_t index) {
    if (group::is_plain(tensor)) [[likely]] {
      const at::ScalarType type = tensor.scalar_type();
      if (call_.like_type_ == type && call_.device_ == c10::DeviceType::CPU) return true;
      if (call_.like_type_ == at::ScalarType::Undefined) {
        take_first(tensor, type);
        return true;
      }
    }
    return take_unusual(tensor, output, index);
  }
  void take_first(const at::Tensor& tensor, at::ScalarType type) {
    call_.like_ = &tensor;
    call_.like_type_ = type;
    call_.args.dtype = group::to_dtype(type);
    call_.record.traced.dtype = static_cast<std::uint8_t>(call_.args.dtype);
    call_.record.traced.shape = {tensor.sizes().data(), tensor.sizes().size()};
  }
  bool take_unusual(const at::Tensor& tensor, bool output, std::size_t index);
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
