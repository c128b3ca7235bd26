// SPDX-License-Identifier: BSD-3-Clause
/// The links of one rank: one for each peer, opened when first used. Private to `transport/`; under
/// the engine's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/transport/engine/epoll_sets.h"
#include "core/transport/link/link.h"
#include "core/tunables/tunables_fixed.h"

namespace muster::transport {

/// Polls the established links for input.
///
/// Links with a descriptor are in an epoll set. If they are few, they are read in every pass
/// without asking epoll, and while threads poll they are removed from the set (`aside_`). Links
/// without a descriptor ("plain": shared memory, loopback) are read in every pass.
class LinkPoller {
 public:
  /// `links`: by rank, null if there is none; never resized.
  LinkPoller(EngineContext& engine, std::span<const std::unique_ptr<Link>> links)
      : engine_(engine), links_(links) {}

  /// Opens the epoll set; without it every link counts as plain.
  Status open();
  /// For epoll: readable while a descriptor in the set is ready.
  int descriptor() const { return ready_->descriptor(); }

  void add(Link& link);
  void remove(Link& link);
  /// Sets whether epoll reports when the link's stream is writable.
  void poll_for_room(Link& link, bool on);

  /// Reads every link that may have something. Calls `writable(link)` for those that take more.
  template <class Writable>
  bool poll(bool may_set_aside, const Writable& writable) {
    bool moved = read_holding();
    if (ready_) {
      const bool few = with_descriptor_.size() <= fixed::kPlainLinks;
      const bool all = !few || (!aside_ && ++passes_ % fixed::kPlainPasses == 0);
      moved |= all ? poll_ready(writable) : poll_few();
      if (all && few && may_set_aside) set_aside();
    }
    return poll_plain() || moved;
  }
  /// Reads what has come on a plain link.
  void poll_plain(Link* link);
  /// Reads the link; reports the end of its stream.
  bool read(Link& link);
  /// The next pass looks at all descriptors.
  void look_at_descriptors() { passes_ = fixed::kPlainPasses - 1; }
  /// From here on epoll reports every link with a descriptor.
  void end_aside();

  bool has_plain_links() const { return !plain_.empty(); }

 private:
  template <class Writable>
  bool poll_ready(const Writable& writable) {
    bool moved = false;
    for (const ReadySet::Ready& ready : ready_->poll()) {
      if (ready.token == ReadySet::kConnector) continue;  // polled in every pass anyway
      Link* const link = links_[static_cast<std::size_t>(ready.token)].get();
      if (link == nullptr) continue;
      if (ready.writable) writable(*link);
      if (ready.readable) read(*link);
      moved = true;
    }
    return moved;
  }
  bool watch(const Link& link);
  bool read_holding();
  bool poll_few();
  bool poll_plain();
  void set_aside();

  EngineContext& engine_;
  const std::span<const std::unique_ptr<Link>> links_;
  std::unique_ptr<ReadySet> ready_;  // null without threads
  std::vector<Link*> plain_;         // null: ended in this pass
  std::vector<Link*> with_descriptor_;
  std::vector<Link*> holding_;  // new ones whose stream came with something to read
  bool aside_ = false;          // those with a descriptor are not in the set
  std::uint64_t passes_ = 0;
};

/// Writes to the links.
///
/// Frames are queued in a link's protocol and the link is marked dirty; dirty links are written
/// when the lock is released, so that frames of one call share a write. Small messages of a
/// `SendBatch` are copied into the link's buffer and stay there until the batch is flushed.
class LinkWriter {
 public:
  LinkWriter(EngineContext& engine, LinkPoller& poller) : engine_(engine), poller_(poller) {}

  void mark_dirty(Link& link);
  void push_control(Link& link, const FrameHeader& header, std::string record = {});

  /// Copies the message into the link's buffer if this thread has a `SendBatch` and the link has
  /// nothing else to write. Returns the number of bytes copied, header included: all or none.
  std::size_t batch(Link& link, const FrameHeader& header, ConstBytes payload);
  /// Marks every link with batched messages dirty.
  void release_batches();

  /// Writes the dirty links; those that take no more stay dirty.
  void flush();
  bool idle() const { return dirty_.empty(); }
  /// Whether a link has reached its limit per pass although its stream may accept more; no event
  /// will report that.
  bool could_write_more() const;

 private:
  EngineContext& engine_;
  LinkPoller& poller_;
  std::vector<Link*> dirty_;
  std::vector<Link*> batched_;  // may have been written in the meantime
};

class Links {
 public:
  Links(EngineContext& engine, Link::MakeEvents make_events);

  /// Null if the link has not been used yet.
  Link* find(int rank) const { return links_[static_cast<std::size_t>(rank)].get(); }
  /// Asks the connector for a stream if there is none.
  Link& to(int rank);
  std::span<const std::unique_ptr<Link>> all() const { return links_; }

  /// A stream to `peer` is established. True if the link has none yet and adopts it.
  bool attach(int peer, std::unique_ptr<ByteStream> stream);
  void close(Link& link);

 private:
  Link& at(int rank);

  EngineContext& engine_;
  const Link::MakeEvents make_events_;
  // A link is made on first use and kept until the end, as poller and writer hold pointers to it;
  // only its stream comes and goes.
  std::vector<std::unique_ptr<Link>> links_;

 public:
  LinkPoller poller;
  LinkWriter writer;
};

}  // namespace muster::transport
