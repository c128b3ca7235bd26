#include "core/transport/link/link_writer.h"

#include <algorithm>
#include <utility>

#include "core/transport/link/send_batch.h"
#include "core/tunables/tunables.h"

namespace muster::transport {

void LinkWriter::mark_dirty(Link& link) {
  if (link.flags.dirty) return;
  link.flags.dirty = true;
  dirty_.push_back(&link);
}

void LinkWriter::push_control(Link& link, const FrameHeader& header, std::string record) {
  link.protocol.out.push_control(header, std::move(record));
  mark_dirty(link);
}

std::size_t LinkWriter::batch(Link& link, const FrameHeader& header, ConstBytes payload) {
  if (payload.size() > fixed::kSmallMessage || !link.up() || link.flags.dirty ||
      link.flags.in_service || !link.write_failure.ok())
    return 0;
  SendBatch* const batch = SendBatch::of(*engine_.fabric);
  if (batch == nullptr) return 0;
  batch->note();
  if (!std::exchange(link.flags.batched, true)) batched_.push_back(&link);
  if (link.protocol.out.gather_message(header, payload) >= fixed::kGatheredWrite) mark_dirty(link);
  return sizeof header + payload.size();
}

void LinkWriter::release_batches() {
  for (Link* const link : batched_) {
    link->flags.batched = false;
    if (link->protocol.out.has_output()) mark_dirty(*link);
  }
  batched_.clear();
}

void LinkWriter::flush() {
  for (std::size_t i = 0; i < dirty_.size();) {
    Link& link = *dirty_[i];
    if (link.up() && link.has_output() && !link.flags.in_service) link.write_some();
    if (!link.write_failure.ok() && link.up()) {
      // The reason for the peer's end may still be unread.
      poller_.read(link);
      if (link.up()) engine_.failures->on_stream_end(link, link.write_failure);
    }
    poller_.poll_for_room(link, link.flags.stuck && link.has_output());
    if (link.up() && link.has_output()) {
      ++i;
      continue;
    }
    link.flags.dirty = false;  // a new stream marks it again
    dirty_[i] = dirty_.back();
    dirty_.pop_back();
  }
}

bool LinkWriter::could_write_more() const {
  return std::any_of(dirty_.begin(), dirty_.end(), [](const Link* link) {
    return link->up() && !link->flags.stuck && !link->flags.in_service && link->has_output();
  });
}

}  // namespace muster::transport
