// SPDX-License-Identifier: BSD-3-Clause
#include "train/fsdp/sharded_norm.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "core/group/errors.h"
#include "muster/collectives.h"
#include "train/fsdp/sharded_unit.h"

namespace muster::parallel {
namespace {

/// Sum of the elements' absolute values to the power of `type`, or with infinity their maximum; NaN
/// if any element is.
double part_of_norm(const std::vector<at::Tensor>& gradients, double type) {
  double sum = 0;
  for (const at::Tensor& gradient : gradients) {
    if (gradient.numel() == 0) continue;
    const auto wide = gradient.is_complex() ? at::kComplexDouble : at::kDouble;
    const double norm =
        at::abs(at::linalg_vector_norm(gradient, type, {}, false, wide)).item<double>();
    if (std::isinf(type))
      sum = norm > sum || std::isnan(norm) ? norm : sum;
    else
      sum += std::pow(norm, type);
  }
  return sum;
}

/// Reduces one number per rank; NaN if any is.
double over_ranks(double mine, ReduceOp op, const Group& group, at::Device device) {
  const at::Tensor both =
      at::tensor({std::isnan(mine) ? 0. : mine, std::isnan(mine) ? 1. : 0.}, at::kDouble)
          .to(device);
  all_reduce(both, {.op = op, .group = group});
  return both[1].item<double>() > 0 ? std::numeric_limits<double>::quiet_NaN()
                                    : both[0].item<double>();
}

/// Units whose parameters are divided among the same ranks, and have the same replicas.
struct NormPart {
  Group group, replicas;
  std::vector<at::Tensor> gradients;  ///< this rank's shards
};

/// In the units' order, which is the same on all ranks.
std::vector<NormPart> parts_of(const std::vector<ShardedUnit*>& units) {
  std::vector<NormPart> parts;
  for (ShardedUnit* unit : units) {
    auto found = std::ranges::find_if(parts, [&](const NormPart& part) {
      return part.group == unit->group() && part.replicas == unit->replicas();
    });
    if (found == parts.end())
      found = parts.insert(parts.end(), {unit->group(), unit->replicas(), {}});
    for (std::size_t i = 0; i < unit->parameters().size(); ++i)
      if (const at::Tensor& gradient = unit->parameters()[i].grad(); gradient.defined())
        found->gradients.push_back(gradient);
  }
  return parts;
}

/// Collective. All ranks that hold some of the part's parameters, sorted.
std::vector<std::int64_t> holders_of(const NormPart& part, at::Device device) {
  const std::vector<int>& ranks = part.group->ranks();
  const auto mine = at::tensor(std::vector<std::int64_t>(ranks.begin(), ranks.end())).to(device);
  at::Tensor all = mine;
  if (part.replicas) {
    all = at::empty({part.replicas->size() * mine.numel()}, mine.options());
    all_gather_into_tensor(all, mine, {.group = part.replicas});
  }
  all = all.cpu();
  std::vector<std::int64_t> holders(all.const_data_ptr<std::int64_t>(),
                                    all.const_data_ptr<std::int64_t>() + all.numel());
  std::ranges::sort(holders);
  return holders;
}

/// Collective. Refuses parts that lie on different sets of ranks: ranks would compute different
/// norms, and their parameters would drift apart. Every rank with such parts throws.
void check_same_holders(const std::vector<NormPart>& parts, at::Device device) {
  if (parts.size() == 1) return;
  const auto first = holders_of(parts.front(), device);
  const auto text = [](const std::vector<std::int64_t>& ranks) {
    std::string all;
    for (const auto rank : ranks) all += (all.empty() ? "" : ", ") + std::to_string(rank);
    return all;
  };
  for (std::size_t i = 1; i < parts.size(); ++i)
    if (const auto others = holders_of(parts[i], device); others != first)
      group::invalid(
          "FullyShardedDataParallel: clip_grad_norm_ of a model whose units lie on different "
          "ranks: some on ranks " +
          text(first) + ", some on ranks " + text(others) +
          ". No rank can see the norm of all of them; clip the modules of each set of ranks by "
          "themselves");
}

}  // namespace

double clip_grad_norm(const std::vector<ShardedUnit*>& units, const std::vector<at::Tensor>& others,
                      double max_norm, double norm_type) {
  if (units.empty())
    group::invalid("FullyShardedDataParallel: clip_grad_norm_ of a model that is not sharded");
  if (!(norm_type > 0)) group::invalid("FullyShardedDataParallel: norm_type must be more than 0");
  const at::NoGradGuard no_grad;
  at::Device device = at::kCPU;  // ranks' devices may differ only in their index
  for (ShardedUnit* unit : units)
    if (unit->parameters().size() > 0) device = unit->parameters()[0].device();
  const std::vector<NormPart> parts = parts_of(units);
  check_same_holders(parts, device);
  const bool is_max = std::isinf(norm_type);
  const ReduceOp op = is_max ? ReduceOp::MAX : ReduceOp::SUM;
  const auto add = [&](double& sum, double more) {
    if (!is_max)
      sum += more;
    else if (std::isnan(more) || more > sum)
      sum = more;
  };
  // Parameters that every rank holds whole count once: by their mean over the ranks of the first
  // part, since all parts lie on the same ranks.
  double whole = part_of_norm(others, norm_type);
  if (const Group& copies = parts.front().replicas)
    whole = over_ranks(is_max ? whole : whole / copies->size(), op, copies, device);
  if (!is_max) whole /= parts.front().group->size();
  double total = 0;
  for (const NormPart& part : parts) {
    double mine = part_of_norm(part.gradients, norm_type);
    if (&part == &parts.front()) add(mine, whole);
    add(total, over_ranks(mine, op, part.group, device));
  }
  if (!is_max) total = std::pow(total, 1 / norm_type);
  if (const double factor = max_norm / (total + 1e-6); !(factor >= 1)) {
    for (const NormPart& part : parts)
      for (const at::Tensor& gradient : part.gradients) gradient.mul_(factor);
    for (const at::Tensor& gradient : others) gradient.mul_(factor);
  }
  return total;
}

}  // namespace muster::parallel
