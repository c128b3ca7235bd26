// SPDX-License-Identifier: BSD-3-Clause
/// One call of any operation, from the user's function to the backend.
///
/// A function of `collectives.h` or `point_to_point.h` builds the call on its stack (`calls.h`,
/// `call_builder.h`). Building stops at the first problem, which is recorded; `explain` describes
/// it when the call is refused. For dense CPU tensors, the call stores only their memory. Other
/// tensors are copied to dense memory (`stage`). A call that outlives the function (asynchronous),
/// or that goes to a backend working on tensors, also holds the tensors (`hold`). Before `hold`,
/// the function's tensors, lists and options must outlive the call.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/collective/call_record.h"
#include "core/collective/communicator.h"
#include "core/group/call/given_tensors.h"
#include "core/group/group_core.h"
#include "muster/clock.h"
#include "muster/op.h"

namespace muster {

inline constexpr int kAnyRank = -1;

namespace group {
class Staging;  // backends/staging.h
}

/// The name of a public function; a literal.
struct FunctionName {
  std::string_view text;
  trace::Name traced;
  constexpr FunctionName(std::string_view name) : text(name), traced(name) {}
  constexpr FunctionName(const char* name) : FunctionName(std::string_view(name)) {}
};

/// The tensors of a call after `hold`. A side has one slice per member if `collective::info(op)`
/// says that it is a list, otherwise exactly one slice. In place, both sides have the same tensor.
/// A broadcast has only outputs; a reduce has outputs on the root only.
struct CallTensors {
  Slices inputs, outputs;
  std::shared_ptr<group::Staging> staging = {};  ///< null if the tensors' memory is used directly
  c10::DimVector shape = {};                     ///< shape in the recorded trace
};

/// The first problem of a call.
enum class Problem : std::uint8_t {
  none,
  not_a_member,  ///< not an error: the call does nothing
  no_such_rank,
  peer_is_self,
  negative_tag,
  reserved_tag,  ///< reserved for the groups themselves
  no_tensors,
  lists_differ,
  whole_and_part,
  splits,
  kind,        ///< undefined, sparse, nested, quantized or of a foreign class
  difference,  ///< dtype or device differs, or an output overlaps itself
  number,      ///< wrong number of slices
  elements,
  memory,  ///< an output overlaps another output or an input
  reduction,
};

/// The tensor or rank at fault.
struct Culprit {
  bool output = false;
  std::size_t index = 0;  ///< index of the slice
  const at::Tensor* tensor = nullptr;
  std::string_view keyword = {};
  std::optional<int> global = {}, local = {};
};

class Call final : public BackendCall {
 public:
  Call(ProcessGroup& group, Op op, const FunctionName& name,
       const std::optional<Duration>& timeout = {}, bool async_op = false);
  Call(Call&& other) noexcept;
  Call& operator=(Call&&) = delete;
  ~Call() = default;

  collective::Args args;  ///< ranks in it are group ranks
  collective::CallRecord record;
  Op op() const override { return args.op; }
  std::string_view name() const override { return record.name; }
  ReduceOp reduce_op() const override {
    return args.reduce == collective::Reduce::premul_sum
               ? ReduceOp::premul_sum(args.factor)
               : ReduceOp(static_cast<ReduceOp::Kind>(args.reduce));
  }
  int root() const override { return is_message() ? -1 : args.root; }
  int peer() const override { return is_message() ? args.root : kAnyRank; }
  std::int64_t tag() const override { return record.traced.tag; }
  TimePoint deadline() const override { return record.deadline; }
  bool is_async() const override { return record.traced.async; }
  void make_async() { record.traced.async = true; }
  bool is_message() const { return muster::is_message(args.op); }
  /// Set for a barrier: the accelerator on which its backend makes it; empty: the backend chooses.
  std::optional<at::Device> barrier_device() const { return barrier_device_; }
  void make_barrier_on(at::Device device) {
    barrier_device_ = device;
    dense_ = false;
  }
  /// Set when it starts.
  std::uint64_t number() const override { return record.traced.sequence; }
  bool is_refused() const override { return refused_; }
  GroupCore& group() const { return *group_; }
  /// All of its memory is dense CPU memory and is in `args`.
  bool is_dense() const { return dense_; }
  /// The tensors; requires `hold`.
  const Slices& inputs() const override { return tensors_->inputs; }
  const Slices& outputs() const override { return tensors_->outputs; }
  /// Holds the tensors. Call while the function's arguments are alive and, like `stage`, before the
  /// call starts; an exception here refuses the call.
  void hold();
  /// For a call that is not dense: holds the tensors and copies them to dense memory. Each call of
  /// `stage` copies again, for another run.
  void stage();
  /// Whether `finish` runs torch operators. These may be slow, and may be user code if a tensor has
  /// a user-defined class.
  bool copies_back() const;
  /// Call after success. Copies results back into tensors that are not dense, and marks outputs as
  /// written for autograd, except in calls for which torch's backends do not.
  void finish() {
    if (tensors_ != nullptr || !keeps_versions_) note_writes();
  }
  const group::Staging* staging() const { return tensors_ ? tensors_->staging.get() : nullptr; }

  Problem problem() const { return problem_; }
  /// Throws a DistError that describes the problem and a remedy.
  [[noreturn]] void explain() const;
  void mark_refused() { refused_ = true; }
  /// The device type of the first tensor; empty for a barrier.
  std::optional<c10::DeviceType> device() const {
    if (like_type_ != at::ScalarType::Undefined) return device_;
    const bool known = culprit_.tensor != nullptr && culprit_.tensor->defined();
    return known ? std::optional(culprit_.tensor->device().type()) : std::nullopt;
  }
  at::ScalarType dtype() const { return like_type_; }
  std::string device_text() const { return like_->device().str(); }
  /// Valid, and on dense CPU memory.
  bool is_valid_dense() const { return dense_ && problem_ == Problem::none; }
  /// An independent copy for another run.
  Call again() const;
  /// Resets this call for another run.
  void rearm();

 private:
  friend class CallBuilder;
  std::size_t members() const { return static_cast<std::size_t>(group_->size()); }
  bool at_root() const { return args.root == group_->rank(); }
  void note_writes();
  void keep_shape(at::IntArrayRef shape);
  template <class Prepare>
  void or_refuse(Prepare prepare);

  GroupCore* group_;
  Problem problem_ = Problem::none;
  bool dense_ = true;
  bool keeps_versions_ = false;
  bool refused_ = false;
  bool has_timeout_ = false;
  c10::DeviceType device_ = c10::DeviceType::CPU;
  at::ScalarType like_type_ = at::ScalarType::Undefined;
  std::optional<at::Device> barrier_device_;
  const at::Tensor* like_ = nullptr;  // the first tensor
  group::GivenTensors input_args_, output_args_;
  Culprit culprit_;
  std::unique_ptr<CallTensors> tensors_;
};

}  // namespace muster
