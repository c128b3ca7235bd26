// SPDX-License-Identifier: BSD-3-Clause
/// A whole job in one thread: ranks are fibers, time is virtual, the network is a queue of events.
/// One seed decides every delay, every split of a byte stream, every scheduling choice and every
/// fault; the same seed gives the same run.
///
/// Only the layers below `Connector` (streams, deaths, the clock) and the operating system's
/// scheduler are simulated: fabric, channels, regions, communicators and algorithms are the real
/// ones. A rank that waits is resumed only when bytes have arrived for it, its mailbox was
/// woken, or its own timer is due: a lost wake-up shows as a hang at the virtual time limit.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/transport/fabric.h"
#include "muster/clock.h"

namespace muster::testing {

struct SimFault {
  enum class Kind {
    kill,  ///< the process of `rank` ends; its host sees it at once, others by the end of their
           ///< streams
    stop,  ///< `rank` gets no more time (SIGSTOP) but its streams stay open
    partition,  ///< from now on nothing passes between the hosts of `rank` and `other`
  };
  Kind kind = Kind::kill;
  TimePoint at;
  int rank = 0;
  int other = -1;
};

struct SimOptions {
  std::uint64_t seed = 1;
  std::vector<int> hosts;  ///< host number of every rank; its size is the world size
  bool regions = true;     ///< ranks of one host share a region; false: streams only
  bool encrypted = false;  ///< streams between hosts carry TLS
  Duration min_delay = std::chrono::microseconds(5);
  Duration max_delay = std::chrono::milliseconds(2);
  /// Stands for what the kernel measures of the link from one rank to another; `sent` is counted by
  /// the stream. Empty: nothing is measured.
  std::function<LinkFigures(int from, int to)> figures = {};
  Duration heartbeat_limit = std::chrono::milliseconds(2500);
  Duration limit =
      std::chrono::seconds(120);  ///< virtual; a rank still running then counts as hung
  std::vector<SimFault> faults;
};

struct SimOutcome {
  enum class End { finished, killed, stopped, hung };
  End end = End::finished;
  Status status;  ///< what the rank's body returned, where it finished
};

struct SimReport {
  std::vector<SimOutcome> ranks;
  Duration elapsed{};  ///< virtual
  std::uint64_t switches = 0;
  std::uint64_t digest = 0;  ///< of the order of everything that happened: equal for equal seeds
};

class SimRank {
 public:
  virtual ~SimRank() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual const Clock& clock() const = 0;
  /// The job's store, over the simulated network.
  virtual std::shared_ptr<store::Store> store() = 0;
  /// Meets the others through the store. Once; ends with this rank.
  virtual Result<std::shared_ptr<transport::Fabric>> join() = 0;
  /// Lets virtual time pass, as computing would.
  virtual void compute(Duration duration) = 0;
};

/// The seed, hosts and faults, to play a job again by.
std::string describe_options(const SimOptions& options);

/// Runs `body` as every rank until all have ended or the limit has passed. Ranks that were killed,
/// stopped or hang are abandoned where they stand, with all that they hold, as a killed process is:
/// run many such jobs in child processes.
SimReport run_sim_job(const SimOptions& options, const std::function<Status(SimRank&)>& body);

}  // namespace muster::testing
