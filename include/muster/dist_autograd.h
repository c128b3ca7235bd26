// SPDX-License-Identifier: BSD-3-Clause
/// Backward passes across workers: torch.distributed.autograd.
///
///     dist_autograd::context context;
///     auto loss = loss_of(rpc::rpc_sync<at::Tensor>("ps", "forward", input));
///     dist_autograd::backward(context.context_id(), {loss});
///     // on the worker that has `weight`
///     at::Tensor gradient = dist_autograd::get_gradients(context.context_id()).at(weight);
///
/// While a context is current on a thread, calls from that thread carry it: what they compute on
/// the callee belongs to it. A tensor that requires grad leaves a send function on the sender and a
/// receive function on the receiver. Backward walks these functions in reverse, from worker to
/// worker. Gradients of leaves are stored in the context on the leaf's worker, never in `grad()`,
/// so contexts do not mix.
///
/// The mode determines which gradients a worker waits for before it continues:
///   Mode::fast    those of every value it sent in this context (torch's FAST mode). No extra
///                 messages. If a value does not contribute to the roots and blocks others,
///                 backward throws once no progress is possible; torch hangs.
///   Mode::smart   those the roots depend on, found by walking the whole graph first. Unused calls
///                 do no harm.
///
/// Thread-safe: several contexts may run at once, and so may several backward passes of one context
/// with retain_graph. A worker that dies during a pass fails the pass; the error names it. Each
/// worker runs the nodes of a pass on one thread, on the CPU or on each device's current stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <vector>

namespace muster::rpc::dist_autograd {

/// Orders tensors by identity: two handles to one tensor are the same key.
struct ByIdentity {
  bool operator()(const at::Tensor& a, const at::Tensor& b) const {
    return a.unsafeGetTensorImpl() < b.unsafeGetTensorImpl();
  }
};
using Gradients = std::map<at::Tensor, at::Tensor, ByIdentity>;

enum class Mode : std::uint8_t { fast, smart };

/// Creates a context that is current on this thread until destroyed, on the same thread.
/// Destruction also frees what all workers keep for it. One at a time per thread. Requires
/// init_rpc.
class context {
 public:
  context();
  ~context();
  context(const context&) = delete;
  context& operator=(const context&) = delete;
  /// Unique within the job.
  std::int64_t context_id() const { return id_; }

 private:
  std::int64_t id_;
};

/// Runs backward from scalar tensors of this worker. Blocks until all workers have finished their
/// part of the graph. Throws DistError if the context is unknown here, or if a root is not scalar
/// or does not require grad. An exception of a backward function on another worker is thrown here
/// with that worker's name.
void backward(std::int64_t context_id, const std::vector<at::Tensor>& roots,
              bool retain_graph = false, Mode mode = Mode::fast);

/// The gradients backward has accumulated for this worker's leaves. Throws DistError if the context
/// is unknown here.
Gradients get_gradients(std::int64_t context_id);

/// This thread's current context, either its own or that of the call it is serving; -1: none.
std::int64_t current_context();

}  // namespace muster::rpc::dist_autograd
