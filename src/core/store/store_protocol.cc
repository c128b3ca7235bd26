// SPDX-License-Identifier: BSD-3-Clause
#include "core/store/store_protocol.h"

#include <algorithm>
#include <limits>

#include "core/tunables/tunables_fixed.h"

namespace muster::store {
namespace {

constexpr std::size_t kLengthBytes = sizeof(std::uint32_t);
constexpr std::size_t kHeaderBytes = 12;  // version, op, zero, id

void put_header(ByteWriter& out, std::uint8_t what, std::uint64_t id) {
  out.put(std::uint32_t{0}).put(kStoreProtocolVersion).put(what).put(std::uint16_t{0}).put(id);
}

/// Fills in the length; returns empty if it is too large.
std::string finished(ByteWriter& out, std::size_t value_bytes) {
  std::string head = out.take();
  const std::size_t length = head.size() - kLengthBytes + value_bytes;
  if (length > kMaxFrameBytes) return {};
  const auto wire = static_cast<std::uint32_t>(length);
  std::memcpy(head.data(), &wire, sizeof wire);
  return head;
}

std::uint32_t wire_size(std::size_t size) {
  return static_cast<std::uint32_t>(
      std::min<std::size_t>(size, std::numeric_limits<std::uint32_t>::max()));
}

Status malformed(const char* what) {
  return Status(Code::refused, std::string("a malformed store ") + what);
}

/// Reads the lengths of `count` texts. Checks that the frame holds that many before allocating.
bool read_lengths(ByteReader& in, std::size_t count, std::vector<std::uint32_t>& lengths) {
  if (!in.ok() || count > in.left() / sizeof(std::uint32_t)) return false;
  lengths.resize(count);
  for (std::uint32_t& length : lengths) length = in.get<std::uint32_t>();
  return in.ok();
}

/// Splits the rest of the frame into texts.
class RequestTail {
 public:
  explicit RequestTail(std::string_view bytes) : bytes_(bytes) {}
  bool take(std::size_t length, std::string_view& text) {
    if (length > bytes_.size()) return false;
    text = bytes_.substr(0, length);
    bytes_.remove_prefix(length);
    return true;
  }
  bool empty() const { return bytes_.empty(); }

 private:
  std::string_view bytes_;
};

}  // namespace

std::string encode_head(const Request& request, std::uint64_t id) {
  ByteWriter out;
  put_header(out, static_cast<std::uint8_t>(request.op), id);
  out.put(static_cast<std::int64_t>(request.timeout.count()))
      .put(request.number)
      .put(request.index)
      .put(request.members);
  out.put(wire_size(request.keys.size())).put(wire_size(request.values.size()));
  std::size_t value_bytes = 0;
  for (const std::string_view key : request.keys) out.put(wire_size(key.size()));
  for (const std::string_view value : request.values) {
    out.put(wire_size(value.size()));
    value_bytes += value.size();
  }
  for (const std::string_view key : request.keys) out.put_bytes(key);
  return finished(out, value_bytes);
}

std::string encode_head(const Reply& reply, std::uint64_t id) {
  ByteWriter out;
  put_header(out, static_cast<std::uint8_t>(reply.status.code()), id);
  const std::string& message = reply.status.message();
  const std::vector<int>& ranks = reply.status.ranks();
  out.put(reply.number)
      .put(wire_size(message.size()))
      .put(wire_size(ranks.size()))
      .put(wire_size(reply.values.size()));
  std::size_t value_bytes = 0;
  for (const Value& value : reply.values) {
    out.put(wire_size(value->size()));
    value_bytes += value->size();
  }
  out.put_bytes(message);
  for (const int rank : ranks) out.put(static_cast<std::int32_t>(rank));
  return finished(out, value_bytes);
}

Result<WireRequest> decode_request(std::string_view frame) {
  ByteReader in(frame);
  const auto version = in.get<std::uint8_t>();
  const auto op = in.get<std::uint8_t>();
  const auto zero = in.get<std::uint16_t>();
  WireRequest wire;
  wire.id = in.get<std::uint64_t>();
  Request& request = wire.request;
  request.timeout = Duration(in.get<std::int64_t>());
  request.number = in.get<std::int64_t>();
  request.index = in.get<std::int32_t>();
  request.members = in.get<std::int32_t>();
  const auto keys = in.get<std::uint32_t>(), values = in.get<std::uint32_t>();
  if (!in.ok() || version != kStoreProtocolVersion || zero != 0 || op == 0 || op > kLastOp)
    return malformed("request");
  request.op = static_cast<StoreOp>(op);
  std::vector<std::uint32_t> lengths;
  if (!read_lengths(in, std::size_t{keys} + values, lengths)) return malformed("request");
  RequestTail tail(frame.substr(frame.size() - in.left()));
  request.keys.resize(keys);
  request.values.resize(values);
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (!tail.take(lengths[i], i < keys ? request.keys[i] : request.values[i - keys]))
      return malformed("request");
  }
  if (!tail.empty()) return malformed("request");
  return wire;
}

Result<WireReply> decode_reply(std::string_view frame) {
  ByteReader in(frame);
  const auto version = in.get<std::uint8_t>();
  const auto code = in.get<std::uint8_t>();
  const auto zero = in.get<std::uint16_t>();
  WireReply wire;
  wire.id = in.get<std::uint64_t>();
  wire.reply.number = in.get<std::int64_t>();
  const auto message_bytes = in.get<std::uint32_t>(), rank_count = in.get<std::uint32_t>(),
             values = in.get<std::uint32_t>();
  if (!in.ok() || version != kStoreProtocolVersion || zero != 0 ||
      code > static_cast<std::uint8_t>(Code::internal))
    return malformed("reply");
  std::vector<std::uint32_t> lengths;
  if (!read_lengths(in, values, lengths)) return malformed("reply");
  RequestTail tail(frame.substr(frame.size() - in.left()));
  std::string_view message, rank_bytes, value;
  if (!tail.take(message_bytes, message) ||
      !tail.take(std::size_t{rank_count} * sizeof(std::int32_t), rank_bytes))
    return malformed("reply");
  std::vector<int> ranks(rank_count);
  ByteReader rank_reader(rank_bytes);
  for (int& rank : ranks) rank = rank_reader.get<std::int32_t>();
  wire.reply.status = Status(static_cast<Code>(code), std::string(message), std::move(ranks));
  wire.reply.values.reserve(values);
  for (const std::uint32_t length : lengths) {
    if (!tail.take(length, value)) return malformed("reply");
    wire.reply.values.push_back(std::make_shared<const std::string>(value));
  }
  if (!tail.empty()) return malformed("reply");
  return wire;
}

void RequestFrames::feed(ConstBytes bytes) {
  if (broken_) return;
  buffer_.erase(0, at_);
  at_ = 0;
  buffer_.append(as_text(bytes));
}

std::optional<std::string_view> RequestFrames::next() {
  const std::size_t have = buffer_.size() - at_;
  if (broken_ || have < kLengthBytes) return std::nullopt;
  std::uint32_t length = 0;
  std::memcpy(&length, buffer_.data() + at_, sizeof length);
  if (length < kHeaderBytes || length > kMaxFrameBytes) {
    broken_ = true;
    buffer_ = std::string();
    at_ = 0;
    return std::nullopt;
  }
  if (have - kLengthBytes < length) return std::nullopt;
  const std::string_view frame(buffer_.data() + at_ + kLengthBytes, length);
  at_ += kLengthBytes + length;
  return frame;
}

void RequestFrames::trim() {
  if (at_ != buffer_.size() || buffer_.capacity() <= fixed::kFragmentBytes) return;
  buffer_ = std::string();
  at_ = 0;
}

std::size_t RequestFrames::outstanding() const {
  const std::size_t have = buffer_.size() - at_;
  if (have < kLengthBytes) return 0;
  std::uint32_t length = 0;
  std::memcpy(&length, buffer_.data() + at_, sizeof length);
  return length > have - kLengthBytes ? length - (have - kLengthBytes) : 0;
}

}  // namespace muster::store
