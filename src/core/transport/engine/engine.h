// SPDX-License-Identifier: BSD-3-Clause
/// Assembles the parts of a fabric. Private to `transport/`.
///
/// Its parts, each of which knows only those before it:
///   `EngineContext`    facts of the job, the pass under way, what is known of the ranks
///   `Link`, `Links`    one peer's stream and protocol; all of them: polling, writing, opening
///   `PassLoop`         the lock, and passes over links and timers
///   `Watcher`, `EngineWait`   run these passes: in the background, and while a thread waits
///   `ChannelState`     matching, credit, calls compared (sender, receiver); `ChannelTable`: ids
///   `FailureDetector`  deaths and blame; `FailureNews`: telling others; `Heartbeats`
///   `FrameRouter`      gives a link's frames to channels and detector
/// What lower parts report upwards goes through `FailureEvents`, `LinkEvents` and `TimedDuties`.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "core/transport/channel/channel_table.h"
#include "core/transport/engine/engine_wait.h"
#include "core/transport/failure/failure_detector.h"
#include "core/transport/failure/heartbeats.h"

namespace muster::transport {

class Engine final : public ConnectorEvents, public TimedDuties {
 public:
  Engine(const FabricOptions& options, std::unique_ptr<Connector> connector);
  ~Engine() override;

  Status meet(const Exchange& exchange);
  /// After `meet`: channels of all ranks, watcher thread.
  Status start(Fabric& fabric);
  /// Fails pending transfers, notifies the peers, flushes, stops the watcher; once.
  void shut_down();
  void leave_unclosed(const std::string& after);
  void fail_rank(const std::string& why, const std::vector<int>& earlier);

  Result<std::shared_ptr<Channel>> open(std::shared_ptr<Engine> self, std::uint32_t id,
                                        std::vector<int> members);
  std::uint32_t next_channel_id();
  Status death_of(int rank);
  Status why_gone(int rank);
  void declare_dead(int rank, const Status& evidence);
  void suspend_heartbeats(bool on);
  /// Writes the batched messages of all threads.
  void write_batches();
  Traffic traffic();
  std::map<int, LinkFigures> link_figures();

  const EngineContext& context() const { return context_; }
  Connector& connector() { return *connector_; }
  PassLoop& loop() { return loop_; }
  EngineWait& waiting() { return wait_; }
  ChannelTable& channels() { return channels_; }

 private:
  // ConnectorEvents.
  void on_stream(int peer, std::unique_ptr<ByteStream> stream) override;
  void on_connect_failed(int peer, Status cause) override {
    detector_.on_connect_failed(peer, cause);
  }
  void on_death(int peer, Status evidence) override {
    detector_.on_death(peer, std::move(evidence));
  }
  // TimedDuties.
  void on_due(TimePoint now) override;

  void retire(std::uint32_t id);
  void push_close(Link& link);
  void close_links();
  bool everything_said();
  void flush_at_the_end();

  std::unique_ptr<Connector> connector_;
  EngineContext context_;
  Links links_;
  PassLoop loop_;
  EngineWait wait_;
  ChannelTable channels_;
  FailureDetector detector_;
  Heartbeats heartbeats_;
  std::unique_ptr<Watcher> watcher_;
  std::atomic<bool> has_left_ = false;
};

}  // namespace muster::transport
