// SPDX-License-Identifier: BSD-3-Clause
/// The several tensors of one c10d call, which stand for several devices of one process. Torch's
/// Gloo combines them before it talks to other ranks, and spreads the result after. Here both
/// happen before: then every tensor has a call of its own, and all get the same value.
#pragma once

#include <ATen/core/Tensor.h>
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <typeinfo>
#include <utility>
#include <vector>

#include "core/group/group_core.h"
#include "faces/compat/backward_calls.h"
#include "faces/compat/torch_error.h"
#include "faces/compat/torch_work.h"
#include "muster/op.h"
#include "muster/process_group.h"

namespace muster::compat {
/// Writes every one with all of them reduced, in the order of the list. Autograd is not told, nor
/// by the next.
void reduce_locally(const std::vector<at::Tensor>& tensors, const ReduceOp& op);
/// Writes every one with the value of `tensors[index]`.
void copy_to_all(const std::vector<at::Tensor>& tensors, std::size_t index);
/// The same tensors, with a copy in the place of one that stands in the list already.
std::vector<at::Tensor> with_memory_of_their_own(std::vector<at::Tensor> tensors);

// How the calls of torch's interface become muster's: with a profiler's range, torch's errors, and
// one Work for what may be several calls. For `torch_backend.cc` alone.

inline std::optional<Duration> given(std::chrono::milliseconds timeout) {
  return timeout > std::chrono::milliseconds::zero() ? std::optional<Duration>(timeout)
                                                     : std::nullopt;
}

/// Returns `make`'s result. If the call is refused, torch Gloo's message follows muster's.
template <class Make, class Words>
auto in_both_words(Make make, Words words) -> decltype(make()) {
  try {
    return make();
  } catch (const DistError& error) {
    const std::string theirs = typeid(error) == typeid(DistError) ? words() : std::string();
    if (theirs.empty()) throw;
    throw DistError(std::string(error.what()) + " (" + theirs + ")", error.code(), error.ranks());
  }
}

/// Issues the calls of one backend on its group.
class TorchCalls {
 public:
  using Works = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  TorchCalls(std::string name, Group group) : name_(std::move(name)), group_(std::move(group)) {}

  /// `make(timeout)` gives a Work, or none where it is done. `words()`: what torch's Gloo says to
  /// these arguments. `inputs`: what a profiler shows of the call. `outputs`: what the Work's
  /// future gives.
  template <class Make, class Words = std::string (*)()>
  Works issue(
      c10d::OpType type, const Tensors& inputs, Tensors outputs, std::chrono::milliseconds timeout,
      Make make, Words words = [] { return std::string(); });
  /// `each(i, timeout)` for every output, or for each of so many lists that the outputs come in, as
  /// one Work.
  template <class Each>
  Works issue_each(c10d::OpType type, const Tensors& inputs, const Tensors& outputs,
                   std::chrono::milliseconds timeout, Each each, std::size_t lists = 1);
  /// Several tensors in one call: `prepare(tensors)` does what is to be done on this rank, then
  /// each has a call of its own. Refused where torch's Gloo would, too.
  template <class Prepare, class Each>
  Works issue_several(Op op, const Tensors& tensors, std::chrono::milliseconds timeout,
                      const std::string& words, Prepare prepare, Each each);

 private:
  std::shared_ptr<BackwardCalls> driven_by_this_pass(const Tensors& inputs);

  const std::string name_;
  const Group group_;
  BackwardCalls::Latest in_backward_;
};

/// Null if the engine's own thread should drive a call on such tensors.
inline std::shared_ptr<BackwardCalls> TorchCalls::driven_by_this_pass(const Tensors& inputs) {
  if (!std::all_of(inputs.begin(), inputs.end(), [](const auto& input) { return input.is_cpu(); }))
    return nullptr;
  return BackwardCalls::of_this_pass(*group_, in_backward_);
}

template <class Make, class Words>
TorchCalls::Works TorchCalls::issue(c10d::OpType type, const Tensors& inputs, Tensors outputs,
                                    std::chrono::milliseconds timeout, Make make, Words words) {
  auto shown = CallRange::begin(name_, type, inputs);
  const bool counts = type != c10d::OpType::SEND && type != c10d::OpType::RECV &&
                      type != c10d::OpType::RECVANYSOURCE;
  TorchWork::Parts parts{.type = type,
                         .works = {},
                         .outputs = std::move(outputs),
                         .lists = 1,
                         .group = group_,
                         .sequence = 0,
                         .timeout = {},
                         .pass = {}};
  parts.timeout = given(timeout).value_or(group_->timeout());
  const auto pass = counts ? driven_by_this_pass(inputs) : nullptr;
  parts.pass = pass;
  if (auto work = in_torch_errors(
          [&] { return in_both_words([&] { return make(given(timeout)); }, words); }))
    parts.works.push_back(std::move(work));
  parts.sequence = counts ? core_of(group_).collective_count() : 0;
  return TorchWork::create(std::move(parts), std::move(shown));
}

template <class Each>
TorchCalls::Works TorchCalls::issue_each(c10d::OpType type, const Tensors& inputs,
                                         const Tensors& outputs, std::chrono::milliseconds timeout,
                                         Each each, std::size_t lists) {
  auto shown = CallRange::begin(name_, type, inputs);
  TorchWork::Parts parts{.type = type,
                         .works = {},
                         .outputs = outputs,
                         .lists = lists,
                         .group = group_,
                         .sequence = 0,
                         .timeout = {},
                         .pass = {}};
  parts.timeout = given(timeout).value_or(group_->timeout());
  const auto pass = driven_by_this_pass(inputs);
  parts.pass = pass;
  in_torch_errors([&] {
    const auto together = core_of(group_).coalesce_sends();
    for (std::size_t i = 0; i < (lists > 1 ? lists : outputs.size()); ++i) {
      if (auto work = each(i, given(timeout))) parts.works.push_back(std::move(work));
    }
  });
  parts.sequence = core_of(group_).collective_count();
  return TorchWork::create(std::move(parts), std::move(shown));
}

template <class Prepare, class Each>
TorchCalls::Works TorchCalls::issue_several(Op op, const Tensors& tensors,
                                            std::chrono::milliseconds timeout,
                                            const std::string& words, Prepare prepare, Each each) {
  const bool sums = op == Op::all_reduce;
  in_torch_errors([&] {
    if (!words.empty())
      core_of(group_).refuse(
          op, sums ? "allreduce" : "broadcast",
          DistError(std::to_string(tensors.size()) +
                    " tensors were given; a call takes one or more that are alike in "
                    "layout, dtype, device and shape, and where it "
                    "has a root, one that is there, with a tensor that is (" +
                    words + ")"));
  });
  prepare(tensors);
  const auto written = with_memory_of_their_own(tensors);
  return issue_each(sums ? c10d::OpType::ALLREDUCE : c10d::OpType::BROADCAST, tensors, tensors,
                    timeout, [&](std::size_t i, auto limit) { return each(written[i], limit); });
}

}  // namespace muster::compat
