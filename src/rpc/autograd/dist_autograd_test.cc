// SPDX-License-Identifier: BSD-3-Clause
// Gradients over several workers against those of one process. Workers are threads.
#include "muster/dist_autograd.h"

#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tanh.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <atomic>
#include <thread>

#include "muster/distributed_optimizer.h"
#include "muster/remote_module.h"
#include "rpc/agent/agent.h"
#include "rpc/autograd/autograd_context.h"
#include "rpc/testing/workers.h"
#include "testing/limits.h"

namespace muster::rpc {
namespace {

using dist_autograd::backward;
using dist_autograd::context;
using dist_autograd::get_gradients;
using dist_autograd::Mode;
using testing::on_workers;
using testing::soon;
using testing::Workers;

at::Tensor numbers(int seed, at::IntArrayRef shape) {
  const auto count = c10::multiply_integers(shape);
  return ((torch::arange(count, torch::kDouble) * 7 + seed * 3).remainder(11) / 11 - 0.4)
      .view(shape);
}
at::Tensor leaf(int seed, at::IntArrayRef shape) {
  return numbers(seed, shape).set_requires_grad(true);
}

// Largest difference relative to the largest value.
double off(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>() / std::max(b.abs().max().item<double>(), 1e-30);
}
constexpr double kClose = 1e-6;

// A weight per worker, made by the first call.
at::Tensor weight_of(int rank) {
  static std::mutex mutex;
  static std::map<int, at::Tensor> weights;
  const std::lock_guard lock(mutex);
  at::Tensor& weight = weights[rank];
  if (!weight.defined()) weight = leaf(20 + rank, {4, 4});
  return weight;
}
at::Tensor layer(const at::Tensor& x) {
  return torch::tanh(torch::matmul(x, weight_of(get_worker_info().id())));
}
// Through this worker, then through the next ones.
at::Tensor chain(at::Tensor x, std::vector<int> hops) {
  x = layer(x);
  if (hops.empty()) return x;
  const int next = hops.front();
  hops.erase(hops.begin());
  return rpc_sync<at::Tensor>(next, "autograd_test::chain", x, hops);
}
struct Angry : torch::autograd::Function<Angry> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::runtime_error("no gradient today");
  }
};
at::Tensor angry(const at::Tensor& x) { return Angry::apply(x); }

struct StackImpl : torch::nn::Module {
  StackImpl(int in, int out, std::int64_t seed)
      : first(register_module("first", torch::nn::Linear(in, 6))),
        second(register_module("second", torch::nn::Linear(6, out))) {
    to(torch::kDouble);
    const torch::NoGradGuard guard;
    int number = static_cast<int>(seed);
    for (auto& parameter : parameters()) parameter.copy_(numbers(number++, parameter.sizes()));
  }
  at::Tensor forward(const at::Tensor& x) { return second(torch::tanh(first(x))); }
  torch::nn::Linear first, second;
};

std::map<std::int64_t, at::Tensor> gradients_here(std::int64_t id) {
  std::map<std::int64_t, at::Tensor> found;
  const auto gradients = get_gradients(id);
  const auto mine = gradients.find(weight_of(get_worker_info().id()));
  if (mine != gradients.end()) found[0] = mine->second;
  return found;
}

void register_all() {
  static const bool once = [] {
    register_function("autograd_test::layer", layer);
    register_function("autograd_test::chain", chain);
    register_function("autograd_test::angry", angry);
    register_function("autograd_test::double", [](const at::Tensor& x) { return x * 2; });
    register_function("autograd_test::gradient", [](std::int64_t id) {
      const auto found = gradients_here(id);
      return found.empty() ? at::Tensor() : found.at(0);
    });
    register_function("autograd_test::gradient_of",
                      [](const RRef<at::Tensor>& parameter, std::int64_t id) {
                        const auto gradients = get_gradients(id);
                        const auto found = gradients.find(parameter.local_value());
                        return found == gradients.end() ? at::Tensor() : found->second;
                      });
    register_function("autograd_test::leaf", [](int seed) { return leaf(seed, {3}); });
    register_function("autograd_test::loss", [](const at::Tensor& x) { return (x * x).sum(); });
    register_function("autograd_test::contexts", [] {
      return static_cast<int>(DistAutograd::of(*current_agent("test"))->contexts());
    });
    register_function("autograd_test::current", [] { return dist_autograd::current_context(); });
    register_remote_module<StackImpl, int, int, std::int64_t>("autograd_test::stack");
    return true;
  }();
  (void)once;
}

constexpr Mode kModes[] = {Mode::fast, Mode::smart};

// spec: O1 context, backward, get_gradients: gradients over three workers and back are those of one
// process, FAST mode, SMART mode
TEST(DistAutograd, LikeOneProcess) {
  register_all();
  on_workers(3, [](int rank) {
    if (rank != 0) return;
    for (const Mode mode : kModes) {
      const auto a = leaf(1, {2, 4});
      const auto b = leaf(2, {2, 4});
      const context current;
      const auto id = current.context_id();
      const auto far = rpc_async<at::Tensor>("worker1", "autograd_test::chain", a + b,
                                             std::vector<int>{2, 0, 1});
      const auto near = rpc_sync<at::Tensor>("worker2", "autograd_test::layer", a * 2);
      const auto loss = (far.wait() * near).sum() + a.sum();
      backward(id, {loss}, false, mode);
      std::vector<at::Tensor> gradients{get_gradients(id).at(a), get_gradients(id).at(b)};
      for (int worker = 0; worker < 3; ++worker)
        gradients.push_back(rpc_sync<at::Tensor>(worker, "autograd_test::gradient", id));
      EXPECT_FALSE(a.grad().defined());  // contexts only

      const auto through = [](const at::Tensor& x, int worker) {
        return torch::tanh(torch::matmul(x, weight_of(worker)));
      };
      const auto expected_loss =
          (through(through(through(through(a + b, 1), 2), 0), 1) * through(a * 2, 2)).sum() +
          a.sum();
      const auto expected =
          torch::autograd::grad({expected_loss}, {a, b, weight_of(0), weight_of(1), weight_of(2)});
      EXPECT_LT(off(loss.detach(), expected_loss.detach()), kClose);
      for (std::size_t i = 0; i < expected.size(); ++i)
        EXPECT_LT(off(gradients[i], expected[i]), kClose) << "gradient " << i;
    }
  });
}

// spec: O1 SMART mode, in which unused calls do no harm; FAST mode says that they do, where torch
// hangs
TEST(DistAutograd, UnusedCalls) {
  register_all();
  on_workers(3, [](int rank) {
    if (rank != 0) return;
    for (const Mode mode : kModes) {
      const auto a = leaf(3, {2, 4});
      const context current;
      const auto id = current.context_id();
      const auto shared = a * 3;
      const auto unused =
          rpc_sync<at::Tensor>("worker1", "autograd_test::chain", shared, std::vector<int>{2});
      const auto used = rpc_sync<at::Tensor>("worker2", "autograd_test::layer", shared);
      const auto loss = used.sum();
      if (mode == Mode::fast) {
        EXPECT_SAYS(backward(id, {loss}, false, mode), "use Mode::smart");
        continue;
      }
      backward(id, {loss}, false, mode);
      const auto expected_loss = torch::tanh(torch::matmul(a * 3, weight_of(2))).sum();
      const auto expected = torch::autograd::grad({expected_loss}, {a, weight_of(2)});
      EXPECT_LT(off(get_gradients(id).at(a), expected[0]), kClose);
      EXPECT_LT(off(rpc_sync<at::Tensor>("worker2", "autograd_test::gradient", id), expected[1]),
                kClose);
    }
  });
}

// spec: O1 retain_graph: gradients add up over passes of one context; without it the second pass
// fails
TEST(DistAutograd, RetainGraph) {
  register_all();
  on_workers(2, [](int rank) {
    if (rank != 0) return;
    const auto a = leaf(4, {2, 4});
    for (const Mode mode : kModes) {
      const context current;
      const auto id = current.context_id();
      const auto loss = rpc_sync<at::Tensor>("worker1", "autograd_test::layer", a * a).sum();
      backward(id, {loss}, true, mode);
      const auto once = get_gradients(id).at(a).clone();
      backward(id, {loss}, false, mode);
      EXPECT_LT(off(get_gradients(id).at(a), 2 * once), kClose);
      EXPECT_ANY_THROW(backward(id, {loss}, false, mode));
    }
  });
}

// spec: O1 gradients of several contexts never mix, N14 several backward contexts are safe: threads
// on all workers at once
TEST(DistAutograd, ManyContextsAtOnce) {
  register_all();
  static std::mutex mutex;
  static std::set<std::int64_t> ids;
  ids.clear();
  on_workers(3, [](int rank) {
    const auto scope = RpcScope::current();
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        const RpcScope::Binding binding(scope);
        for (int round = 0; round < 5; ++round) {
          const auto a = leaf(rank * 100 + t * 10 + round, {2, 4});
          const context current;
          const auto id = current.context_id();
          {
            const std::lock_guard lock(mutex);
            EXPECT_TRUE(ids.insert(id).second) << "an id was given twice";
          }
          const int other = (rank + 1) % 3;
          const auto loss =
              rpc_sync<at::Tensor>(other, "autograd_test::chain", a, std::vector<int>{rank}).sum() *
              (t + 1);
          backward(id, {loss}, false, kModes[static_cast<std::size_t>(round % 2)]);
          const auto expected_loss =
              torch::tanh(
                  torch::matmul(torch::tanh(torch::matmul(a, weight_of(other))), weight_of(rank)))
                  .sum() *
              (t + 1);
          const auto expected =
              torch::autograd::grad({expected_loss}, {a, weight_of(other), weight_of(rank)});
          EXPECT_LT(off(get_gradients(id).at(a), expected[0]), kClose);
          EXPECT_LT(off(rpc_sync<at::Tensor>(other, "autograd_test::gradient", id), expected[1]),
                    kClose);
          EXPECT_LT(off(rpc_sync<at::Tensor>(rank, "autograd_test::gradient", id), expected[2]),
                    kClose);
        }
      });
    }
    for (auto& thread : threads) thread.join();
  });
}

// spec: O1 a context ends on every worker that it has come to
TEST(DistAutograd, ContextsEnd) {
  register_all();
  on_workers(3, [](int rank) {
    if (rank != 0) return;
    std::int64_t id = -1;
    EXPECT_EQ(dist_autograd::current_context(), -1);
    {
      const context current;
      id = current.context_id();
      EXPECT_EQ(dist_autograd::current_context(), id);
      EXPECT_EQ(rpc_sync<std::int64_t>("worker1", "autograd_test::current"), id);
      rpc_sync<at::Tensor>("worker1", "autograd_test::chain", leaf(1, {2, 4}), std::vector<int>{2});
      EXPECT_EQ(rpc_sync<int>("worker2", "autograd_test::contexts"), 1);
      EXPECT_SAYS(context(), "already");
    }
    EXPECT_EQ(rpc_sync<std::int64_t>("worker1", "autograd_test::current"), -1);
    for (int worker = 0; worker < 3; ++worker) {
      const auto begin = steady_clock().now();
      while (rpc_sync<int>(worker, "autograd_test::contexts") > 0 &&
             steady_clock().now() - begin < muster::testing::kMustHappen) {
      }
      EXPECT_EQ(rpc_sync<int>(worker, "autograd_test::contexts"), 0) << "worker " << worker;
    }
    EXPECT_SAYS(get_gradients(id), "knows no context");
  });
}

// spec: O1 scalar roots, an unknown id throws; a failure over there is thrown here
TEST(DistAutograd, Errors) {
  register_all();
  on_workers(2, [](int rank) {
    if (rank != 0) return;
    const auto a = leaf(1, {2, 4});
    const context current;
    const auto id = current.context_id();
    EXPECT_SAYS(backward(12345, {a.sum()}), "knows no context 12345");
    EXPECT_SAYS(get_gradients(12345), "knows no context 12345");
    EXPECT_SAYS(backward(id, {a * 2}), "roots are scalars; one has 8 elements");
    EXPECT_SAYS(backward(id, {a.detach().sum()}), "does not require grad");
    EXPECT_SAYS(backward(id, {}), "at least one root");
    const auto loss = rpc_sync<at::Tensor>("worker1", "autograd_test::angry", a * 2).sum();
    for (const Mode mode : kModes) {
      EXPECT_SAYS(backward(id, {loss}, true, mode), "no gradient today");
      EXPECT_SAYS(backward(id, {loss}, true, mode), "worker1");
    }
    EXPECT_SAYS(loss.backward(), "needs dist_autograd::backward");
  });
}

// spec: O1 N2 an operator that trusts its caller, in its backward pass too, is refused within a
// context, and what comes after it goes on
TEST(DistAutograd, AnOperatorThatTrustsItsCallerIsRefused) {
  register_all();
  on_workers(2, [](int rank) {
    if (rank != 0) return;
    const context current;
    const auto probabilities = leaf(1, {5, 1, 3});
    const std::vector<std::int64_t> lengths = {5};
    EXPECT_SAYS(rpc_sync<at::Tensor>("worker1", "aten::ctc_loss", probabilities.log_softmax(2),
                                     torch::ones({1, 5}, torch::kLong), lengths, lengths),
                "aten::ctc_loss");
    const auto product = rpc_sync<at::Tensor>("worker1", "aten::mul", probabilities, probabilities);
    backward(current.context_id(), {product.sum()}, false, Mode::smart);  // one was sent in vain
    EXPECT_LT(
        off(get_gradients(current.context_id()).at(probabilities), 2 * probabilities.detach()),
        kClose);
  });
}

// spec: N7 RRef.backward, N11 RRef.backward(dist_autograd_ctx_id=-1, retain_graph=False): from the
// user, from the owner, and without a context
TEST(DistAutograd, BackwardOfRRefs) {
  register_all();
  on_workers(2, [](int rank) {
    if (rank != 0) return;
    const auto a = leaf(5, {3});
    const context current;
    const auto id = current.context_id();
    const auto loss = remote<at::Tensor>("worker1", "autograd_test::loss", a * 2);
    loss.backward(id, true);
    EXPECT_LT(off(get_gradients(id).at(a), (8 * a).detach()), kClose);
    loss.backward(id);
    EXPECT_LT(off(get_gradients(id).at(a), (16 * a).detach()), kClose);

    const RRef<at::Tensor> mine((a * a).sum());
    mine.backward();
    EXPECT_LT(off(a.grad(), (2 * a).detach()), kClose);
    // A value that is fetched brings its gradient path along.
    const auto remote_leaf = remote<at::Tensor>("worker1", "autograd_test::leaf", 9);
    backward(id, {(remote_leaf.to_here() * 3).sum()}, false, Mode::smart);
    EXPECT_TRUE(
        torch::equal(remote_leaf.rpc_sync().call<at::Tensor>("autograd_test::gradient_of", id),
                     torch::full({3}, 3.0, torch::kDouble)));
  });
}

// spec: N9 RemoteModule: forward, forward_async, remote_parameters, get_module_rref; gradients flow
// through; N11 RemoteModule(remote_device, module_cls, args, kwargs): a worker alone means its
// cpu; needs RPC initialised
TEST(RemoteModule, LikeALocalOne) {
  register_all();
  EXPECT_SAYS((RemoteModule<StackImpl>("worker1", "autograd_test::stack", 3, 2, 7)),
              "before init_rpc");
  on_workers(2, [](int rank) {
    if (rank != 0) return;
    EXPECT_SAYS((RemoteModule<StackImpl>("worker1/warp", "autograd_test::stack", 3, 2, 7)),
                "no remote device");
    const RemoteModule<StackImpl> there("worker1", "autograd_test::stack", 3, 2, 7);
    StackImpl here(3, 2, 7);
    const auto x = leaf(2, {5, 3});
    EXPECT_LT(off(there.forward(x).detach(), here.forward(x).detach()), kClose);
    EXPECT_EQ(there.get_module_rref().owner_name(), "worker1");
    const auto parameters = there.remote_parameters();
    ASSERT_EQ(parameters.size(), 4U);
    for (const Mode mode : kModes) {
      const context current;
      const auto id = current.context_id();
      const auto loss = (there.forward(x) + there.forward_async(x * 2).wait()).pow(2).sum();
      backward(id, {loss}, false, mode);
      auto inputs = here.parameters();
      inputs.push_back(x);
      const auto expected =
          torch::autograd::grad({(here.forward(x) + here.forward(x * 2)).pow(2).sum()}, inputs);
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_EQ(parameters[i].owner_name(), "worker1");
        EXPECT_LT(off(parameters[i].rpc_sync().call<at::Tensor>("autograd_test::gradient_of", id),
                      expected[i]),
                  kClose);
      }
      EXPECT_LT(off(get_gradients(id).at(x), expected[4]), kClose);
    }
  });
}

// Trains a stack over two workers and the same in one process.
template <class Optimizer, class Options>
void train(const Options& options) {
  const RemoteModule<StackImpl> first("worker1/cpu", "autograd_test::stack", 3, 4, 1);
  const RemoteModule<StackImpl> second("worker2/cpu", "autograd_test::stack", 4, 2, 5);
  auto parameters = first.remote_parameters();
  for (const auto& parameter : second.remote_parameters()) parameters.push_back(parameter);
  DistributedOptimizer<Optimizer> optimizer(parameters, options);

  StackImpl local_first(3, 4, 1), local_second(4, 2, 5);
  auto local = local_first.parameters();
  for (const auto& parameter : local_second.parameters()) local.push_back(parameter);
  Optimizer local_optimizer(local, options);

  for (int step = 0; step < 4; ++step) {
    const auto x = numbers(step, {6, 3});
    {
      const context current;
      backward(current.context_id(), {second.forward(first.forward(x)).pow(2).sum()}, false,
               kModes[static_cast<std::size_t>(step % 2)]);
      optimizer.step(current.context_id());
    }
    local_optimizer.zero_grad();
    local_second.forward(local_first.forward(x)).pow(2).sum().backward();
    local_optimizer.step();
  }
  for (std::size_t i = 0; i < parameters.size(); ++i)
    EXPECT_LT(off(parameters[i].to_here().detach(), local[i].detach()), kClose)
        << "parameter " << i;
}

// spec: O2 DistributedOptimizer: one optimizer per owner, step(ctx), with every optimizer of torch
// that needs no closure
TEST(DistributedOptimizer, LikeLocalOnes) {
  register_all();
  on_workers(3, [](int rank) {
    if (rank != 0) return;
    namespace optim = torch::optim;
    train<optim::SGD>(optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
    train<optim::Adam>(optim::AdamOptions(0.01).betas({0.8, 0.95}));
    train<optim::AdamW>(optim::AdamWOptions(0.01));
    train<optim::Adagrad>(optim::AdagradOptions(0.02));
    train<optim::RMSprop>(optim::RMSpropOptions(0.01).momentum(0.5));

    const RRef<at::Tensor> parameter(leaf(1, {3}));
    EXPECT_SAYS(DistributedOptimizer<optim::LBFGS>({parameter}, optim::LBFGSOptions(1)),
                "not registered");
    EXPECT_SAYS(DistributedOptimizer<optim::SGD>({parameter}, optim::SGDOptions(-1)),
                "learning rate");
    EXPECT_SAYS(
        DistributedOptimizer<optim::SGD>({RRef<at::Tensor>(numbers(1, {3}))}, optim::SGDOptions(1)),
        "require grad");
    EXPECT_SAYS(DistributedOptimizer<optim::SGD>({parameter}, optim::SGDOptions(1)).step(99),
                "knows no context 99");
    EXPECT_EQ(parameter.owner().id(), 0);
  });
}

// spec: O2 steps of several trainers, N14 step(ctx) takes the context: each applies its own
// gradients, whole, and none is lost
TEST(DistributedOptimizer, StepsOfSeveralTrainersDoNotTrample) {
  register_all();
  constexpr int kTrainers = 3, kSteps = 20;
  on_workers(kTrainers, [](int rank) {
    // Two trainers; w2 has the parameter. The gradient of a linear loss is the same whatever the
    // parameter is: sums come out exactly.
    const auto parameter = remote<at::Tensor>("worker2", "autograd_test::leaf", 30 + rank);
    if (rank < 2) {
      DistributedOptimizer<torch::optim::SGD> optimizer({parameter}, torch::optim::SGDOptions(0.5));
      const auto scope = RpcScope::current();
      const auto before = parameter.to_here().detach();
      std::vector<std::thread> threads;
      for (int t = 0; t < 2; ++t) {
        threads.emplace_back([&, t] {
          const RpcScope::Binding binding(scope);
          DistributedOptimizer<torch::optim::SGD> own({parameter}, torch::optim::SGDOptions(0.25));
          for (int step = 0; step < kSteps; ++step) {
            const context current;
            backward(current.context_id(), {(parameter.to_here() * (t + 1)).sum()});
            (t == 0 ? optimizer : own).step(current.context_id());
          }
        });
      }
      for (auto& thread : threads) thread.join();
      EXPECT_LT(off(parameter.to_here().detach(), before - kSteps * (0.5 * 1 + 0.25 * 2)), kClose);
    }
  });
}

// spec: O1 a worker that leaves during a pass fails it by name
TEST(DistAutograd, AWorkerThatLeaves) {
  register_all();
  Workers(2).run(
      [](int rank) {
        static std::atomic<int> stage{0};
        if (rank == 1) {
          stage.wait(0);
          stage = 0;
          return;
        }
        const auto a = leaf(1, {2, 4});
        const context current;
        const auto loss = rpc_sync<at::Tensor>("worker1", "autograd_test::layer", a * 2).sum();
        stage = 1;
        stage.notify_all();
        const auto agent = current_agent("test");
        EXPECT_TRUE(soon([&] { return !agent->lost(1).ok(); }));
        for (const Mode mode : kModes)
          EXPECT_SAYS(backward(current.context_id(), {loss}, true, mode), "worker1");
      },
      false);
}

}  // namespace
}  // namespace muster::rpc
