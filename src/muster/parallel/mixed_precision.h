/// Forward and backward in a narrower type than the one that parameters are kept and updated in.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

namespace muster {

/// After torch's _MixedPrecision for DistributedDataParallel. What is not given stays as it is;
/// only floating-point tensors are cast.
struct MixedPrecision {
  std::optional<at::ScalarType> param_dtype =
      {};  ///< of parameters from forward to the end of backward, and of forward's inputs
  std::optional<at::ScalarType> reduce_dtype =
      {};  ///< what gradients travel as; absent: param_dtype
  std::optional<at::ScalarType> buffer_dtype = {};  ///< of buffers, from the construction on
  bool keep_low_precision_grads = false;  ///< gradients stay in param_dtype after backward
  bool cast_forward_inputs =
      true;  ///< floating-point tensors among forward's arguments become param_dtype
};

namespace parallel {

/// In that type, where there is one and it is a floating-point tensor.
at::Tensor cast_floating_point(const at::Tensor& tensor, std::optional<at::ScalarType> dtype);
/// The same of tensors that stay the tensors that they are.
void cast_in_place(const std::vector<at::Tensor>& tensors, std::optional<at::ScalarType> dtype);

/// The parameters of one module between their two types. One thread at a time. In a shared_ptr.
class LowPrecision : public std::enable_shared_from_this<LowPrecision> {
 public:
  /// Casts the buffers.
  LowPrecision(std::vector<at::Tensor> parameters, const std::vector<at::Tensor>& buffers,
               const MixedPrecision& config);

  /// Gives the parameters memory in param_dtype; true where it did. Gradients that they had stay as
  /// they are, and add up in their own type.
  bool lower();
  /// The full parameters are back; gradients get the type that they are to have for the optimizer.
  void restore();
  /// Between the two.
  bool is_low() const { return !full_.empty(); }
  /// After a forward pass that records gradients: what it has made of the parameters needs them as
  /// they are until its backward. The end of that calls restore() where gradients come, `trained`;
  /// where all is frozen, this sees to it.
  void watch(const std::vector<at::Tensor>& outputs, bool trained);
  /// restore(), unless a pass that was watched may still be followed by its backward.
  void restore_if_over();
  /// An argument of forward.
  at::Tensor cast(const at::Tensor& input) const;

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> full_;  // what restore() brings back; empty while nothing is lowered
  // Live as long as outputs do that were watched.
  std::weak_ptr<const void> trained_, frozen_;
  MixedPrecision config_;
};

}  // namespace parallel
}  // namespace muster
