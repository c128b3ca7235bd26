// SPDX-License-Identifier: BSD-3-Clause
#include "faces/compat/torch_work.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

#include "core/group/group_core.h"
#include "faces/compat/torch_error.h"
#include "faces/compat/torch_versions.h"

namespace muster::compat {
namespace {

using c10d::OpType;

/// As torch's own backends call them.
const char* title_of(OpType type) {
  switch (type) {
    case OpType::BROADCAST: return "broadcast";
    case OpType::ALLREDUCE:
    case OpType::ALLREDUCE_COALESCED: return "all_reduce";
    case OpType::_ALLREDUCE_SPARSE: return "sparse_all_reduce";
    case OpType::REDUCE: return "reduce";
    case OpType::ALLGATHER:
    case OpType::ALLGATHER_COALESCED: return "all_gather";
    case OpType::_ALLGATHER_BASE: return "_all_gather_base";
    case kAllGatherIntoTensorCoalesced: return "all_gather_into_tensor_coalesced";
    case OpType::GATHER: return "gather";
    case OpType::SCATTER: return "scatter";
    case OpType::REDUCE_SCATTER: return "reduce_scatter";
    case OpType::_REDUCE_SCATTER_BASE: return "_reduce_scatter_base";
    case OpType::REDUCE_SCATTER_TENSOR_COALESCED: return "reduce_scatter_tensor_coalesced";
    case OpType::ALLTOALL_BASE:
    case OpType::ALLTOALL: return "all_to_all";
    case OpType::SEND: return "send";
    case OpType::RECV: return "recv";
    case OpType::RECVANYSOURCE: return "recvAnySource";
    case OpType::BARRIER: return "barrier";
    default: return "other";
  }
}

}  // namespace

std::shared_ptr<CallRange> CallRange::begin(const std::string& backend, OpType type,
                                            const std::vector<at::Tensor>& tensors) {
  auto observers = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!observers) [[likely]]
    return nullptr;
  auto call = std::make_shared<CallRange>(std::move(*observers));
  call->title_ = backend + ":" + title_of(type);
  call->range_._setAsync();
  const std::vector<c10::IValue> inputs(tensors.begin(), tensors.end());
  call->range_.before(std::string_view(call->title_), &inputs);
  // The end is reported to the profiler that saw the beginning, on whichever thread it happens.
  call->end_ = at::wrapPropagateTLSState([range = &call->range_] { range->end(); });
  return call;
}

void CallRange::end() {
  std::call_once(ended_, [this] {
    if (end_) end_();
  });
}

c10::intrusive_ptr<TorchWork> TorchWork::create(Parts parts,
                                                const std::shared_ptr<CallRange>& shown) {
  auto whole = c10::make_intrusive<TorchWork>(std::move(parts), shown);
  if (shown) whole->future()->addCallback([shown](c10::ivalue::Future&) { shown->end(); });
  return whole;
}

TorchWork::TorchWork(Parts parts, std::shared_ptr<CallRange> shown)
    : Work(parts.group->rank(), parts.type), parts_(std::move(parts)), shown_(std::move(shown)) {}

bool TorchWork::isCompleted() {
  return std::all_of(parts_.works.begin(), parts_.works.end(),
                     [](const auto& work) { return work->is_completed(); });
}

bool TorchWork::isSuccess() const {
  return std::all_of(parts_.works.begin(), parts_.works.end(),
                     [](const auto& work) { return work->is_success(); });
}

std::exception_ptr TorchWork::exception() const {
  for (const auto& work : parts_.works) {
    if (auto error = work->exception()) return as_torch_error(error);
  }
  return nullptr;
}

int TorchWork::sourceRank() const {
  const int source = parts_.works.empty() ? -1 : parts_.works.front()->source_rank();
  return source < 0 ? source : parts_.group->group_rank_of(source);
}

bool TorchWork::wait(std::chrono::milliseconds timeout) {
  const bool limited = timeout > kNoTimeout;
  const auto deadline = limited ? deadline_after(steady_clock(), timeout) : TimePoint::max();
  return in_torch_errors([&] {
    for (const auto& work : parts_.works)
      work->wait(limited ? std::optional(time_left(steady_clock(), deadline)) : std::nullopt);
    if (shown_) shown_->end();  // the future's callback may not have run yet
    return true;
  });
}

void TorchWork::abort() {
  if (!isCompleted())
    core_of(parts_.group)
        .abort("a Work of rank " + std::to_string(parts_.group->rank()) + " was aborted");
}

c10::intrusive_ptr<c10::ivalue::Future> TorchWork::getFuture() {
  if (const auto pass = parts_.pass.lock()) pass->finish_at_the_end(parts_.works);
  return future();
}

c10::IValue TorchWork::value() const {
  if (parts_.lists == 1) return parts_.outputs;
  std::vector<std::vector<at::Tensor>> lists(parts_.lists);
  for (std::size_t i = 0; i < parts_.outputs.size(); ++i)
    lists[i * parts_.lists / parts_.outputs.size()].push_back(parts_.outputs[i]);
  return lists;
}

c10::intrusive_ptr<c10::ivalue::Future> TorchWork::future() {
  auto result = value();
  if (parts_.pass.expired() && isSuccess()) {
    // After a wait torch's Reducer reads the value at once, when the callbacks that complete
    // `future_` may still have to run. Those of a backward pass wait for its last call.
    auto done = c10::make_intrusive<c10::ivalue::Future>(result.type());
    done->markCompleted(std::move(result));
    return done;
  }
  c10::intrusive_ptr<c10::ivalue::Future> whole;
  {
    const std::lock_guard lock(future_mutex_);
    if (future_) return future_;
    whole = future_ = c10::make_intrusive<c10::ivalue::Future>(result.type());
  }
  const auto left = std::make_shared<std::atomic<std::size_t>>(parts_.works.size());
  for (const auto& work : parts_.works) {
    work->get_future()->addCallback([left, whole, result](c10::ivalue::Future& part) {
      if (part.hasError()) {
        whole->setErrorIfNeeded(as_torch_error(part.exception_ptr()));
      } else if (left->fetch_sub(1) == 1) {
        whole->markCompleted(result);
      }
    });
  }
  return whole;
}

}  // namespace muster::compat
