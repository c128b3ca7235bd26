/// The last step of every rendezvous: all ranks meet in one all_gather of the store that they have
/// found.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "muster/store/rendezvous.h"

namespace muster::store {

struct JoinOptions {
  int rank = -1;  ///< -1: the lowest that is free
  int world_size = 1;
  std::string group_name;
  std::string scope;  ///< more that keeps meetings apart (a restart's number)
  std::string where;  ///< "at tcp://host:port", for messages
  TimePoint deadline;
  bool attend = true;  ///< a TCP store, which says once for its life whose it is, tells the others
                       ///< when this rank goes
};

/// The key under which the ranks meet to join, and what the job is called once they have: by the
/// tokens that all of them brought.
std::string join_key(const std::string& scope, const std::string& group_name);
bool is_join_key(std::string_view key);
std::string job_of(std::string_view join_key, std::string_view all_tokens);

/// "rank 1 of 4 cannot join the job at tcp://host:port", for messages; "this process of 4" where
/// the rank is to be assigned.
std::string cannot_join(int rank, const JoinOptions& options);

/// Fills store (prefixed with a text that no other run has), rank, world_size and job. At the
/// deadline Code::timed_out naming the ranks that did not come; a rank taken twice or another world
/// size is Code::mismatch.
Result<Rendezvous> join(const std::shared_ptr<Store>& store, const JoinOptions& options);

// The ways that need more than a page, each in a file of its own. `rank` may be -1.
Result<Rendezvous> rendezvous_by_file(const std::string& path, JoinOptions options);
Result<Rendezvous> rendezvous_by_multicast(const std::string& host, std::uint16_t port,
                                           JoinOptions options);

}  // namespace muster::store
