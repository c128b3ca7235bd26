// SPDX-License-Identifier: BSD-3-Clause
/// One call as operations of NCCL on dense memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/nccl/communicator.h"
#include "core/collective/op.h"
#include "core/group/call/call.h"
#include "core/group/call/given_tensors.h"

namespace muster::nccl {

/// Why NCCL cannot reduce so on that device, as the end of a sentence; empty if it can. Tensors of
/// any type can be moved. Complex tensors are reduced as pairs of reals, bool as uint8.
std::string why_not_reduced(const NcclLibrary& library, collective::Reduce reduce,
                            at::ScalarType dtype, c10::DeviceIndex device);

/// The transfers of a call, by ranks of its communicator. Holds its tensors.
struct NcclTransferPlan {
  collective::Op op = collective::Op::barrier;
  collective::Reduce reduce = collective::Reduce::sum;
  double factor = 1;
  at::ScalarType dtype = at::kByte;
  int rank = 0;
  int size = 1;
  int root = -1;  ///< or the other end of a message
  Slices inputs = {}, outputs = {};
};

/// One run of a plan. Used by one thread; everything is enqueued on the current stream of the
/// tensors' device.
class NcclTransfer {
 public:
  explicit NcclTransfer(NcclTransferPlan plan) : plan_(std::move(plan)) {}
  const NcclTransferPlan& plan() const { return plan_; }

  /// Copies inputs that are not dense, and finds memory for outputs that are not.
  void prepare();
  /// Calls NCCL; runs inside of `Communicator::run`, after `prepare`.
  void enqueue(const NcclCommunicator& communicator, CommHandle handle, StreamHandle stream) const;
  /// Copies outputs back that are not dense.
  void finish();

 private:
  /// One slice, or all slices of a list, as one piece of memory.
  struct DensePiece {
    at::Tensor tensor = {};  // dense, flat
    void* data() const { return tensor.mutable_data_ptr(); }
  };
  DensePiece dense_input(const Slice& slice);
  DensePiece dense_output(const Slice& slice, bool filled);
  bool is_even(const Slices& slices) const;
  /// The slices of a list, one after another in one piece of memory.
  DensePiece joined_inputs();
  DensePiece joined_outputs();
  void enqueue_reduction(const NcclCommunicator& communicator, CommHandle handle,
                         StreamHandle stream) const;
  void enqueue_exchange(const NcclCommunicator& communicator, CommHandle handle,
                        StreamHandle stream) const;

  NcclTransferPlan plan_;
  bool even_ = false;  // the list is one piece
  std::vector<DensePiece> inputs_, outputs_;
  std::vector<std::pair<at::Tensor, Slice>> copies_back_;
};

}  // namespace muster::nccl
