// SPDX-License-Identifier: BSD-3-Clause
#include <cxxabi.h>
#include <torch/types.h>

#include <algorithm>
#include <exception>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "core/base/log/log.h"
#include "core/group/errors.h"
#include "core/group/group_core.h"
#include "core/group/resolve.h"
#include "muster/objects.h"
#include "muster/pipeline.h"
#include "train/pipeline/stage_messages.h"
#include "train/pipeline/stage_passes.h"
#include "train/pipeline_table/neighbours.h"

namespace muster {

namespace {

using pipeline::StageMessages, pipeline::StagePasses;
using Traffic = StageMessages::StageTraffic;
using Pass = PipelinePass;

constexpr std::size_t at(int index) { return static_cast<std::size_t>(index); }

/// Equal for equal tables.
std::string fingerprint(const PipelineTable& table) {
  std::string text = std::to_string(table.micro_batches);
  for (const int rank : table.rank_of_stage) text += " " + std::to_string(rank);
  for (const auto& actions : table.actions) {
    text += "\n";
    for (const auto& action : actions) text += to_string(action) + " ";
  }
  return std::to_string(std::hash<std::string>()(text));
}

std::vector<TensorList> split(const TensorList& tensors, int count, const char* what) {
  std::vector<TensorList> parts(at(count));
  for (const auto& tensor : tensors) {
    if (tensor.dim() == 0 || tensor.size(0) % count != 0)
      throw DistError(
          std::string(what) + " of " +
          (tensor.dim() == 0 ? "no dimension" : std::to_string(tensor.size(0)) + " rows") +
          " cannot be split into " + std::to_string(count) + " equal micro-batches");
    const auto chunks = tensor.chunk(count);
    for (std::size_t i = 0; i < parts.size(); ++i) parts[i].push_back(chunks[i]);
  }
  return parts;
}

/// `error` in other words: its code and ranks, or this rank if it names none.
Status reworded(const std::exception& error, const std::string& text, int global_rank) {
  const auto* known = dynamic_cast<const DistError*>(&error);
  return {
      known != nullptr ? known->code() : Code::aborted, text,
      known != nullptr && !known->ranks().empty() ? known->ranks() : std::vector<int>{global_rank}};
}

}  // namespace

class PipelineSchedule::Runtime {
 public:
  Runtime(const Result<PipelineTable>& table, std::vector<PipelineStage> stages,
          const PipelineScheduleOptions& options)
      : options_(options),
        group_(group::group_or_default(options.group, "PipelineSchedule")),
        table_(table.ok() ? *table : PipelineTable{}),
        messages_(group_) {
    for (auto& stage : stages) stages_.emplace(stage.stage, StagePasses(stage));
    agree(problem_of(table, stages));
  }

  const PipelineTable& table() const { return table_; }

  PipelineResult run(const TensorList& inputs, const TensorList& targets, bool trains) {
    if (!group_->is_member()) return {};
    batch_ = {.trains = trains, .losses = {}, .outputs = {}};
    const torch::AutoGradMode grad_mode(trains);
    const auto& actions = table_.actions[at(group_->rank())];
    const auto skips = [&](const PipelineAction& action) {
      return !trains && action.pass != Pass::forward;
    };
    std::vector<PipelineAction> list;
    std::remove_copy_if(actions.begin(), actions.end(), std::back_inserter(list), skips);
    if (list.empty()) return {};
    std::size_t now = 0;
    try {
      if (stages_.contains(0)) batch_.inputs = split(inputs, table_.micro_batches, "an input");
      if (stages_.contains(last_stage()) && !targets.empty())
        batch_.targets = split(targets, table_.micro_batches, "a target");
      std::size_t posted = 0;
      for (; now < list.size(); ++now) {
        TensorList received = receive(list[now]);
        post_next(list, now, posted);
        send(list[now], compute(list[now], std::move(received)));
      }
      now = list.size() - 1;
      messages_.finish();
      return result();
    } catch (const abi::__forced_unwind&) {  // the thread is being terminated
      throw;
    } catch (const std::exception& error) {
      fail(list[now], error);
    } catch (...) {
      fail(list[now], std::runtime_error("an exception of an unknown type"));
    }
  }

 private:
  /// One call of `run`.
  struct Batch {
    bool trains = false;
    std::vector<TensorList> inputs, targets;
    std::vector<at::Tensor> losses;
    std::vector<TensorList> outputs;
    /// From a stage to its neighbour on this rank, by receiving stage, kind and micro-batch.
    std::map<std::tuple<int, Traffic, int>, TensorList> local;
  };

  int last_stage() const { return table_.stages() - 1; }

  /// The fault of this rank's arguments; empty if there is none.
  std::string problem_of(const Result<PipelineTable>& table,
                         const std::vector<PipelineStage>& stages) const {
    if (!table.ok()) return table.status().message();
    if (const auto proof = check_pipeline(table_); !proof.ok()) return proof.status().message();
    if (table_.ranks() != group_->size())
      return "the " + table_.name + " table is for " + std::to_string(table_.ranks()) +
             " ranks, and the group has " + std::to_string(group_->size());
    for (int stage = 0; stage < table_.stages(); ++stage) {
      const bool expected = table_.rank_of_stage[at(stage)] == group_->rank();
      const auto given = std::count_if(stages.begin(), stages.end(),
                                       [&](const auto& each) { return each.stage == stage; });
      if (given != (expected ? 1 : 0))
        return "stage " + std::to_string(stage) + " was given " + std::to_string(given) +
               " times, and the " + table_.name + " table has it on rank " +
               std::to_string(table_.rank_of_stage[at(stage)]);
    }
    if (stages_.size() != stages.size() ||
        (!stages_.empty() && stages_.rbegin()->first > last_stage()))
      return "a stage was given that the " + table_.name + " table does not have";
    if (stages_.contains(last_stage()) && !options_.loss) return "the last stage needs a loss";
    return {};
  }

  /// Throws on all ranks if one has a problem, or another table.
  void agree(const std::string& problem) const {
    if (!group_->is_member()) return;
    std::vector<std::vector<std::string>> said(at(group_->size()));  // problem, fingerprint
    all_gather_object(said, {problem, problem.empty() ? fingerprint(table_) : ""},
                      {.group = group_});
    for (std::size_t rank = 0; rank < said.size(); ++rank) {
      const auto refuse = [&](const std::string& why) {
        throw DistError("PipelineSchedule: rank " + std::to_string(rank) + ": " + why,
                        Code::invalid_argument, {group_->ranks()[rank]});
      };
      if (!said[rank][0].empty()) refuse(said[rank][0]);
      if (said[rank][1] != said[0][1]) refuse("its table is not that of rank 0");
    }
  }

  /// The message that an action needs; none at the model's ends and for weights.
  struct Need {
    Traffic kind;
    int source;  // stage
  };
  std::optional<Need> need_of(const PipelineAction& action) const {
    const auto source = pipeline::source_of(action, table_.stages());
    if (!source) return {};
    return Need{traffic_of(action), *source};
  }
  static Traffic traffic_of(const PipelineAction& action) {
    return action.pass == Pass::forward ? Traffic::activations : Traffic::gradients;
  }
  StageMessages::Neighbour neighbour(int own_stage, int other_stage) const {
    return {std::min(own_stage, other_stage), table_.rank_of_stage[at(other_stage)]};
  }

  TensorList receive(const PipelineAction& action) {
    const auto need = need_of(action);
    if (!need)
      return action.pass == Pass::forward ? batch_.inputs[at(action.micro_batch)] : TensorList{};
    if (stages_.contains(need->source))
      return std::move(
          batch_.local.extract({action.stage, need->kind, action.micro_batch}).mapped());
    return messages_.receive(neighbour(action.stage, need->source), need->kind,
                             stages_.at(action.stage).device());
  }

  /// While an action computes, what the next one needs can come. No earlier: a message's deadline
  /// counts from here. A backward_weight needs nothing, and sends nothing that others wait for.
  void post_next(const std::vector<PipelineAction>& list, std::size_t now, std::size_t& posted) {
    if (posted > now) return;
    for (std::size_t next = now + 1; next < list.size(); ++next) {
      const auto need = need_of(list[next]);
      if (!need && list[next].pass == Pass::backward_weight) continue;
      if (!need || stages_.contains(need->source)) return;
      messages_.post(neighbour(list[next].stage, need->source), need->kind,
                     stages_.at(list[next].stage).device());
      posted = next;
      return;
    }
  }

  TensorList compute(const PipelineAction& action, TensorList received) {
    StagePasses& passes = stages_.at(action.stage);
    switch (action.pass) {
      case Pass::forward: return forward(passes, action.micro_batch, std::move(received));
      case Pass::backward: return passes.backward(action.micro_batch, received);
      case Pass::backward_input: return passes.backward_input(action.micro_batch, received);
      case Pass::backward_weight: passes.backward_weight(action.micro_batch); return {};
    }
    return {};
  }

  TensorList forward(StagePasses& passes, int micro_batch, TensorList inputs) {
    StagePasses::ForwardCall call{.inputs = std::move(inputs),
                                  .wants_input_gradients = batch_.trains && passes.stage() > 0};
    const bool is_last = passes.stage() == last_stage();
    if (is_last && (batch_.trains || !batch_.targets.empty())) {
      call.loss = [&](const TensorList& outputs) {
        return options_.loss(
            outputs, batch_.targets.empty() ? TensorList{} : batch_.targets[at(micro_batch)]);
      };
      if (options_.scale_grads) call.scale = 1.0 / table_.micro_batches;
    }
    auto [outputs, loss] = passes.forward(micro_batch, call);
    if (!is_last) return std::move(outputs);
    batch_.outputs.resize(at(table_.micro_batches));
    if (micro_batch > 0 && outputs.size() != batch_.outputs[0].size())
      throw DistError("the last stage returned " + std::to_string(outputs.size()) +
                      " tensors, and " + std::to_string(batch_.outputs[0].size()) +
                      " for the first micro-batch");
    batch_.outputs[at(micro_batch)] = std::move(outputs);
    if (loss.defined()) {
      batch_.losses.resize(at(table_.micro_batches));
      batch_.losses[at(micro_batch)] = std::move(loss);
    }
    return {};
  }

  void send(const PipelineAction& action, TensorList tensors) {
    const auto target = pipeline::target_of(action, table_.stages());
    if (!target) return;
    const Traffic kind = traffic_of(action);
    if (stages_.contains(*target))
      batch_.local[{*target, kind, action.micro_batch}] = std::move(tensors);
    else
      messages_.send(neighbour(action.stage, *target), kind, tensors);
  }

  PipelineResult result() {
    PipelineResult result;
    if (!batch_.losses.empty()) result.losses = torch::stack(batch_.losses);
    for (std::size_t i = 0; !batch_.outputs.empty() && i < batch_.outputs.front().size(); ++i) {
      TensorList parts;
      for (auto& outputs : batch_.outputs) parts.push_back(outputs[i]);
      result.outputs.push_back(torch::cat(parts));
    }
    batch_ = {};
    return result;
  }

  /// Tells the other ranks, and throws.
  [[noreturn]] void fail(const PipelineAction& action, const std::exception& error) {
    batch_ = {};
    for (auto& [stage, passes] : stages_) passes.forget_all();
    const std::string text =
        "pipeline " + table_.name + ": rank " + std::to_string(group_->rank()) + ", stage " +
        std::to_string(action.stage) + ", " + to_string(action.pass) + " of micro-batch " +
        std::to_string(action.micro_batch) + ": " + error.what();
    if (group_->failure().ok()) {
      try {
        core_of(group_).abort(text);
      } catch (const std::exception& failed) {
        log(LogLevel::warning,
            std::string("the other ranks could not be told that a pipeline failed here: ") +
                failed.what());
      }
    }
    group::raise(reworded(error, text, group_->global_rank_of(group_->rank())));
  }

  const PipelineScheduleOptions options_;
  const Group group_;
  const PipelineTable table_;
  std::map<int, StagePasses> stages_;
  StageMessages messages_;
  Batch batch_;
};

PipelineSchedule::PipelineSchedule(const Result<PipelineTable>& table,
                                   std::vector<PipelineStage> stages,
                                   const PipelineScheduleOptions& options)
    : runtime_(std::make_unique<Runtime>(table, std::move(stages), options)) {}
PipelineSchedule::~PipelineSchedule() = default;
PipelineSchedule::PipelineSchedule(PipelineSchedule&&) noexcept = default;

PipelineResult PipelineSchedule::step(const TensorList& inputs, const TensorList& targets) {
  return runtime_->run(inputs, targets, true);
}
PipelineResult PipelineSchedule::evaluate(const TensorList& inputs, const TensorList& targets) {
  return runtime_->run(inputs, targets, false);
}
const PipelineTable& PipelineSchedule::table() const { return runtime_->table(); }

}  // namespace muster
