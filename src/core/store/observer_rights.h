// SPDX-License-Identifier: BSD-3-Clause
/// The rights of a connection of the observer's role. It may read what a job's ranks tell of their
/// calls (`core/trace/responder.h`), ask them, and take the answers away. It reads no other key and
/// writes none. PREFIX is that of a job that runs now: `PREFIXtrace/job` announces it
/// (`job_keys.h`), and how many ranks there are.
///
///   PREFIXtrace/job                  read
///   PREFIXtrace/<rank>               read
///   PREFIXtrace/ask/<rank>           length read; questions added: short, and few at a time
///   PREFIXtrace/answer/<id>/<rank>   read, removed
///
/// All observers together may have `kMostQuestionBytes` of questions waiting.
#pragma once

#include <cstddef>
#include <set>
#include <string>
#include <string_view>

#include "core/store/server/store_table.h"
#include "muster/status.h"

namespace muster::store {

/// A question's bytes at most: one about `trace::kMostAbout` ranks fits.
inline constexpr std::size_t kLongestQuestion = 2 * 1024;  // limit: memory
/// Of all questions of all observers that wait in a store, with their keys.
inline constexpr std::size_t kMostQuestionBytes = std::size_t{8} << 20;  // limit: memory
/// So many observers may be connected to a store, and each may have so many requests waiting.
inline constexpr std::size_t kMostObservers = 64;         // limit: descriptors
inline constexpr std::size_t kMostObserversRequests = 8;  // limit: memory

/// The rights of all observers of one server together.
class ObserverRights {
 public:
  /// Code::refused, naming the request, where an observer may not; Code::exhausted where too many
  /// questions wait. A question that may be asked is counted.
  Status may(const Request& request, const StoreTable& table);
  /// Leaves the keys that it may read in the answer to `list_keys`.
  static void hide(StoreTable::Answers& answers, const StoreTable& table);

 private:
  Status has_room(const Request& question, const StoreTable& table);

  std::set<std::string, std::less<>> asked_;  // queues in which questions may wait
  std::size_t question_bytes_ = 0;            // of them at most
};

}  // namespace muster::store
