/// One call of any operation, from the user's function to the backend.
///
/// A function of `collectives.h` or `point_to_point.h` builds it on the stack (`calls.h`,
/// `call_builder.h`). The first problem is noted, and building stops; `explain` puts it in words,
/// where the call is refused. Of dense tensors in the CPU's
/// memory nothing is held: the call has their memory. Others are copied to such (`stage`). What
/// must outlive the function (an asynchronous call), or goes to a backend that works on tensors,
/// has the tensors too (`hold`). Until then tensors, lists and options that the function was given
/// must outlive the call.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/base/clock.h"
#include "muster/collective/call_record.h"
#include "muster/collective/communicator.h"
#include "muster/group/given_tensors.h"
#include "muster/group/process_group.h"
#include "muster/group/reduce_op.h"

namespace muster {

inline constexpr int kAnyRank = -1;

namespace group {
class Staging;  // backends/staging.h
}

/// What a function is called, a literal.
struct FunctionName {
  std::string_view text;
  trace::Name traced;
  constexpr FunctionName(std::string_view name) : text(name), traced(name) {}
  constexpr FunctionName(const char* name) : FunctionName(std::string_view(name)) {}
};

/// The tensors of a call that holds them: one slice for each member where `collective::info(op)`
/// says that a side lists, else exactly one. In place, both sides have the same tensor; a broadcast
/// has outputs alone, a reduce outputs on the root alone.
struct CallTensors {
  Slices inputs, outputs;
  std::shared_ptr<group::Staging> staging = {};  ///< null where their memory is used as it is
  c10::DimVector shape = {};                     ///< that is recorded
};

/// The first thing that is wrong with a call.
enum class Problem : std::uint8_t {
  none,
  not_a_member,  ///< of the group: the call does nothing
  no_such_rank,
  peer_is_self,
  negative_tag,
  reserved_tag,  ///< the groups' own
  no_tensors,
  lists_differ,
  whole_and_part,
  splits,
  kind,        ///< undefined, sparse, nested or quantized
  difference,  ///< in dtype or device; or an output overlaps itself
  number,      ///< of slices
  elements,
  memory,  ///< outputs that overlap one another, or an input
  reduction,
};

/// What is wrong there: a tensor of a slice, or a rank that was given.
struct Culprit {
  bool output = false;
  std::size_t index = 0;  ///< of the slice
  const at::Tensor* tensor = nullptr;
  std::string_view keyword = {};
  std::optional<int> global = {}, local = {};
};

class Call {
 public:
  Call(ProcessGroup& group, Op op, const FunctionName& name,
       const std::optional<Duration>& timeout = {}, bool async_op = false);
  Call(Call&& other) noexcept;
  Call& operator=(Call&&) = delete;
  ~Call() = default;

  // For backends.
  collective::Args args;  ///< ranks in it are positions in the group
  collective::CallRecord record;
  Op op() const { return args.op; }
  std::string_view name() const { return record.name; }
  ReduceOp reduce_op() const {
    return args.reduce == collective::Reduce::premul_sum
               ? ReduceOp::premul_sum(args.factor)
               : ReduceOp(static_cast<ReduceOp::Kind>(args.reduce));
  }
  /// `submit` should return before it is done.
  bool is_async() const { return record.traced.async; }
  void make_async() { record.traced.async = true; }
  bool is_message() const { return collective::is_message(args.op); }
  /// Of a collective: its number in the group, from 1, once it has started.
  std::uint64_t number() const { return record.traced.sequence; }
  bool is_refused() const { return refused_; }
  ProcessGroup& group() const { return *group_; }
  /// All of its memory is dense and the CPU's: `args` has it.
  bool is_dense() const { return dense_; }
  /// Of the tensors, once they are held.
  const Slices& inputs() const { return tensors_->inputs; }
  const Slices& outputs() const { return tensors_->outputs; }
  /// Keeps the tensors. While the arguments of the function that was called are there. Like
  /// `stage`, before the call starts: what is thrown there refuses it.
  void hold();
  /// Where it is not dense: holds the tensors, and copies them to memory that is; at every call
  /// anew, for a run of its own.
  void stage();
  /// Whether `finish` runs operators of torch's, which may be slow, and the user's where a tensor
  /// is of a class of theirs.
  bool copies_back() const;
  /// After success: copies back into tensors that are not dense, and tells autograd of what has
  /// been written, unless torch's backends say nothing of it either.
  void finish() {
    if (tensors_ != nullptr || !quiet_) note_writes();
  }
  const group::Staging* staging() const { return tensors_ ? tensors_->staging.get() : nullptr; }

  Problem problem() const { return problem_; }
  /// Throws DistError that says what is wrong and what to do about it.
  [[noreturn]] void explain() const;
  void mark_refused() { refused_ = true; }
  /// On which kind of device, by its first tensor; none for a barrier.
  std::optional<c10::DeviceType> device() const {
    if (like_type_ != at::ScalarType::Undefined) return device_;
    const bool known = culprit_.tensor != nullptr && culprit_.tensor->defined();
    return known ? std::optional(culprit_.tensor->device().type()) : std::nullopt;
  }
  at::ScalarType dtype() const { return like_type_; }
  std::string device_text() const { return like_->device().str(); }
  /// Right, and on dense memory of the CPU.
  bool is_plain() const { return dense_ && problem_ == Problem::none; }
  /// For another run of the same call, by itself.
  Call again() const;
  /// For another run of this call.
  void rearm();

 private:
  friend class CallBuilder;
  std::size_t members() const { return static_cast<std::size_t>(group_->size()); }
  bool at_root() const { return args.root == group_->rank(); }
  void note_writes();
  void keep_shape(at::IntArrayRef shape);
  template <class Prepare>
  void or_refuse(Prepare prepare);

  ProcessGroup* group_;
  Problem problem_ = Problem::none;
  bool dense_ = true;
  bool quiet_ = false;
  bool refused_ = false;
  bool has_timeout_ = false;
  c10::DeviceType device_ = c10::DeviceType::CPU;
  at::ScalarType like_type_ = at::ScalarType::Undefined;
  const at::Tensor* like_ = nullptr;  // the first tensor
  group::GivenTensors give_, get_;
  Culprit culprit_;
  std::unique_ptr<CallTensors> tensors_;
};

}  // namespace muster
