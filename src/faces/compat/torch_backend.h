// SPDX-License-Identifier: BSD-3-Clause
/// muster's engine as a backend of stock torch: what
/// `torch.distributed.init_process_group("muster")` makes for CPU tensors.
///
/// Every call becomes the public function of muster's of the same meaning, on this backend's group.
/// Synchronous calls run to their end on the caller's thread; asynchronous ones give a Work with a
/// future. Failures throw torch's DistBackendError and its sisters, from the call if they are known
/// there, else from the Work. Deprecated names of torch's virtuals are overridden where a newer one
/// forwards to them, so that older releases work too.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/group/group_core.h"
#include "faces/compat/torch_calls.h"
#include "faces/compat/torch_error.h"
#include "faces/compat/torch_job.h"
#include "muster/process_group.h"
#include "muster/work.h"

namespace muster::compat {

/// The arguments of which stock torch makes a group's backend (its `_DistributedBackendOptions`).
struct TorchGroup {
  std::string backend;  ///< the name that it is registered by
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{};
  std::string id;                 ///< the same on all members, different for every group
  std::vector<int> global_ranks;  ///< ranks of the default group, by rank of this one; empty for
                                  ///< the default group itself
  bool alone = false;             ///< an engine of its own, beside the default group's
};

class TorchBackend : public c10d::Backend {
 public:
  /// Blocks until all members have come. Groups of a default group on this backend share its
  /// engine; the default group, and one made while that stands on another backend, meet over
  /// `store`. Throws torch's errors.
  static c10::intrusive_ptr<TorchBackend> create(const TorchGroup& made_of);
  /// Over a group of muster's own job, without a job of stock torch's. `shutdown` does nothing: the
  /// group ends where muster ends it. Splitting and shrinking are refused.
  static c10::intrusive_ptr<TorchBackend> over(Group group);

  TorchBackend(std::string name, std::shared_ptr<TorchJob> job, Group group, bool whole_job);
  ~TorchBackend() override;

  using Works = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;

  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Works allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Works allreduce_coalesced(Tensors& tensors,
                            const c10d::AllreduceCoalescedOptions& options) override;
  Works reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Works allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Works _allgather_base(at::Tensor& output, at::Tensor& input,
                        const c10d::AllgatherOptions& options) override;
  Works allgather_coalesced(Lists& outputs, Tensors& inputs,
                            const c10d::AllgatherOptions& options) override;
  Works allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::AllgatherOptions& options) override;
  Works gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Works gather_into_tensor(at::Tensor& output, at::Tensor& input,
                           const c10d::GatherOptions& options);
  Works scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override;
  Works reduce_scatter(Tensors& outputs, Lists& inputs,
                       const c10d::ReduceScatterOptions& options) override;
  Works _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                             const c10d::ReduceScatterOptions& options) override;
  Works reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                        const c10d::ReduceScatterOptions& options) override;
  Works alltoall_base(at::Tensor& output, at::Tensor& input,
                      std::vector<std::int64_t>& output_splits,
                      std::vector<std::int64_t>& input_splits,
                      const c10d::AllToAllOptions& options) override;
  Works alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Works barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

  Works send(Tensors& tensors, int destination, int tag) override;
  Works recv(Tensors& tensors, int source, int tag) override;
  Works recvAnysource(Tensors& tensors, int tag) override;

  /// The group that carries the calls out.
  const Group& group() const { return group_; }
  const std::string getBackendName() const override { return name_; }
  std::uint64_t getSequenceNumberForGroup() override { return core_of(group_).collective_count(); }
  void setSequenceNumberForGroup() override {}

  // Newer than torch 2.6: no `override`.
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() { return options_; }
  /// Allocates DDP's buckets, for example: memory that the other ranks of the host read and write
  /// in place. Private memory if the arena has no room.
  bool supportsTensorAlloc(c10::DeviceIndex device) { return device < 0; }
  at::Tensor allocateTensor(long size, at::TensorOptions options);
  /// For Python's `allocate_tensor`: a tensor of one dimension in memory that the ranks of the host
  /// share; in ordinary memory if the shared memory has no room.
  at::Tensor allocate_shared(std::int64_t size, const at::TensorOptions& options);
  bool supportsSplitting() const { return true; }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& options);
  bool supportsShrinking() const { return true; }
  /// torch keeps its own account of who is left. So where more members have died than it was told
  /// to leave out this throws, naming them, and may be called again with them.
  c10::intrusive_ptr<c10d::Backend> shrink(
      const std::vector<std::int64_t>& ranks_to_exclude, int flags,
      const c10::intrusive_ptr<c10d::Backend::Options>& options);
  void setTimeout(std::chrono::milliseconds timeout);
  c10d::ErrorType getError();
  /// Ends everything in flight; the other members learn it.
  void abort();
  /// For the default group the orderly end, for which it waits; any other group goes with it.
  void shutdown();

 private:
  const std::string name_;
  const std::shared_ptr<TorchJob> job_;  // null: a group of muster's own
  const Group group_;
  TorchCalls calls_;
  const GlooWords gloo_words_;
  const bool whole_job_;
  const c10::intrusive_ptr<c10d::Backend::Options> options_;
  std::atomic<bool> shut_down_{false};
  std::optional<TorchJob::Left> left_;  // where `shrink` found more dead than it was told of
};

}  // namespace muster::compat
