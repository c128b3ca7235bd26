#include "train/fsdp/sharded_timeline.h"

namespace muster::parallel {

const char* name_of(ShardedEvent event) {
  switch (event) {
    case ShardedEvent::gather_started: return "gather_started";
    case ShardedEvent::gather_finished: return "gather_finished";
    case ShardedEvent::forward_began: return "forward_began";
    case ShardedEvent::forward_ended: return "forward_ended";
    case ShardedEvent::backward_began: return "backward_began";
    case ShardedEvent::backward_ended: return "backward_ended";
    case ShardedEvent::reduced: return "reduced";
  }
  return "unknown";
}

}  // namespace muster::parallel
