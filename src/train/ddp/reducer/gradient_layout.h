// SPDX-License-Identifier: BSD-3-Clause
/// The assignment of gradients to buckets and their memory. Private to the reducer; called under
/// its lock.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "muster/work.h"
#include "train/ddp/reducer/bucket_plan.h"
#include "train/ddp/reducer/reducer.h"

namespace muster::parallel {

struct GradientBucket {
  BucketIndices indices;
  bool sparse = false;                // one sparse parameter; `memory` is this pass's gradient
  bool alone = false;                 // one large parameter
  at::ScalarType dtype = at::kFloat;  // of its gradients
  // The memory that is reduced. For a bucket with `alone`, allocated only if the gradient cannot be
  // reduced in place.
  at::Tensor memory;
  at::Tensor in_place;  // a gradient's own memory while it is reduced in place
  // Views of `memory`, one per gradient; complex gradients are reduced as pairs of reals.
  std::vector<at::Tensor> views;
  std::size_t pending = 0;
  WorkRef work;
  std::function<at::Tensor()> finish;  // set if there is a hook
};

class GradientLayout {
 public:
  /// `options` must outlive this object. `any_operation`: the group's backend supports AVG and
  /// PREMUL_SUM.
  GradientLayout(std::vector<at::Tensor> parameters, const ReducerOptions& options,
                 bool any_operation);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  std::size_t size() const { return parameters_.size(); }
  /// The kinds of devices that gradients are on.
  const std::vector<c10::DeviceType>& device_types() const { return device_types_; }
  std::vector<GradientBucket>& buckets() { return buckets_; }
  const std::vector<GradientBucket>& buckets() const { return buckets_; }
  GradientBucket& bucket_of(std::size_t index) { return buckets_[places_[index].bucket]; }
  /// The gradient's view of its bucket.
  const at::Tensor& view(std::size_t index);
  void allocate_memory(GradientBucket& bucket);

  /// Lays out buckets in parameter order, until the order of the gradients is known.
  void lay_out_first();
  void lay_out_by(const std::vector<std::size_t>& order);
  /// For a communication hook, which receives whole buckets: reduces no gradient in place.
  void set_hooked() {
    hooked_ = true;
    lay_out_first();
  }
  /// Sizes in bytes of gradients reduced in place.
  std::vector<std::size_t> in_place_sizes() const;
  std::vector<std::int64_t> bucket_bytes() const;

  std::string name(std::size_t index) const;
  std::string names_of(const std::vector<std::size_t>& indices) const;
  bool is_sparse(std::size_t index) const {
    return index < options_.sparse.size() && options_.sparse[index];
  }
  at::ScalarType reduction_dtype(const at::Tensor& parameter) const;

 private:
  struct GradientPlace {
    std::size_t bucket = 0;
    std::size_t slot = 0;
  };

  bool is_reduced_alone(const at::Tensor& parameter) const;
  std::vector<ParameterFacts> facts() const;
  void lay_out(const std::vector<BucketIndices>& plan);

  const std::vector<at::Tensor> parameters_;
  std::vector<c10::DeviceType> device_types_;
  const ReducerOptions& options_;
  const bool any_operation_;
  bool hooked_ = false;
  std::vector<GradientBucket> buckets_;
  std::vector<GradientPlace> places_;
};

}  // namespace muster::parallel
