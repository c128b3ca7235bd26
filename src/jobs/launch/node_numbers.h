// SPDX-License-Identifier: BSD-3-Clause
/// The launcher's counts of its node's part of a job, for another thread of its process (`muster
/// run --metrics`). The launcher writes them; it waits for no reader longer than a copy of them
/// takes.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "core/store/factory.h"

namespace muster::launch {

/// Thread-safe.
class NodeNumbers {
 public:
  struct Worker {
    int rank = 0;
    std::int64_t pid = 0;
    bool ended = false;
  };
  struct Values {
    std::string job, host;
    std::int64_t epoch = 0;     ///< of the most recently started workers
    std::int64_t restarts = 0;  ///< of the whole job
    std::int64_t failures = 0;  ///< of this node's workers
    std::int64_t commits = 0;   ///< number of the newest commit that a worker here told of
    int world_size = 0;
    std::map<int, Worker> workers;  ///< by local rank
  };
  Values values() const;
  /// The store that this launcher serves to the job; null before and after, and if another node
  /// serves it.
  std::shared_ptr<store::TcpStore> store() const;

  void begin_job(const std::string& job, const std::string& host);
  void begin_epoch(std::int64_t epoch, std::int64_t restarts, int world_size);
  void put_worker(int local_rank, const Worker& worker);
  void end_worker(int local_rank);
  void add_failure();
  void put_commits(std::int64_t commits);
  void put_store(const std::shared_ptr<store::TcpStore>& store);

 private:
  mutable std::mutex lock_;  // guards both; nothing is called under it
  Values values_;
  std::weak_ptr<store::TcpStore> store_;  // goes with the launcher's
};

}  // namespace muster::launch
