/// The frames of the message protocol: one fixed header, then `length` bytes of payload.
/// `docs/internals/transport.md` describes the whole protocol.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/base/bytes.h"
#include "core/transport/channel/channel.h"
#include "core/transport/channel/fingerprint.h"
#include "core/tunables/tunables.h"
#include "muster/status.h"

namespace muster::transport {

/// Large payloads are cut into fragments of this size.
using fixed::kFragmentBytes;
/// Largest payload of a frame that carries a record (a cause of failure).
inline constexpr std::size_t kRecordBytes = 8 * 1024;  // limit: of a sentence

enum class FrameKind : std::uint8_t {
  eager = 1,  ///< a whole message: tag, call, payload
  request,    ///< announces a large message: tag, call, message id, amount = its bytes
  clear,      ///< the receiver waits for the message: message id
  data,       ///< a fragment: message id, amount = where it starts, payload
  withdraw,   ///< the sender cancels the message: message id
  refuse,     ///< the receiver does not want the message: message id
  credit,     ///< returned credit of a channel: amount = bytes of eager messages, tag = envelopes
  channel_failure,  ///< the channel has failed: a cause
  rank_failure,     ///< a rank is lost: message = that rank, amount = 1: it says so itself, 2: it
                    ///< will end without closing its groups, and says what went wrong; and a cause
  ping,             ///< asks for an answer
  pong,
  close,      ///< nothing more will come; amount = 1: the sender's process ended and had not closed
              ///< its groups
  close_ack,  ///< the answer to a close: everything before it was read
};
inline constexpr std::uint8_t kLastFrameKind = static_cast<std::uint8_t>(FrameKind::close_ack);

/// Copied to the wire as it is.
struct FrameHeader {
  static constexpr std::uint8_t kMark = 0xa7;

  std::uint32_t length = 0;  ///< payload bytes that follow
  FrameKind kind = FrameKind::ping;
  std::uint8_t mark = kMark;  ///< if it is missing, the stream is out of sync
  std::uint16_t zero = 0;
  std::uint32_t channel = 0;
  std::uint32_t zero_too = 0;
  std::uint64_t tag = 0;
  std::uint64_t message = 0;
  std::uint64_t amount = 0;
  Fingerprint call;
};
static_assert(sizeof(FrameHeader) == 72);

const char* name_of(FrameKind kind);

/// Whether a header from the wire is one that this version may send: mark, kind, lengths. What its
/// ids mean is for the fabric to check.
Status check_header(const FrameHeader& header);

/// A cause of failure as a record: code, ranks at fault, text. Long texts are cut, so that it fits
/// into kRecordBytes.
std::string encode_cause(const Status& cause);
/// Empty if the record is invalid (an unknown code, ranks outside the job).
std::optional<Status> decode_cause(std::string_view record, int world_size);

}  // namespace muster::transport
