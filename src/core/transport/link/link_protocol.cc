// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/link/link_protocol.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "core/tunables/tunables.h"

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

namespace {

constexpr std::size_t kDrainBytes = fixed::kIoBuffer;

/// Destination of dropped payloads. Never read.
MutableBytes drain() {
  thread_local const std::unique_ptr<std::byte[]> memory(new std::byte[kDrainBytes]);
  return {memory.get(), kDrainBytes};
}

}  // namespace

FrameReader::FrameReader(LinkEvents& events)
    : events_(events), staging_(new std::byte[kStagingBytes]) {}

std::size_t FrameReader::input(std::array<MutableBytes, 2>& pieces, bool headers_alone) {
  const std::size_t most =
      headers_alone ? sizeof header_ : kStagingBytes;  // fewer bytes than a header are staged here
  const MutableBytes staging(staging_.get() + staged_end_, most - staged_end_);
  if (payload_left_ == 0) {
    pieces[0] = staging;
    return 1;
  }
  // All staged bytes have been delivered, so the staging buffer is empty here.
  if (sink_.empty()) {
    pieces[0] = drain().first(std::min(payload_left_, kDrainBytes));
    return 1;
  }
  pieces[0] = sink_.first(std::min(sink_.size(), payload_left_));
  if (sink_.size() < payload_left_) return 1;
  pieces[1] = staging;
  return 2;
}

Status FrameReader::received(std::size_t bytes) {
  if (broken_) return Status(Code::internal, "the peer broke the protocol before");
  if (payload_left_ > 0) {
    const std::size_t direct =
        std::min(bytes, sink_.empty() ? std::min(payload_left_, kDrainBytes)
                                      : std::min(sink_.size(), payload_left_));
    if (!sink_.empty()) sink_ = sink_.subspan(direct);
    payload_left_ -= direct;
    bytes -= direct;
    if (payload_left_ == 0) {
      if (Status status = finish_frame(); !status) return status;
    }
  }
  staged_end_ += bytes;
  return parse();
}

/// Copies staged bytes of the current payload to their destination; returns how many.
std::size_t FrameReader::place(ConstBytes bytes) {
  const std::size_t take = std::min(bytes.size(), payload_left_);
  const std::size_t keep = std::min(take, sink_.size());
  if (keep > 0) std::memcpy(sink_.data(), bytes.data(), keep);
  sink_ = sink_.subspan(keep);
  payload_left_ -= take;
  return take;
}

Status FrameReader::parse() {
  for (;;) {
    const ConstBytes staged(staging_.get() + staged_begin_, staged_end_ - staged_begin_);
    if (payload_left_ > 0) {
      if (staged.empty()) break;
      staged_begin_ += place(staged);
      if (payload_left_ > 0) break;
    } else {
      if (staged.size() < sizeof header_) break;
      std::memcpy(&header_, staged.data(), sizeof header_);
      staged_begin_ += sizeof header_;
      if (Status status = start_frame(); !status) return status;
      if (payload_left_ > 0) continue;
    }
    if (Status status = finish_frame(); !status) return status;
  }
  // Less than a header is left, or nothing.
  const std::size_t left = staged_end_ - staged_begin_;
  std::memmove(staging_.get(), staging_.get() + staged_begin_, left);
  staged_begin_ = 0;
  staged_end_ = left;
  return {};
}

Status FrameReader::start_frame() {
  broken_ = true;  // until proved otherwise
  if (Status status = check_header(header_); !status) return status;
  payload_left_ = header_.length;
  sink_ = {};
  if (payload_left_ > 0) {
    if (header_.kind == FrameKind::eager || header_.kind == FrameKind::data) {
      Result<MutableBytes> sink = events_.on_payload(header_);
      if (!sink) return sink.status();
      sink_ = *sink;
    } else {
      record_.resize(payload_left_);  // at most kRecordBytes
      sink_ = std::as_writable_bytes(std::span(record_));
    }
  } else {
    record_.clear();
  }
  broken_ = false;
  return {};
}

Status FrameReader::finish_frame() {
  sink_ = {};
  const bool message = header_.kind == FrameKind::eager || header_.kind == FrameKind::data;
  Status status = events_.on_frame(header_, message ? ConstBytes() : as_bytes(record_));
  broken_ = !status.ok();
  return status;
}

namespace {

// How many bytes are committed to the byte stream in advance: enough for one gathering write, few
// enough that urgent frames can overtake the rest soon.
constexpr std::size_t kCommitBytes = fixed::kEagerBytes;
constexpr std::size_t kCommitFrames = FrameWriter::kMaxPieces / 2;
// After this many bytes of small messages a fragment gets its turn.
constexpr std::size_t kMessageTurn = fixed::kFragmentBytes;

/// Whether the receiver accepts nothing more for a channel, or from this rank, after such a frame.
bool ends_messages(FrameKind kind) {
  return kind == FrameKind::channel_failure || kind == FrameKind::rank_failure ||
         kind == FrameKind::close;
}

}  // namespace

void FrameWriter::push_control(const FrameHeader& header, std::string record) {
  // For their senders gathered messages are complete, so a frame that ends their channel or rank
  // must not overtake them.
  while (ends_messages(header.kind) && !messages_.empty() && messages_.front().gathered)
    commit_message();
  OutFrame& frame = control_.emplace_back();
  frame.header = header;
  frame.copy = std::move(record);
  frame.header.length = static_cast<std::uint32_t>(frame.copy.size());
}

void FrameWriter::push_message(const FrameHeader& header, ConstBytes payload, Owner owner) {
  OutFrame& frame = messages_.emplace_back();
  frame.header = header;
  frame.header.length = static_cast<std::uint32_t>(payload.size());
  frame.payload = payload;
  frame.owner = std::move(owner);
}

std::size_t FrameWriter::gather_message(const FrameHeader& header, ConstBytes payload) {
  if (messages_.empty() || !messages_.back().gathered) {
    OutFrame& fresh = messages_.emplace_back();
    fresh.gathered = true;
    fresh.copy = std::exchange(spare_, {});
  }
  std::string& copy = messages_.back().copy;
  FrameHeader whole = header;
  whole.length = static_cast<std::uint32_t>(payload.size());
  copy.append(as_text(std::as_bytes(std::span(&whole, 1)))).append(as_text(payload));
  return copy.size();
}

void FrameWriter::push_begun(const FrameHeader& header, ConstBytes payload, Owner owner,
                             std::size_t written) {
  OutFrame& frame = committed_.emplace_back();
  frame.header = header;
  frame.header.length = static_cast<std::uint32_t>(payload.size());
  frame.payload = payload;
  frame.owner = std::move(owner);
  committed_bytes_ += frame.size();
  written_ = written;
}

void FrameWriter::push_stream(const FrameHeader& header, ConstBytes payload, Owner owner) {
  auto channel = std::find_if(streams_.begin(), streams_.end(),
                              [&](const ChannelStreams& s) { return s.channel == header.channel; });
  if (channel == streams_.end()) {
    streams_.emplace_back().channel = header.channel;
    channel = streams_.end() - 1;
  }
  channel->waiting.push_back({header, payload, 0, std::move(owner)});
}

/// Commits one fragment of the next payload of the next channel, and moves both to the end of their
/// queues.
void FrameWriter::commit_fragment() {
  ChannelStreams channel = std::move(streams_.front());
  streams_.pop_front();
  OutStream stream = std::move(channel.waiting.front());
  channel.waiting.pop_front();

  OutFrame& frame = committed_.emplace_back();
  frame.payload = stream.payload.subspan(
      stream.at, std::min(kFragmentBytes, stream.payload.size() - stream.at));
  frame.header = stream.header;
  frame.header.length = static_cast<std::uint32_t>(frame.payload.size());
  frame.header.amount = stream.at;
  stream.at += frame.payload.size();
  frame.last = stream.at == stream.payload.size();
  if (frame.last) {
    frame.owner = std::move(stream.owner);
  } else {
    frame.owner = stream.owner;
    channel.waiting.push_back(std::move(stream));
  }
  if (!channel.waiting.empty()) streams_.push_back(std::move(channel));
  messages_in_a_row_ = 0;
}

void FrameWriter::commit_message() {
  OutFrame& frame = committed_.emplace_back(std::move(messages_.front()));
  messages_.pop_front();
  messages_in_a_row_ += frame.size();
  account(frame);
}

/// Accounts for a frame that has just been committed.
void FrameWriter::account(OutFrame& frame) {
  if (!frame.copy.empty()) frame.payload = as_bytes(frame.copy);
  committed_bytes_ += frame.size();
}

/// Commits frames to the byte stream, the most urgent first.
void FrameWriter::commit() {
  while (committed_bytes_ < kCommitBytes && committed_.size() < kCommitFrames) {
    const bool fragments_turn = messages_in_a_row_ >= kMessageTurn && !streams_.empty();
    if (!control_.empty()) {
      committed_.push_back(std::move(control_.front()));
      control_.pop_front();
      account(committed_.back());
    } else if (!messages_.empty() && !fragments_turn) {
      commit_message();
    } else if (!streams_.empty()) {
      commit_fragment();
      account(committed_.back());
    } else {
      return;
    }
  }
}

std::size_t FrameWriter::output(std::array<ConstBytes, kMaxPieces>& pieces) {
  commit();
  std::size_t count = 0;
  std::size_t skip = written_;
  const auto add = [&](ConstBytes piece) {
    const std::size_t done = std::min(skip, piece.size());
    skip -= done;
    if (done < piece.size()) pieces[count++] = piece.subspan(done);
  };
  for (const OutFrame& frame : committed_) {
    if (count + 2 > kMaxPieces) break;
    if (!frame.gathered) add(std::as_bytes(std::span(&frame.header, 1)));
    add(frame.payload);
  }
  return count;
}

void FrameWriter::sent(std::size_t bytes) {
  written_ += bytes;
  while (!committed_.empty() && written_ >= committed_.front().size()) {
    OutFrame frame = std::move(committed_.front());
    committed_.pop_front();
    written_ -= frame.size();
    committed_bytes_ -= frame.size();
    if (frame.gathered) {
      spare_ = std::move(frame.copy);
      spare_.clear();
    }
    if (frame.owner && frame.last) events_.on_sent(frame.owner);
  }
}

FrameWriter::Detached FrameWriter::detach(const void* owner) {
  const auto theirs = [owner](const auto& item) { return item.owner.get() == owner; };
  Detached result;
  result.message_dropped = std::erase_if(messages_, theirs) > 0;
  for (ChannelStreams& channel : streams_)
    result.stream_cut |= std::erase_if(channel.waiting, theirs) > 0;
  std::erase_if(streams_, [](const ChannelStreams& channel) { return channel.waiting.empty(); });
  for (OutFrame& frame : committed_) {
    if (!theirs(frame)) continue;
    // Only the part that is still to be written is ever looked at, but the whole keeps the
    // arithmetic simple.
    frame.copy.assign(as_text(frame.payload));
    frame.payload = as_bytes(frame.copy);
    frame.owner = nullptr;
  }
  return result;
}

bool FrameWriter::queued(FrameKind kind) const {
  return std::any_of(control_.begin(), control_.end(),
                     [kind](const OutFrame& frame) { return frame.header.kind == kind; });
}

}  // namespace muster::transport
