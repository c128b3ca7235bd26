// SPDX-License-Identifier: BSD-3-Clause
// Parameters that are divided by rows, by the units themselves.

#include <gtest/gtest.h>
#include <torch/nn/modules/conv.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "train/fsdp/sharded_unit.h"
#include "train/fsdp/testing/sharded_models.h"
#include "train/mesh/chunk.h"

namespace muster::testing::fsdp {
namespace {

using parallel::Keep;
using parallel::ShardedUnit;
using parallel::ShardedUnitOptions;

/// Parameters of odd shapes: fewer rows than ranks, none, more dimensions than two, another memory
/// order, and one that is not trained.
struct OddImpl : nn::Module {
  OddImpl()
      : first(register_module("first", nn::Linear(5, 7))),
        image(register_module("image", nn::Conv2d(nn::Conv2dOptions(1, 3, 2).bias(false)))),
        last(register_module("last", nn::Linear(7, 3))),
        scale(register_parameter("scale", torch::ones({1}))),
        empty(register_parameter("empty", torch::ones({0, 4}))),
        fixed(register_parameter("fixed", torch::ones({3}), /*requires_grad=*/false)) {
    to(at::kDouble);
    image->weight.set_data(image->weight.permute({0, 2, 3, 1}).contiguous().permute({0, 3, 1, 2}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto seen = image(x.view({-1, 1, 1, 5}).expand({-1, 1, 2, 5})).mean({2, 3});
    return (last(torch::tanh(first(x))) + seen) * scale * fixed + empty.sum();
  }
  nn::Linear first;
  nn::Conv2d image;
  nn::Linear last;
  at::Tensor scale, empty, fixed;
};
TORCH_MODULE(Odd);

Odd odd_of(std::uint64_t seed) {
  Odd net;
  fill(*net, seed);
  return net;
}

/// The unit of a module, and what calls it.
template <class Model>
struct UnitOf {
  UnitOf(Model model, const ShardedUnitOptions& options)
      : model(std::move(model)), unit(parallel::parts_of(*this->model), options) {}
  at::Tensor operator()(const at::Tensor& x) {
    const auto inputs = unit.before_forward({x});
    const at::Tensor out = model->forward(inputs.front());
    unit.after_forward(std::span(&out, 1));
    return out;
  }
  at::Tensor full() {
    std::vector<at::Tensor> all;
    for (const auto& each : unit.parameters().full()) all.push_back(each.reshape({-1}));
    return torch::cat(all);
  }
  Model model;
  ShardedUnit unit;
};

std::vector<std::int64_t> dims_of(const nn::Module& module, std::int64_t dim) {
  std::vector<std::int64_t> dims;
  for (const auto& parameter : module.parameters())
    dims.push_back(std::min(dim, parameter.dim() - 1));
  return dims;
}

at::Tensor flat_of(const nn::Module& module) {
  std::vector<at::Tensor> all;
  for (const auto& each : module.parameters()) all.push_back(each.detach().reshape({-1}));
  return torch::cat(all);
}

class ShardedRows : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ShardedRows, ::testing::Values(1, 2, 3, 4));

// spec: M1 parameters are sharded: by rows, each has the shape of the whole but for one dimension
TEST_P(ShardedRows, HoldTheirPartOfOneDimension) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](int rank) {
    for (const std::int64_t dim : {0, 1}) {
      const Odd alone = odd_of(1);
      Odd net = odd_of(1);
      const auto dims = dims_of(*net, dim);
      UnitOf<Odd> sharded(net, {.shard_dims = dims});
      const auto whole = alone->parameters(), mine = net->parameters();
      for (std::size_t i = 0; i < whole.size(); ++i) {
        const auto part = parallel::chunk_of(whole[i].size(dims[i]), ranks, rank);
        const auto expected = whole[i].narrow(dims[i], part.first, part.count);
        EXPECT_EQ(mine[i].sizes(), expected.sizes());
        EXPECT_TRUE(mine[i].equal(expected)) << i;
      }
      EXPECT_TRUE(sharded.full().equal(flat_of(*alone)));
    }
  });
}

// spec: M1 a sharded parameter is changed by its shard's tensor as by itself
TEST_P(ShardedRows, ShareMemoryAndVersionWithTheParameter) {
  on_ranks(GetParam(), [&](int) {
    const torch::NoGradGuard no_grad;
    Odd net = odd_of(1);
    UnitOf<Odd> sharded(net, {.shard_dims = dims_of(*net, 0)});
    const auto& parameters = sharded.unit.parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor shard = parameters.shard(i);
      EXPECT_EQ(shard.sizes(), parameters[i].sizes());
      const auto version = parameters[i]._version();
      shard.fill_(static_cast<double>(i));
      EXPECT_GT(parameters[i]._version(), version);
      EXPECT_TRUE(parameters[i].equal(shard));
    }
    // Also while the parameter is whole.
    sharded.unit.set_keep_after_backward(true);
    sharded.unit.unshard();
    const at::Tensor before = sharded(inputs());
    for (std::size_t i = 0; i < parameters.size(); ++i) parameters.shard(i).fill_(0.5);
    Odd alone;
    for (auto& each : alone->parameters()) each.fill_(0.5);
    EXPECT_LT(difference(sharded(inputs()), alone->forward(inputs())), 1e-12);
    EXPECT_TRUE(sharded.full().equal(flat_of(*alone)));
  });
}

void expect_own_storage(const at::Tensor& tensor) {
  EXPECT_EQ(tensor.storage_offset(), 0);
  EXPECT_EQ(tensor.storage().nbytes(), tensor.nbytes());
  EXPECT_EQ(tensor.storage().data() == nullptr, tensor.numel() == 0);
}

// spec: M1 a sharded parameter is a tensor as others: it, its shard and its gradient begin their
// storages and fill them, and outlive the unit
TEST_P(ShardedRows, HaveStoragesOfTheirOwn) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](int rank) {
    std::vector<at::Tensor> shards, gradients, copies;
    {
      Odd net = odd_of(1);
      UnitOf<Odd> sharded(net, {.shard_dims = dims_of(*net, 0)});
      auto& parameters = sharded.unit.parameters();
      parameters.set_gradient_sink(
          [&](std::size_t, const at::Tensor& reduced) { gradients.push_back(reduced); });
      loss_of(sharded(share(inputs(), rank, ranks)), share(targets(), rank, ranks)).backward();
      EXPECT_EQ(gradients.size(), 7u);
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        expect_own_storage(parameters[i]);
        shards.push_back(parameters.shard(i));
        EXPECT_TRUE(shards[i].is_alias_of(parameters[i]));
      }
      parameters.set_gradient_sink({});
      sharded(share(inputs(), rank, ranks)).sum().backward();
      gradients.push_back(net->first->weight.grad());
      gradients.push_back(net->first->bias.grad());
    }
    for (const auto* all : {&shards, &gradients})
      for (const auto& each : *all) {
        expect_own_storage(each);
        copies.push_back(each.clone());
        each.fill_(3.);
      }
    for (const auto& each : copies) EXPECT_TRUE(each.isfinite().all().item<bool>());
  });
}

// spec: M5.refusal a shard whose storage was moved would no longer be what is gathered
TEST_P(ShardedRows, RefuseAStorageThatWasMoved) {
  on_ranks(GetParam(), [&](int) {
    Odd net = odd_of(1);
    UnitOf<Odd> sharded(net, {.shard_dims = dims_of(*net, 0)});
    const auto& parameters = sharded.unit.parameters();
    std::size_t moved = 0;
    while (parameters.name(moved) != "first.weight") ++moved;  // every rank has rows of it
    const at::Tensor& shard = parameters.shard(moved);
    const at::Tensor other = shard.clone();
    shard.storage().set_data_ptr_noswap(
        other.storage().set_data_ptr(at::DataPtr(nullptr, at::kCPU)));
    EXPECT_HAS(message_of<DistError>([&] { sharded.full(); }), "was given other memory");
  });
}

// spec: M2 the same results as one process: sharded by rows, by either dimension
// spec: M1 units free their parameters, keep them, or keep a part of them
TEST_P(ShardedRows, TrainAsOneProcess) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](int rank) {
    for (const std::int64_t dim : {0, 1})
      for (const Keep keep : {Keep::nothing, Keep::all, Keep::part}) {
        Odd alone = odd_of(1), net = odd_of(1);
        UnitOf<Odd> sharded(net, {.after_forward = keep,
                                  .part_ranks = keep == Keep::part ? (ranks == 4 ? 2 : ranks) : 0,
                                  .shard_dims = dims_of(*net, dim)});
        torch::optim::Adam mine(net->parameters(), 0.01), theirs(alone->parameters(), 0.01);
        for (int step = 0; step < 3; ++step) {
          mine.zero_grad();
          theirs.zero_grad();
          loss_of(sharded(share(inputs(), rank, ranks)), share(targets(), rank, ranks)).backward();
          loss_of(alone->forward(inputs()), targets()).backward();
          for (const auto& each : net->parameters())
            if (each.grad().defined()) EXPECT_EQ(each.grad().sizes(), each.sizes());
          mine.step();
          theirs.step();
        }
        EXPECT_LT(difference(sharded.full(), flat_of(*alone)), 1e-12);
        EXPECT_FALSE(sharded.unit.is_unsharded());
      }
  });
}

// spec: M1 hybrid sharding by rows; M2 the same results as one process
TEST(ShardedRowsHybrid, TrainAsOneProcess) {
  on_ranks(4, [&](int rank) {
    const auto mesh = init_device_mesh("cpu", {2, 2});
    Odd alone = odd_of(1), net = odd_of(1);
    UnitOf<Odd> sharded(net, {.group = mesh.get_group(1),
                              .replicas = mesh.get_group(0),
                              .shard_dims = dims_of(*net, 0)});
    torch::optim::SGD mine(net->parameters(), 0.1), theirs(alone->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      mine.zero_grad();
      theirs.zero_grad();
      loss_of(sharded(share(inputs(), rank, 4)), share(targets(), rank, 4)).backward();
      loss_of(alone->forward(inputs()), targets()).backward();
      mine.step();
      theirs.step();
    }
    EXPECT_LT(difference(sharded.full(), flat_of(*alone)), 1e-12);
  });
}

// spec: M1 a unit of one parameter, which a gather fills without a copy; 3 ranks get 3, 3 and 2
// rows
TEST_P(ShardedRows, OfOneParameterAreGatheredInPlace) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](int rank) {
    const auto matrix = [] {
      nn::Linear linear(nn::LinearOptions(8, 8).bias(false));
      linear->to(at::kDouble);
      fill(*linear, 5);
      return linear;
    };
    const at::Tensor all = torch::sin(torch::arange(24 * 8, at::kDouble)).view({24, 8});
    nn::Linear alone = matrix(), net = matrix();
    UnitOf<nn::Linear> sharded(net, {.shard_dims = dims_of(*net, 0)});
    torch::optim::SGD mine(net->parameters(), 0.1), theirs(alone->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      mine.zero_grad();
      theirs.zero_grad();
      sharded(share(all, rank, ranks)).square().mean().backward();
      alone(all).square().mean().backward();
      mine.step();
      theirs.step();
    }
    EXPECT_LT(difference(sharded.full(), flat_of(*alone)), 1e-12);
    // While a gather is under way there is the memory of the whole alone.
    sharded.unit.start_unshard();
    const std::int64_t bytes = sharded.unit.parameters().unsharded_bytes();
    EXPECT_LE(bytes, 9 * 8 * 8 + 64);
    sharded.unit.unshard();
    EXPECT_EQ(sharded.unit.parameters().unsharded_bytes(), bytes);
    sharded.unit.reshard();
  });
}

// spec: M1 gradients come back per parameter, to whom the unit was told
TEST_P(ShardedRows, HandReducedGradientsToTheirSink) {
  const int ranks = GetParam();
  on_ranks(ranks, [&](int rank) {
    Odd alone = odd_of(1), net = odd_of(1);
    UnitOf<Odd> sharded(net, {.shard_dims = dims_of(*net, 0)});
    std::vector<at::Tensor> given(sharded.unit.parameters().size());
    int calls = 0;
    sharded.unit.parameters().set_gradient_sink([&](std::size_t i, const at::Tensor& reduced) {
      ++calls;
      given[i] = reduced.clone();
    });
    loss_of(sharded(share(inputs(), rank, ranks)), share(targets(), rank, ranks)).backward();
    loss_of(alone->forward(inputs()), targets()).backward();
    const auto whole = alone->parameters();
    EXPECT_EQ(calls, 7);  // all but the one that is not trained
    for (std::size_t i = 0; i < given.size(); ++i) {
      ASSERT_EQ(given[i].defined(), whole[i].grad().defined()) << i;
      EXPECT_FALSE(sharded.unit.parameters()[i].grad().defined());
      if (!given[i].defined()) continue;
      const auto part = parallel::chunk_of(whole[i].size(0), ranks, rank);
      const auto expected = whole[i].grad().narrow(0, part.first, part.count);
      ASSERT_EQ(given[i].sizes(), expected.sizes());
      EXPECT_TRUE(given[i].allclose(expected, 1e-12, 1e-14)) << i;
    }
    // Without the sink they are added to those of the parameters again.
    sharded.unit.parameters().set_gradient_sink({});
    sharded(share(inputs(), rank, ranks)).sum().backward();
    EXPECT_TRUE(sharded.unit.parameters()[0].grad().defined());
    EXPECT_EQ(calls, 7);
  });
}

// spec: M5 meta initialisation: parameters without values: NaN until they are set
TEST_P(ShardedRows, AreNaNWhereTheyHadNoValues) {
  on_ranks(GetParam(), [&](int) {
    Odd net;
    const torch::NoGradGuard no_grad;
    drop_values(*net);
    UnitOf<Odd> sharded(net, {.shard_dims = dims_of(*net, 0)});
    for (const auto& parameter : net->parameters()) {
      EXPECT_TRUE(parameter.is_cpu());
      EXPECT_TRUE(parameter.isnan().all().item<bool>());
    }
    EXPECT_EQ(sharded.full().isnan().sum().item<std::int64_t>(), sharded.full().numel());
    for (std::size_t i = 0; i < sharded.unit.parameters().size(); ++i)
      sharded.unit.parameters().shard(i).fill_(0.25);
    EXPECT_TRUE(sharded(inputs()).isfinite().all().item<bool>());
  });
}

// spec: M5.refusal a parameter that cannot be divided so is refused by name, on every rank
TEST_P(ShardedRows, RefuseWhatHasNoRows) {
  on_ranks(GetParam(), [&](int) {
    const auto text_of = [](auto module, std::vector<std::int64_t> dims) {
      return message_of<DistError>([&] {
        UnitOf<decltype(module)>(module, ShardedUnitOptions{.shard_dims = std::move(dims)});
      });
    };
    struct ScaledImpl : nn::LinearImpl {
      ScaledImpl() : LinearImpl(2, 3) { register_parameter("scale", torch::ones({})); }
    };
    const auto net = std::make_shared<ScaledImpl>();
    const std::size_t count = net->parameters().size();
    EXPECT_HAS(text_of(net, std::vector<std::int64_t>(count)), "'scale' is a scalar");
    EXPECT_HAS(text_of(net, {0}), "shard_dims has 1 entries for " + std::to_string(count));
    EXPECT_HAS(text_of(nn::Linear(2, 3), {2, 0}), "along dimension 2");
  });
}

}  // namespace
}  // namespace muster::testing::fsdp
