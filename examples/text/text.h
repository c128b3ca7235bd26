// SPDX-License-Identifier: BSD-3-Clause
/// The letters of examples/data/alice.txt as numbers.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

struct Text {
  std::string letters;     ///< those that occur; letter i has the number i
  torch::Tensor train;     ///< N, int64
  torch::Tensor held_out;  ///< the last tenth of the text, never trained on

  std::string spell(const torch::Tensor& numbers) const;
  torch::Tensor numbers(const std::string& words) const;
};

/// The same on every rank. Throws std::runtime_error where the file is missing.
Text load_text(const std::string& path);

/// Stretches of a text, and the letters that come next at each place of theirs.
struct Windows {
  torch::Tensor letters;  ///< count x length
  torch::Tensor next;     ///< count x length
};
Windows windows_at(const torch::Tensor& text, const torch::Tensor& starts, std::int64_t length);
