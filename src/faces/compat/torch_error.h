// SPDX-License-Identifier: BSD-3-Clause
/// The messages with which torch's own Gloo refuses arguments. Programs and torch's tests search
/// for them, so they are appended to muster's.
///
/// Each function returns the message, or an empty one if Gloo would accept the arguments. They run
/// after a call was refused, or if it has several tensors, but never on the path of a successful
/// call with one tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <cstdint>
#include <exception>
#include <string>
#include <type_traits>
#include <vector>

#include "core/group/errors.h"

namespace muster::compat {
using Tensors = std::vector<at::Tensor>;

/// The errors of torch's Gloo for wrong arguments of a group's calls, each call by its name in c10d
/// ("broadcast"). Empty: the arguments are right.
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

// From muster's exceptions to the ones that stock torch turns into
// torch.distributed.DistBackendError and its sisters, and what torch's say.

/// The text of any exception, without the backtrace at the end of torch's exceptions.
inline std::string text_of(const std::exception& error) {
  const auto* theirs = dynamic_cast<const c10::Error*>(&error);
  return theirs == nullptr ? error.what() : theirs->what_without_backtrace();
}

/// Runs `body`; an exception of muster's comes out as torch's class of the same name, with the same
/// text. A timeout's text begins with the words that programs look for in the errors of torch's own
/// backends.
template <class Body>
auto in_torch_errors(Body body) -> std::invoke_result_t<Body> {
  try {
    return body();
  } catch (const DistBackendError& error) {
    const std::string text = error.what();
    C10_THROW_ERROR(DistBackendError,
                    error.code() == Code::timed_out ? "muster: Timed out waiting: " + text : text);
  } catch (const DistNetworkError& error) {
    C10_THROW_ERROR(DistNetworkError, error.what());
  } catch (const DistStoreError& error) {
    C10_THROW_ERROR(DistStoreError, error.what());
  } catch (const DistError& error) {
    C10_THROW_ERROR(DistError, error.what());
  }
}

/// The same for an exception that is kept.
inline std::exception_ptr as_torch_error(const std::exception_ptr& error) {
  if (!error) return nullptr;
  try {
    in_torch_errors([&] { std::rethrow_exception(error); });
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace muster::compat
