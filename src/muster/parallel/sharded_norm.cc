#include "muster/parallel/sharded_norm.h"

#include <torch/types.h>

#include <cmath>
#include <limits>

#include "muster/collectives.h"
#include "muster/group/errors.h"
#include "muster/parallel/sharded_unit.h"

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

}  // namespace

double clip_grad_norm(const std::vector<ShardedUnit*>& units, const std::vector<at::Tensor>& others,
                      double max_norm, double norm_type) {
  if (units.empty())
    group::invalid("FullyShardedDataParallel: clip_grad_norm_ of a model that is not sharded");
  if (!(norm_type > 0)) group::invalid("FullyShardedDataParallel: norm_type must be more than 0");
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> mine;
  for (ShardedUnit* unit : units)
    for (std::size_t i = 0; i < unit->parameters().size(); ++i)
      if (const at::Tensor& gradient = unit->parameters()[i].grad(); gradient.defined())
        mine.push_back(gradient);
  const Group& group = units.front()->group();
  at::Device device = at::kCPU;  // ranks' devices may differ only in their index
  for (ShardedUnit* unit : units)
    if (unit->parameters().size() > 0) device = unit->parameters()[0].device();
  const double shards = part_of_norm(mine, norm_type);
  double whole = part_of_norm(others, norm_type);
  const bool is_max = std::isinf(norm_type);
  if (const Group& copies = units.front()->replicas())
    whole = is_max ? over_ranks(whole, ReduceOp::MAX, copies, device)
                   : over_ranks(whole / copies->size(), ReduceOp::SUM, copies, device);
  const double total =
      is_max ? over_ranks(std::isnan(whole) || whole > shards ? whole : shards, ReduceOp::MAX,
                          group, device)
             : std::pow(over_ranks(shards + whole / group->size(), ReduceOp::SUM, group, device),
                        1 / norm_type);
  if (const double factor = max_norm / (total + 1e-6); !(factor >= 1)) {
    for (const at::Tensor& gradient : mine) gradient.mul_(factor);
    for (const at::Tensor& gradient : others) gradient.mul_(factor);
  }
  return total;
}

}  // namespace muster::parallel
