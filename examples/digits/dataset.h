// SPDX-License-Identifier: BSD-3-Clause
/// The handwritten digits of examples/data/digits.csv as tensors.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

struct Dataset {
  torch::Tensor images;  ///< N x 1 x 8 x 8, float32, of mean 0 and variance 1
  torch::Tensor labels;  ///< N, int64

  std::int64_t size() const { return labels.size(0); }
  Dataset select(const std::vector<std::int64_t>& indices) const;
  Dataset to(torch::ScalarType dtype) const { return {images.to(dtype), labels}; }
};

struct Split {
  Dataset train;
  Dataset held_out;  ///< every fifth image of a shuffled order, never trained on
};

/// The same on every rank. Throws std::runtime_error where the file is missing or broken, with the
/// line.
Split load_digits(const std::string& path);
