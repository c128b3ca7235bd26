// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "core/group/testing/ranks.h"
#include "muster/device_mesh.h"
#include "muster/pipeline.h"
#include "testing/limits.h"
#include "testing/rank_processes.h"
#include "testing/scratch_folder.h"

namespace muster {
namespace {

using testing::message_of;
using testing::on_ranks;
using testing::RankProcesses;

constexpr std::int64_t kRows = 840, kWidth = 3;  // rows: a multiple of 1 to 8 micro-batches

at::Tensor numbers(int seed, at::IntArrayRef sizes) {
  const auto count = c10::multiply_integers(sizes);
  return torch::sin(torch::arange(count, at::kDouble) * (seed + 1) + seed).view(sizes);
}

/// Two tensors in and out, and row numbers, which have no gradients.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int seed)
      : weight(register_parameter("weight", numbers(seed, {kWidth, kWidth}))),
        bias(register_parameter("bias", numbers(seed + 50, {kWidth}))) {}
  TensorList forward(const TensorList& inputs) {
    const auto x = torch::tanh(torch::matmul(inputs[0], weight) + bias);
    return {x * inputs[1], inputs[1] + x, inputs[2] + 1};
  }
  at::Tensor weight, bias;
};
TORCH_MODULE(Block);

TensorList batch() {
  return {numbers(100, {kRows, kWidth}), numbers(101, {kRows, kWidth}),
          torch::arange(kRows, at::kLong)};
}
at::Tensor targets() { return numbers(102, {kRows, kWidth}); }

at::Tensor loss_of(const TensorList& outputs, const TensorList& targets) {
  return (outputs[0] + outputs[1] - targets[0]).square().mean();
}

struct OneProcess {
  std::vector<Block> blocks;
  TensorList outputs;
  at::Tensor loss;
};
OneProcess one_process(int stages) {
  OneProcess one;
  one.outputs = batch();
  for (int stage = 0; stage < stages; ++stage) {
    one.blocks.emplace_back(stage);
    one.outputs = one.blocks.back()->forward(one.outputs);
  }
  one.loss = loss_of(one.outputs, {targets()});
  one.loss.backward();
  return one;
}

#define EXPECT_CLOSE(a, b) \
  EXPECT_TRUE(torch::allclose(a, b, 1e-9, 1e-12)) << (a) << "\nand\n" << (b)

/// Two steps of the table on this rank, beside one process.
void compare(const PipelineTable& table, int rank) {
  SCOPED_TRACE(table.name + ", " + std::to_string(table.micro_batches) + " micro-batches, rank " +
               std::to_string(rank));
  const OneProcess one = one_process(table.stages());
  std::vector<Block> blocks;
  std::vector<PipelineStage> stages;
  std::vector<int> own;
  for (int stage = 0; stage < table.stages(); ++stage) {
    if (table.rank_of_stage[static_cast<std::size_t>(stage)] != rank) continue;
    own.push_back(stage);
    blocks.emplace_back(stage);
    stages.push_back(pipeline_stage(stage, blocks.back()));
  }
  const bool is_first = own.front() == 0, is_last = own.back() == table.stages() - 1;
  PipelineSchedule schedule(table, stages, {.loss = loss_of});
  const auto inputs = is_first ? batch() : TensorList{};
  const auto wanted = is_last ? TensorList{targets()} : TensorList{};
  const auto before = schedule.evaluate(inputs, wanted);
  for (int step = 1; step <= 2; ++step) {
    const auto result = schedule.step(inputs, wanted);
    for (std::size_t i = 0; i < own.size(); ++i) {
      const auto& expected = one.blocks[static_cast<std::size_t>(own[i])];
      EXPECT_CLOSE(blocks[i]->weight.grad(), expected->weight.grad() * step);
      EXPECT_CLOSE(blocks[i]->bias.grad(), expected->bias.grad() * step);
    }
    EXPECT_EQ(result.losses.defined(), is_last);
    ASSERT_EQ(result.outputs.size(), is_last ? 3U : 0U);
    if (!is_last) continue;
    EXPECT_EQ(result.losses.numel(), table.micro_batches);
    EXPECT_CLOSE(result.losses.mean(), one.loss);
    EXPECT_SAME(result.losses, before.losses);
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_CLOSE(result.outputs[i], one.outputs[i]);
      EXPECT_FALSE(result.outputs[i].requires_grad());
    }
  }
}

// spec: T2.training losses, outputs and gradients equal one process's, several tensors between
// stages, every schedule
TEST(PipelineSchedule, EqualsOneProcess) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    on_ranks(ranks, [&](int rank) {
      for (int count = 1; count <= 8; ++count) {
        compare(*gpipe_table(ranks, count), rank);
        compare(*one_f_one_b_table(ranks, count), rank);
        compare(*zbv_table(ranks, count), rank);
        const auto interleaved = interleaved_1f1b_table(ranks, 2, count);
        if (interleaved.ok()) compare(*interleaved, rank);
      }
    });
  }
}

PipelineStage linear_stage(int stage) {
  torch::nn::Linear linear(2, 2);
  const torch::NoGradGuard no_grad;
  for (auto& parameter : linear->parameters()) parameter.fill_(0.5);
  return pipeline_stage(stage, linear);
}
at::Tensor sum_of(const TensorList& outputs, const TensorList&) { return outputs[0].sum(); }

// spec: T2 modules of one tensor, gradients added up, stages without inputs' gradients or
// parameters
TEST(PipelineSchedule, SumsWhereAsked) {
  on_ranks(2, [](int rank) {
    const auto stage =
        rank == 0 ? linear_stage(0) : PipelineStage{1, [](const TensorList& inputs) -> TensorList {
                                                      return {inputs[0] * 2};
                                                    }};
    PipelineSchedule schedule(gpipe_table(2, 4), {stage}, {.loss = sum_of, .scale_grads = false});
    const auto result = schedule.step({torch::ones({4, 2})});
    if (rank == 0) EXPECT_SAME(stage.parameters[0].grad(), torch::full({2, 2}, 8.0));
    if (rank == 1) EXPECT_SAME(result.losses, torch::full({4}, 6.0));
  });
}

// spec: T2 on one dimension of a mesh, with gradients averaged over the other
TEST(PipelineSchedule, RunsOnADimensionOfAMesh) {
  on_ranks(4, [](int) {
    const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "pp"}});
    const int stage = mesh.get_local_rank("pp"), copy = mesh.get_local_rank("dp");
    const auto rows = [&](const TensorList& tensors) {
      TensorList mine;
      for (const auto& tensor : tensors)
        mine.push_back(tensor.chunk(2)[static_cast<std::size_t>(copy)]);
      return mine;
    };
    Block block(stage);
    PipelineSchedule schedule(one_f_one_b_table(2, 4), {pipeline_stage(stage, block)},
                              {.loss = loss_of, .group = mesh.get_group("pp")});
    schedule.step(rows(batch()), rows({targets()}));
    const OneProcess one = one_process(2);
    const auto& expected = one.blocks[static_cast<std::size_t>(stage)]->parameters();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      auto gradient = block->parameters()[i].grad();
      all_reduce(gradient, {.op = ReduceOp::AVG, .group = mesh.get_group("dp")});
      EXPECT_CLOSE(gradient, expected[i].grad());
    }
  });
}

// spec: T2 wrong arguments are named on all ranks, and the group stays usable
TEST(PipelineSchedule, RefusesOnAllRanks) {
  on_ranks(2, [](int rank) {
    const auto said = [&](const Result<PipelineTable>& table, std::vector<PipelineStage> stages,
                          const PipelineLoss& loss = sum_of) {
      return message_of<DistError>(
          [&] { PipelineSchedule schedule(table, std::move(stages), {.loss = loss}); });
    };
    const auto stage = linear_stage(rank);
    EXPECT_HAS(said(interleaved_1f1b_table(2, 2, 5), {stage}), "5 micro-batches on 2 ranks");
    EXPECT_HAS(said(gpipe_table(3, 2), {stage}),
               "rank 0: the GPipe table is for 3 ranks, and the group has 2");
    EXPECT_HAS(said(gpipe_table(2, 2 + rank), {stage}), "rank 1: its table is not that of rank 0");
    EXPECT_HAS(said(gpipe_table(2, 2), {linear_stage(0)}), "rank 1: stage 0 was given 1 times");
    EXPECT_HAS(said(gpipe_table(2, 2), {stage, linear_stage(7)}), "a stage was given that");
    EXPECT_HAS(said(gpipe_table(2, 2), {stage}, nullptr), "rank 1: the last stage needs a loss");
    auto damaged = *gpipe_table(2, 2);
    damaged.actions[1].pop_back();
    EXPECT_HAS(said(damaged, {stage}), "rank 0: the GPipe table is wrong: rank 1: stage 1");
    barrier();
  });
}

/// The text that each of `ranks` ranks throws in its first or second step.
std::vector<std::string> thrown_by(const PipelineTable& table,
                                   const std::function<void(PipelineStage&)>& damage,
                                   const TensorList& inputs = {torch::ones({8, 2})}) {
  const int ranks = table.ranks();
  std::vector<std::string> said(static_cast<std::size_t>(ranks));
  const auto store = std::make_shared<HashStore>();
  const auto body = [&](int rank) {
    init_process_group({.timeout = muster::testing::kMustHappen,
                        .world_size = ranks,
                        .rank = rank,
                        .store = store});
    {
      std::vector<PipelineStage> stages;
      for (int stage = 0; stage < table.stages(); ++stage) {
        if (table.rank_of_stage[static_cast<std::size_t>(stage)] != rank) continue;
        stages.push_back(linear_stage(stage));
        damage(stages.back());
      }
      PipelineSchedule schedule(table, stages, {.loss = sum_of});
      said[static_cast<std::size_t>(rank)] = message_of<DistError>([&] {
        for (int step = 0; step < 2; ++step) schedule.step(inputs);
      });
    }
    try {
      destroy_process_group();
    } catch (const DistError&) {
      // The group has failed.
    }
  };
  spawn(body, {.nprocs = ranks, .mode = SpawnMode::threads});
  return said;
}

/// Throws from its third forward on.
void break_stage(PipelineStage& stage, int which) {
  if (stage.stage != which) return;
  stage.forward = [forward = stage.forward, calls = 0](const TensorList& inputs) mutable {
    if (++calls == 3) throw std::runtime_error("the attention mask is bad");
    return forward(inputs);
  };
}

// spec: T2 a stage that throws is named on all ranks, with its micro-batch, and nothing hangs
TEST(PipelineSchedule, AStageThatThrowsIsNamedOnAllRanks) {
  const PipelineTable tables[] = {*gpipe_table(3, 4), *one_f_one_b_table(3, 4), *zbv_table(3, 4),
                                  *interleaved_1f1b_table(3, 2, 4)};
  for (const auto& table : tables) {
    for (const int broken : {0, 1, table.stages() - 1}) {
      const auto said = thrown_by(table, [&](auto& stage) { break_stage(stage, broken); });
      for (const auto& text : said)
        EXPECT_HAS(text, "rank " +
                             std::to_string(table.rank_of_stage[static_cast<std::size_t>(broken)]) +
                             ", stage " + std::to_string(broken) +
                             ", forward of micro-batch 2: the attention mask is bad");
    }
  }
}

// spec: T2 a batch that cannot be split evenly is refused, on all ranks
TEST(PipelineSchedule, UnevenBatchesAreRefused) {
  for (const auto& text : thrown_by(*gpipe_table(2, 3), [](auto&) {}))
    EXPECT_HAS(text, "an input of 8 rows cannot be split into 3 equal micro-batches");
}

// spec: T2 sizes are agreed on with the first micro-batch
TEST(PipelineSchedule, OutputsOfOtherSizesAreRefused) {
  const auto change = [](PipelineStage& stage) {
    if (stage.stage != 0) return;
    stage.forward = [calls = 0](const TensorList& inputs) mutable -> TensorList {
      return {++calls < 2 ? inputs[0] : inputs[0].to(at::kDouble)};
    };
  };
  for (const auto& text : thrown_by(*one_f_one_b_table(2, 4), change))
    EXPECT_HAS(text,
               "rank 0, stage 0, forward of micro-batch 1: its outputs are [2, 2] Double, but "
               "were [2, 2] Float for the first micro-batch");
}

// spec: T2 the last stage returns as many tensors for each micro-batch, and no stage complex ones
TEST(PipelineSchedule, OutputsThatCannotGoOnAreRefused) {
  const auto grow = [](PipelineStage& stage) {
    if (stage.stage != 1) return;
    stage.forward = [calls = 0](const TensorList& inputs) mutable {
      return TensorList(++calls < 2 ? 1 : 2, inputs[0]);
    };
  };
  for (const auto& text : thrown_by(*gpipe_table(2, 4), grow))
    EXPECT_HAS(text,
               "rank 1, stage 1, forward of micro-batch 1: the last stage returned 2 tensors, and "
               "1 for the first micro-batch");
  const auto turn = [](PipelineStage& stage) {
    if (stage.stage != 0) return;
    stage.forward = [](const TensorList& inputs) -> TensorList {
      return {at::complex(inputs[0], inputs[0])};
    };
  };
  for (const auto& text : thrown_by(*gpipe_table(2, 4), turn))
    EXPECT_HAS(text, "rank 0, stage 0, forward of micro-batch 0: a complex output");
}

// spec: T2 a killed rank is named by the others, which end
TEST(PipelineProcess, AKilledRankIsNamed) {
  const testing::ScratchFolder scratch;
  RankProcesses ranks(3, [&](int rank) -> std::string {
    const rlimit none{0, 0};
    ::setrlimit(RLIMIT_CORE, &none);
    torch::set_num_threads(1);
    init_process_group({.init_method = "file://" + scratch.file("meeting"),
                        .timeout = std::chrono::seconds(300),
                        .world_size = 3,
                        .rank = rank});
    auto stage = linear_stage(rank);
    if (rank == 2) {
      stage.forward = [forward = stage.forward, calls = 0](const TensorList& inputs) mutable {
        if (++calls == 6) ::raise(SIGKILL);
        return forward(inputs);
      };
    }
    PipelineSchedule schedule(one_f_one_b_table(3, 4), {stage}, {.loss = sum_of});
    try {
      for (;;) schedule.step({torch::ones({8, 2})});
    } catch (const DistError& error) {
      return (error.ranks() == std::vector<int>{2} ? "names rank 2: " : "names others: ") +
             std::string(error.what());
    }
  });
  const auto ends = ranks.join(muster::testing::kMustHappen);
  for (const int rank : {0, 1}) {
    const auto& end = ends[static_cast<std::size_t>(rank)];
    EXPECT_FALSE(end.killed_at_the_limit);
    EXPECT_HAS(end.report, "names rank 2: pipeline 1F1B: rank " + std::to_string(rank) +
                               ", stage " + std::to_string(rank) + ", ");
    EXPECT_HAS(end.report, " of micro-batch ");
  }
}

}  // namespace
}  // namespace muster
