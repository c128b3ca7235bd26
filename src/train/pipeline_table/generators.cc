// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <utility>

#include "muster/pipeline_table.h"

namespace muster {
namespace {

using Pass = PipelinePass;
using Actions = std::vector<PipelineAction>;

Status check_counts(const std::string& name, int ranks, int stages_per_rank, int micro_batches) {
  if (ranks >= 1 && stages_per_rank >= 1 && micro_batches >= 1) return {};
  return {Code::invalid_argument,
          name + ": ranks, stages per rank and micro-batches must be at least 1, but are " +
              std::to_string(ranks) + ", " + std::to_string(stages_per_rank) + " and " +
              std::to_string(micro_batches)};
}

/// A table whose stages go round the ranks, without actions.
PipelineTable looped(std::string name, int ranks, int stages_per_rank, int micro_batches) {
  PipelineTable table{std::move(name), micro_batches, {}, {}};
  for (int stage = 0; stage < ranks * stages_per_rank; ++stage)
    table.rank_of_stage.push_back(stage % ranks);
  table.actions.resize(static_cast<std::size_t>(ranks));
  return table;
}

/// Hands out the micro-batches of one stage and pass in order, and leaves out those that the
/// pipeline does not have.
class Appender {
 public:
  Appender(Actions& actions, int micro_batches)
      : actions_(actions), micro_batches_(micro_batches) {}
  void add(int stage, Pass pass, int& next) {
    if (next < micro_batches_) actions_.push_back({stage, pass, next});
    ++next;
  }

 private:
  Actions& actions_;
  const int micro_batches_;
};

/// The two stages of a rank of ZBV: `down` in the first half of the V, `up` in the second.
class ZbvRank {
 public:
  ZbvRank(Actions& actions, int ranks, int rank, int micro_batches)
      : append_(actions, micro_batches),
        ranks_(ranks),
        rank_(rank),
        // A full V; what the pipeline lacks is left out.
        full_(std::max(2 * ranks - 1, micro_batches)) {
    down_.stage = rank;
    up_.stage = 2 * ranks - 1 - rank;
  }

  void fill() {
    warm_up();
    while (up_.forward < down_.forward || down_.forward < full_) {
      if (down_.forward < full_) forward(down_);
      backward(down_);
      forward(up_);
      backward(up_);
    }
    cool_down();
  }

 private:
  struct VStage {
    int stage = 0;
    int forward = 0, input = 0, weight = 0;  // the next micro-batch of each pass
  };
  void forward(VStage& stage) { append_.add(stage.stage, Pass::forward, stage.forward); }
  void input(VStage& stage) { append_.add(stage.stage, Pass::backward_input, stage.input); }
  void weight(VStage& stage) { append_.add(stage.stage, Pass::backward_weight, stage.weight); }
  void backward(VStage& stage) {
    input(stage);
    weight(stage);
  }

  void warm_up() {
    for (int i = 0; i < 2 * (ranks_ - rank_) - 1; ++i) forward(down_);
    for (int i = 0; i < rank_; ++i) {
      forward(up_);
      forward(down_);
    }
    for (int i = 0; i < ranks_ - rank_; ++i) {
      forward(up_);
      backward(up_);
    }
  }
  /// Weights fill the time in which inputs' gradients come from the other ranks.
  void cool_down() {
    for (int i = 0; i < rank_; ++i) {
      input(down_);
      input(up_);
    }
    for (int i = 0; i < ranks_ - rank_; ++i) backward(down_);
    while (up_.weight < up_.input) weight(up_);
    while (down_.weight < down_.input) weight(down_);
  }

  Appender append_;
  const int ranks_, rank_, full_;
  VStage down_, up_;
};

}  // namespace

Result<PipelineTable> gpipe_table(int ranks, int micro_batches) {
  if (const Status wrong = check_counts("GPipe", ranks, 1, micro_batches); !wrong) return wrong;
  PipelineTable table = looped("GPipe", ranks, 1, micro_batches);
  for (int rank = 0; rank < ranks; ++rank) {
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      for (int i = 0; i < micro_batches; ++i)
        table.actions[static_cast<std::size_t>(rank)].push_back({rank, pass, i});
    }
  }
  return table;
}

Result<PipelineTable> one_f_one_b_table(int ranks, int micro_batches) {
  if (const Status wrong = check_counts("1F1B", ranks, 1, micro_batches); !wrong) return wrong;
  PipelineTable table = looped("1F1B", ranks, 1, micro_batches);
  for (int rank = 0; rank < ranks; ++rank) {
    Appender append(table.actions[static_cast<std::size_t>(rank)], micro_batches);
    int forward = 0, backward = 0;
    while (forward < std::min(ranks - 1 - rank, micro_batches))
      append.add(rank, Pass::forward, forward);
    while (backward < micro_batches) {
      append.add(rank, Pass::forward, forward);
      append.add(rank, Pass::backward, backward);
    }
  }
  return table;
}

Result<PipelineTable> interleaved_1f1b_table(int ranks, int stages_per_rank, int micro_batches) {
  const std::string name = "interleaved 1F1B";
  if (const Status wrong = check_counts(name, ranks, stages_per_rank, micro_batches); !wrong)
    return wrong;
  const int rounds = std::max(1, micro_batches / ranks);
  if (micro_batches % rounds != 0)
    return Status(Code::invalid_argument,
                  name + ": " + std::to_string(micro_batches) + " micro-batches on " +
                      std::to_string(ranks) + " ranks go in " + std::to_string(rounds) +
                      " rounds, and are no multiple of that; try " +
                      std::to_string(micro_batches / ranks * ranks) + " or " +
                      std::to_string((micro_batches / ranks + 1) * ranks));
  PipelineTable table = looped(name, ranks, stages_per_rank, micro_batches);
  const int per_round = micro_batches / rounds;
  const int total = stages_per_rank * micro_batches;
  for (int rank = 0; rank < ranks; ++rank) {
    Appender append(table.actions[static_cast<std::size_t>(rank)], micro_batches);
    std::vector<int> forward(static_cast<std::size_t>(stages_per_rank)), backward(forward);
    const auto add = [&](Pass pass, std::vector<int>& next, int local) {
      append.add(local * ranks + rank, pass, next[static_cast<std::size_t>(local)]);
    };
    const int warm_up = std::min((stages_per_rank - 1) * per_round + 2 * (ranks - 1 - rank), total);
    for (int step = 0; step < total + warm_up; ++step) {
      if (step < total) add(Pass::forward, forward, step / per_round % stages_per_rank);
      if (step >= warm_up)
        add(Pass::backward, backward,
            stages_per_rank - 1 - (step - warm_up) / per_round % stages_per_rank);
    }
  }
  return table;
}

Result<PipelineTable> zbv_table(int ranks, int micro_batches) {
  if (const Status wrong = check_counts("ZBV", ranks, 2, micro_batches); !wrong) return wrong;
  PipelineTable table = looped("ZBV", ranks, 2, micro_batches);
  for (int rank = 0; rank < ranks; ++rank) {
    table.rank_of_stage[static_cast<std::size_t>(2 * ranks - 1 - rank)] = rank;
    ZbvRank(table.actions[static_cast<std::size_t>(rank)], ranks, rank, micro_batches).fill();
  }
  return table;
}

}  // namespace muster
