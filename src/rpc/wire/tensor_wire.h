// SPDX-License-Identifier: BSD-3-Clause
/// Messages as workers exchange them, and tensors on the wire.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <functional>
#include <string>

#include "core/base/bytes.h"
#include "muster/rpc_value.h"
#include "muster/status.h"
#include "rpc/wire/message.h"

namespace muster::rpc {

/// A message between workers: a call, its reply, or a message of a layer above. On the wire it is a
/// MessageHead and the parts that the head announces.
struct RpcMessage {
  MessageKind kind = MessageKind::call;
  bool wants_answer = false;
  bool observed = false;        ///< the sender's observer has seen it
  std::uint64_t call = 0;       ///< the caller's number for the call
  std::int64_t time_left = -1;  ///< as MessageHead::time_left
  std::string name;             ///< the function's name
  std::string note;             ///< written by the observer (autograd)
  Value value;
};

/// A tensor to be sent. `data` points into `source`, which must be kept until it has been sent.
struct TensorOut {
  TensorHead head;
  at::Tensor source;
  ConstBytes data;
  bool ours = false;  ///< `source` is a private copy
};
/// Maps a sender's device to the receiver's (device maps); throws if there is no mapping.
using DeviceMapping = std::function<at::Device(at::Device)>;
/// Dense memory is sent as it is; a tensor with gaps is packed first. Throws for layouts that
/// cannot be sent.
TensorOut describe_tensor(const at::Tensor& tensor, const DeviceMapping& device);
/// Makes a private copy, so later changes to the described tensor have no effect.
void make_ours(TensorOut& tensor);

/// Memory for a tensor to be received. Fails with Code::internal if sizes, dtype and byte count are
/// inconsistent, and with Code::exhausted if out of memory.
struct TensorIn {
  c10::Storage memory;
  MutableBytes data;
};
Result<TensorIn> allocate_tensor(const TensorHead& head);
/// Makes the tensor whose bytes are in `memory`.
at::Tensor assemble_tensor(const TensorHead& head, TensorIn memory);

}  // namespace muster::rpc
