/// Events that links and channels report upwards because they concern other parts. Private to
/// `transport/`; all under the engine's lock, none on the path of an ordinary message.
#pragma once

#include <cstdint>

#include "muster/status.h"

namespace muster::transport {

class Link;

class FailureEvents {
 public:
  /// A transfer needs `rank`, whose death was seen earlier and had no consequence then.
  virtual void on_needed(int rank) = 0;
  /// The members of this channel contradict each other, or its user has failed it.
  virtual void on_channel_failure(std::uint32_t channel, const Status& cause) = 0;
  virtual void on_stream_end(Link& link, const Status& why) = 0;
  /// A stream to the link's peer has been requested, or exists without a request.
  virtual void on_stream_begin(Link& link) = 0;

 protected:
  ~FailureEvents() = default;
};

}  // namespace muster::transport
