// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/byte_stream.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "core/base/descriptor.h"
#include "core/transport/link/pieces.h"
#include "core/tunables/tunables_fixed.h"

namespace muster::transport {
namespace {

/// Stands before each piece on its strand. Copied to the wire as it is.
struct PieceHeader {
  std::uint64_t number = 0;  ///< from 0 on, in the order of the stream
  std::uint32_t length = 0;  ///< so many bytes follow
  std::uint32_t zero = 0;
};
static_assert(sizeof(PieceHeader) == 16);

/// A TLS stream with nothing unsent takes a piece of this size whole, however many parts it has, so
/// a piece never holds up the next ones on its writer's side: a session lets kIoBuffer wait, of
/// which its own headers and tags take less than 1 KiB.
constexpr std::size_t kPieceBytes = fixed::kIoBuffer - 1024;

struct StrandState {
  explicit StrandState(std::unique_ptr<ByteStream> over) : stream(std::move(over)) {}

  std::unique_ptr<ByteStream> stream;
  PieceHeader head;  // of the next piece, as far as it has come
  std::size_t head_bytes = 0;
  bool readable = true;  // until a read has found nothing
  bool ending = false;   // all that will ever come is there: every read finds something or the end
  bool full = false;     // until its descriptor is writable
  Status ended;          // what a read has met

  bool has_head() const { return head_bytes == sizeof head; }
};

/// Every descriptor is in an epoll set of the bundle's own, edge-triggered: reads, and writes that
/// find a strand full, take its news and keep them as flags of the strands. News that are taken no
/// longer make the set readable, so a descriptor of the bundle's own does while a read has some
/// left: those that a write has found, and what does not fit into the reader's memory.
class BundleStream final : public ByteStream {
 public:
  explicit BundleStream(std::vector<std::unique_ptr<ByteStream>> streams) {
    for (auto& stream : streams) strands_.emplace_back(std::move(stream));
    watch();
  }

  Result<std::size_t> write(std::span<const ConstBytes> pieces) override {
    if (std::ranges::any_of(strands_, [](const StrandState& each) { return each.full; })) {
      take_news();
      if (has_input()) keep_readable(true);
    }
    if (Status flushed = flush(); !flushed) return flushed;
    Pieces<ConstBytes> offered(pieces);
    std::size_t total = 0;
    while (!offered.empty()) {
      if (to_come_ == 0 && !begin_piece(offered.left())) break;
      if (strands_[to_].full) break;
      const Result<std::size_t> took = write_to(strands_[to_], offered);
      if (!took) return took;
      total += *took;
    }
    if (total > 0 || usable()) return total;
    return strands_.front().ended;
  }

  Result<std::size_t> read(std::span<const MutableBytes> pieces) override {
    take_news();
    Pieces<MutableBytes> wanted(pieces);
    std::size_t total = 0;
    Status end;
    while (!wanted.empty()) {
      const Result<std::size_t> got = read_piece(wanted);
      if (!got) end = got.status();
      if (!got || *got == 0) break;
      wanted.took(*got);
      total += *got;
    }
    keep_readable(wanted.empty() ? has_input() : !end.ok());
    if (end.ok() || total > 0) return total;
    return end;
  }

  bool has_unsent() const override {
    return std::ranges::any_of(strands_,
                               [](const StrandState& each) { return each.stream->has_unsent(); });
  }
  bool full() const override {
    if (to_come_ > 0) return strands_[to_].full;
    return std::ranges::none_of(strands_, takes_more);
  }
  int descriptor() const override { return epoll_ ? epoll_.get() : -1; }
  const char* kind() const override { return strands_.front().stream->kind(); }
  std::optional<LinkFigures> figures() const override {
    std::optional<LinkFigures> all;
    for (const StrandState& strand : strands_) {
      const auto found = strand.stream->figures();
      if (!found) continue;
      if (!all) all.emplace(LinkFigures{.round_trip = found->round_trip});
      // 0 is not known.
      if (found->round_trip.count() > 0 &&
          (all->round_trip.count() == 0 || found->round_trip < all->round_trip))
        all->round_trip = found->round_trip;
      all->bytes_per_s += found->bytes_per_s;
      all->sent += found->sent;
      all->resent += found->resent;
    }
    return all;
  }
  std::vector<SendPosition> send_positions() const override {
    std::vector<SendPosition> all;
    for (const StrandState& strand : strands_)
      std::ranges::copy(strand.stream->send_positions(), std::back_inserter(all));
    return all;
  }

 private:
  static bool takes_more(const StrandState& strand) { return !strand.full && strand.ended.ok(); }
  bool usable() const {
    return std::ranges::any_of(strands_, [](const StrandState& each) { return each.ended.ok(); });
  }

  /// Whether a read may find something that the set does not tell, or no longer.
  bool has_input() const {
    if (left_ > 0) return strands_[from_].readable;
    return std::ranges::any_of(strands_, [this](const StrandState& each) {
      return each.has_head() ? each.head.number == next_ : each.readable && each.ended.ok();
    });
  }
  void keep_readable(bool on) {
    if (!epoll_ || on == kept_readable_ || mark_.forked()) return;
    std::uint64_t count = 1;
    [[maybe_unused]] const auto moved = on ? ::write(readable_.get(), &count, sizeof count)
                                           : ::read(readable_.get(), &count, sizeof count);
    kept_readable_ = on;
  }

  /// Without the set, the bundle has no descriptor, and every strand is tried each time.
  void watch() {
    epoll_ = GuardedDescriptor(Descriptor(::epoll_create1(EPOLL_CLOEXEC)));
    // Readable at first: a strand may have come with bytes that followed its handshake.
    readable_ = GuardedDescriptor(Descriptor(::eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK)));
    epoll_event own{};
    own.events = EPOLLIN;
    own.data.u64 = kOwn;
    if (!readable_ || ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, readable_.get(), &own) != 0)
      epoll_.reset();
    for (std::size_t i = 0; epoll_ && i < strands_.size(); ++i) {
      epoll_event event{};
      event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
      event.data.u64 = i;
      const int descriptor = strands_[i].stream->descriptor();
      if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, descriptor, &event) != 0) epoll_.reset();
    }
  }

  void take_news() {
    if (mark_.forked()) return;  // the strands say so
    if (!epoll_) {
      for (StrandState& strand : strands_) {
        strand.readable = true;
        strand.full = false;
      }
      return;
    }
    std::array<epoll_event, kMostStrands + 1> events;
    const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
    for (int i = 0; i < count; ++i) {
      const auto& event = events[static_cast<std::size_t>(i)];
      if (event.data.u64 == kOwn) continue;
      StrandState& strand = strands_[event.data.u64];
      const bool ends = (event.events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
      strand.ending |= ends;
      strand.readable |= ends || (event.events & EPOLLIN) != 0;
      if (ends || (event.events & EPOLLOUT) != 0) strand.full = false;
    }
  }

  /// Sends what strands have taken and still hold. While nothing more can be written, one strand
  /// after the other is tried although the set has not told of room: it never does where a socket
  /// had nothing in flight when the system lacked memory.
  Status flush() {
    if (full()) tried_ = (tried_ + 1) % strands_.size();
    for (std::size_t i = 0; i < strands_.size(); ++i) {
      StrandState& strand = strands_[i];
      if (!strand.stream->has_unsent() || (strand.full && !(i == tried_ && full()))) continue;
      if (const auto flushed = strand.stream->write({}); !flushed) return flushed.status();
      strand.full = strand.stream->has_unsent();
    }
    return {};
  }

  /// Chooses a strand with room for the next piece, in turns; false where none has.
  bool begin_piece(std::span<const ConstBytes> offered) {
    for (std::size_t tried = 0; tried < strands_.size(); ++tried) {
      const std::size_t candidate = (to_ + 1 + tried) % strands_.size();
      if (!takes_more(strands_[candidate])) continue;
      to_ = candidate;
      std::size_t bytes = 0;
      for (const ConstBytes& piece : offered) bytes += piece.size();
      to_come_ = std::min(bytes, kPieceBytes);
      header_ = {.number = written_++, .length = static_cast<std::uint32_t>(to_come_)};
      header_sent_ = 0;
      return true;
    }
    return false;
  }

  /// Writes of the piece that has begun. Bytes that a piece has promised and the caller does not
  /// offer yet follow with a later call, on the same strand.
  Result<std::size_t> write_to(StrandState& strand, Pieces<ConstBytes>& offered) {
    std::array<ConstBytes, Pieces<ConstBytes>::kMostPieces> out;
    out[0] = std::as_bytes(std::span(&header_, 1)).subspan(header_sent_);
    std::size_t bytes = out[0].size();
    const std::size_t first = out[0].empty() ? 0 : 1;
    const std::size_t count = first + offered.first(to_come_, std::span(out).subspan(first), bytes);
    const Result<std::size_t> took = strand.stream->write(std::span(out.data(), count));
    if (!took) return took;
    strand.full = strand.stream->has_unsent() || *took < bytes;
    if (*took == 0 && header_sent_ == 0) {  // another strand may have room for it
      --written_;
      to_come_ = 0;
    }
    const std::size_t of_header = std::min(*took, sizeof header_ - header_sent_);
    const std::size_t of_piece = *took - of_header;
    header_sent_ += of_header;
    to_come_ -= of_piece;
    offered.took(of_piece);
    return of_piece;
  }

  /// Reads of the stream's next piece; 0 where nothing of it has come.
  Result<std::size_t> read_piece(const Pieces<MutableBytes>& wanted) {
    if (left_ == 0) {
      if (Status found = find_next(); !found) return found;
      if (left_ == 0) return std::size_t{0};
    }
    std::array<MutableBytes, Pieces<MutableBytes>::kMostPieces> room;
    std::size_t bytes = 0;
    const std::size_t count = wanted.first(left_, room, bytes);
    const Result<std::size_t> got = read_from(strands_[from_], std::span(room.data(), count));
    if (got) left_ -= *got;
    return got;
  }

  Result<std::size_t> read_from(StrandState& strand, std::span<const MutableBytes> room) {
    if (!strand.ended.ok()) return strand.ended;
    while (strand.readable) {
      const Result<std::size_t> got = strand.stream->read(room);
      if (!got) strand.ended = got.status();
      if (!got || *got > 0) return got;
      strand.readable = strand.ending || strand.stream->holds_more();
    }
    return std::size_t{0};
  }

  void read_head(StrandState& strand) {
    while (!strand.has_head() && strand.ended.ok()) {
      const MutableBytes room =
          std::as_writable_bytes(std::span(&strand.head, 1)).subspan(strand.head_bytes);
      const Result<std::size_t> got = read_from(strand, std::span(&room, 1));
      if (!got || *got == 0) return;
      strand.head_bytes += *got;
    }
  }
  bool is_valid(const PieceHeader& head) const {
    return head.number >= next_ && head.zero == 0 && head.length > 0 && head.length <= kPieceBytes;
  }

  /// Looks for the strand with the stream's next piece; `left_` stays 0 where it has not come. An
  /// end is told once that piece cannot come any more: what strands have brought before is read.
  Status find_next() {
    bool may_come = false;
    for (std::size_t i = 0; i < strands_.size(); ++i) {
      StrandState& strand = strands_[i];
      read_head(strand);
      if (!strand.has_head()) {
        may_come |= strand.ended.ok();
        continue;
      }
      if (!is_valid(strand.head))
        return Status(Code::internal, "the connections of its bundle have lost step");
      if (strand.head.number != next_) continue;
      from_ = i;
      left_ = strand.head.length;
      strand.head_bytes = 0;
      ++next_;
      return {};
    }
    for (const StrandState& strand : strands_) {
      // Closed strands end one after the other, so one that is closed says nothing of the others.
      if (!strand.ended.ok() && (strand.ended.code() != Code::closed || !may_come))
        return strand.ended;
    }
    return may_come ? Status()
                    : Status(Code::internal, "a piece of what its bundle carries is missing");
  }

  static constexpr std::uint64_t kOwn = kMostStrands;  // of `readable_` in the set

  std::vector<StrandState> strands_;
  GuardedDescriptor epoll_;
  GuardedDescriptor readable_;  // an eventfd in the set
  bool kept_readable_ = true;
  ProcessMark mark_;
  // Writing: the piece that has begun, on strand `to_`.
  std::size_t to_ = 0, to_come_ = 0;
  std::size_t tried_ = 0;  // by `flush`
  PieceHeader header_;
  std::size_t header_sent_ = sizeof(PieceHeader);
  std::uint64_t written_ = 0;  // pieces begun
  // Reading: the piece that is being read, from strand `from_`.
  std::size_t from_ = 0, left_ = 0;
  std::uint64_t next_ = 0;  // piece
};

}  // namespace

std::unique_ptr<ByteStream> make_bundle_stream(std::vector<std::unique_ptr<ByteStream>> strands) {
  return std::make_unique<BundleStream>(std::move(strands));
}

}  // namespace muster::transport
