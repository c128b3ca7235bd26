// SPDX-License-Identifier: BSD-3-Clause
#include "train/pipeline/stage_messages.h"

#include <torch/types.h>

#include <algorithm>

#include "muster/point_to_point.h"

namespace muster::pipeline {

namespace {

constexpr std::int64_t kFirstTag = 1'000'000;
/// A message that is started long before anybody waits for it. Waits for it have the group's
/// timeout.
constexpr Duration kNoLimit = Duration::max();
// A description is a message of one size: the number of tensors, then dtype, number of dimensions
// and sizes of each.
constexpr std::int64_t kMostTensors = 16;    // limit: protocol
constexpr std::int64_t kMostDimensions = 8;  // limit: protocol
constexpr std::int64_t kOneTensor = 2 + kMostDimensions;
constexpr std::int64_t kDescription = 1 + kMostTensors * kOneTensor;

/// One tag for each boundary and kind. Its messages match in the order of the table's actions,
/// which both sides share.
std::int64_t tag_of(const StageMessages::Neighbour& neighbour, StageMessages::StageTraffic kind) {
  return kFirstTag + 2 * neighbour.from_stage + static_cast<std::int64_t>(kind);
}

StageOutputs describe(const TensorList& tensors) {
  StageOutputs outputs;
  for (const auto& tensor : tensors)
    outputs.tensors.push_back({tensor.sizes().vec(), tensor.scalar_type()});
  return outputs;
}

at::Tensor packed(const StageOutputs& outputs) {
  if (outputs.tensors.size() > kMostTensors)
    throw DistError("a stage has at most " + std::to_string(kMostTensors) + " outputs, and not " +
                    std::to_string(outputs.tensors.size()));
  auto numbers = torch::zeros({kDescription}, at::kLong);
  auto* next = numbers.mutable_data_ptr<std::int64_t>();
  *next++ = static_cast<std::int64_t>(outputs.tensors.size());
  for (const auto& tensor : outputs.tensors) {
    if (tensor.sizes.size() > kMostDimensions)
      throw DistError("an output of a stage has at most " + std::to_string(kMostDimensions) +
                      " dimensions, and not " + std::to_string(tensor.sizes.size()));
    next[0] = static_cast<std::int64_t>(tensor.dtype);
    next[1] = static_cast<std::int64_t>(tensor.sizes.size());
    std::copy(tensor.sizes.begin(), tensor.sizes.end(), next + 2);
    next += kOneTensor;
  }
  return numbers;
}

StageOutputs unpacked(const at::Tensor& numbers) {
  const auto* next = numbers.const_data_ptr<std::int64_t>();
  const auto refuse_unless = [](bool right) {
    if (!right)
      throw DistError(
          "what came is no description of a stage's outputs; does another message of "
          "the group use the same tag?",
          Code::mismatch);
  };
  refuse_unless(*next > 0 && *next <= kMostTensors);
  StageOutputs outputs;
  outputs.tensors.resize(static_cast<std::size_t>(*next++));
  for (auto& tensor : outputs.tensors) {
    refuse_unless(next[0] >= 0 && next[0] < static_cast<std::int64_t>(at::ScalarType::NumOptions) &&
                  next[1] >= 0 && next[1] <= kMostDimensions);
    tensor.dtype = static_cast<at::ScalarType>(next[0]);
    tensor.sizes.assign(next + 2, next + 2 + next[1]);
    next += kOneTensor;
  }
  return outputs;
}

}  // namespace

std::string StageOutputs::text() const {
  std::string text;
  for (const auto& tensor : tensors) {
    text += text.empty() ? "[" : ", [";
    for (std::size_t i = 0; i < tensor.sizes.size(); ++i)
      text += (i == 0 ? "" : ", ") + std::to_string(tensor.sizes[i]);
    text += std::string("] ") + c10::toString(tensor.dtype);
  }
  return text.empty() ? "nothing" : text;
}

void StageMessages::start_send(const Neighbour& to, StageTraffic kind, const at::Tensor& tensor) {
  sends_.push_back(isend(
      tensor,
      {.group = group_, .tag = tag_of(to, kind), .group_dst = to.group_rank, .timeout = kNoLimit}));
  receivers_.push_back(to.group_rank);
  while (!sends_.empty() && sends_.front()->is_completed()) {
    sends_.front()->wait();  // throws if it failed
    sends_.pop_front();
    receivers_.pop_front();
  }
}

void StageMessages::send_description(const Neighbour& to, const StageOutputs& outputs,
                                     at::Device device) {
  start_send(to, StageTraffic::activations, packed(outputs).to(device));
}

StageOutputs StageMessages::receive_description(const Neighbour& from, at::Device device) const {
  auto numbers = torch::empty({kDescription}, torch::dtype(at::kLong).device(device));
  recv(numbers, {.group = group_,
                 .tag = tag_of(from, StageTraffic::activations),
                 .group_src = from.group_rank});
  return unpacked(numbers.to(at::kCPU));
}

void StageMessages::send(const Neighbour& to, StageTraffic kind, const TensorList& tensors) {
  if (kind == StageTraffic::activations) {
    if (tensors.empty()) throw DistError("it has no outputs, and another stage needs some");
    const StageOutputs outputs = describe(tensors);
    const auto [known, is_new] = outputs_.try_emplace(to.from_stage, outputs);
    if (is_new) send_description(to, outputs, tensors.front().device());
    if (known->second != outputs)
      throw DistError("its outputs are " + outputs.text() + ", but were " + known->second.text() +
                          " for the first micro-batch; all must be alike",
                      Code::mismatch);
  }
  for (const auto& tensor : tensors) start_send(to, kind, tensor.contiguous());
}

StageMessages::PostedReceives StageMessages::start(const Neighbour& from, StageTraffic kind,
                                                   at::Device device) const {
  PostedReceives receives;
  for (const auto& tensor : outputs_.at(from.from_stage).tensors) {
    if (kind == StageTraffic::gradients && !c10::isFloatingType(tensor.dtype)) continue;
    receives.tensors.push_back(
        torch::empty(tensor.sizes, torch::dtype(tensor.dtype).device(device)));
    receives.works.push_back(irecv(receives.tensors.back(), {.group = group_,
                                                             .tag = tag_of(from, kind),
                                                             .group_src = from.group_rank,
                                                             .timeout = kNoLimit}));
  }
  return receives;
}

void StageMessages::post(const Neighbour& from, StageTraffic kind, at::Device device) {
  if (outputs_.contains(from.from_stage))
    posted_[{from.from_stage, kind}].push_back(start(from, kind, device));
}

TensorList StageMessages::receive(const Neighbour& from, StageTraffic kind, at::Device device) {
  if (kind == StageTraffic::activations && !outputs_.contains(from.from_stage))
    outputs_[from.from_stage] = receive_description(from, device);
  auto& posted = posted_[{from.from_stage, kind}];
  if (posted.empty()) posted.push_back(start(from, kind, device));
  const PostedReceives receives = std::move(posted.front());
  posted.pop_front();
  for (const auto& work : receives.works) wait(*work, from.group_rank, "sent nothing");
  return receives.tensors;
}

void StageMessages::finish() {
  for (; !sends_.empty(); sends_.pop_front(), receivers_.pop_front())
    wait(*sends_.front(), receivers_.front(), "received nothing");
}

void StageMessages::wait(Work& work, int group_rank, const char* what) const {
  try {
    work.wait(group_->timeout());
  } catch (const DistError& error) {
    // Not a failure of the group, which may be another rank's deadline.
    if (error.code() != Code::timed_out || work.is_completed()) throw;
    const int rank = group_->global_rank_of(group_rank);
    throw DistBackendError("rank " + std::to_string(rank) + " " + what + " within the " +
                               muster::describe(group_->timeout()) +
                               " that this rank waited for it",
                           Code::timed_out, {rank});
  }
}

}  // namespace muster::pipeline
