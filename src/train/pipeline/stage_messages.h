// SPDX-License-Identifier: BSD-3-Clause
/// The messages between one stage and a neighbour on another rank: activations one way, their
/// gradients the other way. The first activations follow a description of their sizes and dtypes.
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "muster/pipeline.h"

namespace muster::pipeline {

/// Shapes and dtypes of a stage's outputs, as told to the next stage.
struct StageOutputs {
  struct OneTensor {
    std::vector<std::int64_t> sizes;
    at::ScalarType dtype;
    bool operator==(const OneTensor&) const = default;
  };
  std::vector<OneTensor> tensors;
  bool operator==(const StageOutputs&) const = default;
  /// "[4, 8] Float, [4] Long".
  std::string text() const;
};

/// All messages of this rank's stages. Nothing blocks but `receive`, and `finish` for the sends.
/// Each of their waits has the group's timeout, however long ago the message was started.
class StageMessages {
 public:
  explicit StageMessages(Group group) : group_(std::move(group)) {}

  /// A stage boundary, from the side of this rank.
  struct Neighbour {
    int from_stage = 0;  ///< activations go from here to the next stage, gradients come back
    int group_rank = 0;  ///< the other side's rank
    bool operator<(const Neighbour& other) const { return from_stage < other.from_stage; }
  };
  enum class StageTraffic { activations, gradients };

  /// Throws DistError if activations differ from the first ones sent.
  void send(const Neighbour& to, StageTraffic kind, const TensorList& tensors);
  /// Posts the receives for one micro-batch ahead, if the sizes are known.
  void post(const Neighbour& from, StageTraffic kind, at::Device device);
  /// The oldest posted receives, or new ones; blocks until they are there.
  TensorList receive(const Neighbour& from, StageTraffic kind, at::Device device);
  /// Waits for all sends. Everything posted must have been received.
  void finish();

 private:
  struct PostedReceives {
    TensorList tensors;
    std::vector<WorkRef> works;
  };
  PostedReceives start(const Neighbour& from, StageTraffic kind, at::Device device) const;
  StageOutputs receive_description(const Neighbour& from, at::Device device) const;
  void send_description(const Neighbour& to, const StageOutputs& outputs, at::Device device);
  void start_send(const Neighbour& to, StageTraffic kind, const at::Tensor& tensor);
  /// Names the rank, by `what` it has not done within the group's timeout from now.
  void wait(Work& work, int group_rank, const char* what) const;

  const Group group_;
  std::map<int, StageOutputs> outputs_;  // by from_stage; both sides know them alike
  std::map<std::pair<int, StageTraffic>, std::deque<PostedReceives>> posted_;
  std::deque<WorkRef> sends_;
  std::deque<int> receivers_;  // of the sends
};

}  // namespace muster::pipeline
