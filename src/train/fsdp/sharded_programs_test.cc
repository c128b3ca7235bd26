// SPDX-License-Identifier: BSD-3-Clause
// Programs as users write them for one process: each gives that process's weights on sharded
// models.

#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "train/fsdp/testing/sharded_models.h"

namespace muster::testing::fsdp {
namespace {

constexpr std::int64_t kWords = 11, kWidth = 6;

struct LanguageBlockImpl : nn::Module {
  LanguageBlockImpl()
      : norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})))),
        up(register_module("up", nn::Linear(kWidth, 9))),
        down(register_module("down", nn::Linear(9, kWidth))) {}
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::tanh(up(norm(x)))); }
  nn::LayerNorm norm;
  nn::Linear up, down;
};
TORCH_MODULE(LanguageBlock);

/// Scores words by a weight that is also another layer's.
struct TiedHeadImpl : nn::Module {
  explicit TiedHeadImpl(const at::Tensor& shared) : weight(register_parameter("weight", shared)) {}
  at::Tensor forward(const at::Tensor& x) { return torch::linear(x, weight); }
  at::Tensor weight;
};
/// A language model whose first and last layer share their weight.
struct LanguageModelImpl : nn::Module {
  LanguageModelImpl()
      : embedding(register_module("embedding", Shardable<nn::EmbeddingImpl>(kWords, kWidth))),
        blocks(register_module("blocks", nn::Sequential(LanguageBlock(), LanguageBlock()))),
        head(register_module("head", Shardable<TiedHeadImpl>(embedding->weight))) {
    to(at::kDouble);
  }
  /// Each once; parameters() has the shared one twice.
  std::vector<at::Tensor> distinct() const {
    std::vector<at::Tensor> all = parameters();
    all.erase(std::find_if(all.begin(), all.end(),
                           [this](const at::Tensor& each) { return each.is_same(head->weight); }));
    return all;
  }
  at::Tensor forward(const at::Tensor& words) { return head(blocks->forward(embedding(words))); }
  Shardable<nn::EmbeddingImpl> embedding;
  nn::Sequential blocks;
  Shardable<TiedHeadImpl> head;
};
TORCH_MODULE(LanguageModel);

at::Tensor words_of(int step) {
  return (torch::arange(kSamples * 4, at::kLong).view({kSamples, 4}) * (step + 3) + step) % kWords;
}

/// The sum over all samples, divided by their number.
at::Tensor loss_of_words(const at::Tensor& scores, const at::Tensor& words) {
  return torch::log_softmax(scores, -1)
             .gather(-1, ((words + 1) % kWords).unsqueeze(-1))
             .square()
             .sum() /
         static_cast<double>(words.numel());
}

/// A program's model: its module and forward, and the calls that differ when it is sharded.
struct Trained {
  LanguageModel net{nullptr};
  std::function<at::Tensor(const at::Tensor&)> forward;
  std::function<double(double)> clip;
  std::function<void(const std::function<void()>&)> without_sync;
  int rank = 0, ranks = 1;

  void backward(int step) const {
    const at::Tensor words = share(words_of(step), rank, ranks);
    loss_of_words(forward(words), words).backward();
  }
};
using Program = std::function<void(Trained&)>;

struct NamedProgram {
  std::string name;
  Program run;
  bool is_meta = false;  ///< the sharded model begins without values
};

std::vector<at::Tensor> of_dim(const LanguageModelImpl& net, bool matrices) {
  std::vector<at::Tensor> all;
  for (const auto& parameter : net.distinct())
    if ((parameter.dim() >= 2) == matrices) all.push_back(parameter);
  return all;
}

void clip(Trained& model) {
  torch::optim::AdamW optimizer(model.net->distinct(), 0.02);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    model.backward(step);
    model.clip(0.05);
    optimizer.step();
  }
}

void decay_groups(Trained& model) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  const auto add = [&](std::vector<at::Tensor> parameters, double decay) {
    EXPECT_FALSE(parameters.empty());
    groups.emplace_back(std::move(parameters),
                        std::make_unique<torch::optim::AdamWOptions>(
                            torch::optim::AdamWOptions(0.02).weight_decay(decay)));
  };
  add(of_dim(*model.net, true), 0.3);
  add(of_dim(*model.net, false), 0);
  torch::optim::AdamW optimizer(groups, torch::optim::AdamWOptions(0.02));
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    model.backward(step);
    optimizer.step();
  }
}

void frozen(Trained& model) {
  model.net->embedding->weight.set_requires_grad(false);
  std::vector<at::Tensor> trained;
  for (const auto& parameter : model.net->distinct())
    if (parameter.requires_grad()) trained.push_back(parameter);
  torch::optim::Adam optimizer(trained, 0.02);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    model.backward(step);
    optimizer.step();
  }
}

void two_optimizers(Trained& model) {
  torch::optim::SGD first(of_dim(*model.net, true),
                          torch::optim::SGDOptions(0.05).momentum(0.9).nesterov(true));
  torch::optim::Adam second(of_dim(*model.net, false), 0.02);
  for (int step = 0; step < 3; ++step) {
    first.zero_grad();
    second.zero_grad();
    model.backward(step);
    first.step();
    second.step();
  }
}

/// The average takes the place of the weights in the end.
void exponential_average(Trained& model) {
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> average;
  for (const auto& parameter : model.net->distinct()) average.push_back(parameter.detach().clone());
  torch::optim::SGD optimizer(model.net->distinct(), 0.1);
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    {
      const torch::AutoGradMode grads(true);
      model.backward(step);
    }
    optimizer.step();
    const auto parameters = model.net->distinct();
    for (std::size_t i = 0; i < average.size(); ++i) average[i].mul_(0.7).add_(parameters[i], 0.3);
  }
  const auto parameters = model.net->distinct();
  for (std::size_t i = 0; i < average.size(); ++i) parameters[i].copy_(average[i]);
}

void accumulation(Trained& model, bool without_sync) {
  torch::optim::AdamW optimizer(model.net->distinct(), 0.02);
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    for (int part = 0; part < 3; ++part) {
      const auto backward = [&] { model.backward(step * 3 + part); };
      without_sync&& part < 2 ? model.without_sync(backward) : backward();
    }
    model.clip(0.1);
    optimizer.step();
  }
}

/// A penalty on the weights themselves, computed from this rank's rows of each gradient.
void decayed_by_hand(Trained& model) {
  torch::optim::SGD optimizer(model.net->distinct(), 0.1);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    model.backward(step);
    const torch::NoGradGuard no_grad;
    for (auto& parameter : model.net->distinct())
      if (parameter.dim() == 2)  // by the norm of each row, which a rank has whole
        parameter.mutable_grad().add_(parameter / (1 + parameter.norm(2, {1}, true)), 0.01);
    optimizer.step();
  }
}

std::vector<NamedProgram> programs() {
  return {
      {"clip", clip},
      {"decay groups", decay_groups},
      {"frozen", frozen},
      {"two optimizers", two_optimizers},
      {"exponential average", exponential_average},
      {"accumulation", [](Trained& model) { accumulation(model, false); }},
      {"accumulation without sync", [](Trained& model) { accumulation(model, true); }},
      {"rows", decayed_by_hand},
      {"meta", clip, true},
  };
}

LanguageModel model_of(std::uint64_t seed) {
  LanguageModel net;
  fill(*net, seed);
  return net;
}

at::Tensor alone(const NamedProgram& program) {
  Trained model{.net = model_of(3)};
  model.forward = [&](const at::Tensor& words) { return model.net->forward(words); };
  model.clip = [&](double most) {
    // As torch's, in double precision.
    std::vector<at::Tensor> gradients;
    for (const auto& each : model.net->distinct())
      if (each.grad().defined()) gradients.push_back(each.grad());
    const double norm = flat(gradients).norm().item<double>();
    const double factor = most / (norm + 1e-6);
    if (factor < 1)
      for (auto& each : gradients) each.mul_(factor);
    return norm;
  };
  model.without_sync = [](const std::function<void()>& pass) { pass(); };
  program.run(model);
  return flat(model.net->parameters()).clone();
}

/// `ties`: the first and the last layer are a unit of their own.
at::Tensor sharded(const NamedProgram& program, Options options, bool ties, int rank, int ranks) {
  LanguageModel net = model_of(3);
  if (program.is_meta) drop_values(*net);
  if (ties) {
    Options inner = options;
    inner.auto_wrap_policy = {};
    fully_shard({net->embedding.ptr(), net->head.ptr()}, inner);
  }
  FullyShardedDataParallel<LanguageModel> model(net, options);
  if (program.is_meta) {
    StateDict state;
    const LanguageModel values = model_of(3);
    for (const auto& item : values->named_parameters())
      state.emplace_back(item.key(), item.value());
    model.load_state_dict(state);
  }
  Trained trained{.net = net, .rank = rank, .ranks = ranks};
  trained.forward = [&](const at::Tensor& words) { return model(words); };
  trained.clip = [&](double most) { return model.clip_grad_norm_(most); };
  trained.without_sync = [&](const std::function<void()>& pass) {
    const auto alone = model.no_sync();
    pass();
  };
  program.run(trained);
  return whole(model);
}

class ShardedPrograms : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ShardedPrograms, ::testing::Values(1, 2, 3, 4));

// spec: M5 clip, decay groups by dim(), tied weights, frozen parameters, two optimizers, averages
// of weights, accumulation and meta initialisation give one process's weights
TEST_P(ShardedPrograms, GiveOneProcessesWeights) {
  const int ranks = GetParam();
  for (const NamedProgram& program : programs()) {
    const at::Tensor expected = alone(program);
    on_ranks(ranks, [&](int rank) {
      for (const auto& [wraps, ties] : {std::pair{false, false}, {true, false}, {true, true}}) {
        Options options;
        if (wraps) options.auto_wrap_policy = module_wrap_policy<LanguageBlockImpl>();
        EXPECT_LT(difference(sharded(program, options, ties, rank, ranks), expected), 1e-12)
            << program.name << (wraps ? " in units" : "") << (ties ? ", tied layers in one" : "");
      }
    });
  }
}

// spec: M5 the same over a mesh: rows of ranks that hold the same
TEST(ShardedProgramsHybrid, GiveOneProcessesWeights) {
  for (const NamedProgram& program : programs()) {
    const at::Tensor expected = alone(program);
    on_ranks(4, [&](int rank) {
      Options options{.auto_wrap_policy = module_wrap_policy<LanguageBlockImpl>(),
                      .sharding_strategy = ShardingStrategy::HYBRID_SHARD};
      options.device_mesh = init_device_mesh("cpu", {2, 2});
      for (const bool ties : {false, true})
        EXPECT_LT(difference(sharded(program, options, ties, rank, 4), expected), 1e-12)
            << program.name;
    });
  }
}

// spec: M5 tied weights by a list of modules: whole from the first until each has run; a pass that
// an exception has ended, or of the first module alone, does not hinder the next
TEST(ShardedTogether, IsOneUnitOfSeveralModules) {
  on_ranks(2, [](int rank) {
    LanguageModel net = model_of(3), alone = model_of(3);
    fully_shard({net->embedding.ptr(), net->head.ptr()});
    FullyShardedDataParallel<LanguageModel> model(net);
    EXPECT_EQ(model.units(), 2u);
    EXPECT_EQ(net->embedding->weight.size(0), rank == 0 ? 6 : 5);
    const at::Tensor words = words_of(1);
    const at::Tensor expected = alone->forward(words);
    EXPECT_LT(difference(model(words), expected), 1e-12);
    EXPECT_EQ(net->embedding->weight.size(0), rank == 0 ? 6 : 5);
    // The head refuses its input.
    EXPECT_ANY_THROW({
      net->embedding(words);
      net->head(torch::ones({2, kWidth + 1}, at::kDouble));
    });
    EXPECT_EQ(net->embedding->weight.size(0), rank == 0 ? 6 : 5);
    EXPECT_LT(difference(model(words), expected), 1e-12);
    // Something between the two throws: the next pass begins anew.
    net->embedding(words);
    EXPECT_LT(difference(model(words), expected), 1e-12);
    EXPECT_EQ(net->embedding->weight.size(0), rank == 0 ? 6 : 5);
    const auto used = [&] {
      const at::Tensor x = net->embedding(words);
      x.mul_(2);  // in place, between the modules
      return net->head(x);
    };
    const at::Tensor twice = alone->head->forward(alone->embedding->forward(words) * 2);
    loss_of_words(used(), words).backward();
    loss_of_words(twice, words).backward();
    const auto gradient = sharded_tensor(net->head->weight)->like(net->head->weight.grad()).full();
    EXPECT_LT(difference(gradient, alone->head->weight.grad()), 1e-12);
    nn::Linear plain(2, 2);
    EXPECT_HAS(message_of<DistError>([&] { fully_shard({plain.ptr()}); }), "a Shardable");
    EXPECT_HAS(message_of<DistError>([&] { fully_shard({net->head.ptr()}); }), "sharded already");
  });
}

// spec: M5 ShardedTensor in C++: a sharded parameter knows what it is a part of, and over what
// spec: M6.norms tensors of units of different groups
TEST(ShardedTensorsOfModels, SayWhatTheyArePartsOf) {
  on_ranks(4, [](int rank) {
    LanguageModel net = model_of(3), alone = model_of(3);
    Options options{.auto_wrap_policy = module_wrap_policy<LanguageBlockImpl>(),
                    .sharding_strategy = ShardingStrategy::HYBRID_SHARD};
    options.device_mesh = init_device_mesh("cpu", {2, 2});
    EXPECT_FALSE(sharded_tensor(net->embedding->weight));
    FullyShardedDataParallel<LanguageModel> model(net, options);
    const auto part = sharded_tensor(net->embedding->weight);
    ASSERT_TRUE(part);
    EXPECT_EQ(part->sizes(), (std::vector<std::int64_t>{kWords, kWidth}));
    EXPECT_EQ(part->offsets(), (std::vector<std::int64_t>{rank % 2 == 0 ? 0 : 6, 0}));
    EXPECT_EQ(part->placements(),
              (std::vector<Placement>{Placement::replicate(), Placement::shard(0)}));
    EXPECT_TRUE(part->full().equal(alone->embedding->weight));
    const at::Tensor words = share(words_of(0), rank, 4);
    loss_of_words(model(words), words).backward();
    loss_of_words(alone(words_of(0)), words_of(0)).backward();
    std::vector<ShardedTensor> gradients;
    for (const auto& parameter : net->distinct())
      gradients.push_back(sharded_tensor(parameter)->like(parameter.grad()));
    std::vector<at::Tensor> expected;
    for (const auto& parameter : alone->distinct()) expected.push_back(parameter.grad());
    EXPECT_NEAR(get_total_norm(gradients), flat(expected).norm().item<double>(), 1e-12);
    EXPECT_TRUE(gradients[0].full().allclose(expected[0], 1e-12, 1e-14));
    EXPECT_EQ(get_total_norm(gradients), model.clip_grad_norm_(1e9));
  });
}

}  // namespace
}  // namespace muster::testing::fsdp
