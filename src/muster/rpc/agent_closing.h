/// How all workers end together. Private to the agent.
///
/// The lowest worker that is still there leads. Everybody tells it when it comes to its shutdown;
/// once all have, it asks rounds of questions: how many requests were sent and handled, is anything
/// under way? Two rounds in a row with the same numbers, where everybody was idle both times and
/// every request that was sent was handled, mean that nothing is on its way either; then it says so
/// and all go. (Mattern's four-counter method.) A worker that is lost is not waited for; if it led,
/// the next one starts anew.
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

#include "muster/base/clock.h"
#include "muster/base/status.h"
#include "muster/rpc/agent.h"
#include "muster/rpc/message.h"

namespace muster::rpc {

class Agent::Closing {
 public:
  explicit Closing(Agent& agent) : agent_(agent) {}

  void add_drain(std::shared_ptr<Drain> drain) { drains_.push_back(std::move(drain)); }

  /// On the thread that shuts down. Success once all may go; timed_out naming those that it waits
  /// for.
  Status run(TimePoint deadline);
  /// A message of another's closing; any thread.
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
  std::mutex mutex_;
  std::vector<Note> notes_;
  std::atomic<std::size_t> note_count_{0};

  // Of the thread that shuts down.
  bool begun_ = false;
  bool closed_ = false;
  int leader_ = -1;
  std::set<int> here_;
  /// The leader's questions.
  struct {
    std::uint64_t number = 0;
    bool asked = false;
    std::map<int, Note> answers;
    std::map<int, Note> before;  // of the round before
    TimePoint next = TimePoint::min();
    Duration pause = std::chrono::microseconds(200);  // limit: load of an end that takes long
  } round_;
  std::string told_;         // whom the leader waits for, as it last said
  std::string leader_says_;  // the same, as this worker heard it
};

}  // namespace muster::rpc
