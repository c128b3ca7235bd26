#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <vector>

#include "muster/group/test_ranks.h"
#include "muster/parallel.h"
#include "muster/testing/process_usage.h"
#include "muster/testing/seed.h"

namespace muster::testing {
namespace {

namespace nn = torch::nn;
using Options = DistributedDataParallelOptions;

/// Big enough that one gradient that is kept in each step shows.
struct NetImpl : nn::Module {
  NetImpl()
      : table(register_module("table", nn::Embedding(nn::EmbeddingOptions(50, 64).sparse(true)))),
        in(register_module("in", nn::Linear(64, 128))),
        out(register_module("out", nn::Linear(128, 8))) {}
  at::Tensor forward(const at::Tensor& words) { return out(torch::relu(in(table(words)))); }
  nn::Embedding table;
  nn::Linear in, out;
};
TORCH_MODULE(Net);

// spec: K2 training goes on for as long as one likes
TEST(DdpMemory, DoesNotGrow) {
  if (!kMemoryTells) GTEST_SKIP() << "sanitizers keep freed memory";
  const std::vector<Options> variants{{.bucket_cap_mb = 0.02},
                                      {.find_unused_parameters = true},
                                      {.gradient_as_bucket_view = true, .static_graph = true},
                                      {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}}};
  const int steps = long_tests() ? 10000 : 500, warm_up = 100;
  for (std::size_t variant = 0; variant < variants.size(); ++variant) {
    on_ranks(2, [&](int rank) {
      Net net;
      DistributedDataParallel<Net> model(net, variants[variant]);
      torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.01));
      MemoryInUse before;
      for (int step = 0; step < steps; ++step) {
        if (step == warm_up) {
          barrier();  // neither rank is in the middle of a step
          before = memory_in_use();
          barrier();
        }
        optimizer.zero_grad();
        model(torch::arange(4, at::kLong) + step % 40 + rank).square().mean().to(at::kFloat).backward();
        optimizer.step();
      }
      barrier();
      const auto after = memory_in_use();
      barrier();
      constexpr std::size_t kSlack = std::size_t{2} << 20;
      EXPECT_LT(after.own, before.own + kSlack) << "variant " << variant << " grew by " << after.own - before.own << " bytes";
      EXPECT_LT(after.shared, before.shared + kSlack) << "variant " << variant;
    });
  }
}

}  // namespace
}  // namespace muster::testing
