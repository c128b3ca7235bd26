#include "train/modules/flat_memory.h"

#include <ATen/TensorUtils.h>
#include <torch/types.h>

#include "core/group/errors.h"
#include "muster/shared_memory.h"

namespace muster::parallel {

at::Tensor unset_memory(std::int64_t elements, const at::TensorOptions& options) {
  if (options.device().is_cpu()) {
    try {
      return empty_shared({elements}, options);
    } catch (const DistError& error) {
      if (error.code() != Code::exhausted) throw;
    }
  }
  return at::empty({elements}, options);
}

at::Tensor flat_memory(std::int64_t elements, const at::TensorOptions& options) {
  return unset_memory(elements, options).zero_();
}

at::Tensor shaped_like(const at::Tensor& flat, std::int64_t at, const at::Tensor& like) {
  const auto strides = like.is_non_overlapping_and_dense()
                           ? like.strides().vec()
                           : at::detail::defaultStrides(like.sizes());
  return at::empty({0}, flat.options())
      .set_(flat.storage(), flat.storage_offset() + at, like.sizes(), strides);
}

}  // namespace muster::parallel
