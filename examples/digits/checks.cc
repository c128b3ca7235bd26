// SPDX-License-Identifier: BSD-3-Clause
#include "checks.h"

#include <muster/distributed.h>
#include <torch/serialize.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>

namespace {

constexpr int kSteps = 20;
constexpr double kTolerance = 1e-5;
constexpr double kMoved = 1e-2;  // what 20 steps change at least, else nothing was compared
constexpr double kAccuracy = 0.97;

std::string print(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

/// The largest number that any rank found.
double worst_of_all(double mine) {
  auto worst = torch::tensor({mine}, torch::kFloat64);
  muster::all_reduce(worst, {.op = muster::ReduceOp::MAX});
  return worst.item<double>();
}

/// |a - b| / |b|.
double relative_difference(const torch::Tensor& a, const torch::Tensor& b) {
  return ((a - b).norm() / b.norm()).item<double>();
}

torch::Tensor bytes_of(const Network& network) { return flat_weights(network).view(torch::kUInt8); }

std::int64_t differing_bytes(const torch::Tensor& a, const torch::Tensor& b) {
  return a.ne(b).sum().item<std::int64_t>();
}

/// Rank 0's text on every rank.
std::string from_rank_0(const std::string& text) {
  auto length = torch::tensor({static_cast<std::int64_t>(text.size())});
  muster::broadcast(length, {.src = 0});
  auto letters = torch::zeros({length.item<std::int64_t>()}, torch::kUInt8);
  if (muster::get_rank() == 0)
    std::copy(text.begin(), text.end(), letters.data_ptr<std::uint8_t>());
  muster::broadcast(letters, {.src = 0});
  const auto* first = letters.data_ptr<std::uint8_t>();
  return std::string(first, first + letters.numel());
}

/// Samples [begin, end) of the epoch's common order: what all ranks' shares of a batch are
/// together.
std::vector<std::int64_t> whole_batch(const muster::DistributedSampler& everything,
                                      std::int64_t begin, std::int64_t end) {
  const auto order = everything.indices();
  return {order.begin() + begin, order.begin() + end};
}

}  // namespace

Check same_bits_everywhere(const Network& network) {
  const auto mine = bytes_of(network);
  auto all = torch::empty({muster::get_world_size(), mine.numel()}, torch::kUInt8);
  muster::all_gather_into_tensor(all, mine);
  const auto different =
      worst_of_all(static_cast<double>(differing_bytes(all, mine.expand_as(all))));
  return {different == 0, std::to_string(mine.numel()) + " bytes of weights on each of " +
                              std::to_string(muster::get_world_size()) + " ranks, " +
                              print("%.0f differ", different)};
}

Check like_one_process(const Dataset& train, std::int64_t batch) {
  const auto data = train.to(torch::kFloat64);
  torch::manual_seed(7);
  Network shared, alone;
  shared->to(torch::kFloat64);
  alone->to(torch::kFloat64);
  Trainer together(shared, Averaging::all_ranks);
  {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < alone->parameters().size(); ++i)
      alone->parameters()[i].copy_(shared->parameters()[i]);
  }
  Trainer reference(alone, Averaging::nobody);

  const muster::DistributedSampler sampler(train.size());
  const muster::DistributedSampler everything(train.size(), {.num_replicas = 1, .rank = 0});
  const auto mine = sampler.indices();
  const auto share = batch / muster::get_world_size();
  const auto start = flat_weights(shared);
  double worst = 0;
  for (int step = 0; step < kSteps; ++step) {
    together.step(data.select({mine.begin() + step * share, mine.begin() + (step + 1) * share}));
    if (muster::get_rank() != 0) continue;
    reference.step(data.select(whole_batch(everything, step * batch, (step + 1) * batch)));
    worst = std::max(worst, relative_difference(flat_weights(shared), flat_weights(alone)));
  }
  worst = worst_of_all(std::isfinite(worst) ? worst : 1.0);
  const double moved = relative_difference(flat_weights(shared), start);
  return {worst <= kTolerance && moved >= kMoved,
          print("the weights' largest relative difference is %.1e", worst) +
              print(", at most %.0e allowed", kTolerance) + print("; they moved by %.2f", moved)};
}

Check survives_checkpoint(Network& network) {
  const auto before = bytes_of(network);
  const auto name = "muster-digits-" + std::to_string(::getpid()) + ".pt";
  const auto path = from_rank_0(std::filesystem::temp_directory_path() / name);
  if (muster::get_rank() == 0) torch::save(network, path);
  muster::barrier();
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : network->parameters()) parameter.zero_();
  }
  torch::load(network, path);
  muster::barrier();
  std::error_code ignored;
  if (muster::get_rank() == 0) std::filesystem::remove(path, ignored);
  const auto different =
      worst_of_all(static_cast<double>(differing_bytes(bytes_of(network), before)));
  return {different == 0, "rank 0 saved, " + std::to_string(muster::get_world_size()) +
                              " ranks loaded, " + print("%.0f bytes differ", different)};
}

Check recognises(Network& network, const Dataset& held_out) {
  const auto right = accuracy(network, held_out);
  return {right >= kAccuracy, print("%.2f %% of ", 100 * right) + std::to_string(held_out.size()) +
                                  print(" images, at least %.0f %% asked", 100 * kAccuracy)};
}
