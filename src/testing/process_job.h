// SPDX-License-Identifier: BSD-3-Clause
/// The shortest way from a process to a working communicator, for tests whose ranks are processes.
#pragma once

#include <memory>
#include <string>

#include "core/collective/communicator.h"
#include "core/transport/factory.h"
#include "testing/limits.h"

namespace muster::testing {

struct ProcessJobOptions {
  int rank = 0;
  int world_size = 1;
  std::string store_path;  ///< a file that all ranks see; new for every job
  bool shared_memory = true;
  std::string
      host_label;  ///< see ConnectorOptions: ranks with different labels are on different hosts
  std::string towards;  ///< see ConnectorOptions; empty: loopback
  Duration heartbeat_limit =
      std::chrono::milliseconds(2500);  ///< zero where ranks may rightly be silent for longer
  std::string secret = "a secret for tests only";
  Duration timeout = muster::testing::kMustHappen;
};

struct ProcessJob {
  std::shared_ptr<transport::Fabric> fabric;
  std::shared_ptr<collective::Communicator> world;
};

/// Blocks until every rank has joined.
Result<ProcessJob> join_process_job(const ProcessJobOptions& options);

}  // namespace muster::testing
