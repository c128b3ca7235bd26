/// Peers that may be in the middle of a store into this process's memory after a call has failed.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "core/shm/process_end.h"
#include "core/shm/segment_layout.h"

namespace muster::shm {

/// Called by the arena's quarantine, which may outlive the group and its member. A peer counts as
/// dead only when its process has ended; a silent peer may just be stopped.
class OutstandingWriters {
 public:
  /// `region` keeps `MemberProgress` mapped. (A member with memory in
  /// quarantine does not leave its group's segment, which is therefore not freed.)
  explicit OutstandingWriters(std::shared_ptr<void> region) : region_(std::move(region)) {}
  /// `peer` has finished once its counter `done` has reached `end`.
  void add(const MemberProgress& peer, Counter done, Position end,
           std::shared_ptr<ProcessEnd> process) {
    peers_.push_back({&peer, done, end, std::move(process)});
  }
  /// Whether any peer may still store. Never true again after it has returned false.
  bool operator()();

 private:
  struct WriterPeer {
    const MemberProgress* progress;
    Counter done;
    Position end;
    std::shared_ptr<ProcessEnd> process;
  };
  std::shared_ptr<void> region_;
  std::vector<WriterPeer> peers_;
};

}  // namespace muster::shm
