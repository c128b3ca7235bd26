#include "muster/shared_memory.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>

#include "core/group/errors.h"
#include "core/shm/arena/arena.h"

namespace muster {

at::Tensor empty_shared(at::IntArrayRef sizes, const at::TensorOptions& options) {
  if (!options.device().is_cpu())
    group::invalid("empty_shared: the arena holds CPU tensors only, not " + options.device().str());
  for (const auto size : sizes)
    if (size < 0) group::invalid("empty_shared: shape " + c10::str(sizes) + " has a negative size");
  auto* arena = group::take(shm::Arena::of_process());
  std::uint64_t bytes = c10::elementSize(c10::typeMetaToScalarType(options.dtype()));
  for (const auto size : sizes)
    if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes))
      group::invalid("empty_shared: a tensor of shape " + c10::str(sizes) +
                     " is larger than any memory");
  auto* memory = group::take(arena->allocate(static_cast<std::size_t>(bytes)));
  return at::for_blob(memory, sizes)
      .deleter([arena](void* freed) { arena->free(static_cast<std::byte*>(freed)); })
      .options(options)
      .resizeable_storage()
      .allocator(c10::GetCPUAllocator())
      .make_tensor();
}

bool in_shared_memory(const at::Tensor& tensor) {
  const auto* const arena = shm::Arena::if_made();
  if (arena == nullptr || !tensor.defined() || !tensor.has_storage() || !tensor.is_cpu())
    return false;
  const auto& storage = tensor.storage();
  return arena->offset_of(static_cast<const std::byte*>(storage.data()), storage.nbytes())
      .has_value();
}

}  // namespace muster
