// SPDX-License-Identifier: BSD-3-Clause
#include "dataset.h"

#include <ATen/CPUGeneratorImpl.h>

#include <fstream>
#include <sstream>
#include <stdexcept>

namespace {

constexpr int kSide = 8;
// Mean and standard deviation of all pixels, 0 to 16.
constexpr float kMean = 4.884f;
constexpr float kDeviation = 6.017f;
constexpr std::uint64_t kSplitSeed = 1998;

void read_line(const std::string& line, std::vector<float>& pixels,
               std::vector<std::int64_t>& labels) {
  std::istringstream in(line);
  std::string cell;
  for (int i = 0; i <= kSide * kSide; ++i) {
    if (!std::getline(in, cell, ',')) throw std::runtime_error("it has fewer than 65 numbers");
    const int value = std::stoi(cell);
    if (i == kSide * kSide) {
      if (value < 0 || value > 9) throw std::runtime_error("its last number is no digit");
      labels.push_back(value);
    } else {
      pixels.push_back((static_cast<float>(value) - kMean) / kDeviation);
    }
  }
}

}  // namespace

Dataset Dataset::select(const std::vector<std::int64_t>& indices) const {
  const auto index = torch::tensor(indices, torch::kInt64);
  return {images.index_select(0, index), labels.index_select(0, index)};
}

Split load_digits(const std::string& path) {
  std::ifstream file(path);
  if (!file)
    throw std::runtime_error("cannot read " + path + "; give the folder of digits.csv with --data");
  std::vector<float> pixels;
  std::vector<std::int64_t> labels;
  for (std::string line; std::getline(file, line);) {
    try {
      read_line(line, pixels, labels);
    } catch (const std::exception& error) {
      throw std::runtime_error(path + ", line " + std::to_string(labels.size() + 1) + ": " +
                               error.what());
    }
  }
  const auto count = static_cast<std::int64_t>(labels.size());
  const Dataset all{torch::tensor(pixels).view({count, 1, kSide, kSide}),
                    torch::tensor(labels, torch::kInt64)};
  const auto order =
      torch::randperm(count, at::detail::createCPUGenerator(kSplitSeed), torch::kInt64);
  std::vector<std::int64_t> train, held_out;
  for (std::int64_t i = 0; i < count; ++i)
    (i % 5 == 0 ? held_out : train).push_back(order[i].item<std::int64_t>());
  return {all.select(train), all.select(held_out)};
}
