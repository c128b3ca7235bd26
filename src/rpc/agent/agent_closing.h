// SPDX-License-Identifier: BSD-3-Clause
/// The graceful shutdown of all workers. Private to the agent.
///
/// The lowest live worker is the leader. Each worker tells it when it starts its shutdown. Once all
/// have, the leader runs rounds of queries: number of requests sent and handled, and whether
/// anything is in flight. Two consecutive rounds with equal numbers, in which every worker was idle
/// and every request sent had been handled, prove that nothing is in transit; the leader then tells
/// all workers to exit. (Mattern's four-counter method.) Lost workers are not waited for; if the
/// leader is lost, the next one starts over.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "muster/clock.h"
#include "muster/status.h"
#include "rpc/agent/agent.h"
#include "rpc/wire/message.h"

namespace muster::rpc {

class Agent::AgentClosing {
 public:
  explicit AgentClosing(Agent& agent) : agent_(agent) {}

  void add_drain(std::shared_ptr<Drain> drain) { drains_.push_back(std::move(drain)); }

  /// Runs on the thread that shuts down. Ok once all may exit; timed_out naming the workers it
  /// waits for.
  Status run(TimePoint deadline);
  /// Receives another worker's closing message; any thread.
  void take(Request request);

 private:
  using Word = ClosingWord;
  using Note = ClosingNote;

  int leader() const;
  std::vector<int> alive() const;
  void say(int to, Note note);
  void hear(const Note& note);
  void lead(TimePoint now);
  void new_leader();
  struct Missing {
    std::string text;
    std::vector<int> workers;
  };
  Missing missing() const;
  void tell_whom(const std::vector<int>& workers);

  Agent& agent_;
  std::vector<std::shared_ptr<Drain>> drains_;
  // Notes that other threads have received, for the thread that shuts down.
  std::mutex mutex_;  // guards notes_
  std::vector<Note> notes_;
  std::atomic<std::size_t> note_count_{0};  // size of notes_, written under mutex_

  // Used only by the thread that shuts down.
  bool begun_ = false;
  bool closed_ = false;
  int leader_ = -1;
  std::set<int> here_;
  /// The leader's rounds of queries.
  struct {
    std::uint64_t number = 0;
    bool asked = false;
    std::map<int, Note> answers;
    std::map<int, Note> before;  // of the previous round
    TimePoint next = TimePoint::min();
    Duration pause = std::chrono::microseconds(200);  // limit: load of an end that takes long
  } round_;
  std::string told_;         // workers the leader waits for, as last announced
  std::string leader_says_;  // the same, as received by this worker
};

}  // namespace muster::rpc
