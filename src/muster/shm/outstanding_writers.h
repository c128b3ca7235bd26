/// Peers that may be in the middle of a store into this process's memory, after a call has failed.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "muster/shm/process_end.h"
#include "muster/shm/segment_layout.h"

namespace muster::shm {

/// Asked by the arena's quarantine, which may outlive the group and its member. A peer is taken for
/// dead only when its process has ended: one that is silent may have been stopped.
class OutstandingWriters {
 public:
  /// `region` keeps `Progress` where it is. (The segment of a group that failed is not given back.)
  explicit OutstandingWriters(std::shared_ptr<void> region) : region_(std::move(region)) {}
  /// `peer` has finished once its counter `done` has reached `end`.
  void add(const Progress& peer, Counter done, Position end, std::shared_ptr<ProcessEnd> process) {
    peers_.push_back({&peer, done, end, std::move(process)});
  }
  /// Whether any may still store. Once not, never again.
  bool operator()();

 private:
  struct Peer {
    const Progress* progress;
    Counter done;
    Position end;
    std::shared_ptr<ProcessEnd> process;
  };
  std::shared_ptr<void> region_;
  std::vector<Peer> peers_;
};

}  // namespace muster::shm
