#include "core/transport/link/frame.h"

#include <algorithm>
#include <vector>

namespace muster::transport {
namespace {

constexpr std::size_t kMaxCulprits = 512;   // limit: of a record
constexpr std::size_t kMaxText = 4 * 1024;  // limit: of a record

Status broken(const FrameHeader& header, const std::string& what) {
  return Status(Code::internal, std::string("a ") + name_of(header.kind) + " frame " + what);
}

/// The most payload that a kind of frame may have.
std::size_t longest(FrameKind kind) {
  switch (kind) {
    case FrameKind::eager: return kEagerBytes;
    case FrameKind::data: return kFragmentBytes;
    case FrameKind::channel_failure:
    case FrameKind::rank_failure: return kRecordBytes;
    default: return 0;
  }
}

}  // namespace

const char* name_of(FrameKind kind) {
  switch (kind) {
    case FrameKind::eager: return "eager";
    case FrameKind::request: return "request";
    case FrameKind::clear: return "clear";
    case FrameKind::data: return "data";
    case FrameKind::withdraw: return "withdraw";
    case FrameKind::refuse: return "refuse";
    case FrameKind::credit: return "credit";
    case FrameKind::channel_failure: return "channel failure";
    case FrameKind::rank_failure: return "rank failure";
    case FrameKind::ping: return "ping";
    case FrameKind::pong: return "pong";
    case FrameKind::close: return "close";
    case FrameKind::close_ack: return "close_ack";
  }
  return "unknown";
}

Status check_header(const FrameHeader& header) {
  if (header.mark != FrameHeader::kMark || header.zero != 0 || header.zero_too != 0) {
    return Status(Code::internal,
                  "what should be a frame's header is none: the two sides have lost step");
  }
  const auto kind = static_cast<std::uint8_t>(header.kind);
  if (kind == 0 || kind > kLastFrameKind)
    return Status(Code::internal, "a frame of the unknown kind " + std::to_string(kind));
  const std::size_t limit = longest(header.kind);
  if (header.length > limit) {
    return broken(header, "says that it is " + std::to_string(header.length) +
                              " bytes long; at most " + std::to_string(limit) + " are allowed");
  }
  if (header.kind == FrameKind::data && header.length == 0) return broken(header, "is empty");
  return {};
}

std::string encode_cause(const Status& cause) {
  ByteWriter out;
  const std::size_t culprits = std::min(cause.ranks().size(), kMaxCulprits);
  out.put(static_cast<std::uint8_t>(cause.code())).put(static_cast<std::uint16_t>(culprits));
  for (std::size_t i = 0; i < culprits; ++i) out.put(static_cast<std::int32_t>(cause.ranks()[i]));
  out.put_text(std::string_view(cause.message()).substr(0, kMaxText));
  return out.take();
}

std::optional<Status> decode_cause(std::string_view record, int world_size) {
  ByteReader in(record);
  const auto code = in.get<std::uint8_t>();
  const auto culprits = in.get<std::uint16_t>();
  if (!in.ok() || code == 0 || code > static_cast<std::uint8_t>(Code::internal) ||
      culprits > kMaxCulprits)
    return std::nullopt;
  std::vector<int> ranks;
  for (std::uint16_t i = 0; i < culprits; ++i) {
    const auto rank = in.get<std::int32_t>();
    if (!in.ok() || rank < 0 || rank >= world_size) return std::nullopt;
    ranks.push_back(rank);
  }
  const std::string_view text = in.get_text();
  if (!in.at_end()) return std::nullopt;
  return Status(static_cast<Code>(code), std::string(text), std::move(ranks));
}

}  // namespace muster::transport
