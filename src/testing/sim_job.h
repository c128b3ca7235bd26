// SPDX-License-Identifier: BSD-3-Clause
/// The inside of the simulator: the job with its clock and events, and the streams between its
/// processes. Only `sim_*.cc` include it.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/shm/region_memory.h"
#include "core/store/server/store_server.h"
#include "testing/fiber.h"
#include "testing/sim_network.h"

namespace muster::testing {

using shm::HostRegion;
using shm::Mailbox;
using transport::ByteStream;
using transport::ConnectorEvents;

class SimJob;

/// One direction of a stream: bytes in flight with the time of their arrival.
struct Pipe {
  struct Parcel {
    TimePoint arrives;
    std::string bytes;
  };
  int from = -1;
  int to = -1;
  std::deque<Parcel> parcels;
  std::size_t held = 0;
  std::uint64_t sent = 0;
  TimePoint last_arrival{};
  bool ended = false;  // by its writer, or its writer's death
  TimePoint end_arrives{};
  bool cut = false;  // a partition: what is sent vanishes, no end is seen
};

class SimStream final : public ByteStream {
 public:
  SimStream(SimJob& job, std::shared_ptr<Pipe> out, std::shared_ptr<Pipe> in)
      : job_(job), out_(std::move(out)), in_(std::move(in)) {}
  ~SimStream() override;
  Result<std::size_t> write(std::span<const ConstBytes> pieces) override;
  Result<std::size_t> read(std::span<const MutableBytes> pieces) override;
  int descriptor() const override { return -1; }
  const char* kind() const override { return "sim"; }
  std::optional<LinkFigures> figures() const override;

 private:
  SimJob& job_;
  std::shared_ptr<Pipe> out_;
  std::shared_ptr<Pipe> in_;
};

/// The simulator's state of one rank.
struct Process {
  std::unique_ptr<Fiber> fiber;
  std::unique_ptr<SimRank> face;
  bool started = false;
  bool killed = false;
  bool stopped = false;
  TimePoint wakes{};            // its own timer
  TimePoint idle_since{};       // what had arrived by then it has looked at
  std::uint32_t seen_word = 0;  // of its mailbox, when it went idle
  Mailbox* mailbox = nullptr;   // in the region where there is one
  SimOutcome outcome;
  ConnectorEvents* events = nullptr;
  std::deque<std::pair<TimePoint, std::function<void()>>>
      news;  // for the connector's poll, in order of time
};

class SimJob final : public Clock {
 public:
  explicit SimJob(const SimOptions& options);
  SimReport run(const std::function<Status(SimRank&)>& body);

  TimePoint now() const override { return now_; }
  void idle(int rank, TimePoint until);

  int world_size() const { return static_cast<int>(options_.hosts.size()); }
  const SimOptions& options() const { return options_; }
  Process& process(int rank) { return processes_[static_cast<std::size_t>(rank)]; }
  std::uint64_t draw(std::uint64_t bound) {
    return std::uniform_int_distribution<std::uint64_t>(0, bound - 1)(random_);
  }
  Duration delay();
  void note(std::uint64_t what) { digest_ = (digest_ ^ what) * 0x100000001b3ull; }
  std::uint64_t digest() const { return digest_; }

  bool partitioned(int a, int b) const;
  std::unique_ptr<ByteStream> stream_between(int from, int to);
  std::array<std::unique_ptr<ByteStream>, 2> encrypted_streams(int from, int to);
  void request_stream(int from, int to);
  void tell(int rank, Duration after, std::function<void()> news);
  HostRegion* region_of(int rank);
  std::vector<int> host_numbers() const;

  /// The store's server takes one place more than there are ranks; it stands on the host of rank 0
  /// and never dies.
  int store_place() const { return world_size(); }
  int host_of(int place) const {
    return options_.hosts[place == store_place() ? 0 : static_cast<std::size_t>(place)];
  }
  /// A new connection of a rank to the store's server; once per rank.
  std::unique_ptr<ByteStream> reach_store(int rank);
  static const Secret& secret();

 private:
  void strike(const SimFault& fault);
  void kill(int rank);
  bool runnable(int rank);
  TimePoint next_event(int rank);
  /// When the next bytes or end reach a place, of those that come later than `after`.
  TimePoint next_arrival(int place, TimePoint after) const;
  TimePoint store_event() const;
  void serve_store();

  SimOptions options_;
  std::mt19937_64 random_;
  TimePoint store_looked_{};
  TimePoint now_{std::chrono::seconds(1)};
  TimePoint start_{now_};
  std::uint64_t digest_ = 0xcbf29ce484222325ull;
  std::uint64_t switches_ = 0;
  std::vector<Process> processes_;
  std::vector<std::vector<std::shared_ptr<Pipe>>> pipes_;  // [from][to], null until opened
  std::vector<std::unique_ptr<HostRegion>> regions_;       // one view per rank
  std::map<int, std::shared_ptr<void>> memory_;            // by host
  std::vector<std::pair<int, int>> cuts_;                  // hosts that no longer reach each other
  store::StoreServer server_;
  std::vector<std::unique_ptr<ByteStream>> serving_;  // the server's end of each rank's connection
};

/// The job's store as one rank sees it: the real server, greeting and protocol, over a simulated
/// stream.
std::shared_ptr<store::Store> make_sim_store(SimJob& job, int rank, Duration timeout);

}  // namespace muster::testing
