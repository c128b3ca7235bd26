#include <torch/nn/functional/linear.h>
#include <torch/nn/modules/linear.h>

#include <ostream>
#include <string>

#include "muster/tensor_parallel.h"
#include "train/tensor/division.h"

namespace muster {
namespace {

using at::Tensor;
using tensor_parallel::chunk_of;
using tensor_parallel::divided_parameter;

std::string text_of(const char* layer, std::int64_t in, std::int64_t out,
                    const ProcessGroup& group) {
  return std::string(layer) + "(in_features=" + std::to_string(in) +
         ", out_features=" + std::to_string(out) + ", ranks=" + std::to_string(group.size()) + ")";
}

/// What one process has.
torch::nn::Linear whole_linear(std::int64_t in, std::int64_t out, bool bias) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(bias));
}

}  // namespace

ColumnParallelLinearImpl::ColumnParallelLinearImpl(std::int64_t in_features,
                                                   std::int64_t out_features,
                                                   const ColumnParallelLinearOptions& options)
    : in_features_(in_features), out_features_(out_features), options_(options) {
  options_.group = tensor_parallel::member_group(options.group, "ColumnParallelLinear");
  ColumnParallelLinearImpl::reset();
}

void ColumnParallelLinearImpl::reset() {
  const auto whole = whole_linear(in_features_, out_features_, options_.bias);
  const tensor_parallel::ParameterOptions as{options_.dtype, options_.device};
  weight = register_parameter("weight", divided_parameter(whole->weight, 0, *options_.group, as));
  bias = options_.bias
             ? register_parameter("bias", divided_parameter(whole->bias, 0, *options_.group, as))
             : register_parameter("bias", {}, false);
}

void ColumnParallelLinearImpl::pretty_print(std::ostream& stream) const {
  stream << text_of("muster::ColumnParallelLinear", in_features_, out_features_, *options_.group);
}

Tensor ColumnParallelLinearImpl::forward(const Tensor& input) {
  const Group& group = options_.group;
  tensor_parallel::check_last_dimension(
      input, in_features_, text_of("ColumnParallelLinear", in_features_, out_features_, *group));
  const Tensor all = options_.sequence_parallel
                         ? gather_from_sequence_parallel_region(input, group, options_.sequence_dim)
                         : copy_to_tensor_parallel_region(input, group);
  Tensor part = torch::nn::functional::linear(all, weight, bias);
  if (!options_.gather_output) return part;
  return gather_from_tensor_parallel_region(part, group, -1, out_features_);
}

RowParallelLinearImpl::RowParallelLinearImpl(std::int64_t in_features, std::int64_t out_features,
                                             const RowParallelLinearOptions& options)
    : in_features_(in_features), out_features_(out_features), options_(options) {
  options_.group = tensor_parallel::member_group(options.group, "RowParallelLinear");
  RowParallelLinearImpl::reset();
}

void RowParallelLinearImpl::reset() {
  const auto whole = whole_linear(in_features_, out_features_, options_.bias);
  const tensor_parallel::ParameterOptions as{options_.dtype, options_.device};
  weight = register_parameter("weight", divided_parameter(whole->weight, 1, *options_.group, as));
  bias = options_.bias
             ? register_parameter("bias", tensor_parallel::whole_parameter(whole->bias, as))
             : register_parameter("bias", {}, false);
}

void RowParallelLinearImpl::pretty_print(std::ostream& stream) const {
  stream << text_of("muster::RowParallelLinear", in_features_, out_features_, *options_.group);
}

Tensor RowParallelLinearImpl::forward(const Tensor& input) {
  const Group& group = options_.group;
  const bool parallel = options_.input_is_parallel;
  tensor_parallel::check_last_dimension(
      input, parallel ? chunk_of(in_features_, *group).count : in_features_,
      text_of("RowParallelLinear", in_features_, out_features_, *group),
      parallel ? ", this rank's part; input_is_parallel = false takes whole inputs" : "");
  const Tensor part = parallel ? input : scatter_to_tensor_parallel_region(input, group);
  const Tensor product = torch::nn::functional::linear(part, weight);
  if (!options_.sequence_parallel) {
    const Tensor sum = reduce_from_tensor_parallel_region(product, group);
    return bias.defined() ? sum + bias : sum;
  }
  const Tensor sum =
      reduce_scatter_to_sequence_parallel_region(product, group, options_.sequence_dim);
  // Each rank's gradient of the bias is that of its part of the sequence.
  return bias.defined() ? sum + copy_to_tensor_parallel_region(bias, group) : sum;
}

}  // namespace muster
