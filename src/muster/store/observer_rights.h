/// What a connection of the observer's role may do with a store: read what a job's ranks tell of
/// their calls (`trace/responder.h`), ask them, and take the answers away. It reads no other key
/// and writes none.
///
///   .../trace/job                  read
///   .../trace/<rank>               read
///   .../trace/ask/<rank>           length read; questions added: short ones, and few at a time
///   .../trace/answer/<id>/<rank>   read, removed
#pragma once

#include <cstddef>
#include <string_view>

#include "muster/status.h"
#include "muster/store/store_table.h"

namespace muster::store {

/// A question's bytes at most.
inline constexpr std::size_t kLongestQuestion = 64 * 1024;  // limit: memory

/// Code::refused, naming the request, where an observer may not.
Status observer_may(const Request& request);
/// Leaves the keys that it may read in the answer to `list_keys`.
void hide_from_observers(StoreTable::Answers& answers);

}  // namespace muster::store
