#include <torch/types.h>

#include <ostream>
#include <utility>

#include "core/group/errors.h"
#include "muster/tensor_parallel.h"
#include "train/tensor/division.h"

namespace muster {

using at::Tensor;

SequenceParallelLayerNormImpl::SequenceParallelLayerNormImpl(
    std::vector<std::int64_t> normalized_shape, const SequenceParallelLayerNormOptions& options)
    : normalized_shape_(std::move(normalized_shape)), options_(options) {
  options_.group = tensor_parallel::member_group(options.group, "SequenceParallelLayerNorm");
  SequenceParallelLayerNormImpl::reset();
}

void SequenceParallelLayerNormImpl::reset() {
  const bool affine = options_.elementwise_affine;
  const auto registered = [&](const char* name, bool present, auto make) {
    if (!present) return register_parameter(name, {}, false);
    return register_parameter(
        name, tensor_parallel::whole_parameter(make(at::IntArrayRef(normalized_shape_)),
                                               {options_.dtype, options_.device}));
  };
  weight = registered("weight", affine, [](auto sizes) { return at::ones(sizes); });
  bias = registered("bias", affine && options_.bias, [](auto sizes) { return at::zeros(sizes); });
}

void SequenceParallelLayerNormImpl::pretty_print(std::ostream& stream) const {
  stream << "muster::SequenceParallelLayerNorm(" << tensor_parallel::text_of(normalized_shape_)
         << ", eps=" << options_.eps << ", ranks=" << options_.group->size() << ")";
}

Tensor SequenceParallelLayerNormImpl::forward(const Tensor& input) {
  const at::IntArrayRef shape = normalized_shape_;
  if (input.sizes().size() < shape.size() ||
      input.sizes().slice(input.sizes().size() - shape.size()) != shape)
    group::invalid("SequenceParallelLayerNorm: the input is " +
                   tensor_parallel::text_of(input.sizes()) +
                   ", and its last dimensions should be " + tensor_parallel::text_of(shape));
  // Each rank's gradients of the parameters are those of its part of the sequence.
  const auto shared = [&](const Tensor& parameter) {
    return parameter.defined() ? copy_to_tensor_parallel_region(parameter, options_.group)
                               : parameter;
  };
  return at::layer_norm(input, shape, shared(weight), shared(bias), options_.eps);
}

}  // namespace muster
