// SPDX-License-Identifier: BSD-3-Clause
#include "train/ddp/reducer/gradient_layout.h"

#include <algorithm>
#include <numeric>

#include "core/group/errors.h"
#include "train/modules/packed_broadcast.h"

namespace muster::parallel {

GradientLayout::GradientLayout(std::vector<at::Tensor> parameters, const ReducerOptions& options,
                               bool any_operation)
    : parameters_(std::move(parameters)), options_(options), any_operation_(any_operation) {
  for (std::size_t i = 0; i < size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    if (!parameter.defined() || !parameter.requires_grad() || !parameter.is_leaf())
      group::invalid("a reducer's parameters must be leaves that require gradients; " + name(i) +
                     " is not");
    const auto type = parameter.device().type();
    if (std::ranges::find(device_types_, type) == device_types_.end())
      device_types_.push_back(type);
  }
  lay_out_first();
}

std::string GradientLayout::name(std::size_t index) const {
  return index < options_.names.size() ? options_.names[index]
                                       : "parameter " + std::to_string(index);
}

std::string GradientLayout::names_of(const std::vector<std::size_t>& indices) const {
  std::string text;
  for (const std::size_t index : indices) {
    if (!text.empty()) text += ", ";
    text += name(index);
  }
  return text;
}

at::ScalarType GradientLayout::reduction_dtype(const at::Tensor& parameter) const {
  return parameter.is_floating_point() ? options_.reduce_dtype.value_or(parameter.scalar_type())
                                       : parameter.scalar_type();
}

bool GradientLayout::is_reduced_alone(const at::Tensor& parameter) const {
  return !hooked_ && !options_.gradient_as_bucket_view && any_operation_ && parameter.is_cpu() &&
         parameter.is_floating_point() && reduction_dtype(parameter) == parameter.scalar_type() &&
         static_cast<std::int64_t>(parameter.nbytes()) >= options_.in_place_bytes;
}

const at::Tensor& GradientLayout::view(std::size_t index) {
  GradientBucket& bucket = bucket_of(index);
  if (!bucket.memory.defined()) allocate_memory(bucket);
  return bucket.views[places_[index].slot];
}

std::vector<ParameterFacts> GradientLayout::facts() const {
  std::vector<ParameterFacts> all;
  for (std::size_t i = 0; i < size(); ++i) {
    const at::ScalarType dtype = reduction_dtype(parameters_[i]);
    all.push_back(
        {.bytes = parameters_[i].numel() * static_cast<std::int64_t>(c10::elementSize(dtype)),
         .dtype = dtype,
         .device = parameters_[i].device(),
         .alone = is_sparse(i) || is_reduced_alone(parameters_[i])});
  }
  return all;
}

void GradientLayout::lay_out(const std::vector<BucketIndices>& plan) {
  const at::NoGradGuard no_grad;
  std::vector<GradientBucket> made;
  places_.assign(size(), {});
  for (const BucketIndices& indices : plan) {
    GradientBucket bucket;
    bucket.indices = indices;
    bucket.sparse = is_sparse(indices.front());
    bucket.pending = indices.size();
    for (std::size_t slot = 0; slot < indices.size(); ++slot)
      places_[indices[slot]] = {made.size(), slot};
    if (!bucket.sparse) {
      bucket.dtype = reduction_dtype(parameters_[indices.front()]);
      bucket.alone = is_reduced_alone(parameters_[indices.front()]);
      if (!bucket.alone) allocate_memory(bucket);
    }
    made.push_back(std::move(bucket));
  }
  buckets_ = std::move(made);
}

void GradientLayout::allocate_memory(GradientBucket& bucket) {
  const at::NoGradGuard no_grad;
  std::int64_t elements = 0;
  for (const std::size_t index : bucket.indices) elements += parameters_[index].numel();
  const auto of_gradients =
      parameters_[bucket.indices.front()].options().requires_grad(false).dtype(bucket.dtype);
  const std::int64_t parts = c10::isComplexType(bucket.dtype) ? 2 : 1;
  bucket.memory =
      flat_memory(elements * parts, of_gradients.dtype(c10::toRealValueType(bucket.dtype)));
  const at::Tensor gradients =
      at::empty({0}, of_gradients).set_(bucket.memory.storage(), 0, {elements}, {1});
  std::int64_t at = 0;
  for (const std::size_t index : bucket.indices) {
    bucket.views.push_back(shaped_like(gradients, at, parameters_[index]));
    at += parameters_[index].numel();
    at::Tensor& gradient = parameters_[index].mutable_grad();
    if (options_.gradient_as_bucket_view && gradient.defined()) {
      bucket.views.back().copy_(gradient.detach());
      gradient = bucket.views.back();
    }
  }
}

void GradientLayout::lay_out_first() {
  std::vector<std::size_t> order(size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  // If the first pass determines the order, it uses as few buckets as possible.
  const bool will_rebuild = options_.static_graph || !options_.find_unused_parameters;
  auto plan = will_rebuild ? plan_buckets(facts(), order, INT64_MAX, INT64_MAX)
                           : plan_buckets(facts(), order, options_.first_bucket_bytes,
                                          options_.bucket_cap_bytes);
  // Gradients come in reverse parameter order, so a bucket is complete with its first parameter's
  // gradient.
  const auto first_of = [](const BucketIndices& indices) {
    return *std::min_element(indices.begin(), indices.end());
  };
  std::stable_sort(plan.begin(), plan.end(),
                   [&](const auto& a, const auto& b) { return first_of(a) > first_of(b); });
  lay_out(plan);
}

void GradientLayout::lay_out_by(const std::vector<std::size_t>& order) {
  lay_out(plan_buckets(facts(), order, options_.first_bucket_bytes, options_.bucket_cap_bytes));
}

std::vector<std::size_t> GradientLayout::in_place_sizes() const {
  std::vector<std::size_t> bytes;
  for (const GradientBucket& bucket : buckets_)
    if (bucket.alone) bytes.push_back(parameters_[bucket.indices.front()].nbytes());
  return bytes;
}

std::vector<std::int64_t> GradientLayout::bucket_bytes() const {
  std::vector<std::int64_t> bytes;
  for (const GradientBucket& bucket : buckets_) {
    const at::Tensor& reduced_memory =
        bucket.sparse || bucket.alone ? parameters_[bucket.indices.front()] : bucket.memory;
    bytes.push_back(static_cast<std::int64_t>(reduced_memory.nbytes()));
  }
  return bytes;
}

}  // namespace muster::parallel
