// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <string>
#include <vector>

#include "core/group/testing/ranks.h"
#include "muster/parallel.h"

namespace muster::testing {
namespace {

namespace nn = torch::nn;
using Options = DistributedDataParallelOptions;

void fill(nn::Module& module, double salt = 0) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) {
    const auto numbers = torch::arange(parameter.numel(), at::kDouble) + (salt += 17);
    parameter.copy_((torch::sin(numbers * 12.9898) * 0.5).view(parameter.sizes()));
  }
}

/// Maps words to a number: an embedding table, optionally shared with the output layer.
struct WordsImpl : nn::Module {
  explicit WordsImpl(bool sparse)
      : table(register_module("table", nn::Embedding(nn::EmbeddingOptions(10, 4).sparse(sparse)))),
        out(register_module("out", nn::Linear(4, 1))) {
    to(at::kDouble);
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& words) { return out(torch::tanh(table(words).mean(1))); }
  nn::Embedding table;
  nn::Linear out;
};
TORCH_MODULE(Words);

at::Tensor words_of(int rank) {
  return (torch::arange(12, at::kLong) * (rank + 1) % 7).view({4, 3});
}

// spec: F22 sparse gradients of a model
TEST(SparseGradients, AreAveragedAndStaySparse) {
  for (const int ranks : {1, 2, 3}) {
    Words reference(true);
    at::Tensor sum;
    for (int rank = 0; rank < ranks; ++rank) {
      reference->zero_grad();
      reference(words_of(rank)).sum().backward();
      const auto gradient = reference->table->weight.grad().to_dense();
      sum = sum.defined() ? sum + gradient : gradient.clone();
    }
    for (const Options& options :
         {Options{}, Options{.gradient_as_bucket_view = true}, Options{.static_graph = true},
          Options{.find_unused_parameters = true}}) {
      on_ranks(ranks, [&](int rank) {
        Words words(true);
        DistributedDataParallel<Words> model(words, options);
        for (int step = 0; step < 3; ++step) {
          words->zero_grad();
          model(words_of(rank)).sum().backward();
          const auto& gradient = words->table->weight.grad();
          EXPECT_TRUE(gradient.is_sparse());
          EXPECT_LT((gradient.to_dense() - sum / ranks).abs().max().item<double>(), 1e-14);
        }
      });
    }
  }
}

TEST(SparseGradients, GoThroughHooksAndMayBeMissing) {
  on_ranks(2, [&](int rank) {
    Words words(true), plain(true);
    DistributedDataParallel<Words> model(words), without(plain);
    model.register_comm_hook(all_reduce_hook(model.process_group()));
    for (int step = 0; step < 2; ++step) {
      words->zero_grad();
      plain->zero_grad();
      model(words_of(rank)).sum().backward();
      without(words_of(rank)).sum().backward();
      EXPECT_SAME(words->table->weight.grad().to_dense(), plain->table->weight.grad().to_dense());
    }
  });
  // Rank 1 uses only the output layer.
  struct EitherImpl : WordsImpl {
    EitherImpl() : WordsImpl(true) {}
    at::Tensor forward(const at::Tensor& words, bool reads) {
      return reads ? WordsImpl::forward(words) : out(torch::ones({4, 4}, at::kDouble));
    }
  };
  on_ranks(2, [&](int rank) {
    const auto either = std::make_shared<EitherImpl>();
    DistributedDataParallel<std::shared_ptr<EitherImpl>> model(either,
                                                               {.find_unused_parameters = true});
    model(words_of(0), rank == 0).sum().backward();
    Words alone(true);
    alone(words_of(0)).sum().backward();
    EXPECT_SAME(either->table->weight.grad().to_dense() * 2,
                alone->table->weight.grad().to_dense());
  });
}

TEST(SparseGradients, ThatWereNotExpectedAreNamed) {
  struct LookupImpl : nn::Module {
    LookupImpl() : table(register_parameter("table", torch::ones({5, 2}))) {}
    at::Tensor forward(const at::Tensor& words) {
      return torch::embedding(table, words, -1, false, true);
    }
    at::Tensor table;
  };
  on_ranks(1, [](int) {
    DistributedDataParallel<std::shared_ptr<LookupImpl>> model(std::make_shared<LookupImpl>());
    EXPECT_HAS(message_of<DistError>([&] { model(torch::zeros({2}, at::kLong)).sum().backward(); }),
               "the gradient of table is sparse");
  });
}

struct NormedImpl : nn::Module {
  NormedImpl()
      : in(register_module("in", nn::Linear(6, 16))),
        norm(register_module("norm", nn::BatchNorm1d(16))),
        out(register_module("out", nn::Linear(16, 2))) {
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    seen = {x.scalar_type(), in->weight.scalar_type(), norm->running_mean.scalar_type()};
    return out(torch::relu(norm(in(x))));
  }
  nn::Linear in;
  nn::BatchNorm1d norm;
  nn::Linear out;
  std::vector<at::ScalarType> seen;
};
TORCH_MODULE(Normed);

at::Tensor batch(int rank) { return torch::sin(torch::arange(48) * 0.7 + rank).view({8, 6}); }

double trained(const Options& options, int rank, Normed net, int steps, bool accumulates = false) {
  DistributedDataParallel<Normed> model(net, options);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  at::Tensor loss;
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    if (accumulates) {
      const auto local = model.no_sync();
      model(batch(rank)).square().mean().to(at::kFloat).backward();
    }
    loss = (model(batch(rank)).to(at::kFloat) - 1).square().mean();
    loss.backward();
    optimizer.step();
  }
  return loss.item<double>();
}

// spec: K1.mixed_precision mixed_precision
TEST(MixedPrecision, ComputesLowAndUpdatesFull) {
  const MixedPrecision low{.param_dtype = at::kBFloat16, .buffer_dtype = at::kBFloat16};
  on_ranks(2, [&](int rank) {
    for (const bool accumulates : {false, true}) {
      Normed full, mixed;
      const double expected = trained({}, rank, full, 8, accumulates);
      const double loss = trained({.mixed_precision = low}, rank, mixed, 8, accumulates);
      EXPECT_EQ(mixed->seen,
                (std::vector<at::ScalarType>{at::kBFloat16, at::kBFloat16, at::kBFloat16}));
      EXPECT_EQ(full->seen, (std::vector<at::ScalarType>{at::kFloat, at::kFloat, at::kFloat}));
      EXPECT_NEAR(loss, expected, 0.05);
      EXPECT_NE(loss, expected) << "nothing was cast";
      for (std::size_t i = 0; i < mixed->parameters().size(); ++i) {
        const auto ours = mixed->parameters()[i], theirs = full->parameters()[i];
        EXPECT_EQ(ours.scalar_type(), at::kFloat);
        EXPECT_EQ(ours.grad().scalar_type(), at::kFloat);
        EXPECT_LT((ours - theirs).norm().item<double>(), 0.1 * theirs.norm().item<double>() + 0.05);
        auto zero = ours.detach().clone();
        broadcast(zero, {.src = 0});
        EXPECT_SAME(zero, ours) << "the ranks' models are the same";
      }
    }
  });
}

// If gradients are summed in a wider type, they are divided in that type too.
// spec: K1 mixed_precision: reduce_dtype
TEST(MixedPrecision, DividesInTheWiderType) {
  on_ranks(3, [](int) {
    nn::Linear net(nn::LinearOptions(1, 4).bias(false));
    DistributedDataParallel<nn::Linear> model(
        net, {.mixed_precision =
                  MixedPrecision{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    model.forward(torch::ones({1, 1})).sum().backward();
    EXPECT_TRUE(torch::allclose(net->weight.grad(), torch::ones({4, 1}), 1e-6, 1e-6))
        << net->weight.grad();
  });
}

// Ranks with different bucket layouts would otherwise fail in the middle of backward.
TEST(Options, MustBeTheSameOnAllRanks) {
  on_ranks(2, [](int rank) {
    nn::Linear net(2, 2);
    const auto text = message_of<DistError>([&] {
      const DistributedDataParallel<nn::Linear> model(net, {.gradient_as_bucket_view = rank == 1});
    });
    EXPECT_HAS(
        text, "'gradient_as_bucket_view off' on rank 0 and 'gradient_as_bucket_view on' on rank 1");
  });
}

// spec: K1 mixed_precision: reduce_dtype, cast_forward_inputs, keep_low_precision_grads
TEST(MixedPrecision, EachPartCanBeHadAlone) {
  on_ranks(2, [](int rank) {
    Normed net;
    DistributedDataParallel<Normed> only_travel(
        net, {.mixed_precision = MixedPrecision{.reduce_dtype = at::kBFloat16}});
    std::int64_t bytes = 0;
    for (const auto& parameter : net->parameters()) bytes += parameter.numel() * 2;
    EXPECT_EQ(only_travel.bucket_bytes(), std::vector<std::int64_t>{bytes});
    only_travel(batch(rank)).sum().backward();
    EXPECT_EQ(net->seen, (std::vector<at::ScalarType>{at::kFloat, at::kFloat, at::kFloat}));
    for (const auto& parameter : net->parameters()) {
      EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
      EXPECT_SAME(parameter.grad(), parameter.grad().to(at::kBFloat16).to(at::kFloat));
    }
    Normed kept;
    DistributedDataParallel<Normed> keeps(
        kept, {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16,
                                                 .reduce_dtype = at::kFloat,
                                                 .buffer_dtype = at::kBFloat16,
                                                 .keep_low_precision_grads = true,
                                                 .cast_forward_inputs = false}});
    keeps(batch(rank).to(at::kBFloat16)).sum().backward();
    EXPECT_EQ(kept->seen[0], at::kBFloat16);
    EXPECT_EQ(kept->in->weight.grad().scalar_type(), at::kBFloat16);
    EXPECT_EQ(kept->in->weight.scalar_type(), at::kFloat);
    EXPECT_THROW(keeps(batch(rank)), c10::Error) << "nobody cast the input";
    {
      const torch::NoGradGuard no_grad;
      keeps(batch(rank).to(at::kBFloat16));
    }
    EXPECT_EQ(kept->in->weight.scalar_type(), at::kFloat) << "full again where no backward follows";
  });
}

/// Takes arguments of all kinds.
struct ManyImpl : nn::Module {
  ManyImpl() : weight(register_parameter("weight", torch::ones({1}))) {}
  at::Tensor forward(const at::Tensor& x, std::vector<at::Tensor>& list,
                     std::pair<at::Tensor, int> pair,
                     const std::map<std::string, at::Tensor>& named, int number,
                     const std::string& text) {
    for (const auto& each : {x, list[0], pair.first, named.at("a")})
      EXPECT_EQ(each.scalar_type(), at::kBFloat16);
    EXPECT_EQ(list[1].scalar_type(), at::kLong) << "no floating-point number";
    EXPECT_EQ(number, 3);
    EXPECT_EQ(text, "text");
    return x * weight;
  }
  at::Tensor weight;
};

TEST(MixedPrecision, ReachesIntoStructuresOfArguments) {
  on_ranks(1, [](int) {
    DistributedDataParallel<std::shared_ptr<ManyImpl>> model(
        std::make_shared<ManyImpl>(),
        {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}});
    const auto x = torch::ones({2});
    std::vector<at::Tensor> list{x, torch::ones({1}, at::kLong)};
    const std::map<std::string, at::Tensor> named{{"a", x}};
    model(x, list, std::pair{x, 1}, named, 3, "text").sum().backward();
    EXPECT_EQ(list[0].scalar_type(), at::kFloat) << "the caller's own are left alone";
  });
}

// spec: K9 with device_ids, forward moves inputs to the device
TEST(Arguments, AreReplacedWhereverTheyAre) {
  std::tuple<at::Tensor, std::optional<at::Tensor>, std::array<at::Tensor, 2>, int> all{
      torch::ones({1}), torch::ones({2}), {}, 5};
  std::get<2>(all)[1] = torch::ones({3});
  parallel::replace_tensors(all, [](const at::Tensor& tensor) { return tensor.to(at::kMeta); });
  EXPECT_TRUE(std::get<0>(all).is_meta() && std::get<1>(all)->is_meta() &&
              std::get<2>(all)[1].is_meta());
  EXPECT_FALSE(std::get<2>(all)[0].defined());
  static_assert(!parallel::holds_tensors<int> &&
                !parallel::holds_tensors<std::vector<std::string>>);
}

struct ChainImpl : nn::Module {
  ChainImpl()
      : a(register_module("a", nn::Linear(3, 3))),
        b(register_module("b", nn::Linear(3, 3))),
        c(register_module("c", nn::Linear(3, 1))) {
    to(at::kDouble);
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return c(torch::tanh(b(torch::tanh(a(x))))); }
  nn::Linear a, b, c;
};
TORCH_MODULE(Chain);

at::Tensor rows(int rank) {
  return torch::sin(torch::arange(12, at::kDouble) * 1.3 + rank).view({4, 3});
}

// spec: K1.delay delay_all_reduce_named_params, param_to_hook_all_reduce
TEST(DelayedAllReduce, GivesTheSameAverages) {
  on_ranks(2, [](int rank) {
    Chain plain;
    DistributedDataParallel<Chain> reference(plain);
    const auto steps = [&](auto& model, Chain& net) {
      torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
      for (int step = 0; step < 4; ++step) {
        if (step != 2) optimizer.zero_grad(step % 2 == 0);
        if (step == 1) {
          const auto local = model.no_sync();
          model(rows(rank)).sum().backward();
        }
        model(rows(rank)).square().sum().backward();
        optimizer.step();
      }
    };
    steps(reference, plain);
    for (const bool all : {false, true}) {
      Chain net;
      Options options{.param_to_hook_all_reduce = net->a->weight};
      for (const auto& item : net->named_parameters())
        if (all || item.key()[0] != 'b')
          options.delay_all_reduce_named_params.emplace_back(item.key(), item.value());
      DistributedDataParallel<Chain> model(net, options);
      EXPECT_EQ(model.bucket_bytes().size(), 1u);
      steps(model, net);
      for (std::size_t i = 0; i < net->parameters().size(); ++i)
        EXPECT_LT((net->parameters()[i] - plain->parameters()[i]).abs().max().item<double>(), 1e-14)
            << i << " " << all;
    }
  });
}

// spec: K1 delay_all_reduce_named_params: errors
TEST(DelayedAllReduce, RefusesHalfOfIt) {
  on_ranks(1, [](int) {
    Chain net;
    const auto said = [&](const Options& options) {
      return message_of<DistError>(
          [&] { const DistributedDataParallel<Chain> model(net, options); });
    };
    EXPECT_HAS(said({.param_to_hook_all_reduce = net->a->weight}),
               "need to be set at the same time");
    EXPECT_HAS(said({.delay_all_reduce_named_params = {{"a.weight", net->a->weight}}}),
               "need to be set at the same time");
    EXPECT_HAS(said({.delay_all_reduce_named_params = {{"x", torch::ones({1}).requires_grad_()}},
                     .param_to_hook_all_reduce = net->a->weight}),
               "'x' of delay_all_reduce_named_params is not a parameter");
  });
}

// spec: K1.check_reduction check_reduction
// spec: K9 the rest False or None
TEST(Options, OfTorchsThatSayNothingAreTaken) {
  const Options defaults;
  EXPECT_FALSE(defaults.check_reduction || defaults.mixed_precision ||
               defaults.param_to_hook_all_reduce.defined());
  EXPECT_TRUE(defaults.delay_all_reduce_named_params.empty());
  on_ranks(1, [](int) {
    DistributedDataParallel<Chain> model(
        Chain{}, {.device_ids = std::vector<int>{}, .check_reduction = true});
    model(rows(0)).sum().backward();
    EXPECT_FALSE(model.output_device());
  });
}

// spec: K1 init_sync
TEST(Options, WithoutInitSyncEachRankKeepsItsOwn) {
  on_ranks(2, [](int rank) {
    Chain net;
    {
      const torch::NoGradGuard no_grad;
      net->a->bias.fill_(rank);
    }
    const DistributedDataParallel<Chain> model(net, {.init_sync = false});
    EXPECT_EQ(net->a->bias[0].item<double>(), rank);
  });
}

// spec: K3 find_unused_parameters: outputs may be left out of the loss too
TEST(FindUnused, OutputsMayBeLeftOutOfTheLoss) {
  struct TwoImpl : nn::Module {
    TwoImpl()
        : a(register_module("a", nn::Linear(2, 2))), b(register_module("b", nn::Linear(2, 2))) {}
    std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& x) { return {a(x), b(x)}; }
    nn::Linear a, b;
  };
  on_ranks(2, [](int rank) {
    const auto two = std::make_shared<TwoImpl>();
    DistributedDataParallel<std::shared_ptr<TwoImpl>> model(two, {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      two->zero_grad();
      const auto out = model(torch::ones({1, 2}) * (rank + 1));
      out.first.sum().backward();
      EXPECT_TRUE(two->a->weight.grad().eq(1.5).all().item<bool>());
      EXPECT_FALSE(two->b->weight.grad().defined());
    }
  });
}

/// The averages of the ranks' gradients of a Chain, per parameter.
std::vector<at::Tensor> averages(int ranks, const std::vector<int>& salts) {
  std::vector<at::Tensor> all;
  Chain alone;
  for (int rank = 0; rank < ranks; ++rank)
    for (const int salt : salts) (alone(rows(rank + salt)).sum() / ranks).backward();
  for (const auto& parameter : alone->parameters()) all.push_back(parameter.grad());
  return all;
}

TEST(FindUnused, ParametersMayBeFrozenForAWhile) {
  on_ranks(2, [](int rank) {
    const auto expected = averages(2, {0});
    for (const bool delays : {false, true}) {
      Chain net;
      Options options{.find_unused_parameters = true};
      if (delays) {
        options.delay_all_reduce_named_params = {{"c.weight", net->c->weight}};
        options.param_to_hook_all_reduce = net->b->weight;
      }
      DistributedDataParallel<Chain> model(net, options);
      for (int step = 0; step < 6; ++step) {
        const bool frozen = step == 2 || step == 3;
        net->b->weight.requires_grad_(!frozen);
        net->zero_grad();
        model(rows(rank)).sum().backward();
        for (std::size_t i = 0; i < expected.size(); ++i) {
          const auto parameter = net->parameters()[i];
          ASSERT_EQ(parameter.grad().defined(), parameter.requires_grad()) << "step " << step;
          if (!parameter.requires_grad()) continue;
          EXPECT_LT((parameter.grad() - expected[i]).abs().max().item<double>(), 1e-14)
              << "step " << step;
        }
      }
    }
  });
}

// spec: K1.static_graph static_graph: a parameter one rank uses is averaged, a parameter no rank
// uses is unchanged
TEST(StaticGraph, LeavesAloneWhatNobodyUses) {
  struct ThreeImpl : nn::Module {
    ThreeImpl()
        : both(register_module("both", nn::Linear(2, 2))),
          one(register_module("one", nn::Linear(2, 2))),
          none(register_module("none", nn::Linear(2, 2))) {}
    at::Tensor forward(const at::Tensor& x, bool uses_one) {
      return uses_one ? one(both(x)) : both(x);
    }
    nn::Linear both, one, none;
  };
  for (const bool views : {false, true}) {
    on_ranks(2, [&](int rank) {
      const auto three = std::make_shared<ThreeImpl>();
      DistributedDataParallel<std::shared_ptr<ThreeImpl>> model(
          three, {.gradient_as_bucket_view = views, .static_graph = true});
      const auto before = three->none->weight.detach().clone(),
                 before_one = three->one->weight.detach().clone();
      torch::optim::SGD optimizer(three->parameters(),
                                  torch::optim::SGDOptions(0.1).weight_decay(0.5));
      for (int step = 0; step < 4; ++step) {
        optimizer.zero_grad();
        model(torch::ones({1, 2}), rank == 0).sum().backward();
        optimizer.step();
        EXPECT_FALSE(three->none->weight.grad().defined()) << "step " << step;
        EXPECT_SAME(three->one->bias.grad(), torch::full({2}, 0.5));
      }
      EXPECT_SAME(three->none->weight.detach(), before);
      EXPECT_FALSE(torch::equal(three->one->weight.detach(), before_one));
    });
  }
}

TEST(MixedPrecision, SeveralForwardsMayComeBeforeOneBackward) {
  on_ranks(2, [](int rank) {
    const auto expected = averages(2, {0, 5});
    Chain net;
    DistributedDataParallel<Chain> model(
        net, {.mixed_precision = MixedPrecision{.param_dtype = at::kFloat}});
    const auto evaluate = [&] {
      const torch::NoGradGuard no_grad;
      return model(rows(rank));
    };
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      const auto first = model(rows(rank));
      EXPECT_SAME(evaluate(), first.detach()) << "without a gradient it leaves the graph alone";
      const auto second = model(rows(rank + 5));
      evaluate();
      (first.sum() + second.sum()).backward();
      for (std::size_t i = 0; i < expected.size(); ++i) {
        const auto parameter = net->parameters()[i];
        EXPECT_EQ(parameter.scalar_type(), at::kDouble);
        EXPECT_LT((parameter.grad() - expected[i]).abs().max().item<double>(), 1e-5)
            << "step " << step;
      }
      model(rows(rank));  // its outputs are dropped, so no backward can follow
      evaluate();
      EXPECT_EQ(net->a->weight.scalar_type(), at::kDouble);
    }
  });
}

TEST(Options, TheModelsOwnGroupHasTheGivenOnesBackend) {
  on_ranks(2, [](int rank) {
    DistributedDataParallel<Chain> model(Chain{}, {.process_group = new_group({.backend = "tcp"})});
    model(rows(rank)).sum().backward();
    EXPECT_EQ(model.process_group()->backend(), "tcp");
  });
}

TEST(SharedParameters, AreAveragedOnce) {
  struct TiedImpl : nn::Module {
    TiedImpl()
        : a(register_module("a", nn::Linear(3, 3))), b(register_module("b", nn::Linear(3, 3))) {
      to(at::kDouble);
      fill(*this);
      b->weight = b->register_parameter("tied", a->weight);
    }
    at::Tensor forward(const at::Tensor& x) {
      return torch::linear(torch::tanh(a(x)), a->weight, b->bias);
    }
    nn::Linear a, b;
  };
  on_ranks(2, [](int rank) {
    const auto tied = std::make_shared<TiedImpl>();
    DistributedDataParallel<std::shared_ptr<TiedImpl>> model(tied,
                                                             {.find_unused_parameters = true});
    model(rows(rank)).sum().backward();
    at::Tensor sum;
    for (int other = 0; other < 2; ++other) {
      const auto alone = std::make_shared<TiedImpl>();
      alone->forward(rows(other)).sum().backward();
      const auto gradient = alone->a->weight.grad();
      sum = sum.defined() ? sum + gradient : gradient.clone();
    }
    EXPECT_LT((tied->a->weight.grad() - sum / 2).abs().max().item<double>(), 1e-14);
  });
}

}  // namespace
}  // namespace muster::testing
