// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/call/call.h"

#include <utility>

#include "core/group/backends/staging.h"
#include "core/group/call/dense_tensor.h"
#include "core/group/errors.h"
#include "core/group/group_core.h"

namespace muster {
Call::Call(ProcessGroup& group, Op op, const FunctionName& name,
           const std::optional<Duration>& timeout, bool async_op)
    : group_(&core_of(group)) {
  args.op = op;
  record.name = name.text;
  record.group = group.name();
  record.recorder = group_->parts().recorder.get();
  record.recorded_group = group_->parts().recorded_as;
  record.traced.name = name.traced;
  record.traced.async = async_op;
  has_timeout_ = timeout.has_value();
  record.timeout = timeout ? *timeout : group.timeout();
  if (!group.is_member()) [[unlikely]]
    problem_ = Problem::not_a_member;
}

Call::Call(Call&& other) noexcept
    : args(std::move(other.args)),
      record(other.record),
      group_(other.group_),
      problem_(other.problem_),
      dense_(other.dense_),
      keeps_versions_(other.keeps_versions_),
      refused_(other.refused_),
      has_timeout_(other.has_timeout_),
      device_(other.device_),
      like_type_(other.like_type_),
      barrier_device_(other.barrier_device_),
      like_(other.like_),
      input_args_(other.input_args_),
      output_args_(other.output_args_),
      culprit_(other.culprit_),
      tensors_(std::move(other.tensors_)) {
  other.record.recorder = nullptr;  // the recording moves along
}

Call Call::again() const {
  const FunctionName name(record.name);
  Call call(*group_, args.op, name, has_timeout_ ? std::optional(record.timeout) : std::nullopt,
            is_async());
  call.args = args;
  call.barrier_device_ = barrier_device_;
  call.record.traced = record.traced;
  call.dense_ = dense_;
  call.keeps_versions_ = keeps_versions_;
  call.device_ = device_;
  call.like_type_ = like_type_;
  call.tensors_ = std::make_unique<CallTensors>(CallTensors{inputs(), outputs()});
  call.keep_shape(tensors_->shape);
  return call;
}

void Call::rearm() {
  record.started = record.completed_inline = false;
  record.deadline = record.begun = TimePoint();
  record.ticket = {};
  record.traced.sequence = 0;
  if (!has_timeout_) record.timeout = group_->timeout();
}

/// `prepare` runs torch operators, or user code if a tensor has a user-defined class. Other
/// exceptions propagate unchanged, because their type carries information.
template <class Prepare>
void Call::or_refuse(Prepare prepare) {
  try {
    prepare();
  } catch (const DistError& why) {
    group_->refuse(*this, why);
  } catch (const c10::Error& why) {
    group_->refuse(*this, DistError(why.what_without_backtrace()));
  } catch (const std::exception&) {
    group_->count_refused(*this);
    throw;
  }
}

void Call::hold() {
  if (tensors_) return;
  or_refuse([this] {
    auto tensors = std::make_unique<CallTensors>();
    tensors->inputs = input_args_.slices(group_->size());
    tensors->outputs = output_args_.slices(group_->size());
    tensors_ = std::move(tensors);
    keep_shape({record.traced.shape.data(), record.traced.shape.size()});
  });
}

/// The recorded shape must outlive the original tensor: for parts and splits, only views are held.
void Call::keep_shape(at::IntArrayRef shape) {
  tensors_->shape.assign(shape.begin(), shape.end());
  record.traced.shape = {tensors_->shape.data(), tensors_->shape.size()};
}

void Call::stage() {
  hold();
  or_refuse([this] {
    if (tensors_->staging) {
      tensors_->staging->refill();
    } else {
      tensors_->staging = std::make_shared<group::Staging>(*tensors_, args, at_root());
    }
  });
}

bool Call::copies_back() const { return staging() != nullptr && staging()->copies_back(); }

void Call::note_writes() {
  if (tensors_ && tensors_->staging) tensors_->staging->finish(keeps_versions_);
  if (keeps_versions_) return;
  if (tensors_ == nullptr) {
    for (std::size_t i = 0; i < output_args_.count; ++i)
      group::mark_written(output_args_.tensors[i]);
    if (output_args_.lists == nullptr) return;
    for (const auto& list : *output_args_.lists)
      for (const auto& tensor : list) group::mark_written(tensor);
    return;
  }
  for (std::size_t i = 0; i < tensors_->outputs.size(); ++i) {
    const auto& slice = tensors_->outputs[i];
    if (slice.size() != 1) continue;
    const auto& tensor = slice.front();
    // On a device, if what carried the call out has used the tensor's own memory.
    const bool is_used =
        i < args.outputs.size() && args.outputs[i].data() == tensor.const_data_ptr();
    if (group::is_dense_cpu(tensor) || is_used) group::mark_written(tensor);
  }
}

}  // namespace muster
