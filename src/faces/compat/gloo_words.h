/// The messages with which torch's own Gloo refuses arguments. Programs and torch's tests search
/// for them, so they are appended to muster's.
///
/// Each function returns the message, or an empty one if Gloo would accept the arguments. They run
/// after a call was refused, or if it has several tensors, but never on the path of a successful
/// call with one tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace muster::compat {

using Tensors = std::vector<at::Tensor>;

/// Of the calls of one group, each by its name in c10d ("broadcast").
class GlooWords {
 public:
  GlooWords(int rank, int size) : rank_(rank), size_(size) {}

  std::string broadcast(const Tensors& tensors, std::int64_t root, std::int64_t root_tensor) const;
  std::string allreduce(const Tensors& tensors, bool only_sums) const;
  std::string allreduce_coalesced(const Tensors& tensors) const;
  std::string reduce(const Tensors& tensors, std::int64_t root, std::int64_t root_tensor) const;
  std::string allgather(const std::vector<Tensors>& outputs, const Tensors& inputs) const;
  std::string allgather_coalesced(const std::vector<Tensors>& outputs, const Tensors& inputs) const;
  std::string gather(const std::vector<Tensors>& outputs, const Tensors& inputs,
                     std::int64_t root) const;
  std::string scatter(const Tensors& outputs, const std::vector<Tensors>& inputs,
                      std::int64_t root) const;
  std::string reduce_scatter(const Tensors& outputs, const std::vector<Tensors>& inputs) const;
  std::string alltoall(const Tensors& outputs, const Tensors& inputs) const;
  std::string alltoall_base(const at::Tensor& tensor,
                            const std::vector<std::int64_t>& splits) const;
  std::string message(const Tensors& tensors) const;

 private:
  std::string root(const std::string& call, std::int64_t root) const;

  const int rank_, size_;
};

}  // namespace muster::compat
