// SPDX-License-Identifier: BSD-3-Clause
/// The last step of every rendezvous: all ranks meet in one all_gather on the store they found.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "core/rendezvous/rendezvous.h"
#include "core/store/job_keys.h"

namespace muster::store {

struct MeetingOptions {
  int rank = -1;  ///< -1: the lowest free rank
  int world_size = 1;
  std::string group_name;
  std::string scope;  ///< further distinguishes meetings, such as a restart number
  std::string where;  ///< "at tcp://host:port", for messages
  TimePoint deadline;
  /// Declare this rank to a TCP store, so that the other ranks learn when it leaves. Possible once
  /// per store object.
  bool registers = true;
};

/// "rank 1 of 4 cannot join the job at tcp://host:port", for messages; "this process of 4" if the
/// rank is to be assigned.
std::string cannot_join(int rank, const MeetingOptions& options);

/// Fills store (with a prefix unique to this run), rank, world_size and job. Fails at the deadline
/// with Code::timed_out naming the missing ranks, and with Code::mismatch on a duplicate rank or a
/// different world size.
Result<Rendezvous> join(const std::shared_ptr<Store>& store, const MeetingOptions& options);

// Rendezvous by file and by multicast. `rank` may be -1.
Result<Rendezvous> rendezvous_by_file(const std::string& path, MeetingOptions options);
Result<Rendezvous> rendezvous_by_multicast(const std::string& host, std::uint16_t port,
                                           MeetingOptions options);

}  // namespace muster::store
