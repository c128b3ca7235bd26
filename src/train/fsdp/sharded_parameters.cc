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

#include "core/group/call/quantized.h"
#include "core/group/calls.h"
#include "core/group/errors.h"
#include "core/group/group_core.h"
#include "muster/collectives.h"
#include "muster/shared_memory.h"
#include "train/fsdp/sharded_memory.h"
#include "train/modules/packed_broadcast.h"

namespace muster::parallel {
namespace {

/// A shard was changed by other means than its parameter.
void note_change(const at::Tensor& parameter) {
  if (!parameter.is_inference()) parameter.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

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
Call& ShardedParameters::tagged(Call& call) const {
  call.args.tag = static_cast<std::uint64_t>(options_.number) + 1;
  return call;
}
WorkRef ShardedParameters::submit(ProcessGroup& group, Call&& call) const {
  return core_of(group).submit(tagged(call));
}

/// A kept part has been compressed before, in other blocks: gathered so again, backward would
/// compute with other values than forward.
WorkRef ShardedParameters::gather_into(const at::Tensor& filled, const Flat& flat,
                                       const Group& group, bool async_op) const {
  const CollectiveOptions options{.async_op = async_op,
                                  .compression = flat.kept.defined()
                                                     ? Compression::none
                                                     : communication_.parameter_compression};
  Call call = calls::all_gather_into_tensor(*group, filled, flat.sent, options);
  if (options.compression == Compression::none) return submit(*group, std::move(call));
  return group::all_gather_quantized(tagged(call), filled.chunk(group->size()), flat.sent, options);
}

/// Begins to fill the whole, or the wire. A synchronous call has finished on return.
void ShardedParameters::start_gather(Flat& flat, bool async_op) {
  flat.has_values = false;
  const std::int64_t version = version_of(flat);
  if (std::exchange(flat.version, version) != version) drop_part(flat);
  const auto options = flat.unsharded.options();
  flat.sent = flat.kept.defined() ? flat.kept : flat.shard.to(options);
  const Group& group = flat.kept.defined() ? part_ : options_.group;
  if (flat.is_direct || flat.kept.defined()) {
    allocate(flat);
  } else {
    flat.wire = unset_memory(flat.shard_elements * group->size(), options);
    options_.meter->gathered.add(bytes_of(flat.wire));
  }
  const at::Tensor& filled = flat.wire.defined() ? flat.wire : flat.unsharded;
  if (communication_.all_gather)
    communication_.all_gather(filled, flat.sent, group);
  else
    flat.gather = gather_into(filled, flat, group, async_op);
  flat.has_values = true;
  if (!async_op || !flat.gather) finish_gather(flat);
}

/// If the gather fails there are no values: a later unshard() gathers anew.
void ShardedParameters::finish_gather(Flat& flat) {
  const at::Tensor sent = std::exchange(flat.sent, at::Tensor()), wire = flat.wire;
  const WorkRef gather = std::exchange(flat.gather, nullptr);
  if (!gather && !wire.defined()) return;
  flat.has_values = false;
  drop_wire(flat);
  if (gather) gather->wait();
  if (wire.defined()) {
    ByteMeter::MeterScope staging(options_.meter->staging);
    staging.add(bytes_of(wire));
    allocate(flat);
    copy_rows(flat, wire, whole_);
  }
  flat.has_values = true;
}

void ShardedParameters::drop_wire(Flat& flat) {
  options_.meter->gathered.subtract(bytes_of(flat.wire));
  flat.wire.reset();
}

void ShardedParameters::drop_part(Flat& flat) {
  options_.meter->gathered.subtract(bytes_of(flat.kept));
  flat.kept.reset();
}

/// Frees the whole and what is kept of it.
void ShardedParameters::free(Flat& flat) {
  try {
    if (const WorkRef gather = std::exchange(flat.gather, nullptr)) gather->wait();
  } catch (const std::exception&) {
    // The group has failed; its next call says so.
  }
  flat.sent.reset();
  flat.has_values = flat.is_started = false;
  drop_wire(flat);
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

/// Throws if a parameter has been replaced, or its storage was given other memory, as
/// share_memory_() and sending it to another process do; changes would be lost.
void ShardedParameters::check_unchanged() const {
  for (std::size_t i = 0; i < size(); ++i) {
    const at::Tensor& tensor = parameters_[i].tensor;
    if (tensor.scalar_type() == shards_[i].scalar_type() && tensor.is_alias_of(shards_[i]) &&
        tensor.sizes() == shards_[i].sizes() && shards_[i].const_data_ptr() == starts_[i])
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
      shard.narrow(0, range.in_shard, range.elements).copy_(shards[i].reshape({-1}));
    }
    const at::Tensor gathered = unset_memory(flat.shard_elements * options_.group->size(), options);
    all_gather_into_tensor(gathered, shard, {.group = options_.group});
    const at::Tensor whole = flat.is_direct ? gathered : unset_memory(flat.whole_elements, options);
    for (const std::size_t i : flat.indices) all[i] = shaped_like(whole, places_[i].at, whole_[i]);
    if (!flat.is_direct) copy_rows(flat, gathered, all);
  }
  return all;
}

at::Tensor ShardedParameters::shard_of(std::size_t index, const at::Tensor& whole) const {
  if (whole.sizes() != sizes_of(index))
    group::invalid(name(index) + " has the sizes " + c10::str(sizes_of(index)) +
                   ", and a tensor of " + c10::str(whole.sizes()) + " was given for it");
  if (places_[index].dim != kFlat)
    return own_rows(index, whole.detach()).clone(at::MemoryFormat::Contiguous);
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
