// SPDX-License-Identifier: BSD-3-Clause
#include "models.h"

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/types.h>

#include <cmath>
#include <stdexcept>

namespace muster::testing {
namespace {

namespace nn = torch::nn;

struct Mlp final : Model {
  explicit Mlp(std::int64_t width)
      : a(register_module("a", nn::Linear(8, width))),
        b(register_module("b", nn::Linear(width, width))),
        c(register_module("c", nn::Linear(width, 3))) {}
  at::Tensor forward(const Batch& batch) override {
    return c(torch::relu(b(torch::tanh(a(batch.x)))));
  }
  nn::Linear a, b, c;
};
/// A matrix of more than 64 KiB: its gradient is averaged where it lies.
constexpr std::int64_t kLargeWidth = 130;

struct Conv final : Model {
  at::Tensor forward(const Batch& batch) override {
    auto x = torch::max_pool2d(torch::relu(norm_a(a(batch.x))), 2);
    return c(torch::relu(norm_b(b(x))).mean({2, 3}));
  }
  nn::Conv2d a{register_module("a", nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1)))};
  nn::BatchNorm2d norm_a{register_module("norm_a", nn::BatchNorm2d(8))};
  nn::Conv2d b{register_module("b", nn::Conv2d(nn::Conv2dOptions(8, 8, 3).padding(1)))};
  nn::BatchNorm2d norm_b{register_module("norm_b", nn::BatchNorm2d(8))};
  nn::Linear c{register_module("c", nn::Linear(8, 3))};
};

struct Transformer final : Model {
  static constexpr std::int64_t kWidth = 8, kHeads = 2;
  at::Tensor forward(const Batch& batch) override {
    auto x = table(batch.x) + place.slice(0, 0, batch.x.size(1));
    const auto parts =
        qkv(x).view({x.size(0), x.size(1), 3, kHeads, kWidth / kHeads}).permute({2, 0, 3, 1, 4});
    const auto q = parts[0], k = parts[1], v = parts[2];
    const auto weights = torch::softmax(
        torch::matmul(q, k.transpose(-2, -1)) / std::sqrt(double{kWidth / kHeads}), -1);
    const auto mixed =
        torch::matmul(weights, v).transpose(1, 2).reshape({x.size(0), x.size(1), kWidth});
    x = norm_a(x + out(mixed));
    x = norm_b(x + down(torch::gelu(up(x))));
    return head(x);
  }
  nn::Embedding table{register_module("table", nn::Embedding(11, kWidth))};
  nn::Linear qkv{register_module("qkv", nn::Linear(kWidth, 3 * kWidth))};
  nn::Linear out{register_module("out", nn::Linear(kWidth, kWidth))};
  nn::LayerNorm norm_a{register_module("norm_a", nn::LayerNorm(nn::LayerNormOptions({kWidth})))};
  nn::Linear up{register_module("up", nn::Linear(kWidth, 16))};
  nn::Linear down{register_module("down", nn::Linear(16, kWidth))};
  nn::LayerNorm norm_b{register_module("norm_b", nn::LayerNorm(nn::LayerNormOptions({kWidth})))};
  nn::Linear head{register_module("head", nn::Linear(kWidth, 11))};
  at::Tensor place = register_parameter("place", torch::zeros({6, kWidth}));
};

/// One matrix in two places.
struct Tied : nn::Module {
  explicit Tied(const at::Tensor& weight)
      : weight(register_parameter("weight", weight)),
        bias(register_parameter("bias", torch::zeros({weight.size(0)}))) {}
  at::Tensor weight, bias;
};
struct Shared final : Model {
  at::Tensor forward(const Batch& batch) override {
    return c(torch::tanh(torch::linear(torch::tanh(a(batch.x)), b->weight, b->bias)));
  }
  nn::Linear a{register_module("a", nn::Linear(8, 8))};
  std::shared_ptr<Tied> b = register_module("b", std::make_shared<Tied>(a->weight));
  nn::Linear c{register_module("c", nn::Linear(8, 3))};
};

/// `side` is used now and then, on some ranks; `never` never.
struct Unused final : Model {
  at::Tensor forward(const Batch& batch) override {
    auto x = torch::tanh(a(batch.x));
    if (batch.flag) x = torch::tanh(side(x));
    return c(x);
  }
  nn::Linear a{register_module("a", nn::Linear(8, 8))};
  nn::Linear side{register_module("side", nn::Linear(8, 8))};
  nn::Linear never{register_module("never", nn::Linear(8, 8))};
  nn::Linear c{register_module("c", nn::Linear(8, 3))};
};

struct Normed final : Model {
  at::Tensor forward(const Batch& batch) override { return c(torch::relu(norm(a(batch.x)))); }
  nn::Linear a{register_module("a", nn::Linear(8, 16))};
  nn::BatchNorm1d norm{register_module("norm", nn::BatchNorm1d(16))};
  nn::Linear c{register_module("c", nn::Linear(16, 3))};
};

struct SparseTable final : Model {
  at::Tensor forward(const Batch& batch) override { return c(torch::tanh(table(batch.x).mean(1))); }
  nn::Embedding table{
      register_module("table", nn::Embedding(nn::EmbeddingOptions(13, 8).sparse(true)))};
  nn::Linear c{register_module("c", nn::Linear(8, 3))};
};

}  // namespace

const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      {.name = "mlp", .x_shape = {4, 8}, .y_shape = {4, 3}, .bucket_cap_mb = 0.001},
      {.name = "large", .x_shape = {4, 8}, .y_shape = {4, 3}},
      {.name = "conv", .x_shape = {4, 3, 8, 8}, .y_shape = {4, 3}, .bucket_cap_mb = 0.001},
      {.name = "transformer",
       .x_shape = {4, 6},
       .y_shape = {4, 6},
       .tokens = 11,
       .y_is_tokens = true},
      {.name = "shared", .x_shape = {4, 8}, .y_shape = {4, 3}},
      {.name = "unused", .x_shape = {4, 8}, .y_shape = {4, 3}, .find_unused = true},
      {.name = "sparse", .x_shape = {4, 5}, .y_shape = {4, 3}, .tokens = 13, .momentum = 0},
      {.name = "uneven", .x_shape = {4, 8}, .y_shape = {4, 3}, .join = true},
      {.name = "uneven_effective",
       .x_shape = {4, 8},
       .y_shape = {4, 3},
       .bucket_cap_mb = 0.001,
       .join = true,
       .divide_by_initial = false},
  };
  return all;
}

std::shared_ptr<Model> make_model(const std::string& name, at::ScalarType dtype) {
  std::shared_ptr<Model> model;
  if (name == "mlp") model = std::make_shared<Mlp>(16);
  if (name == "large") model = std::make_shared<Mlp>(kLargeWidth);
  if (name == "conv") model = std::make_shared<Conv>();
  if (name == "transformer") model = std::make_shared<Transformer>();
  if (name == "shared") model = std::make_shared<Shared>();
  if (name == "unused") model = std::make_shared<Unused>();
  if (name == "sparse") model = std::make_shared<SparseTable>();
  if (name.starts_with("uneven")) model = std::make_shared<Normed>();
  if (!model) throw std::invalid_argument("no model of this name: " + name);
  model->to(dtype);
  return model;
}

at::Tensor loss_of(const Case& what, const at::Tensor& output, const at::Tensor& y) {
  if (what.y_is_tokens)
    return nn::functional::cross_entropy(output.view({-1, output.size(-1)}), y.view({-1}));
  return nn::functional::mse_loss(output, y);
}

}  // namespace muster::testing
