// SPDX-License-Identifier: BSD-3-Clause
#include "muster/data_parallel.h"

#include <gtest/gtest.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <barrier>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/group/testing/ranks.h"
#include "train/ddp/testing/relative_difference.h"

namespace muster::testing {
namespace {

namespace nn = torch::nn;

struct ScaledImpl : nn::Cloneable<ScaledImpl> {
  ScaledImpl() { reset(); }
  void reset() override {
    in = register_module("in", nn::Linear(5, 8));
    out = register_module("out", nn::Linear(8, 3));
    scale = register_parameter("scale", torch::ones({3}));
  }
  at::Tensor forward(const at::Tensor& x) { return out(torch::tanh(in(x))) * scale; }
  nn::Linear in = nullptr, out = nullptr;
  at::Tensor scale;
};
TORCH_MODULE(Scaled);

template <class Module>
Module filled(Module net) {
  const torch::NoGradGuard no_grad;
  int salt = 0;
  net->to(at::kDouble);
  for (auto& each : net->parameters())
    each.copy_(
        torch::sin(torch::arange(each.numel(), at::kDouble) * 12.9898 + ++salt).view(each.sizes()));
  return net;
}
at::Tensor features(std::int64_t rows = 10) {
  return torch::cos(torch::arange(rows * 5, at::kDouble) * 1.7).view({rows, 5});
}
class Copies : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(DataParallel, Copies, ::testing::Values(1, 2, 3, 4, 12));

// spec: K6 the batch is divided, the outputs are gathered, the gradients are summed into the module
TEST_P(Copies, TrainLikeTheModuleItself) {
  auto alone = filled(Scaled()), shared = filled(Scaled());
  DataParallel<Scaled> model(shared, {.replicas = GetParam()});
  torch::optim::SGD theirs(alone->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD ours(shared->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 5; ++step) {
    theirs.zero_grad();
    ours.zero_grad();
    auto x = features().set_requires_grad(true), y = features().set_requires_grad(true);
    const auto expected = alone->forward(x), output = model(y);
    EXPECT_LT(testing::relative_difference(output, expected), 1e-13);
    expected.square().mean().backward();
    output.square().mean().backward();
    EXPECT_LT(testing::relative_difference(y.grad(), x.grad()), 1e-13);
    theirs.step();
    ours.step();
    for (std::size_t i = 0; i < alone->parameters().size(); ++i)
      EXPECT_LT(testing::relative_difference(shared->parameters()[i].grad(),
                                             alone->parameters()[i].grad()),
                1e-12)
          << i;
  }
  for (std::size_t i = 0; i < alone->parameters().size(); ++i)
    EXPECT_LT(testing::relative_difference(shared->parameters()[i], alone->parameters()[i]), 1e-12)
        << i;
}

TEST_P(Copies, GiveTheSameBitsEachTime) {
  at::Tensor first;
  for (int run = 0; run < 3; ++run) {
    auto net = filled(Scaled());
    DataParallel<Scaled> model(net, {.replicas = GetParam()});
    model(features(37)).square().sum().backward();
    if (!first.defined()) first = net->in->weight.grad().clone();
    EXPECT_TRUE(same_bytes(net->in->weight.grad(), first));
  }
}

// spec: K6 gradients of several backward passes accumulate, and stay undefined if none are required
TEST(DataParallelGradients, AddUpAndCanBeLeftOut) {
  auto net = filled(Scaled());
  DataParallel<Scaled> model(net, {.replicas = 2});
  model(features()).sum().backward();
  const auto once = net->in->weight.grad().clone();
  model(features()).sum().backward();
  EXPECT_LT(testing::relative_difference(net->in->weight.grad(), 2 * once), 1e-14);
  net->in->weight.set_requires_grad(false);
  net->zero_grad();
  model(features()).sum().backward();
  EXPECT_FALSE(net->in->weight.grad().defined());
  EXPECT_TRUE(net->out->weight.grad().defined());
  net->in->weight.set_requires_grad(true);
  {
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(model(features()).requires_grad())
        << "the copies' threads compute in this thread's mode";
  }
  model(features()).sum().backward();
  EXPECT_LT(testing::relative_difference(net->in->weight.grad(), once), 1e-14);
}

/// Every replica waits for the others inside forward, which requires one thread per replica.
struct MeetImpl : nn::Cloneable<MeetImpl> {
  explicit MeetImpl(std::barrier<>* meeting) : meeting(meeting) {}
  void reset() override {}
  at::Tensor forward(const at::Tensor& x) {
    meeting->arrive_and_wait();
    return torch::full(
        {x.size(0)},
        static_cast<std::int64_t>(std::hash<std::thread::id>()(std::this_thread::get_id())),
        at::kLong);
  }
  std::barrier<>* meeting;
};
TORCH_MODULE(Meet);

// spec: K6 threads
TEST(DataParallelThreads, RunTheCopiesAtTheSameTime) {
  std::barrier<> meeting(4);
  DataParallel<Meet> model(Meet(&meeting), {.replicas = 4});
  const auto ids = model(torch::zeros({4, 1}));
  std::set<std::int64_t> different;
  for (int i = 0; i < 4; ++i) different.insert(ids[i].item<std::int64_t>());
  EXPECT_EQ(different.size(), 4u);
}

/// Arguments and results of every structure.
struct MixedImpl : nn::Cloneable<MixedImpl> {
  void reset() override {}
  std::pair<std::vector<at::Tensor>, std::map<std::string, at::Tensor>> forward(
      const std::vector<at::Tensor>& list, const at::Tensor& factor,
      const std::optional<at::Tensor>& more, const std::string& name) {
    return {{list[0] * factor, list[1].sum()}, {{name, more ? *more : -list[0]}}};
  }
};
TORCH_MODULE(Mixed);

// spec: K10 dim; nested arguments and results
TEST(DataParallelStructures, AreDividedAndJoined) {
  DataParallel<Mixed> model(Mixed(), {.dim = 1, .replicas = 3});
  const auto a = torch::arange(12.).view({2, 6}), b = torch::ones({1, 6, 2});
  const auto [list, map] = model(std::vector<at::Tensor>{a, b}, torch::tensor(2.),
                                 std::optional<at::Tensor>(), std::string("x"));
  EXPECT_SAME(list[0], 2 * a);
  EXPECT_SAME(list[1], torch::full({3}, 4.)) << "results of no dimension make a vector";
  EXPECT_SAME(map.at("x"), -a);
  const auto with = model(std::vector<at::Tensor>{a, b}, torch::tensor(2.),
                          std::optional<at::Tensor>(a + 1), std::string("y"));
  EXPECT_SAME(with.second.at("y"), a + 1);
}

// spec: K10 a batch that the copies do not divide
TEST(DataParallelStructures, OfFewRowsUseFewCopies) {
  auto net = filled(Scaled());
  DataParallel<Scaled> model(net, {.replicas = 4});
  for (const std::int64_t rows : {1, 2, 3, 5, 7})
    EXPECT_LT(testing::relative_difference(model(features(rows)), net->forward(features(rows))),
              1e-13)
        << rows;
}

TEST(DataParallelBuffers, OfTheFirstCopyAreTheModules) {
  nn::Sequential net(nn::BatchNorm1d(nn::BatchNorm1dOptions(2).momentum(1.0)));
  DataParallel<nn::Sequential> model(net, {.replicas = 2});
  auto x = torch::cat({torch::full({4, 2}, 3.), torch::full({4, 2}, 50.)});
  model.forward(x);
  EXPECT_SAME(net->named_buffers()["0.running_mean"], torch::full({2}, 3.));
  EXPECT_EQ(net->named_buffers()["0.num_batches_tracked"].item<std::int64_t>(), 1);
  net->eval();
  const auto output = model.forward(x);
  EXPECT_LT(testing::relative_difference(output, net->forward(x)), 1e-6)
      << "the copies follow the training mode and the buffers";
}

TEST(DataParallelBuffers, OfAFrozenPartStayAsTheyAre) {
  nn::Sequential net(nn::Linear(2, 2), nn::BatchNorm1d(2), nn::BatchNorm1d(2), nn::Dropout(0.5));
  net->train();
  net[1]->eval();
  net[3]->eval();
  DataParallel<nn::Sequential> model(net, {.replicas = 2});
  model.forward(torch::full({6, 2}, 3.));
  EXPECT_SAME(net->named_buffers()["1.running_mean"], torch::zeros({2}));
  EXPECT_EQ(net->named_buffers()["2.num_batches_tracked"].item<std::int64_t>(), 1);
  const auto once = model.forward(torch::ones({6, 2})), again = model.forward(torch::ones({6, 2}));
  EXPECT_TRUE(once.equal(again)) << "nothing dropped out";
}

struct ThrowsImpl : nn::Cloneable<ThrowsImpl> {
  void reset() override {}
  at::Tensor forward(const at::Tensor& x) {
    if (x[0].item<double>() > 1) throw std::domain_error("row " + std::to_string(x[0].item<int>()));
    return x;
  }
};
TORCH_MODULE(Throws);
struct RigidImpl : nn::Module {
  RigidImpl() { register_parameter("w", torch::ones(1)); }
  at::Tensor forward(const at::Tensor& x) { return x; }
};
TORCH_MODULE(Rigid);
struct NumberImpl : nn::Cloneable<NumberImpl> {
  void reset() override {}
  double forward(const at::Tensor& x) { return x.sum().item<double>(); }
};
TORCH_MODULE(Number);

TEST(DataParallelErrors, AreThoseOfTheFirstCopyThatFailed) {
  DataParallel<Throws> model(Throws(), {.replicas = 4});
  EXPECT_HAS(message_of<std::domain_error>([&] { model(torch::arange(4.)); }), "row 2");
  EXPECT_SAME(model(torch::zeros(4)), torch::zeros(4));
}

TEST(DataParallelErrors, NameWhatToChange) {
  EXPECT_HAS(message_of<DistError>(
                 [] { DataParallel<Scaled>(Scaled(), {.device_ids = std::vector<int>{0}}); }),
             "device_ids are devices of an accelerator, and the module is on cpu");
  EXPECT_HAS(message_of<DistError>([] { DataParallel<Scaled>(Scaled(), {.output_device = 0}); }),
             "output_device needs");
  EXPECT_HAS(message_of<DistError>([] { DataParallel<Scaled>(Scaled(), {.replicas = 0}); }),
             "replicas must be at least 1");
  EXPECT_HAS(message_of<DistError>([] { DataParallel<Rigid>{Rigid()}; }), "derive its class");
  DataParallel<Number> number(Number(), {.replicas = 2});
  EXPECT_HAS(message_of<DistError>([&] { number(torch::ones(4)); }), "must give tensors");
  DataParallel<Mixed> mixed(Mixed(), {.replicas = 4});
  const auto text = message_of<DistError>([&] {
    mixed(std::vector<at::Tensor>{torch::ones(8), torch::ones(2)}, torch::tensor(1.),
          std::optional<at::Tensor>(), std::string("x"));
  });
  EXPECT_HAS(text, "one makes 4 parts, another of size 2 makes 2");
}

// spec: K10 the defaults
TEST(DataParallelOptions, HaveTorchsDefaults) {
  EXPECT_FALSE(DataParallelOptions().device_ids.has_value());
  EXPECT_FALSE(DataParallelOptions().output_device.has_value());
  EXPECT_EQ(DataParallelOptions().dim, 0);
}

}  // namespace
}  // namespace muster::testing
