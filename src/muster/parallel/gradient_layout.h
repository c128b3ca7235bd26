/// Which gradients travel together, and where they lie meanwhile. Private to the reducer; under its
/// lock.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "muster/group/work.h"
#include "muster/parallel/bucket_plan.h"
#include "muster/parallel/reducer.h"

namespace muster::parallel {

struct GradientBucket {
  BucketIndices indices;
  bool sparse = false;                // then of one parameter, and `memory` is this pass's gradient
  bool alone = false;                 // of one large parameter
  at::ScalarType dtype = at::kFloat;  // of the gradients in it
  at::Tensor memory;    // what travels; of one that is alone: made when its gradient cannot travel
                        // where it lies
  at::Tensor in_place;  // the memory of such a gradient, while it travels
  std::vector<at::Tensor> views;  // of the memory; complex ones too, which travel as pairs of reals
  std::size_t pending = 0;
  WorkRef work;
  std::function<at::Tensor()> finish;  // with a hook
};

class GradientLayout {
 public:
  /// `options` must outlive this. `any_operation`: the group's backend has AVG and PREMUL_SUM.
  GradientLayout(std::vector<at::Tensor> parameters, const ReducerOptions& options,
                 bool any_operation);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  std::size_t size() const { return parameters_.size(); }
  std::vector<GradientBucket>& buckets() { return buckets_; }
  const std::vector<GradientBucket>& buckets() const { return buckets_; }
  GradientBucket& bucket_of(std::size_t index) { return buckets_[places_[index].bucket]; }
  /// Where the gradient lies in its bucket.
  const at::Tensor& view(std::size_t index);
  void give_memory(GradientBucket& bucket);

  /// By the order of the parameters, as long as that of the gradients is not known.
  void lay_out_first();
  void lay_out_by(const std::vector<std::size_t>& order);
  /// A communication hook is given whole buckets.
  void keep_buckets_whole() {
    hooked_ = true;
    lay_out_first();
  }
  /// Bytes of the gradients that travel alone.
  std::vector<std::size_t> bytes_alone() const;
  std::vector<std::int64_t> bucket_bytes() const;

  std::string name(std::size_t index) const;
  std::string names_of(const std::vector<std::size_t>& indices) const;
  bool is_sparse(std::size_t index) const {
    return index < options_.sparse.size() && options_.sparse[index];
  }
  at::ScalarType travels_as(const at::Tensor& parameter) const;

 private:
  struct Place {
    std::size_t bucket = 0;
    std::size_t slot = 0;
  };

  bool goes_alone(const at::Tensor& parameter) const;
  std::vector<ParameterFacts> facts() const;
  void lay_out(const std::vector<BucketIndices>& plan);

  const std::vector<at::Tensor> parameters_;
  const ReducerOptions& options_;
  const bool any_operation_;
  bool hooked_ = false;
  std::vector<GradientBucket> buckets_;
  std::vector<Place> places_;
};

}  // namespace muster::parallel
