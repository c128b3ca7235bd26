/// The links of one rank: one for each peer, opened when first used. Private to `transport/`; under
/// the engine's lock.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "core/transport/link/link.h"
#include "core/transport/link/link_poller.h"
#include "core/transport/link/link_writer.h"

namespace muster::transport {

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
  std::vector<std::unique_ptr<Link>> links_;

 public:
  LinkPoller poller;
  LinkWriter writer;
};

}  // namespace muster::transport
