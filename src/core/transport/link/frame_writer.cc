#include "core/transport/link/frame_writer.h"
#include "core/tunables/tunables.h"

#include <algorithm>
#include <utility>

namespace muster::transport {
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
