// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <barrier>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/group/testing/ranks.h"
#include "muster/parallel.h"
#include "testing/limits.h"
#include "testing/rank_processes.h"
#include "testing/scratch_folder.h"

namespace muster::testing {
namespace {

namespace nn = torch::nn;
using Options = DistributedDataParallelOptions;

/// Two layers; `second` may be unused.
struct PairImpl : nn::Module {
  PairImpl()
      : first(register_module("first", nn::Linear(4, 6))),
        second(register_module("second", nn::Linear(6, 6))) {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) parameter.fill_(0.25);
  }
  at::Tensor forward(at::Tensor x, bool uses_second = true) {
    x = torch::tanh(first(x));
    return uses_second ? second(x) : x;
  }
  nn::Linear first, second;
};
TORCH_MODULE(Pair);

at::Tensor fours(int rank) { return torch::ones({2, 4}) * (rank + 1); }

/// The error of rank 0, which does nothing wrong, when `wrong` happens on the last of `ranks`: in
/// the same step or the next.
std::string told(int ranks,
                 const std::function<void(DistributedDataParallel<Pair>&, int rank)>& wrong,
                 bool with_hook = false) {
  const auto store = std::make_shared<HashStore>();
  std::string text;
  const auto body = [&](int rank) {
    DistributedDataParallel<Pair> model(Pair{});
    if (with_hook) model.register_comm_hook(all_reduce_hook());
    model(fours(rank)).sum().backward();
    barrier();  // no rank is still in the first step
    if (rank == ranks - 1) return wrong(model, rank);
    const auto said = message_of<DistError>([&] {
      for (int step = 0; step < 3; ++step) model(fours(rank)).sum().backward();
    });
    if (rank == 0) text = said;
  };
  const auto whole = [&](int rank) {
    init_process_group({.timeout = muster::testing::kMustHappen,
                        .world_size = ranks,
                        .rank = rank,
                        .store = store});
    body(rank);
    try {
      destroy_process_group();
    } catch (const DistError&) {
      // Destroying a failed group may throw again.
    }
  };
  spawn(whole, {.nprocs = ranks, .mode = SpawnMode::threads});
  return text;
}

// spec: K3 models run in another order: each has a group of its own, so the sums of one never meet
// those of the other, and the timeout says which group every rank is in
TEST(DdpFailures, ModelsRunInAnotherOrderAreNamedAtTheTimeout) {
  const auto store = std::make_shared<HashStore>();
  std::barrier<> both_know(2);  // the end of one would be what the other hears of
  const auto body = [&](int rank) {
    init_process_group(
        {.timeout = muster::testing::kMustHappen, .world_size = 2, .rank = rank, .store = store});
    DistributedDataParallel<Pair> one(Pair{}), other(Pair{});
    for (auto* model : {&one, &other}) {
      (*model)(fours(rank)).sum().backward();
      model->process_group()->set_timeout(std::chrono::seconds(1));
    }
    const auto text =
        message_of<DistError>([&] { (rank == 0 ? one : other)(fours(rank)).sum().backward(); });
    both_know.arrive_and_wait();
    EXPECT_HAS(text, "rank " + std::to_string(1 - rank) + " has not entered this call");
    EXPECT_HAS(text, rank == 0 ? "of group '[0, 1] (2)', " : "of group '[0, 1]', ");
  };
  spawn(body, {.nprocs = 2, .mode = SpawnMode::threads});
}

// spec: K3 a parameter that got no gradient on one rank, the others do not hang
TEST(DdpFailures, AParameterWithoutGradientOnOneRankEndsAll) {
  const auto text = told(3, [](auto& model, int rank) {
    model(fours(rank), false).sum().backward();
    const auto own = message_of<DistError>([&] { model(fours(rank)); });
    EXPECT_HAS(own, "Parameters which did not receive grad for rank 2: second.weight, second.bias");
  });
  EXPECT_HAS(text, "rank 2");
}

TEST(DdpFailures, AChangedModuleIsNamedAndEndsAll) {
  const auto say = [](const std::function<void(Pair&)>& change, const std::string& expected) {
    const auto text = told(2, [&](auto& model, int rank) {
      change(model.module());
      const auto own = message_of<DistError>([&] { model(fours(rank)); });
      EXPECT_HAS(own, "was changed after it was wrapped");
      EXPECT_HAS(own, expected);
    });
    EXPECT_HAS(text, "rank 1");
  };
  say([](Pair& pair) { pair->register_parameter("late", torch::ones({2})); }, "'late' is new");
  say([](Pair& pair) { pair->first->weight.requires_grad_(false); },
      "'first.weight' was trained then, and is not now");
  say([](Pair& pair) { pair->to(at::kDouble); }, "'first.weight' has another dtype");
  say([](Pair& pair) { pair = Pair(); }, "another module stands in its place");
}

TEST(DdpFailures, ASecondBackwardEndsThere) {
  on_ranks(2, [](int rank) {
    DistributedDataParallel<Pair> model(Pair{});
    const auto loss = model(fours(rank)).sum();
    loss.backward({}, true);
    EXPECT_HAS(message_of<DistError>([&] { loss.backward(); }),
               "backward ran a second time over one forward pass");
    model(fours(rank)).sum().backward();  // nothing was lost
  });
}

// spec: K2 gradients that would be added up on one rank alone
TEST(DdpFailures, ASecondBackwardOfOneRankIsToldToTheOthersWhereItEndsThere) {
  for (const bool with_hook : {false, true}) {
    const auto text = told(
        3,
        [](auto& model, int rank) {
          const auto loss = model(fours(rank)).sum();
          loss.backward({}, true);
          EXPECT_HAS(message_of<DistError>([&] { loss.backward(); }), "the gradient of second.");
        },
        with_hook);
    EXPECT_HAS(text,
               "rank 2: backward ran a second time over one forward pass: the gradient of second.");
  }
}

// A rank that continues makes the same calls as the others; nothing fails.
TEST(DdpFailures, ASecondBackwardOfOneRankMayBeCaught) {
  on_ranks(3, [](int rank) {
    DistributedDataParallel<Pair> model(Pair{});
    const auto loss = model(fours(rank)).sum();
    loss.backward({}, true);
    if (rank == 0) {
      EXPECT_HAS(message_of<DistError>([&] { loss.backward(); }), "backward ran a second time");
    }
    for (auto& parameter : model.module()->parameters()) parameter.mutable_grad().reset();
    for (int step = 0; step < 3; ++step) model(fours(rank)).sum().backward();
    auto gradient = model.module()->first->weight.grad().clone();
    broadcast(gradient, {.src = 0});
    EXPECT_SAME(gradient, model.module()->first->weight.grad());
  });
}

// As processes, one of which exits with an exception: ours, or autograd's own after the graph was
// freed.
TEST(DdpFailures, ASecondBackwardOfAProcessEndsTheOthers) {
  for (const bool retains : {true, false}) {
    const ScratchFolder folder;
    RankProcesses ranks(3, [&](int rank) -> std::string {
      at::set_num_threads(1);
      init_process_group({.init_method = "file://" + folder.file("meet"),
                          .timeout = muster::testing::kMustHappen,
                          .world_size = 3,
                          .rank = rank});
      try {
        DistributedDataParallel<Pair> model(Pair{});
        for (int step = 0; step < 1000; ++step) {
          const auto loss = model(fours(rank)).sum();
          loss.backward({}, retains);
          if (rank == 0 && step == 3) loss.backward();
        }
      } catch (const DistError& error) {
        const std::string text = error.what();
        if (rank == 0) return text;
        const bool named = text.find("rank 0: ") != std::string::npos &&
                           text.find("the gradient of second.") != std::string::npos;
        return error.ranks() != std::vector<int>{0} ? text + " blames others"
               : named                              ? "named with its parameter"
                                                    : "named: " + text;
      } catch (const c10::Error& error) {
        return "autograd's";
      }
      return "nothing was thrown";
    });
    const auto ends = ranks.join(muster::testing::kMustHappen);
    if (retains) {
      EXPECT_HAS(ends[0].report,
                 "backward ran a second time over one forward pass: the gradient of second.");
    } else {
      EXPECT_EQ(ends[0].report, "autograd's");
    }
    for (const std::size_t rank : {1, 2}) {
      EXPECT_FALSE(ends[rank].killed_at_the_limit);
      EXPECT_HAS(ends[rank].report, retains ? "named with its parameter" : "named: ");
    }
  }
}

struct Stop : std::runtime_error {
  Stop() : std::runtime_error("the batch is poisoned") {}
};

// Before the first gradient and between two of them; also with a hook that averages.
TEST(DdpFailures, AnExceptionInBackwardEndsAllAndIsNamed) {
  for (const auto& [early, with_hook] :
       {std::pair{true, false}, {false, false}, {true, true}, {false, true}}) {
    const auto wrong = [early = early](auto& model, int rank) {
      auto loss = model(fours(rank)).sum();
      const auto throws = [](const at::Tensor&) -> at::Tensor { throw Stop(); };
      if (early) {
        loss = (loss * 2).sum();
        auto out = model(fours(rank));
        out.register_hook(throws);
        loss = out.sum();
      } else {
        model.module()->first->weight.register_hook(throws);
      }
      EXPECT_THROW(loss.backward(), Stop);
      EXPECT_HAS(message_of<DistError>([&] { model(fours(rank)); }),
                 "an earlier reduction of the gradients failed");
    };
    const auto text = told(3, wrong, with_hook);
    EXPECT_HAS(text, "rank 2");
    EXPECT_HAS(text, "an exception ended backward in the middle");
  }
}

// As processes, one of which exits with an exception: the ranks that wait for its gradients learn
// of it before it is gone.
TEST(DdpFailures, AnExceptionInBackwardOfAProcessIsNamed) {
  const ScratchFolder folder;
  RankProcesses ranks(3, [&](int rank) -> std::string {
    at::set_num_threads(1);
    init_process_group({.init_method = "file://" + folder.file("meet"),
                        .timeout = muster::testing::kMustHappen,
                        .world_size = 3,
                        .rank = rank});
    DistributedDataParallel<Pair> model(Pair{}, {.bucket_cap_mb = 0.00001});
    int step = 0;
    model.module()->first->weight.register_hook([&](const at::Tensor& gradient) {
      if (rank == 1 && step == 3) throw Stop();
      return gradient;
    });
    try {
      for (; step < 1000; ++step) model(fours(rank)).sum().backward();
    } catch (const DistError& error) {
      const std::string text = error.what();
      return text.find("an exception ended backward in the middle") != std::string::npos &&
                     error.ranks() == std::vector<int>{1}
                 ? "named"
                 : text;
    } catch (const Stop&) {
      return "stopped";
    }
    return "nothing was thrown";
  });
  const auto ends = ranks.join(muster::testing::kMustHappen);
  EXPECT_EQ(ends[0].report, "named");
  EXPECT_EQ(ends[1].report, "stopped");
  EXPECT_EQ(ends[2].report, "named");
}

TEST(DdpFailures, AHookThatFailsOnOneRankEndsAll) {
  on_ranks(2, [](int rank) {
    DistributedDataParallel<Pair> model(Pair{});
    model.register_comm_hook(
        [rank, plain = all_reduce_hook(model.process_group())](const GradBucket& bucket) {
          if (rank == 1) throw DistError("the compressor ran dry");
          return plain(bucket);
        });
    const auto text = message_of<DistError>([&] { model(fours(rank)).sum().backward(); });
    EXPECT_HAS(text, "the compressor ran dry");
  });
}

}  // namespace
}  // namespace muster::testing
