// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/link/link.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "core/base/bytes.h"
#include "core/tunables/tunables.h"

namespace muster::transport {
namespace {

template <class Bytes>
std::size_t total_of(std::span<const Bytes> pieces) {
  std::size_t total = 0;
  for (const Bytes& piece : pieces) total += piece.size();
  return total;
}

}  // namespace

/// Whether only the next frame's header should be read: it announces a large payload, or follows
/// one.
bool Link::header_alone() const {
  const ConstBytes front = stream->look()[0];
  if (!protocol.in.between_frames() || front.size() < sizeof(FrameHeader)) return !front.empty();
  std::uint32_t length;
  std::memcpy(&length, front.data() + offsetof(FrameHeader, length), sizeof length);
  return length > fixed::kSmallMessage;
}

// If a descriptor reports readiness, a stream that transferred less than asked is not called again
// in this pass, which saves a system call. Input buffered inside a stream is not reported by a
// descriptor, so it is read completely.

bool Link::read_some() {
  const bool tells_of_news = has_descriptor();
  std::size_t total = 0;
  while (up() && (total < fixed::kIoShare || stream->holds_more())) {
    std::array<MutableBytes, 2> pieces;
    const std::size_t count = protocol.in.input(pieces, header_alone());
    const std::size_t room = total_of(std::span<const MutableBytes>(pieces.data(), count));
    const Result<std::size_t> got = stream->read(std::span(pieces.data(), count));
    if (!got) {
      ended = got.status();
      return true;
    }
    if (*got == 0) break;
    total += *got;
    times.heard = engine_.pass.time;
    times.asked = TimePoint{};
    if (Status status = protocol.in.received(*got); !status) {
      ended = Status(Code::internal,
                     "rank " + std::to_string(peer_) + " has broken the message protocol on its " +
                         stream->kind() + " link: " + status.message(),
                     {peer_});
      return true;
    }
    if (*got < room && tells_of_news && !stream->holds_more()) break;
  }
  return total > 0;
}

std::size_t Link::write_inline(const FrameHeader& header, ConstBytes payload) {
  if (!up() || flags.in_service || protocol.out.has_output() || !write_failure.ok()) return 0;
  const std::array<ConstBytes, 2> pieces{std::as_bytes(std::span(&header, 1)), payload};
  const Result<std::size_t> took = stream->write(pieces);
  if (took && *took > 0) ++engine_.pass.traffic.writes;
  return took ? *took : 0;  // a failure is final: the normal path will see it again and handle it
}

TryReceive Link::try_receive(const FrameHeader& expected, MutableBytes data) {
  if (!up() || flags.in_service || !protocol.in.between_frames()) return TryReceive::needs_transfer;
  const auto [front, rest] = stream->look();
  if (front.empty()) return TryReceive::not_yet;
  if (data.size() > kEagerBytes || front.size() + rest.size() < sizeof expected + data.size())
    return TryReceive::needs_transfer;
  FrameHeader around;
  const std::byte* header = front.data();
  if (front.size() < sizeof expected) {
    const auto from_front =
        std::copy(front.begin(), front.end(), reinterpret_cast<std::byte*>(&around));
    std::copy_n(rest.begin(), sizeof around - front.size(), from_front);
    header = reinterpret_cast<const std::byte*>(&around);
  }
  if (!equal_words<sizeof expected / 8>(header, &expected)) return TryReceive::needs_transfer;
  const ConstBytes behind = front.subspan(std::min(front.size(), sizeof expected));
  const std::size_t there = std::min(data.size(), behind.size());
  if (there > 0) std::memcpy(data.data(), behind.data(), there);
  const std::size_t skipped = sizeof expected - std::min(front.size(), sizeof expected);
  if (there < data.size())
    std::memcpy(data.data() + there, rest.data() + skipped, data.size() - there);
  stream->drop(sizeof expected + data.size());
  times.heard = times.last_message = engine_.time_of_news();
  times.asked = TimePoint{};
  return TryReceive::received;
}

// A ping that is no longer queued has been written, but for committed messages and one buffer of
// each stream. Each connection must have acknowledged what it had been given by then: the peer
// reads the ping of a bundle in its place, after all that was written before it. By the beat that
// looks, more may have been written; the ping then counts as arrived up to a beat late.
bool Link::ping_is_moving() {
  if (ping.arrived) return false;
  const std::vector<SendPosition> positions = stream->send_positions();
  if (ping.ends.empty() && !protocol.out.queued(FrameKind::ping)) {
    for (const SendPosition& each : positions) ping.ends.push_back(each.written);
  }
  std::uint64_t acknowledged = 0;
  bool arrived = ping.ends.size() == positions.size() && !positions.empty();
  for (std::size_t i = 0; i < positions.size(); ++i) {
    acknowledged += positions[i].acknowledged;
    arrived = arrived && positions[i].acknowledged >= ping.ends[i];
  }
  ping.arrived = arrived;
  const auto before = std::exchange(ping.acknowledged, acknowledged);
  return !arrived && before && *before != acknowledged;
}

bool Link::write_some() {
  const bool tells_of_news = has_descriptor();
  std::size_t total = 0;
  flags.stuck = false;
  while (up() && total < fixed::kIoShare && has_output()) {
    std::array<ConstBytes, FrameWriter::kMaxPieces> pieces;
    const std::size_t count = protocol.out.has_output() ? protocol.out.output(pieces) : 0;
    const std::size_t offered = total_of(std::span<const ConstBytes>(pieces.data(), count));
    const Result<std::size_t> took = stream->write(std::span(pieces.data(), count));
    if (!took) {
      write_failure = took.status();
      break;
    }
    if (*took > 0) {
      total += *took;
      ++engine_.pass.traffic.writes;
      protocol.out.sent(*took);
    }
    if (*took == 0 || (*took < offered && tells_of_news) || stream->full()) {
      flags.stuck = has_output();
      break;
    }
  }
  return total > 0;
}

}  // namespace muster::transport
