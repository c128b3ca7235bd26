// SPDX-License-Identifier: BSD-3-Clause
/// The wire protocol between a TCP store's client and server after the handshake: frames of bounded
/// length, little-endian.
///
///   frame    length of what follows (u32), version (u8), op or code (u8), zero (u16), id (u64),
///            body
///   request  timeout in ns (i64, negative: no limit), number (i64), index (i32), members (i32),
///            keys (u32), values (u32), length of each key, of each value (u32), the keys' bytes,
///            the values' bytes
///   reply    number (i64), message length (u32), ranks (u32), values (u32), length of each value
///            (u32), message, each rank (i32), the values' bytes
/// A reply carries its request's id. Replies are sent in the order they become ready. Encoding
/// only; no I/O.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/bytes.h"
#include "core/security/handshake.h"
#include "core/store/request.h"

namespace muster::store {

inline constexpr std::uint8_t kStoreProtocolVersion = 1;
/// The build number a store presents to Handshake: "store" and the version.
inline constexpr std::uint64_t kStoreBuild = 0x73746f7265000000u | kStoreProtocolVersion;
/// The name that the keys of a store's connections are bound to: its port and the job's name, which
/// observers need not know. Two jobs with one secret have different ones.
inline std::string store_job(std::uint16_t port, const std::string& name, Handshake::Role role) {
  const std::string at = "store at port " + std::to_string(port);
  return role == Handshake::Role::observer ? at : at + " of job " + name;
}
/// The longest frame: one value of maximum size plus room for keys.
inline constexpr std::size_t kMaxFrameBytes =
    (std::size_t{1} << 30) + (std::size_t{64} << 20);  // limit: protocol

/// Encodes a frame up to the values' bytes, which follow unchanged so that large values are sent
/// without a copy. Empty if the frame would exceed kMaxFrameBytes.
std::string encode_head(const Request& request, std::uint64_t id);
std::string encode_head(const Reply& reply, std::uint64_t id);

struct WireRequest {
  std::uint64_t id = 0;
  Request request;  ///< views into the frame
};
struct WireReply {
  std::uint64_t id = 0;
  Reply reply;
};
/// `frame` excludes its length. A frame that is too short or too long is an error.
Result<WireRequest> decode_request(std::string_view frame);
Result<WireReply> decode_reply(std::string_view frame);

/// Splits a byte stream into frames. Holds only received bytes, so a false length costs no memory.
class RequestFrames {
 public:
  void feed(ConstBytes bytes);
  /// The next complete frame without its length; valid until the next `feed`.
  std::optional<std::string_view> next();
  /// The stream announced a frame of invalid length; no more frames follow.
  bool broken() const { return broken_; }
  /// Bytes missing from the current frame; 0 if its length is not known yet.
  std::size_t outstanding() const;
  std::size_t held() const { return buffer_.capacity(); }
  /// Frees a large buffer once all its frames have been read; invalidates returned frames.
  void trim();

 private:
  std::string buffer_;
  std::size_t at_ = 0;
  bool broken_ = false;
};

}  // namespace muster::store
