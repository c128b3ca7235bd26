// SPDX-License-Identifier: BSD-3-Clause
/// A small transformer that says which letter comes next.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>

constexpr std::int64_t kContext = 48;  ///< letters that it sees at most

/// Attention to what came before, then two linear layers; each is added to its input. After Vaswani
/// et al., "Attention Is All You Need", NeurIPS 2017, normalised first.
struct BlockImpl : torch::nn::Module {
  BlockImpl(std::int64_t width, std::int64_t heads);
  torch::Tensor forward(torch::Tensor x);

  std::int64_t heads;
  torch::nn::LayerNorm before_attention, before_mixing;
  torch::nn::Linear queries_keys_values, mixed, wide, narrow;
};
TORCH_MODULE(Block);

struct LanguageModelImpl : torch::nn::Module {
  explicit LanguageModelImpl(std::int64_t letters, std::int64_t width = 48, std::int64_t heads = 4,
                             int blocks = 2);
  /// count x length letters; count x length x letters scores of the next one.
  torch::Tensor forward(const torch::Tensor& letters);

  torch::nn::Embedding letter, place;
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm last;
  torch::nn::Linear scores;
};
TORCH_MODULE(LanguageModel);

/// Mean over the windows of -ln(probability of the next letter).
torch::Tensor loss_of(const torch::Tensor& scores, const torch::Tensor& next);
