#include "faces/compat/torch_range.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>

#include <utility>

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
    case OpType::ALLGATHER_INTO_TENSOR_COALESCED: return "all_gather_into_tensor_coalesced";
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

}  // namespace muster::compat
