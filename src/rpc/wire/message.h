// SPDX-License-Identifier: BSD-3-Clause
/// The wire format of messages between workers: one head per message, then whatever is too large
/// for it. No torch, no I/O: bytes in, values out.
///
/// A head consists of a fixed part, the function's name, a note of the layers above (autograd), one
/// description per tensor, the payload and the bytes of small tensors. A large payload and large
/// tensors are sent separately, each as a transport message under its own tag, so they are received
/// directly into the value's memory. A head too long for one eager message is announced by a short
/// one. All input is checked against the bytes present before anything is allocated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/bytes.h"
#include "muster/status.h"

namespace muster::rpc {

/// The kind of a message. `reply` and `error` answer a message of any other kind that expects a
/// reply.
enum class MessageKind : std::uint8_t {
  call = 1,     ///< run the function `name` with the value as its arguments
  reply = 2,    ///< the value is the result
  error = 3,    ///< the payload describes the exception (remote_exception.h)
  cancel = 4,   ///< the caller no longer waits for the reply to `call`
  closing = 5,  ///< part of the graceful shutdown
  // For the layers above, which set a handler with Agent::on.
  rref_first = 16,
  rref_last = 31,
  autograd_first = 32,
  autograd_last = 47,
  user_first = 64,  ///< 64: calls of Python's functions; free from 65 on
};

/// Heads up to this size are sent eagerly.
inline constexpr std::size_t kHeadBytes = 16 * 1024;                 // limit: protocol
inline constexpr std::size_t kMaxHeadBytes = std::size_t{64} << 20;  // limit: protocol
inline constexpr std::uint64_t kMaxPayloadBytes = std::uint64_t{1} << 32;
inline constexpr std::uint64_t kMaxTensorBytes = std::uint64_t{1} << 40;
inline constexpr std::uint32_t kMaxDimensions = 64;

/// Describes a tensor. The decoder does not check that `bytes` matches dtype and sizes.
struct TensorHead {
  std::uint8_t dtype = 0;        ///< torch's number
  std::uint8_t device_type = 0;  ///< device at the receiver; torch's number
  std::uint8_t device_index = 0;
  std::uint8_t flags = 0;
  static constexpr std::uint8_t kUndefined = 1;     ///< an undefined tensor
  static constexpr std::uint8_t kRequiresGrad = 2;  ///< the sender's tensor requires grad
  static constexpr std::uint8_t kApart = 4;  ///< its bytes are sent separately; set by the encoder
  /// Bytes are in index order, not in memory order.
  static constexpr std::uint8_t kElementOrder = 8;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;  ///< in elements, none negative
  std::uint64_t bytes = 0;
};

/// The head of a message on the wire.
struct MessageHead {
  MessageKind kind = MessageKind::call;
  std::uint8_t flags = 0;
  static constexpr std::uint8_t kWantsAnswer = 1;
  static constexpr std::uint8_t kObserved = 2;      ///< the observer has seen it being sent
  static constexpr std::uint8_t kPayloadApart = 4;  ///< set by the encoder
  /// Only announces a head of `payload_bytes` bytes under `first_tag`.
  static constexpr std::uint8_t kLong = 8;
  std::uint64_t call = 0;  ///< the caller's number for the call
  /// Nanoseconds until the caller stops waiting; -1: no limit.
  std::int64_t time_left = -1;
  std::string_view name;
  std::string_view note;
  std::uint64_t payload_bytes = 0;
  /// First tag of the parts sent separately: the payload first, then tensors in order.
  std::uint64_t first_tag = 0;
  std::vector<TensorHead> tensors;

  // Set in decoded heads only: views into the input; empty if sent separately.
  std::string_view payload;
  std::vector<std::string_view> tensor_bytes;  ///< as many as tensors
};

/// A part that is sent separately: the payload, or the tensor of this index.
inline constexpr int kPayloadPart = -1;
/// Decides which parts are sent separately and notes it in the flags of `head` and its tensors: the
/// payload and then each tensor go into the head if there is still room for them. Returns the
/// others in the order of their tags.
std::vector<int> place_parts(MessageHead& head, std::size_t payload_bytes);
/// Writes a head whose parts are placed. `data[i]` are the `tensors[i].bytes` bytes of tensor i;
/// bytes that are sent separately are not read. A head of more than kHeadBytes is itself sent
/// separately, after its announcement.
std::string encode(const MessageHead& head, ConstBytes payload,
                   const std::vector<ConstBytes>& data);
/// The short head that announces a long one of `head_bytes` bytes, sent under `tag`.
std::string encode_announcement(MessageKind kind, std::size_t head_bytes, std::uint64_t tag);

/// Decodes a whole head. If it announces a long one, only kind, flags, payload_bytes and first_tag
/// are set. Errors are Code::internal with the reason.
Result<MessageHead> decode(ConstBytes bytes);

/// A remote exception, as the payload of MessageKind::error.
struct ErrorText {
  std::uint8_t code = 0;  ///< muster's Code for muster's own errors
  std::string type;       ///< "std::out_of_range"; "" if unknown
  std::string text;
  std::string trace;  ///< stack trace, if known
  std::vector<std::int32_t> ranks;
};
std::string encode_error(const ErrorText& error);
Result<ErrorText> decode_error(std::string_view bytes);

/// Messages of the graceful shutdown (agent_closing.h), as the payload of MessageKind::closing.
enum class ClosingWord : std::uint8_t { here = 1, waiting, begin, probe, counts, close };
struct ClosingNote {
  int from = -1;  ///< not encoded: known from the message
  ClosingWord word = ClosingWord::here;
  std::uint64_t round = 0;
  std::uint64_t sent = 0;
  std::uint64_t handled = 0;
  bool busy = false;
  std::string waits_for;
};
std::string encode_closing(const ClosingNote& note);
Result<ClosingNote> decode_closing(std::string_view bytes);

}  // namespace muster::rpc
