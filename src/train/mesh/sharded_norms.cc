// SPDX-License-Identifier: BSD-3-Clause
#include "train/mesh/sharded_norms.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/group/errors.h"
#include "muster/collectives.h"

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

double over_all(double mine, ReduceOp op, const std::vector<Group>& groups, at::Device device) {
  for (const Group& group : groups) mine = over_ranks(mine, op, group, device);
  return mine;
}

/// Collective. All ranks that hold some of the part's tensors, sorted.
std::vector<std::int64_t> holders_of(const NormPart& part, at::Device device) {
  at::Tensor all;
  for (const auto& groups : {part.shards, part.replicas})
    for (const Group& group : groups) {
      if (!all.defined()) {
        const std::vector<int>& ranks = group->ranks();
        all = at::tensor(std::vector<std::int64_t>(ranks.begin(), ranks.end())).to(device);
        continue;
      }
      const at::Tensor mine = all;
      all = at::empty({group->size() * mine.numel()}, mine.options());
      all_gather_into_tensor(all, mine, {.group = group});
    }
  all = all.cpu();
  std::vector<std::int64_t> holders(all.const_data_ptr<std::int64_t>(),
                                    all.const_data_ptr<std::int64_t>() + all.numel());
  std::ranges::sort(holders);
  return holders;
}

/// Collective. Refuses parts that lie on different sets of ranks: ranks would compute different
/// norms, and their parameters would drift apart. Every rank with such parts throws.
void check_same_holders(const std::string& who, const std::vector<NormPart>& parts,
                        at::Device device) {
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
          who + " lie on different ranks: some on ranks " + text(first) + ", some on ranks " +
          text(others) +
          ". No rank can see the norm of all of them; clip those of each set of ranks by "
          "themselves");
}

}  // namespace

double norm_of_parts(const std::string& who, const std::vector<NormPart>& parts,
                     const std::vector<at::Tensor>& others, double norm_type, at::Device device) {
  check_same_holders(who, parts, device);
  const bool is_max = std::isinf(norm_type);
  const ReduceOp op = is_max ? ReduceOp::MAX : ReduceOp::SUM;
  const auto add = [&](double& sum, double more) {
    if (!is_max)
      sum += more;
    else if (std::isnan(more) || more > sum)
      sum = more;
  };
  // Tensors that every rank holds whole count once: by their mean over the ranks of the first part,
  // since all parts lie on the same ranks.
  const NormPart& first = parts.front();
  double whole = part_of_norm(others, norm_type);
  if (!is_max)
    for (const auto& groups : {first.shards, first.replicas})
      for (const Group& group : groups) whole /= group->size();
  whole = over_all(whole, op, first.replicas, device);
  double total = 0;
  for (const NormPart& part : parts) {
    double mine = part_of_norm(part.tensors, norm_type);
    if (&part == &first) add(mine, whole);
    add(total, over_all(mine, op, part.shards, device));
  }
  // Replicas may have added in another order.
  if (parts.size() > 1 || !first.replicas.empty() || first.shards.size() > 1) {
    total = over_all(total, ReduceOp::MAX, first.shards, device);
    total = over_all(total, ReduceOp::MAX, first.replicas, device);
  }
  return is_max ? total : std::pow(total, 1 / norm_type);
}

void scale_to_norm(const std::vector<NormPart>& parts, const std::vector<at::Tensor>& others,
                   double norm, double max_norm) {
  const double factor = max_norm / (norm + 1e-6);
  if (factor >= 1) return;
  for (const NormPart& part : parts)
    for (const at::Tensor& tensor : part.tensors) tensor.mul_(factor);
  for (const at::Tensor& tensor : others) tensor.mul_(factor);
}

}  // namespace muster::parallel
