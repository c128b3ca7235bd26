// SPDX-License-Identifier: BSD-3-Clause
// Gradients of sharded parameters: collected whole, reduced, and added to those of the shards.

#include <ATen/ScalarOps.h>
#include <torch/types.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "core/group/call/quantized.h"
#include "core/group/calls.h"
#include "core/group/group_core.h"
#include "core/group/scopes.h"
#include "train/fsdp/sharded_memory.h"
#include "train/fsdp/sharded_parameters.h"
#include "train/modules/packed_broadcast.h"

namespace muster::parallel {
namespace {

constexpr int kDistinctLengths = 64;  // of otherwise equally long reductions

template <class Number>
void scale_to(Number* to, const Number* from, std::int64_t elements, Number factor) {
  for (std::int64_t i = 0; i < elements; ++i) to[i] = from[i] * factor;
}

}  // namespace

void ShardedParameters::collect_gradients(bool will_wait) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < size(); ++i) {
    at::Tensor gradient = std::exchange(parameters_[i].tensor.mutable_grad(), at::Tensor());
    if (!gradient.defined()) continue;
    if (gradient.is_sparse()) gradient = gradient.to_dense();
    if (sums_[i].defined())
      sums_[i].add_(gradient);
    else
      sums_[i] = will_wait ? gradient.to(flats_[places_[i].flat].reduced_dtype) : gradient;
  }
}

void ShardedParameters::drop_gradients() {
  for (at::Tensor& sum : sums_) sum.reset();
  for (Flat& flat : flats_) flat.partial.reset();
  reductions_.clear();
}

/// As for DistributedDataParallel: a network needs no core, but within a host the calls would take
/// one from the threads that compute.
bool ShardedParameters::reduces_beside_computation() const {
  const Group& last = options_.replicas ? options_.replicas : options_.group;
  const auto device = flats_.front().options.device().type();
  return group::scope_on(core_of(last), BackendScope::manual_progress, device) == nullptr;
}

void ShardedParameters::start_reduction() {
  const at::NoGradGuard no_grad;
  if (flats_.empty()) return;
  const bool async_op = reduces_beside_computation();
  for (std::size_t number = 0; number < flats_.size(); ++number) {
    const auto& indices = flats_[number].indices;
    if (std::any_of(indices.begin(), indices.end(),
                    [this](std::size_t i) { return parameters_[i].tensor.requires_grad(); }))
      start_reduction(number, async_op);
    if (!async_op) finish_reduction();
  }
}

/// The gradients in the order of ranks: each rank's shard is followed by one number per parameter,
/// which is positive if any rank has a gradient of it, so that one call does both. Padding after it
/// makes the length depend on these parameters' number.
at::Tensor ShardedParameters::staged_gradients(Flat& flat, ByteMeter::MeterScope& staging) {
  const int ranks = options_.group->size();
  const int copies = options_.replicas ? options_.replicas->size() : 1;
  const auto parameters = static_cast<std::int64_t>(flat.indices.size());
  const std::int64_t length = flat.shard_elements + parameters + options_.number % kDistinctLengths;
  const auto options = flat.options.dtype(flat.reduced_dtype);
  const bool by_rows = options_.shard_dims && options.device().is_cpu();
  at::Tensor all = by_rows ? unset_memory(ranks * length, options).view({ranks, -1})
                           : flat_memory(ranks * length, options).view({ranks, -1});
  if (by_rows) clear_padding(flat, all);
  const double divisor = communication_.divisor.value_or(static_cast<double>(ranks) * copies);
  staging.add(bytes_of(all));
  const bool all_used =
      std::ranges::all_of(flat.indices, [this](std::size_t i) { return sums_[i].defined(); });
  if (all_used) all.narrow(1, flat.shard_elements, parameters).fill_(1);
  for (std::int64_t slot = 0; slot < parameters; ++slot) {
    const std::size_t i = flat.indices[static_cast<std::size_t>(slot)];
    if (!sums_[i].defined()) continue;
    if (!all_used) all.select(1, flat.shard_elements + slot).fill_(1);
    stage_gradient(i, all, 1.0 / divisor);
  }
  return all;
}

/// Sets to 0 what no gradient will be written to: a parameter without one, and padding.
void ShardedParameters::clear_padding(const Flat& flat, const at::Tensor& lines) const {
  const auto width = static_cast<std::int64_t>(lines.element_size());
  for (int rank = 0; rank < options_.group->size(); ++rank) {
    std::byte* const line =
        static_cast<std::byte*>(lines.mutable_data_ptr()) + rank * lines.stride(0) * width;
    std::int64_t at = 0;
    const auto clear_until = [&](std::int64_t end) {
      if (end > at) std::memset(line + at * width, 0, static_cast<std::size_t>((end - at) * width));
    };
    for (const std::size_t i : flat.indices) {
      const ShardPlace& place = places_[i];
      clear_until(place.in_shard);
      at = place.in_shard;
      if (!sums_[i].defined() || place.elements == 0) continue;
      const std::int64_t size = sizes_of(i)[static_cast<std::size_t>(place.dim)];
      at += chunk_of(size, options_.group->size(), rank).count * (place.elements / size);
    }
    clear_until(lines.size(1));
  }
}

/// Divides in the dtype of the reduction.
void ShardedParameters::stage_gradient(std::size_t index, const at::Tensor& lines, double factor) {
  const at::Tensor gradient = std::exchange(sums_[index], at::Tensor());
  if (has_plain_rows(index, gradient) && lines.is_cpu()) {
    const auto put_rows = [&]<class Number>(Number) {
      each_rank(index, [&](int rank, std::int64_t first, std::int64_t elements) {
        scale_to(
            lines.mutable_data_ptr<Number>() + rank * lines.stride(0) + places_[index].in_shard,
            gradient.const_data_ptr<Number>() + first, elements, static_cast<Number>(factor));
      });
    };
    if (gradient.scalar_type() == lines.scalar_type()) {
      if (lines.scalar_type() == at::kFloat) return put_rows(0.f);
      if (lines.scalar_type() == at::kDouble) return put_rows(0.);
    }
  }
  const at::Tensor scale = at::native::wrapped_scalar_tensor(factor);
  const auto put = [&](at::Tensor to, const at::Tensor& from) {
    from.scalar_type() == to.scalar_type() ? at::mul_out(to, from, scale)
                                           : to.copy_(from).mul_(scale);
  };
  if (places_[index].dim != kFlat) {
    for (const auto& [from, to] : row_blocks(index, gradient, lines)) put(to, from);
    return;
  }
  const at::Tensor values = in_memory_order(gradient, whole_[index]);
  for (const ShardRange& range : ranges_of(index))
    put(lines.select(0, range.rank).narrow(0, range.in_shard, range.elements),
        values.narrow(0, range.in_parameter, range.elements));
}

/// Compressed gradients travel by a call of their own: the numbers behind them (see
/// staged_gradients) would round to zero beside large gradients.
std::vector<WorkRef> ShardedParameters::sum_over_ranks(const Flat& flat, const at::Tensor& lines,
                                                       const at::Tensor& reduced,
                                                       bool async_op) const {
  ProcessGroup& group = *options_.group;
  const ReduceScatterOptions options{.async_op = async_op,
                                     .compression = communication_.gradient_compression};
  if (options.compression == Compression::none)
    return {submit(group, calls::reduce_scatter_tensor(group, reduced, lines.view({-1}), options))};
  const auto parts = [&](std::int64_t first, std::int64_t count) {
    TensorList list;
    for (const at::Tensor& line : lines.unbind()) list.push_back(line.narrow(0, first, count));
    return list;
  };
  const std::int64_t gradients = flat.shard_elements, others = reduced.numel() - gradients;
  const TensorList inputs = parts(0, gradients);
  const at::Tensor sums = reduced.narrow(0, 0, gradients);
  Call call = calls::reduce_scatter(group, sums, inputs, options);
  WorkRef work = group::reduce_scatter_quantized(tagged(call), sums, inputs, options);
  return {std::move(work),
          submit(group, calls::reduce_scatter(group, reduced.narrow(0, gradients, others),
                                              parts(gradients, others), {.async_op = async_op}))};
}

/// The same among the replicas.
std::vector<WorkRef> ShardedParameters::sum_over_replicas(const Flat& flat,
                                                          const at::Tensor& reduced,
                                                          bool async_op) const {
  ProcessGroup& group = *options_.replicas;
  const AllReduceOptions options{.async_op = async_op,
                                 .compression = communication_.gradient_compression};
  if (options.compression == Compression::none)
    return {submit(group, calls::all_reduce(group, reduced, options))};
  const std::int64_t gradients = flat.shard_elements, others = reduced.numel() - gradients;
  const at::Tensor sums = reduced.narrow(0, 0, gradients);
  Call call = calls::all_reduce(group, sums, options);
  WorkRef work = group::all_reduce_quantized(tagged(call), sums, options);
  return {std::move(work),
          submit(group, calls::all_reduce(group, reduced.narrow(0, gradients, others),
                                          {.async_op = async_op}))};
}

/// With replicas, only the call among them is asynchronous.
void ShardedParameters::start_reduction(std::size_t number, bool async_op) {
  Flat& flat = flats_[number];
  ByteMeter::MeterScope staging(options_.meter->staging);
  at::Tensor all, reduced;
  {
    ByteMeter::MeterScope whole_ones(options_.meter->staging);
    for (const std::size_t i : flat.indices) whole_ones.add(bytes_of(sums_[i]));
    all = staged_gradients(flat, staging);
    reduced = unset_memory(all.size(1), flat.options.dtype(flat.reduced_dtype));
    staging.add(bytes_of(reduced));
  }
  std::vector<WorkRef> works;
  if (communication_.reduce_scatter)
    communication_.reduce_scatter(reduced, all.view({-1}), options_.group);
  else
    works = sum_over_ranks(flat, all, reduced, async_op && !options_.replicas);
  if (flat.partial.defined()) reduced.add_(std::exchange(flat.partial, at::Tensor()));
  if (options_.replicas) {
    if (!communication_.reduce_over_replicas) {
      flat.partial = reduced;
      return;
    }
    if (communication_.all_reduce)
      communication_.all_reduce(reduced, options_.replicas);
    else
      works = sum_over_replicas(flat, reduced, async_op);
  }
  reductions_.push_back({number, all, reduced, std::move(works), std::move(staging)});
}

void ShardedParameters::finish_reduction() {
  const at::NoGradGuard no_grad;
  for (Reduction& each : std::exchange(reductions_, {})) {
    for (const WorkRef& work : each.works)
      if (work) work->wait();
    const Flat& flat = flats_[each.flat];
    if (communication_.after_reduction)
      communication_.after_reduction(each.reduced.narrow(0, 0, flat.shard_elements));
    add_to_gradients(flat, each.reduced);
  }
}

/// `reduced` is a shard of the averages and what follows it.
void ShardedParameters::add_to_gradients(const Flat& flat, const at::Tensor& reduced) {
  const auto parameters = static_cast<std::int64_t>(flat.indices.size());
  const at::Tensor flags = reduced.narrow(0, flat.shard_elements, parameters);
  const at::Tensor used =
      (flags.is_complex() ? at::real(flags) : flags).to(at::kCPU, at::kFloat).contiguous();
  const at::Tensor averages = reduced.to(flat.shard.options().pinned_memory(false));
  for (std::int64_t slot = 0; slot < parameters; ++slot) {
    if (used.const_data_ptr<float>()[slot] == 0) continue;
    const std::size_t i = flat.indices[static_cast<std::size_t>(slot)];
    const at::Tensor average =
        with_own_storage(shaped_like(averages, own_range(i).in_shard, shards_[i]));
    if (gradient_sink_) {
      gradient_sink_(i, average);
      continue;
    }
    at::Tensor& sum = is_unsharded_ ? shard_gradients_[i] : parameters_[i].tensor.mutable_grad();
    sum.defined() ? void(sum.add_(average)) : void(sum = average);
  }
}

}  // namespace muster::parallel
