/// The wire form of what workers say to each other: one head per message, then what is too large
/// for it. No torch, no I/O: bytes in, values out.
///
/// A head is a fixed part, then the function's name, a note of the layers above (autograd), one
/// description per tensor, the payload and the bytes of small tensors. A large payload and large
/// tensors travel apart, each as a message of the transport's under a tag of its own, so that they
/// go straight into the memory of the value that they become. A head that is itself too long for
/// one eager message is announced by a short one. Everything that comes in is checked against the
/// bytes that are there before anything is allocated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "muster/base/bytes.h"
#include "muster/base/status.h"

namespace muster::rpc {

/// What a message is. `reply` and `error` answer a message of any other kind that wants an answer.
enum class Kind : std::uint8_t {
  call = 1,     ///< run the function `name` with the value as its arguments
  reply = 2,    ///< the value is the result
  error = 3,    ///< the payload says what was thrown (remote_error.h)
  cancel = 4,   ///< nobody waits for the answer to `call` any more
  closing = 5,  ///< of the graceful end
  // Free for the layers above, which give them a handler with Agent::on.
  rref_first = 16,
  rref_last = 31,
  autograd_first = 32,
  autograd_last = 47,
  user_first = 64,
};

/// Heads up to this size travel at once.
inline constexpr std::size_t kHeadBytes = 16 * 1024;                 // limit: protocol
inline constexpr std::size_t kMaxHeadBytes = std::size_t{64} << 20;  // limit: protocol
inline constexpr std::uint64_t kMaxPayloadBytes = std::uint64_t{1} << 32;
inline constexpr std::uint64_t kMaxTensorBytes = std::uint64_t{1} << 40;
inline constexpr std::uint32_t kMaxDimensions = 64;

/// How a tensor is described. Whether `bytes` is what type and sizes ask for is for the reader of
/// tensors to check.
struct TensorHead {
  std::uint8_t dtype = 0;        ///< torch's number
  std::uint8_t device_type = 0;  ///< where it is to live at the receiver; torch's number
  std::uint8_t device_index = 0;
  std::uint8_t flags = 0;
  static constexpr std::uint8_t kUndefined = 1;     ///< no tensor at all
  static constexpr std::uint8_t kRequiresGrad = 2;  ///< what autograd makes of it is autograd's
  static constexpr std::uint8_t kApart = 4;         ///< its bytes travel apart; set by the encoder
  static constexpr std::uint8_t kElementOrder =
      8;  ///< bytes in the order of its indices, not of its memory
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;  ///< of elements, none negative
  std::uint64_t bytes = 0;
};

struct Head {
  Kind kind = Kind::call;
  std::uint8_t flags = 0;
  static constexpr std::uint8_t kWantsAnswer = 1;
  static constexpr std::uint8_t kObserved = 2;      ///< the observer has seen it leave
  static constexpr std::uint8_t kPayloadApart = 4;  ///< set by the encoder
  static constexpr std::uint8_t kLong =
      8;                   ///< only announces a head of `payload_bytes` under `first_tag`
  std::uint64_t call = 0;  ///< the caller's number of it
  std::int64_t time_left =
      -1;  ///< nanoseconds until nobody wants the answer any more; -1: no limit
  std::string_view name;
  std::string_view note;
  std::uint64_t payload_bytes = 0;
  std::uint64_t first_tag = 0;  ///< of what travels apart: the payload first, then tensors in order
  std::vector<TensorHead> tensors;

  // Only of decoded heads: views into the input; empty where it travels apart.
  std::string_view payload;
  std::vector<std::string_view> tensor_bytes;  ///< as many as tensors
};

/// What is to be sent: `head` as one message under tag 0, then what travels apart under first_tag,
/// first_tag + 1, ...
struct EncodedMessage {
  static constexpr int kPayload = -1;
  std::string head;
  std::string long_head;   ///< empty unless the head was too long to travel at once; then it is the
                           ///< first of what travels apart
  std::vector<int> apart;  ///< what else does, in order: kPayload, or the position of a tensor
};
/// Says what travels apart and writes the head. `data[i]` are the bytes of tensor i,
/// `tensors[i].bytes` many; those that travel apart are not looked at.
EncodedMessage encode(Head head, ConstBytes payload, const std::vector<ConstBytes>& data);

/// A whole head; where it announces a long one only kind, flags, payload_bytes and first_tag are
/// set. Code::internal says what is wrong.
Result<Head> decode(ConstBytes bytes);

/// What was thrown over there, as the payload of Kind::error.
struct ErrorText {
  std::uint8_t code = 0;  ///< muster's Code where it was one of its errors
  std::string type;       ///< "std::out_of_range"; "" where it is not known
  std::string text;
  std::string trace;  ///< where it was thrown, where that is known
  std::vector<std::int32_t> ranks;
};
std::string encode_error(const ErrorText& error);
Result<ErrorText> decode_error(std::string_view bytes);

/// What workers tell each other on their way to the graceful end (agent_closing.h), as the payload
/// of Kind::closing.
enum class ClosingWord : std::uint8_t { here = 1, waiting, begin, probe, counts, close };
struct ClosingNote {
  int from = -1;  ///< does not travel: the message has it
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
