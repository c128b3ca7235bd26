/// Writes to the links. Private to `transport/`; under the engine's lock.
///
/// Frames are queued in a link's protocol and the link is marked dirty; dirty links are written
/// when the lock is released, so that frames of one call share a write. Small messages of a
/// `SendBatch` are copied into the link's buffer and stay there until the batch is flushed.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "core/transport/link/link_poller.h"

namespace muster::transport {

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

}  // namespace muster::transport
