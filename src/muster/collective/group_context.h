/// What the parts of one communicator know of their group.
#pragma once

#include <memory>
#include <string>

#include "muster/base/clock.h"
#include "muster/base/status.h"
#include "muster/trace/peer_traces.h"
#include "muster/transport/channel.h"
#include "muster/transport/fabric.h"
#include "muster/transport/fingerprint.h"

namespace muster::collective {

struct GroupContext {
  std::shared_ptr<transport::Fabric> fabric;
  std::shared_ptr<transport::Channel> channel;
  std::string name;
  std::shared_ptr<const trace::PeerTraces> peer_traces =
      {};  ///< null: nobody knows what the others did last

  int rank() const { return channel->rank(); }
  int size() const { return channel->size(); }
  int job_rank() const { return fabric->rank(); }
  int job_rank_of(int member) const { return channel->members()[static_cast<std::size_t>(member)]; }
  /// "group 'world'", "a group of 4 ranks".
  std::string text() const {
    return name.empty() ? "a group of " + std::to_string(size()) + " ranks"
                        : "group '" + name + "'";
  }
  /// "group 'world' on rank 3".
  std::string here() const { return text() + " on rank " + std::to_string(job_rank()); }
  TimePoint now() const { return fabric->clock().now(); }
  /// "all_reduce(SUM, int64, 3 elements), call 7 of group 'world' on rank 2".
  std::string call_text(const transport::Fingerprint& call) const;
  /// Within a catch block: ends the group on all members with what was thrown here, in `call` where
  /// one is known; the group's failure. The end of the thread ends the group too, and goes on.
  Status fail_by_exception(const transport::Fingerprint* call = nullptr) const;
};

}  // namespace muster::collective
