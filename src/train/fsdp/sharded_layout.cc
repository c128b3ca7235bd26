// SPDX-License-Identifier: BSD-3-Clause
// Where each parameter's elements lie in the shards and in the whole.

#include <ATen/Parallel.h>
#include <torch/types.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <limits>
#include <utility>

#include "train/fsdp/sharded_memory.h"
#include "train/fsdp/sharded_parameters.h"
#include "train/mesh/chunk.h"
#include "train/modules/packed_broadcast.h"

namespace muster::parallel {
namespace {

// Alignment of whole parameters and shards, for the widest loads.
constexpr std::int64_t kAlignment = 64;  // bytes

std::int64_t rounded_up(std::int64_t value, std::int64_t step) {
  return (value + step - 1) / step * step;
}

}  // namespace

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

at::Tensor with_own_storage(const at::Tensor& view) {
  const auto bytes = static_cast<std::size_t>(bytes_of(view));
  at::DataPtr memory(nullptr, view.device());
  if (bytes > 0)
    memory = at::DataPtr(
        view.mutable_data_ptr(), new c10::Storage(view.storage()),
        [](void* kept) { delete static_cast<c10::Storage*>(kept); }, view.device());
  const c10::Storage own(c10::Storage::use_byte_size_t(), bytes, std::move(memory),
                         /*allocator=*/nullptr, /*resizable=*/false);
  return at::empty({0}, view.options()).set_(own, 0, view.sizes(), view.strides());
}

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
    for (const at::Tensor& each : {flat.unsharded, flat.kept, flat.wire})
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
  choose_flats();
  shards_.resize(size());
  starts_.resize(size());
  whole_.resize(size());
  aliases_.resize(size());
  for (Flat& flat : flats_) {
    options_.shard_dims ? place_rows(flat) : place_flat(flat);
    flat.shard = shard_memory(flat);
    flat.unsharded = at::empty({flat.is_direct ? flat.shard_elements * ranks : flat.whole_elements},
                               flat.options.dtype(flat.unsharded_dtype));
    for (const std::size_t i : flat.indices) shard_parameter(flat, i);
    free_memory(flat.unsharded);
  }
}

/// Parameters that are not trained are stored separately: their gradients need not be reduced.
void ShardedParameters::choose_flats() {
  places_.resize(size());
  for (std::size_t i = 0; i < size(); ++i) {
    const at::Tensor& tensor = parameters_[i].tensor;
    const bool floats = tensor.is_floating_point();
    const at::ScalarType whole_dtype =
        floats ? options_.param_dtype.value_or(tensor.scalar_type()) : tensor.scalar_type();
    auto flat = std::find_if(flats_.begin(), flats_.end(), [&](const Flat& each) {
      return each.options.dtype() == tensor.dtype() &&
             parameters_[each.indices.front()].tensor.requires_grad() == tensor.requires_grad();
    });
    if (flat == flats_.end()) {
      Flat added{};
      const at::Device own = tensor.is_meta() ? at::Device(at::kCPU) : tensor.device();
      added.options = at::TensorOptions(tensor.scalar_type()).device(options_.device.value_or(own));
      added.unsharded_dtype = whole_dtype;
      added.reduced_dtype = floats ? options_.reduce_dtype.value_or(options_.reduce_in_own_dtype
                                                                        ? tensor.scalar_type()
                                                                        : whole_dtype)
                                   : whole_dtype;
      flats_.push_back(std::move(added));
      flat = std::prev(flats_.end());
    }
    places_[i].flat = static_cast<std::size_t>(flat - flats_.begin());
    places_[i].elements = tensor.numel();
    flat->indices.push_back(i);
  }
}

void ShardedParameters::place_flat(Flat& flat) {
  const int ranks = options_.group->size();
  const std::int64_t step = aligned_elements(flat);
  std::int64_t elements = 0;
  for (const std::size_t i : flat.indices) {
    places_[i].at = rounded_up(elements, step);
    elements = places_[i].at + places_[i].elements;
  }
  flat.shard_elements = rounded_up((elements + ranks - 1) / ranks, step);
}

/// Every rank's shard has room for as many rows as the first rank has, so that all have one length.
void ShardedParameters::place_rows(Flat& flat) {
  const int ranks = options_.group->size();
  const std::int64_t step = aligned_elements(flat);
  std::int64_t in_shard = 0, in_whole = 0;
  bool all_contiguous = true;
  for (const std::size_t i : flat.indices) {
    const at::Tensor& tensor = parameters_[i].tensor;
    ShardPlace& place = places_[i];
    place.dim = (*options_.shard_dims)[i];
    place.at = rounded_up(in_whole, step);
    place.in_shard = rounded_up(in_shard, step);
    const std::int64_t size = tensor.size(place.dim);
    const std::int64_t row = size > 0 ? tensor.numel() / size : 0;
    in_whole = place.at + tensor.numel();
    in_shard = place.in_shard + chunk_of(size, ranks, 0).count * row;
    all_contiguous = all_contiguous && tensor.is_contiguous();
  }
  flat.shard_elements = rounded_up(in_shard, step);
  flat.whole_elements = rounded_up(in_whole, step * ranks);
  // One rank's shard is the whole, and so are the ranks' shards of one parameter without padding
  // between the ranks' rows.
  const bool is_dense = flat.indices.size() == 1 && flat.shard_elements == in_shard &&
                        places_[flat.indices.front()].dim == 0;
  flat.is_direct = all_contiguous && (ranks == 1 || is_dense);
}

/// Changes the parameter's form. Its version counter goes on.
void ShardedParameters::shard_parameter(const Flat& flat, std::size_t index) {
  const at::Tensor& tensor = parameters_[index].tensor;
  whole_[index] = shaped_like(flat.unsharded, places_[index].at, tensor);
  at::Tensor& shard = shards_[index];
  std::vector<std::int64_t> sizes{own_range(index).elements};
  if (const auto rows = rows_of(index)) {
    sizes = tensor.sizes().vec();
    sizes[static_cast<std::size_t>(rows->dim)] = rows->count;
  }
  shard = with_own_storage(shaped_like(flat.shard, own_range(index).in_shard,
                                       at::empty(sizes, flat.options.device(at::kMeta))));
  starts_[index] = shard.const_data_ptr();
  tensor.mutable_grad().reset();
  if (tensor.is_meta()) {
    if (shard.is_floating_point() || shard.is_complex())
      shard.fill_(std::numeric_limits<double>::quiet_NaN());
    tensor.unsafeGetTensorImpl()->shallow_copy_from(shard.getIntrusivePtr());
  } else {
    shard.copy_(shard_of(index, tensor));
    tensor.set_data(shard);
  }
  aliases_[index] = tensor.detach();
}

// ---- rows

std::optional<ShardedParameters::ShardRows> ShardedParameters::rows_of(std::size_t index) const {
  const std::int64_t dim = places_[index].dim;
  if (dim == kFlat) return {};
  const Chunk mine = chunk_of(sizes_of(index)[static_cast<std::size_t>(dim)], *options_.group);
  return ShardRows{dim, mine.first, mine.count};
}

at::Tensor ShardedParameters::own_rows(std::size_t index, const at::Tensor& whole) const {
  const auto rows = rows_of(index);
  return whole.narrow(rows->dim, rows->first, rows->count);
}

/// The elements of parameter `index` in `whole`, and the same in `lines`, which has a line for each
/// rank that begins as its shard does; as pairs of equal shapes, one for the ranks that hold as
/// many rows as the first and one for a rank that holds fewer.
ShardedParameters::RowBlocks ShardedParameters::row_blocks(std::size_t index,
                                                           const at::Tensor& whole,
                                                           const at::Tensor& lines) const {
  const auto [flat, at, elements, dim, in_shard] = places_[index];
  RowBlocks blocks;
  if (elements == 0) return blocks;
  const std::int64_t size = whole.size(dim), row = elements / size;
  const std::int64_t rows = chunk_of(size, options_.group->size(), 0).count;
  const std::int64_t full = size / rows, rest = size % rows;
  const at::Tensor first = lines.narrow(0, 0, full).narrow(1, in_shard, rows * row);
  std::vector<std::int64_t> sizes = whole.sizes().vec();
  const at::Tensor even = rest == 0 ? whole : whole.narrow(dim, 0, full * rows);
  if (dim == 0 && whole.is_contiguous()) {
    blocks.emplace_back(even.view({full, rows * row}), first);
  } else {
    sizes[static_cast<std::size_t>(dim)] = rows;
    sizes.insert(sizes.begin(), full);
    blocks.emplace_back(even.unflatten(dim, {full, rows}).movedim(dim, 0), first.view(sizes));
    sizes.erase(sizes.begin());
  }
  if (rest == 0) return blocks;
  sizes[static_cast<std::size_t>(dim)] = rest;
  blocks.emplace_back(whole.narrow(dim, full * rows, rest),
                      lines.select(0, full).narrow(0, in_shard, rest * row).view(sizes));
  return blocks;
}

/// Whether loops over the rows' memory are quicker than operators: `tensor` has parameter `index`'s
/// rows one after the other, and an operator would use no other thread.
bool ShardedParameters::has_plain_rows(std::size_t index, const at::Tensor& tensor) const {
  return tensor.is_cpu() && places_[index].dim == 0 && tensor.is_contiguous() && !tensor.is_neg() &&
         !tensor.is_conj() && !tensor._is_zerotensor() &&
         (tensor.numel() <= at::internal::GRAIN_SIZE || at::get_num_threads() == 1);
}

/// Fills whole parameters from the ranks' shards.
void ShardedParameters::copy_rows(const Flat& flat, const at::Tensor& wire,
                                  const std::vector<at::Tensor>& whole) const {
  const at::Tensor lines = wire.view({options_.group->size(), -1});
  const auto width = static_cast<std::int64_t>(wire.element_size());
  for (const std::size_t i : flat.indices) {
    if (!has_plain_rows(i, whole[i])) {
      for (const auto& [to, from] : row_blocks(i, whole[i], lines)) to.copy_(from);
      continue;
    }
    auto* const to = static_cast<std::byte*>(whole[i].mutable_data_ptr());
    const auto* const from = static_cast<const std::byte*>(wire.const_data_ptr());
    each_rank(i, [&](int rank, std::int64_t first, std::int64_t elements) {
      const std::int64_t at = rank * flat.shard_elements + places_[i].in_shard;
      std::memcpy(to + first * width, from + at * width,
                  static_cast<std::size_t>(elements * width));
    });
  }
}

// ---- flat

/// The parts of a parameter that is divided flat.
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
  if (const auto rows = rows_of(index)) {
    const std::int64_t size = sizes_of(index)[static_cast<std::size_t>(rows->dim)];
    const std::int64_t row = size > 0 ? places_[index].elements / size : 0;
    return {rank, places_[index].in_shard, rows->first * row, rows->count * row};
  }
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
    bytes += static_cast<std::int64_t>(flat.unsharded.storage().nbytes()) + bytes_of(flat.wire);
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

}  // namespace muster::parallel
