// SPDX-License-Identifier: BSD-3-Clause
/// The models whose training steps are timed; bench/stock_ddp_worker.py has the same in Python.
#pragma once

#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/pooling.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <memory>
#include <string>
#include <vector>

namespace bench_ddp {

namespace nn = torch::nn;

struct Model : nn::Module {
  virtual at::Tensor forward(const at::Tensor& inputs) = 0;
  virtual at::Tensor inputs() const = 0;
};

/// 784-2048-2048-10, batch 64.
struct Mlp final : Model {
  at::Tensor forward(const at::Tensor& x) override { return c(torch::relu(b(torch::relu(a(x))))); }
  at::Tensor inputs() const override { return torch::randn({64, 784}); }
  nn::Linear a{register_module("a", nn::Linear(784, 2048))};
  nn::Linear b{register_module("b", nn::Linear(2048, 2048))};
  nn::Linear c{register_module("c", nn::Linear(2048, 10))};
};

/// Two 3x3 convolutions beside a shortcut.
struct Block final : nn::Module {
  Block(std::int64_t in, std::int64_t out, std::int64_t stride)
      : first(register_module(
            "first",
            nn::Conv2d(nn::Conv2dOptions(in, out, 3).stride(stride).padding(1).bias(false)))),
        norm_first(register_module("norm_first", nn::BatchNorm2d(out))),
        second(register_module("second",
                               nn::Conv2d(nn::Conv2dOptions(out, out, 3).padding(1).bias(false)))),
        norm_second(register_module("norm_second", nn::BatchNorm2d(out))) {
    if (in != out)
      shortcut = register_module(
          "shortcut", nn::Conv2d(nn::Conv2dOptions(in, out, 1).stride(stride).bias(false)));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = norm_second(second(torch::relu(norm_first(first(x)))));
    return torch::relu(y + (shortcut.is_empty() ? x : shortcut(x)));
  }
  nn::Conv2d first;
  nn::BatchNorm2d norm_first;
  nn::Conv2d second;
  nn::BatchNorm2d norm_second;
  nn::Conv2d shortcut{nullptr};
};

/// ResNet-18 for images of 32 x 32, batch 8: 11 million parameters in 62 tensors.
struct ResNet final : Model {
  ResNet() {
    std::int64_t in = 64;
    for (const std::int64_t out : {64, 128, 256, 512}) {
      blocks.push_back(register_module("block" + std::to_string(blocks.size()),
                                       std::make_shared<Block>(in, out, in == out ? 1 : 2)));
      blocks.push_back(register_module("block" + std::to_string(blocks.size()),
                                       std::make_shared<Block>(out, out, 1)));
      in = out;
    }
  }
  at::Tensor forward(const at::Tensor& images) override {
    auto x = torch::relu(norm(stem(images)));
    for (const auto& block : blocks) x = block->forward(x);
    return head(x.mean({2, 3}));
  }
  at::Tensor inputs() const override { return torch::randn({8, 3, 32, 32}); }
  nn::Conv2d stem{
      register_module("stem", nn::Conv2d(nn::Conv2dOptions(3, 64, 3).padding(1).bias(false)))};
  nn::BatchNorm2d norm{register_module("norm", nn::BatchNorm2d(64))};
  std::vector<std::shared_ptr<Block>> blocks;
  nn::Linear head{register_module("head", nn::Linear(512, 10))};
};

inline std::shared_ptr<Model> make_model(const std::string& name) {
  if (name == "resnet") return std::make_shared<ResNet>();
  return std::make_shared<Mlp>();
}

}  // namespace bench_ddp
