/// Answers of a store's state machines to requests that may have waited.
#pragma once

#include <cstdint>
#include <vector>

#include "core/store/request.h"

namespace muster::store {

/// Chosen by the caller; unique among waiting requests.
using Ticket = std::uint64_t;

struct TicketReply {
  Ticket ticket = 0;
  Reply reply;
};
using Answers = std::vector<TicketReply>;

}  // namespace muster::store
