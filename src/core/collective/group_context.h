// SPDX-License-Identifier: BSD-3-Clause
/// The group that all parts of one communicator work for.
#pragma once

#include <memory>
#include <string>

#include "core/trace/peer_traces.h"
#include "core/transport/channel/channel.h"
#include "core/transport/channel/fingerprint.h"
#include "core/transport/fabric.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::collective {

struct GroupContext {
  std::shared_ptr<transport::Fabric> fabric;
  std::shared_ptr<transport::Channel> channel;
  std::string name;
  /// Null: the other members' last calls are unknown.
  std::shared_ptr<const trace::PeerTraces> peer_traces = {};

  int rank() const { return channel->rank(); }
  int size() const { return channel->size(); }
  int job_rank() const { return fabric->rank(); }
  int job_rank_of(int member) const { return channel->members()[static_cast<std::size_t>(member)]; }
  /// For example "group 'world'" or "a group of 4 ranks".
  std::string text() const {
    return name.empty() ? "a group of " + std::to_string(size()) + " ranks"
                        : "group '" + name + "'";
  }
  /// For example "group 'world' on rank 3".
  std::string here() const { return text() + " on rank " + std::to_string(job_rank()); }
  TimePoint now() const { return fabric->clock().now(); }
  /// For example "all_reduce(SUM, int64, 3 elements), call 7 of group 'world' on rank 2".
  std::string call_text(const transport::Fingerprint& call) const;
  /// Call in a catch block. Fails the group on all members with the current exception, in `call` if
  /// given, and returns the group's failure. If the thread is being terminated, fails the group too
  /// and continues the termination.
  Status fail_by_exception(const transport::Fingerprint* call = nullptr) const;
};

}  // namespace muster::collective
