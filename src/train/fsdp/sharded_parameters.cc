// SPDX-License-Identifier: BSD-3-Clause
#include "train/fsdp/sharded_parameters.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "core/group/calls.h"
#include "core/group/errors.h"
#include "core/group/group_core.h"
#include "muster/collectives.h"
#include "muster/shared_memory.h"
#include "train/modules/packed_broadcast.h"

namespace muster::parallel {
namespace {

// Alignment of whole parameters and shards, for the widest loads.
constexpr std::int64_t kAlignment = 64;  // bytes
constexpr int kDistinctLengths = 64;     // of otherwise equally long reductions

std::int64_t rounded_up(std::int64_t value, std::int64_t step) {
  return (value + step - 1) / step * step;
}

/// The elements of `tensor` as one dimension, in the memory order of `like`; a copy if the layouts
/// differ.
at::Tensor in_memory_order(const at::Tensor& tensor, const at::Tensor& like) {
  const auto flat = [](const at::Tensor& dense) {
    return at::empty({0}, dense.options())
        .set_(dense.storage(), dense.storage_offset(), {dense.numel()}, {1});
  };
  const at::Tensor plain = tensor.detach();
  if (plain.strides() == like.strides() && plain.is_non_overlapping_and_dense() &&
      !plain.is_neg() && !plain.is_conj())
    return flat(plain);
  at::Tensor copy = at::empty_strided(like.sizes(), like.strides(), plain.options());
  copy.copy_(plain);
  return flat(copy);
}

/// Allocates memory for `tensor` after it was freed.
void allocate_memory(const at::Tensor& tensor) {
  const at::Tensor fresh = unset_memory(tensor.numel(), tensor.options());
  tensor.storage().set_nbytes(fresh.storage().nbytes());
  tensor.storage().set_data_ptr_noswap(
      fresh.storage().set_data_ptr(at::DataPtr(nullptr, tensor.device())));
}

void free_memory(const at::Tensor& tensor) {
  tensor.storage().set_data_ptr_noswap(at::DataPtr(nullptr, tensor.device()));
  tensor.storage().set_nbytes(0);
}

/// A shard was changed by other means than its parameter.
void note_change(const at::Tensor& parameter) {
  if (!parameter.is_inference()) parameter.unsafeGetTensorImpl()->bump_version();
}

std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.numel() * static_cast<std::int64_t>(tensor.element_size()) : 0;
}

}  // namespace

ShardedParameters::ShardedParameters(std::vector<ModuleParts::Named> parameters,
                                     ShardingOptions options)
    : parameters_(std::move(parameters)),
      options_(std::move(options)),
      shard_gradients_(parameters_.size()),
      sums_(parameters_.size()) {
  if (!options_.meter) options_.meter = std::make_shared<ShardedMeter>();
  const at::NoGradGuard no_grad;
  const c10::InferenceMode ordinary(false);
  lay_out();
}

/// The alignment in elements.
std::int64_t ShardedParameters::aligned_elements(const Flat& flat) {
  const auto narrowest =
      std::min(c10::elementSize(flat.unsharded_dtype), flat.options.dtype().itemsize());
  return std::max<std::int64_t>(1, kAlignment / static_cast<std::int64_t>(narrowest));
}

ShardedParameters::~ShardedParameters() {
  for (Flat& flat : flats_)
    for (const at::Tensor& each : {flat.unsharded, flat.kept})
      if (each.defined() && each.storage().nbytes() > 0)
        options_.meter->gathered.subtract(bytes_of(each));
}

at::Tensor ShardedParameters::shard_memory(const Flat& flat) const {
  if (!options_.offload || flat.options.device().is_cpu())
    return flat_memory(flat.shard_elements, flat.options);
  return at::zeros({flat.shard_elements},
                   flat.options.device(at::kCPU).pinned_memory(options_.pin_memory &&
                                                               flat.options.device().is_cuda()));
}

/// Shards the parameters. Their former memory is freed unless it is held elsewhere.
void ShardedParameters::lay_out() {
  const int ranks = options_.group->size();
  std::vector<std::int64_t> elements;
  places_.resize(size());
  for (std::size_t i = 0; i < size(); ++i) {
    const at::Tensor& tensor = parameters_[i].tensor;
    const bool floats = tensor.is_floating_point();
    const at::ScalarType whole_dtype =
        floats ? options_.param_dtype.value_or(tensor.scalar_type()) : tensor.scalar_type();
    // Parameters that are not trained are stored separately: their gradients need not be reduced.
    auto flat = std::find_if(flats_.begin(), flats_.end(), [&](const Flat& each) {
      return each.options.dtype() == tensor.dtype() &&
             parameters_[each.indices.front()].tensor.requires_grad() == tensor.requires_grad();
    });
    if (flat == flats_.end()) {
      Flat added{};
      added.options =
          at::TensorOptions(tensor.scalar_type()).device(options_.device.value_or(tensor.device()));
      added.unsharded_dtype = whole_dtype;
      added.reduced_dtype = floats ? options_.reduce_dtype.value_or(options_.reduce_in_own_dtype
                                                                        ? tensor.scalar_type()
                                                                        : whole_dtype)
                                   : whole_dtype;
      flats_.push_back(std::move(added));
      elements.push_back(0);
      flat = std::prev(flats_.end());
    }
    const auto number = static_cast<std::size_t>(flat - flats_.begin());
    const std::int64_t step = aligned_elements(*flat);
    places_[i] = {number, rounded_up(elements[number], step), tensor.numel()};
    elements[number] = places_[i].at + tensor.numel();
    flat->indices.push_back(i);
  }
  shards_.resize(size());
  whole_.resize(size());
  for (std::size_t number = 0; number < flats_.size(); ++number) {
    Flat& flat = flats_[number];
    flat.shard_elements =
        rounded_up((elements[number] + ranks - 1) / ranks, aligned_elements(flat));
    flat.shard = shard_memory(flat);
    flat.unsharded =
        at::empty({flat.shard_elements * ranks}, flat.options.dtype(flat.unsharded_dtype));
    for (const std::size_t i : flat.indices) {
      const at::Tensor& tensor = parameters_[i].tensor;
      whole_[i] = shaped_like(flat.unsharded, places_[i].at, tensor);
      const ShardRange range = own_range(i);
      shards_[i] = shaped_like(flat.shard, range.in_shard,
                               at::empty({range.elements}, flat.options.device(at::kMeta)));
      shards_[i].copy_(shard_of(i, tensor));
      tensor.mutable_grad().reset();
      tensor.set_data(shards_[i]);
    }
    free_memory(flat.unsharded);
  }
}

std::vector<ShardedParameters::ShardRange> ShardedParameters::ranges_of(std::size_t index) const {
  const ShardPlace& place = places_[index];
  const std::int64_t shard = flats_[place.flat].shard_elements;
  std::vector<ShardRange> all;
  for (std::int64_t at = place.at; at < place.at + place.elements;) {
    const std::int64_t end = std::min((at / shard + 1) * shard, place.at + place.elements);
    all.push_back({static_cast<int>(at / shard), at % shard, at - place.at, end - at});
    at = end;
  }
  return all;
}

ShardedParameters::ShardRange ShardedParameters::own_range(std::size_t index) const {
  const int rank = options_.group->rank();
  for (const ShardRange& range : ranges_of(index))
    if (range.rank == rank) return range;
  return {.rank = rank};
}

bool ShardedParameters::any_trained() const {
  return std::ranges::any_of(parameters_,
                             [](const auto& each) { return each.tensor.requires_grad(); });
}

bool ShardedParameters::is_in_unsharded(const at::Tensor& tensor) const {
  return std::ranges::any_of(flats_,
                             [&](const Flat& flat) { return tensor.is_alias_of(flat.unsharded); });
}

std::int64_t ShardedParameters::unsharded_bytes() const {
  std::int64_t bytes = 0;
  for (const Flat& flat : flats_)
    bytes += static_cast<std::int64_t>(flat.unsharded.storage().nbytes());
  return bytes;
}

std::int64_t ShardedParameters::shard_bytes() const {
  std::int64_t bytes = 0;
  for (const Flat& flat : flats_) bytes += bytes_of(flat.shard);
  return bytes;
}

std::int64_t ShardedParameters::gradient_bytes() const {
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < size(); ++i)
    for (const at::Tensor& each :
         {is_unsharded_ ? shard_gradients_[i] : parameters_[i].tensor.grad(), sums_[i]})
      bytes += bytes_of(each);
  for (const Flat& flat : flats_) bytes += bytes_of(flat.partial);
  return bytes;
}

// ---- the two forms

/// A shard's gradient is kept separately until its parameter is a shard again.
void ShardedParameters::show_whole(const std::vector<at::Tensor>& whole) {
  check_unchanged();
  for (std::size_t i = 0; i < size(); ++i) {
    const at::Tensor& parameter = parameters_[i].tensor;
    shard_gradients_[i] = std::exchange(parameter.mutable_grad(), at::Tensor());
    parameter.set_data(whole[i]);
    // A graph of the shard, which the program may keep, would deliver gradients of the shard's
    // size, on the shard's device.
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
    if (accumulator && (!accumulator->input_metadata(0).is_same_shape(parameter) ||
                        accumulator->input_metadata(0).device() != parameter.device()))
      torch::autograd::impl::get_autograd_meta(parameter)->grad_accumulator_.reset();
  }
}

void ShardedParameters::show_shards() {
  for (std::size_t i = 0; i < size(); ++i) {
    const at::Tensor& parameter = parameters_[i].tensor;
    parameter.mutable_grad() = std::exchange(shard_gradients_[i], at::Tensor());
    parameter.set_data(shards_[i]);
  }
}

void ShardedParameters::allocate(Flat& flat) {
  if (flat.unsharded.storage().nbytes() > 0 || flat.unsharded.numel() == 0) return;
  allocate_memory(flat.unsharded);
  options_.meter->gathered.add(bytes_of(flat.unsharded));
}

/// The calls of two units never match, so that ranks out of step get an error at once instead of
/// one unit's values for another's.
WorkRef ShardedParameters::submit(ProcessGroup& group, Call&& call) const {
  call.args.tag = static_cast<std::uint64_t>(options_.number) + 1;
  return core_of(group).submit(call);
}

/// Begins to fill the whole. A synchronous call has finished on return.
void ShardedParameters::start_gather(Flat& flat, bool async_op) {
  allocate(flat);
  flat.has_values = false;
  const std::int64_t version = version_of(flat);
  if (std::exchange(flat.version, version) != version) drop_part(flat);
  flat.sent = flat.kept.defined() ? flat.kept : flat.shard.to(flat.unsharded.options());
  const Group& group = flat.kept.defined() ? part_ : options_.group;
  if (communication_.all_gather)
    communication_.all_gather(flat.unsharded, flat.sent, group);
  else
    flat.gather = submit(*group, calls::all_gather_into_tensor(*group, flat.unsharded, flat.sent,
                                                               {.async_op = async_op}));
  flat.has_values = true;
  if (!async_op || !flat.gather) finish_gather(flat);
}

/// If the gather fails there are no values: a later unshard() gathers anew.
void ShardedParameters::finish_gather(Flat& flat) {
  const at::Tensor sent = std::exchange(flat.sent, at::Tensor());
  const WorkRef gather = std::exchange(flat.gather, nullptr);
  if (!gather) return;
  flat.has_values = false;
  gather->wait();
  flat.has_values = true;
}

void ShardedParameters::drop_part(Flat& flat) {
  options_.meter->gathered.subtract(bytes_of(flat.kept));
  flat.kept.reset();
}

/// Frees the whole and what is kept of it.
void ShardedParameters::free(Flat& flat) {
  try {
    finish_gather(flat);
  } catch (const std::exception&) {
    // The group has failed; its next call says so.
  }
  flat.has_values = flat.is_started = false;
  drop_part(flat);
  if (keeps_storage_ || flat.unsharded.storage().nbytes() == 0) return;
  options_.meter->gathered.subtract(bytes_of(flat.unsharded));
  free_memory(flat.unsharded);
}

/// Grows with every change of the shards.
std::int64_t ShardedParameters::version_of(const Flat& flat) const {
  std::int64_t version = 0;
  for (const std::size_t i : flat.indices)
    if (const at::Tensor& tensor = parameters_[i].tensor; !tensor.is_inference())
      version += static_cast<std::int64_t>(tensor._version());
  return version;
}

/// Throws if a parameter has been replaced; the replacement would be lost.
void ShardedParameters::check_unchanged() const {
  for (std::size_t i = 0; i < size(); ++i) {
    const at::Tensor& tensor = parameters_[i].tensor;
    if (tensor.scalar_type() == shards_[i].scalar_type() && tensor.is_alias_of(shards_[i]) &&
        tensor.sizes() == shards_[i].sizes())
      continue;
    group::invalid("'" + name(i) +
                   "' was given other memory after it was sharded: move and cast a module (to(), "
                   "half(), cuda()) before, and " +
                   "change its values in place");
  }
}

void ShardedParameters::unshard(Gather gather) {
  if (is_unsharded_) return;
  const at::NoGradGuard no_grad;
  for (Flat& flat : flats_) {
    const bool is_current = flat.has_values && flat.version == version_of(flat);
    const bool is_started = std::exchange(flat.is_started, false);
    if (flat.has_values) finish_gather(flat);
    const bool keeps = gather == Gather::anew         ? is_started && is_current
                       : gather == Gather::if_changed ? is_current
                                                      : flat.has_values;
    if (gather == Gather::anew || gather == Gather::if_changed) drop_part(flat);
    if (gather == Gather::never)
      allocate(flat);
    else if (!keeps)
      start_gather(flat, /*async_op=*/false);
    drop_part(flat);
  }
  show_whole(whole_);
  is_unsharded_ = true;
}

void ShardedParameters::start_gather(const std::function<void()>& when_done) {
  if (is_unsharded_) return;
  const at::NoGradGuard no_grad;
  WorkRef last;
  for (Flat& flat : flats_) {
    if (flat.has_values) continue;
    flat.is_started = true;
    start_gather(flat, /*async_op=*/true);
    if (flat.gather) last = flat.gather;
  }
  // The calls of one group end in their order.
  if (last && when_done)
    last->get_future()->addCallback([when_done](c10::ivalue::Future&) { when_done(); });
}

bool ShardedParameters::is_gathering() const {
  return std::ranges::any_of(flats_, [](const Flat& flat) { return flat.is_started; });
}

bool ShardedParameters::has_gathered() const {
  return is_gathering() && std::ranges::all_of(flats_, [](const Flat& flat) {
           return flat.has_values && (!flat.gather || flat.gather->is_completed());
         });
}

void ShardedParameters::reshard(Keep keep) {
  const at::NoGradGuard no_grad;
  if (std::exchange(is_unsharded_, false)) show_shards();
  if (keep == Keep::all) return;
  for (Flat& flat : flats_) {
    at::Tensor kept;
    if (keep == Keep::part && flat.has_values) {
      finish_gather(flat);
      const std::int64_t elements = flat.unsharded.numel() / part_->size();
      kept = flat.unsharded.narrow(0, part_->rank() * elements, elements).clone();
    }
    free(flat);
    flat.kept = kept;
    options_.meter->gathered.add(bytes_of(kept));
  }
}

// ---- gradients

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
  return core_of(last).manual_progress() == nullptr;
}

void ShardedParameters::start_reduction() {
  const at::NoGradGuard no_grad;
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
  at::Tensor all = flat_memory(ranks * length, options).view({ranks, -1});
  const double divisor = communication_.divisor.value_or(static_cast<double>(ranks) * copies);
  const at::Tensor factor = at::native::wrapped_scalar_tensor(1.0 / divisor);
  staging.add(bytes_of(all));
  for (const std::size_t i : flat.indices) staging.add(bytes_of(sums_[i]));
  for (std::int64_t slot = 0; slot < parameters; ++slot) {
    const std::size_t i = flat.indices[static_cast<std::size_t>(slot)];
    if (!sums_[i].defined()) continue;
    all.select(1, flat.shard_elements + slot).fill_(1);
    const at::Tensor values = in_memory_order(std::exchange(sums_[i], at::Tensor()), whole_[i]);
    for (const ShardRange& range : ranges_of(i)) {
      at::Tensor to = all.select(0, range.rank).narrow(0, range.in_shard, range.elements);
      const at::Tensor from = values.narrow(0, range.in_parameter, range.elements);
      // Divides in the dtype of the reduction.
      from.scalar_type() == to.scalar_type() ? at::mul_out(to, from, factor)
                                             : to.copy_(from).mul_(factor);
    }
  }
  return all;
}

/// With replicas, only the call among them is asynchronous.
void ShardedParameters::start_reduction(std::size_t number, bool async_op) {
  Flat& flat = flats_[number];
  ByteMeter::MeterScope staging(options_.meter->staging);
  const at::Tensor all = staged_gradients(flat, staging);
  const at::Tensor reduced = unset_memory(all.size(1), flat.options.dtype(flat.reduced_dtype));
  staging.add(bytes_of(reduced));
  WorkRef work;
  const at::Tensor input = all.view({-1});
  if (communication_.reduce_scatter)
    communication_.reduce_scatter(reduced, input, options_.group);
  else
    work = submit(*options_.group,
                  calls::reduce_scatter_tensor(*options_.group, reduced, input,
                                               {.async_op = async_op && !options_.replicas}));
  if (flat.partial.defined()) reduced.add_(std::exchange(flat.partial, at::Tensor()));
  if (options_.replicas) {
    if (!communication_.reduce_over_replicas) {
      flat.partial = reduced;
      return;
    }
    if (communication_.all_reduce)
      communication_.all_reduce(reduced, options_.replicas);
    else
      work = submit(*options_.replicas,
                    calls::all_reduce(*options_.replicas, reduced, {.async_op = async_op}));
  }
  reductions_.push_back({number, all, reduced, std::move(work), std::move(staging)});
}

void ShardedParameters::finish_reduction() {
  const at::NoGradGuard no_grad;
  for (Reduction& each : std::exchange(reductions_, {})) {
    if (each.work) each.work->wait();
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
    const at::Tensor average = shaped_like(averages, own_range(i).in_shard, shards_[i]);
    at::Tensor& sum = is_unsharded_ ? shard_gradients_[i] : parameters_[i].tensor.mutable_grad();
    sum.defined() ? void(sum.add_(average)) : void(sum = average);
  }
}

// ---- whole values

std::vector<at::Tensor> ShardedParameters::full() const {
  if (shows_full_) {
    std::vector<at::Tensor> all;
    for (const auto& parameter : parameters_) all.push_back(parameter.tensor.detach());
    return all;
  }
  if (!is_unsharded_) check_unchanged();
  return full_of(shards_);
}

std::vector<at::Tensor> ShardedParameters::full_of(const std::vector<at::Tensor>& shards) const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> all(size());
  for (const Flat& flat : flats_) {
    const auto options = flat.options.dtype(shards[flat.indices.front()].scalar_type());
    const at::Tensor shard = flat_memory(flat.shard_elements, options);
    for (const std::size_t i : flat.indices) {
      const ShardRange range = own_range(i);
      if (shards[i].numel() != range.elements)
        group::invalid(name(i) + " has " + std::to_string(range.elements) +
                       " elements on this rank, and " + std::to_string(shards[i].numel()) +
                       " were given for it");
      shard.narrow(0, range.in_shard, range.elements).copy_(shards[i].view({-1}));
    }
    const at::Tensor flat_values =
        unset_memory(flat.shard_elements * options_.group->size(), options);
    all_gather_into_tensor(flat_values, shard, {.group = options_.group});
    for (const std::size_t i : flat.indices)
      all[i] = shaped_like(flat_values, places_[i].at, whole_[i]);
  }
  return all;
}

at::Tensor ShardedParameters::shard_of(std::size_t index, const at::Tensor& whole) const {
  if (whole.sizes() != sizes_of(index))
    group::invalid(name(index) + " has the sizes " + c10::str(sizes_of(index)) +
                   ", and a tensor of " + c10::str(whole.sizes()) + " was given for it");
  const ShardRange range = own_range(index);
  return in_memory_order(whole, whole_[index])
      .narrow(0, range.in_parameter, range.elements)
      .clone();
}

void ShardedParameters::set(std::size_t index, const at::Tensor& whole) {
  check_unchanged();
  const at::NoGradGuard no_grad;
  shards_[index].copy_(shard_of(index, whole));
  note_change(parameters_[index].tensor);
}

void ShardedParameters::show_full(const std::vector<at::Tensor>& whole) {
  const at::NoGradGuard no_grad;
  show_whole(whole);
  shows_full_ = true;
}

void ShardedParameters::end_show_full(bool keep_values) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> values(keep_values ? size() : 0);
  std::exception_ptr failure;
  try {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = shard_of(i, parameters_[i].tensor);
    for (std::size_t i = 0; i < values.size(); ++i) {
      shards_[i].copy_(values[i]);
      note_change(parameters_[i].tensor);
    }
  } catch (...) {
    failure = std::current_exception();
  }
  show_shards();
  shows_full_ = false;
  if (failure) std::rethrow_exception(failure);
}

}  // namespace muster::parallel
