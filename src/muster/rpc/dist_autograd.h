/// Gradients of what was computed on several workers: torch.distributed.autograd.
///
///     dist_autograd::context context;
///     auto loss = loss_of(rpc::rpc_sync<at::Tensor>("ps", "forward", input));
///     dist_autograd::backward(context.context_id(), {loss});
///     // on the worker that has `weight`
///     at::Tensor gradient = dist_autograd::get_gradients(context.context_id()).at(weight);
///
/// While a context is current on a thread, calls from it carry it along: what they compute over
/// there is part of it, and tensors that require grad leave a send function where they come from
/// and a receive function where they arrive. Backward walks these functions against their
/// direction, from worker to worker. Gradients of leaves go to the context, on the leaf's worker,
/// never to `grad()`: contexts do not mix.
///
/// Which gradients does a worker wait for before it goes on?
///   Mode::fast    of every value that it has sent in this context (torch's FAST mode). Nothing is
///                 asked beforehand. Where some of them take no part in the roots and block others,
///                 backward throws saying so, once nothing moves any more; torch hangs.
///   Mode::smart   of those that the roots depend on, which are found by walking the whole graph
///                 first: unused calls do no harm.
///
/// Thread-safe: several contexts, and several backward passes of one context with retain_graph, may
/// run at once. A worker that dies during a pass fails that pass, by name. Nodes are run by one
/// thread per worker and pass, on the CPU or on each device's current stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <vector>

namespace muster::rpc::dist_autograd {

/// Tensors by identity: two handles to one tensor are one key.
struct ByIdentity {
  bool operator()(const at::Tensor& a, const at::Tensor& b) const {
    return a.unsafeGetTensorImpl() < b.unsafeGetTensorImpl();
  }
};
using Gradients = std::map<at::Tensor, at::Tensor, ByIdentity>;

enum class Mode : std::uint8_t { fast, smart };

/// A context of its own, current on the thread that makes it until it goes; it must go on that
/// thread. Then what all workers keep for it goes too. One at a time per thread. Needs init_rpc.
class context {
 public:
  context();
  ~context();
  context(const context&) = delete;
  context& operator=(const context&) = delete;
  /// Unique in the job.
  std::int64_t context_id() const { return id_; }

 private:
  std::int64_t id_;
};

/// Backward from scalar tensors of this worker; blocks until the whole job's part of the graph is
/// done. Throws DistError where the context is unknown here or a root is no scalar or does not
/// require grad; what a backward function over there throws, with its worker.
void backward(std::int64_t context_id, const std::vector<at::Tensor>& roots,
              bool retain_graph = false, Mode mode = Mode::fast);

/// What backward has summed up for the leaves of this worker. Throws DistError where the context is
/// unknown here.
Gradients get_gradients(std::int64_t context_id);

/// The context of this thread, here or as the callee of a call in one; -1: none.
std::int64_t current_context();

}  // namespace muster::rpc::dist_autograd
