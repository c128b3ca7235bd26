// SPDX-License-Identifier: BSD-3-Clause
#include "model.h"

#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/loss.h>
#include <torch/types.h>

namespace nn = torch::nn;
namespace functional = torch::nn::functional;

BlockImpl::BlockImpl(std::int64_t width, std::int64_t heads)
    : heads(heads),
      before_attention(
          register_module("before_attention", nn::LayerNorm(nn::LayerNormOptions({width})))),
      before_mixing(register_module("before_mixing", nn::LayerNorm(nn::LayerNormOptions({width})))),
      queries_keys_values(register_module("queries_keys_values", nn::Linear(width, 3 * width))),
      mixed(register_module("mixed", nn::Linear(width, width))),
      wide(register_module("wide", nn::Linear(width, 4 * width))),
      narrow(register_module("narrow", nn::Linear(4 * width, width))) {}

torch::Tensor BlockImpl::forward(torch::Tensor x) {
  const auto count = x.size(0), length = x.size(1), width = x.size(2);
  // count x length x 3 x heads x size, to three of count x heads x length x size
  const auto parts = queries_keys_values(before_attention(x))
                         .view({count, length, 3, heads, width / heads})
                         .permute({2, 0, 3, 1, 4});
  const auto seen =
      at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
  x = x + mixed(seen.transpose(1, 2).reshape({count, length, width}));
  return x + narrow(functional::gelu(wide(before_mixing(x))));
}

LanguageModelImpl::LanguageModelImpl(std::int64_t letters, std::int64_t width, std::int64_t heads,
                                     int count)
    : letter(register_module("letter", nn::Embedding(letters, width))),
      place(register_module("place", nn::Embedding(kContext, width))),
      blocks(register_module("blocks", nn::ModuleList())),
      last(register_module("last", nn::LayerNorm(nn::LayerNormOptions({width})))),
      scores(register_module("scores", nn::Linear(width, letters))) {
  for (int i = 0; i < count; ++i) blocks->push_back(Block(width, heads));
  const torch::NoGradGuard no_grad;
  for (auto* table : {&letter, &place}) (*table)->weight.mul_(0.1);
}

torch::Tensor LanguageModelImpl::forward(const torch::Tensor& letters) {
  auto x = letter(letters) + place(torch::arange(letters.size(1)));
  for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
  return scores(last(x));
}

torch::Tensor loss_of(const torch::Tensor& scores, const torch::Tensor& next) {
  return functional::cross_entropy(scores.flatten(0, 1), next.flatten());
}
