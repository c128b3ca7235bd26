// SPDX-License-Identifier: BSD-3-Clause
/// Pipeline schedules as data: the order in which each rank works on the micro-batches, for GPipe,
/// 1F1B, interleaved 1F1B and ZBV, and a check that proves an order right.
///
/// A model is cut into stages; each rank has one or several. A stage sends its outputs to the next
/// stage and the gradients of its inputs to the previous one. A table names no messages: they
/// follow from its actions. It has no idle ticks either; those follow from the durations of the
/// passes. The same tables as torch.distributed.pipelining, which prints them as CSV.
///
/// Sources: Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "Efficient Large-Scale Language
/// Model Training on GPU Clusters", SC 2021 (1F1B, interleaved); Qi et al., "Pipeline Parallelism
/// with Controllable Memory" and "Zero Bubble Pipeline Parallelism", 2024 (ZBV).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "muster/status.h"

namespace muster {

enum class PipelinePass : std::uint8_t {
  forward,
  backward,         ///< gradients of inputs and weights in one pass
  backward_input,   ///< gradients of the stage's inputs only
  backward_weight,  ///< gradients of its weights, after backward_input
};

struct PipelineAction {
  int stage = 0;
  PipelinePass pass = PipelinePass::forward;
  int micro_batch = 0;
  bool operator==(const PipelineAction&) const = default;
};
/// As torch writes it: stage, then F, B, I (input) or W (weight), then micro-batch: "2F0".
std::string to_string(const PipelineAction& action);
/// "forward", "backward", "backward for inputs" or "backward for weights".
const char* to_string(PipelinePass pass);

struct PipelineTable {
  std::string name;  ///< for messages
  int micro_batches = 0;
  std::vector<int> rank_of_stage;                    ///< by stage
  std::vector<std::vector<PipelineAction>> actions;  ///< by rank, in order

  int ranks() const { return static_cast<int>(actions.size()); }
  int stages() const { return static_cast<int>(rank_of_stage.size()); }
};

// Generators. Each fails (Code::invalid_argument) unless all its arguments are at least 1. One
// stage a rank, unless stated otherwise.

/// All forwards, then all backwards. Rank r holds the activations of all micro-batches.
Result<PipelineTable> gpipe_table(int ranks, int micro_batches);

/// Warm-up of min(M, P - 1 - r) forwards, then one forward and one backward in turn. Rank r holds
/// at most min(M, P - r) activations.
Result<PipelineTable> one_f_one_b_table(int ranks, int micro_batches);

/// `stages_per_rank` stages a rank: rank r has stages r, r + P, r + 2 P, ... M micro-batches go in
/// max(1, M / P) rounds (rounded down), and M must be a multiple of the number of rounds, as in
/// torch; every M up to 2 P - 1 is, and so is every multiple of P.
Result<PipelineTable> interleaved_1f1b_table(int ranks, int stages_per_rank, int micro_batches);

/// Zero bubble, V-shaped: rank r has stages r and 2 P - 1 - r, and backward is split. No rank is
/// idle between its first and its last action if the three passes take equally long and M is at
/// least 2 P - 1. A rank holds at most 2 P activations.
Result<PipelineTable> zbv_table(int ranks, int micro_batches);

struct PipelineCheckOptions {
  /// Messages that one stage may have sent to a neighbour and that are not received yet; its next
  /// send blocks. At least 1. Default: no limit.
  int messages_in_flight = INT32_MAX;
  /// Durations, in any unit. A full backward takes as long as both its halves. Messages take none.
  double forward = 1;
  double backward_input = 1;
  double backward_weight = 1;
};

struct PipelineReport {
  /// By rank: the most (stage, micro-batch) pairs between the start of their forward and the end of
  /// their backward or backward_weight.
  std::vector<int> peak_activations;
  /// By rank: time at work, and time from its first action's start to its last one's end.
  std::vector<double> busy;
  std::vector<double> span;
  double makespan = 0;  ///< from the first action's start to the last one's end

  /// The idle part of all ranks' time, 0 to 1.
  double bubble_fraction() const;
};

/// Proves that the table runs to its end and computes what one process does: each micro-batch is
/// done once by each stage, forward and backward; each action comes after those that it depends on;
/// both ends of each stage boundary handle the micro-batches in the same order; and no rank waits
/// for ever with blocking receives, and sends that block at the limit. Otherwise fails
/// (Code::invalid_argument), naming the rank and the action.
Result<PipelineReport> check_pipeline(const PipelineTable& table,
                                      const PipelineCheckOptions& options = {});

}  // namespace muster
