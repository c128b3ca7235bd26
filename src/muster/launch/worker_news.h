/// What an agent tells a worker that stays through the epochs of its job (`--elastic=keep`): one
/// record at a time, over a pipe. A worker that reads the end of the pipe has lost its agent.
#pragma once

#include <cstdint>
#include <string>

#include "muster/launch/rank_assignment.h"
#include "muster/status.h"

namespace muster::launch {

/// The variable with the number of the pipe's descriptor.
inline constexpr const char* kNewsVariable = "MUSTER_LAUNCHER_NEWS";
/// Set in a spare process, which has no rank before the news of its first epoch.
inline constexpr const char* kSpareVariable = "MUSTER_SPARE";

enum class WorkerNewsKind : std::uint8_t {
  epoch,  ///< the job goes on in another epoch, in which the worker has these ranks
  leave,  ///< the node is to be given up: leave after the next commit
};

struct WorkerNews {
  WorkerNewsKind kind = WorkerNewsKind::epoch;
  std::int64_t epoch = 0;
  int restarts = 0;
  WorkerRanks ranks{};
  std::string agent_store{};  ///< HOST:PORT of the launcher's store that serves the epoch
  std::string master_addr{};
  std::uint16_t master_port = 0;
  std::string reason{};  ///< for people: "node 0 (host-a): rank 3 (...) was ended by SIGKILL"
};

/// Shorter than PIPE_BUF, so that a write is whole or nothing; a long reason is cut off.
std::string encode(const WorkerNews& news);

/// Blocks until a record is there. Code::closed at the end of the pipe.
Result<WorkerNews> read_worker_news(int descriptor);

}  // namespace muster::launch
