// SPDX-License-Identifier: BSD-3-Clause
// Plays a table with blocking receives and bounded sends. A rank's steps depend only on the
// messages that came, so one order of playing the ranks stands for all.
#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include "muster/pipeline_table.h"
#include "train/pipeline_table/neighbours.h"

namespace muster {
namespace {

using Pass = PipelinePass;

constexpr std::size_t at(int index) { return static_cast<std::size_t>(index); }

Status wrong(const PipelineTable& table, int rank, const std::string& what) {
  return {Code::invalid_argument,
          "the " + table.name + " table is wrong: rank " + std::to_string(rank) + ": " + what};
}

/// Messages from one stage to a neighbour, in order.
struct Boundary {
  struct SentMicroBatch {
    int micro_batch;
    double time;
  };
  std::vector<SentMicroBatch> sent;
  std::vector<double> taken;  // when the receiver had each
};

/// How far one rank has come.
struct RankState {
  std::size_t next = 0;       // action
  bool has_received = false;  // what the next action needs
  bool has_computed = false;  // and has yet to send
  double first = 0, clock = 0, busy = 0;
  int held = 0;
};

class Play {
 public:
  Play(const PipelineTable& table, const PipelineCheckOptions& options)
      : table_(table),
        options_(options),
        done_(at(table.stages() * table.micro_batches * 4)),
        ranks_(at(table.ranks())) {
    report_.peak_activations.resize(ranks_.size());
  }

  Result<PipelineReport> run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (int rank = 0; rank < table_.ranks(); ++rank) {
        while (step(rank)) moved = true;
        if (!failure_.ok()) return failure_;
      }
    }
    for (int rank = 0; rank < table_.ranks(); ++rank) {
      const RankState& state = ranks_[at(rank)];
      if (state.next < table_.actions[at(rank)].size()) return deadlock();
      report_.busy.push_back(state.busy);
      report_.span.push_back(state.clock - state.first);
      report_.makespan = std::max(report_.makespan, state.clock);
    }
    return std::move(report_);
  }

 private:
  const PipelineAction& action_of(int rank) const {
    return table_.actions[at(rank)][ranks_[at(rank)].next];
  }
  std::vector<bool>::reference done(int stage, Pass pass, int micro_batch) {
    return done_[(at(stage) * at(table_.micro_batches) + at(micro_batch)) * 4 +
                 static_cast<std::size_t>(pass)];
  }
  bool has_gradients(int stage, int micro_batch) {
    return done(stage, Pass::backward, micro_batch) ||
           done(stage, Pass::backward_input, micro_batch);
  }

  /// Receives, computes or sends for the next action. False if the rank has to wait, is at its end
  /// or has failed.
  bool step(int rank) {
    RankState& state = ranks_[at(rank)];
    if (state.next == table_.actions[at(rank)].size()) return false;
    const PipelineAction& action = action_of(rank);
    if (!state.has_received) return state.has_received = receive(rank, action);
    if (!state.has_computed) return state.has_computed = compute(rank, action);
    if (!send(rank, action)) return false;
    ++state.next;
    state.has_received = state.has_computed = false;
    return true;
  }

  bool receive(int rank, const PipelineAction& action) {
    const auto source = pipeline::source_of(action, table_.stages());
    if (!source) return true;
    if (table_.rank_of_stage[at(*source)] == rank) {
      const bool ready = action.pass == Pass::forward
                             ? done(*source, Pass::forward, action.micro_batch)
                             : has_gradients(*source, action.micro_batch);
      return ready || fail(rank, to_string(action) + " needs stage " + std::to_string(*source) +
                                     " of this rank first");
    }
    Boundary& boundary = boundaries_[{*source, action.stage}];
    const std::size_t index = boundary.taken.size();
    if (boundary.sent.size() == index) return false;
    const auto& message = boundary.sent[index];
    if (message.micro_batch != action.micro_batch)
      return fail(rank, to_string(action) + " receives micro-batch " +
                            std::to_string(message.micro_batch) + ", which stage " +
                            std::to_string(*source) + " sent first");
    RankState& state = ranks_[at(rank)];
    state.clock = std::max(state.clock, message.time);
    boundary.taken.push_back(state.clock);
    return true;
  }

  bool compute(int rank, const PipelineAction& action) {
    const auto [stage, pass, micro_batch] = action;
    if (pass != Pass::forward) {
      const Pass before = pass == Pass::backward_weight ? Pass::backward_input : Pass::forward;
      if (!done(stage, before, micro_batch))
        return fail(rank, to_string(action) + " needs " + to_string({stage, before, micro_batch}) +
                              " first");
    }
    RankState& state = ranks_[at(rank)];
    if (state.next == 0) state.first = state.clock;
    const double time = duration(pass);
    state.clock += time;
    state.busy += time;
    if (pass == Pass::forward) ++state.held;
    int& peak = report_.peak_activations[at(rank)];
    peak = std::max(peak, state.held);
    if (pass == Pass::backward || pass == Pass::backward_weight) --state.held;
    done(stage, pass, micro_batch) = true;
    return true;
  }

  bool send(int rank, const PipelineAction& action) {
    const auto target = pipeline::target_of(action, table_.stages());
    if (!target || table_.rank_of_stage[at(*target)] == rank) return true;
    Boundary& boundary = boundaries_[{action.stage, *target}];
    const std::size_t limit = at(options_.messages_in_flight);
    RankState& state = ranks_[at(rank)];
    if (boundary.sent.size() >= limit) {
      const std::size_t freed = boundary.sent.size() - limit;
      if (freed >= boundary.taken.size()) return false;
      state.clock = std::max(state.clock, boundary.taken[freed]);
    }
    boundary.sent.push_back({action.micro_batch, state.clock});
    return true;
  }

  double duration(Pass pass) const {
    switch (pass) {
      case Pass::forward: return options_.forward;
      case Pass::backward: return options_.backward_input + options_.backward_weight;
      case Pass::backward_input: return options_.backward_input;
      case Pass::backward_weight: return options_.backward_weight;
    }
    return 0;
  }

  bool fail(int rank, const std::string& what) {
    failure_ = wrong(table_, rank, what);
    return false;
  }

  Status deadlock() const {
    std::string what = "the " + table_.name + " table never ends:";
    for (int rank = 0; rank < table_.ranks(); ++rank) {
      const RankState& state = ranks_[at(rank)];
      if (state.next == table_.actions[at(rank)].size()) continue;
      const PipelineAction& action = action_of(rank);
      what +=
          " rank " + std::to_string(rank) +
          (state.has_computed ? " cannot send what it computed in " : " waits to receive for ") +
          to_string(action) + ";";
    }
    what.pop_back();
    return {Code::invalid_argument, what};
  }

  const PipelineTable& table_;
  const PipelineCheckOptions options_;
  std::vector<bool> done_;  // by stage, micro-batch and pass
  std::vector<RankState> ranks_;
  std::map<std::pair<int, int>, Boundary> boundaries_;  // by sending and receiving stage
  PipelineReport report_;
  Status failure_;
};

Status check_shape(const PipelineTable& table) {
  const auto bad = [&](const std::string& what) {
    return Status(Code::invalid_argument, "the " + table.name + " table is wrong: " + what);
  };
  if (table.ranks() == 0 || table.stages() == 0 || table.micro_batches < 1)
    return bad("it has no ranks, no stages or no micro-batches");
  for (const int rank : table.rank_of_stage)
    if (rank < 0 || rank >= table.ranks())
      return bad("a stage is on rank " + std::to_string(rank) + " of " +
                 std::to_string(table.ranks()));
  for (int rank = 0; rank < table.ranks(); ++rank) {
    for (const auto& action : table.actions[at(rank)]) {
      if (action.stage < 0 || action.stage >= table.stages() ||
          table.rank_of_stage[at(action.stage)] != rank)
        return wrong(table, rank, to_string(action) + ": this rank has no such stage");
      if (action.micro_batch < 0 || action.micro_batch >= table.micro_batches)
        return wrong(table, rank, to_string(action) + ": there is no such micro-batch");
    }
  }
  return {};
}

/// Each stage does each micro-batch once: forward, and backward whole or in its two halves.
Status check_counts(const PipelineTable& table) {
  for (int stage = 0; stage < table.stages(); ++stage) {
    const int rank = table.rank_of_stage[at(stage)];
    std::vector<std::array<int, 4>> counts(at(table.micro_batches));
    for (const auto& action : table.actions[at(rank)])
      if (action.stage == stage)
        ++counts[at(action.micro_batch)][at(static_cast<int>(action.pass))];
    for (int i = 0; i < table.micro_batches; ++i) {
      const auto [forward, backward, input, weight] = counts[at(i)];
      if (forward != 1 || backward + input != 1 || weight != input)
        return wrong(table, rank,
                     "stage " + std::to_string(stage) + " does micro-batch " + std::to_string(i) +
                         " " + std::to_string(forward) + " times forward and " +
                         std::to_string(backward) + " times backward (inputs alone " +
                         std::to_string(input) + ", weights alone " + std::to_string(weight) +
                         "), instead of once");
    }
  }
  return {};
}

}  // namespace

std::string to_string(const PipelineAction& action) {
  static constexpr char kLetters[] = {'F', 'B', 'I', 'W'};
  return std::to_string(action.stage) + kLetters[static_cast<std::size_t>(action.pass)] +
         std::to_string(action.micro_batch);
}

const char* to_string(PipelinePass pass) {
  static constexpr const char* kNames[] = {"forward", "backward", "backward for inputs",
                                           "backward for weights"};
  return kNames[static_cast<std::size_t>(pass)];
}

double PipelineReport::bubble_fraction() const {
  const double all = makespan * static_cast<double>(busy.size());
  return all > 0 ? 1 - std::accumulate(busy.begin(), busy.end(), 0.0) / all : 0;
}

Result<PipelineReport> check_pipeline(const PipelineTable& table,
                                      const PipelineCheckOptions& options) {
  if (options.messages_in_flight < 1)
    return Status(Code::invalid_argument, "check_pipeline: messages_in_flight must be at least 1");
  if (const Status bad = check_shape(table); !bad) return bad;
  if (const Status bad = check_counts(table); !bad) return bad;
  return Play(table, options).run();
}

}  // namespace muster
