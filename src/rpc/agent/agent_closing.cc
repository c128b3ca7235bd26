// SPDX-License-Identifier: BSD-3-Clause
#include "rpc/agent/agent_closing.h"

#include <algorithm>

#include "core/base/log/log.h"

namespace muster::rpc {
namespace {

constexpr Duration kLongestPause =
    std::chrono::milliseconds(10);  // limit: load of an end that takes long
constexpr Duration kWarnAfter = std::chrono::seconds(10);
/// How often a waiting worker that is not the leader checks whether it has become the leader.
constexpr Duration kLook =
    std::chrono::milliseconds(100);  // limit: how late a new leader is noticed

}  // namespace

std::vector<int> Agent::AgentClosing::alive() const {
  std::vector<int> workers;
  for (int worker = 0; worker < agent_.workers_.size(); ++worker) {
    if (!agent_.calls_.is_lost(worker)) workers.push_back(worker);
  }
  return workers;
}

int Agent::AgentClosing::leader() const { return alive().front(); }  // this worker is always alive

void Agent::AgentClosing::say(int to, Note note) {
  note.from = agent_.workers_.self_id();
  if (to == agent_.workers_.self_id()) return hear(note);
  OutgoingCall message;
  message.to = to;
  message.kind = MessageKind::closing;
  message.fill = [&](Value& value, ValueDelivery&) { value.bytes = encode_closing(note); };
  agent_.post(std::move(message));
}

void Agent::AgentClosing::take(Request request) {
  auto note = decode_closing(request.message.value.bytes);
  if (!note)
    return agent_.on_loss(request.from,
                          Status(note.status().code(), note.status().message(), {request.from}));
  note->from = request.from;
  {
    const std::lock_guard lock(mutex_);
    notes_.push_back(std::move(*note));
    note_count_.store(notes_.size());
  }
  agent_.fabric_->wake();
}

/// On the thread that shuts down.
void Agent::AgentClosing::hear(const Note& note) {
  switch (note.word) {
    case Word::here:
      here_.insert(note.from);
      told_.clear();
      return;
    case Word::waiting: leader_says_ = note.waits_for; return;
    case Word::begin:
      if (!begun_) {
        begun_ = true;
        for (const auto& drain : drains_) drain->begin();
      }
      return;
    case Word::probe: {
      Note answer;
      answer.word = Word::counts;
      answer.round = note.round;
      for (const auto& drain : drains_) {
        if (drain->idle()) continue;
        answer.busy = true;
        const auto what = drain->waits_for();
        if (!what.empty()) answer.waits_for += (answer.waits_for.empty() ? "" : ", ") + what;
      }
      if (!agent_.quiet()) {
        answer.busy = true;
        if (answer.waits_for.empty()) answer.waits_for = "calls under way";
      }
      // Read after `quiet`, not before: a call that starts in between then changes the next round's
      // numbers.
      answer.handled = agent_.server_.handled();
      answer.sent = agent_.outbox_.sent();
      say(note.from, std::move(answer));
      return;
    }
    case Word::counts:
      if (note.round == round_.number) round_.answers[note.from] = note;
      return;
    case Word::close: closed_ = true; return;
  }
}

void Agent::AgentClosing::new_leader() {
  leader_ = leader();
  round_.asked = false;
  round_.answers.clear();
  round_.before.clear();
  Note here;
  here.word = Word::here;
  say(leader_, std::move(here));
}

/// The leader's step, after a message has arrived or a timer has expired.
void Agent::AgentClosing::lead(TimePoint now) {
  const auto workers = alive();
  if (!std::all_of(workers.begin(), workers.end(), [&](int w) { return here_.contains(w); }))
    return tell_whom(workers);
  if (!round_.asked) {
    if (now < round_.next) return;
    round_.asked = true;
    round_.answers.clear();
    ++round_.number;
    for (const int worker : workers) {
      Note begin;
      begin.word = Word::begin;
      say(worker, std::move(begin));
      Note probe;
      probe.word = Word::probe;
      probe.round = round_.number;
      say(worker, std::move(probe));
    }
  }
  if (!std::all_of(workers.begin(), workers.end(),
                   [&](int w) { return round_.answers.contains(w); }))
    return;
  round_.asked = false;
  std::uint64_t sent = 0;
  std::uint64_t handled = 0;
  bool still = round_.before.size() == round_.answers.size();
  for (const auto& [worker, note] : round_.answers) {
    sent += note.sent;
    handled += note.handled;
    const auto earlier = round_.before.find(worker);
    still = still && !note.busy && earlier != round_.before.end() && !earlier->second.busy &&
            earlier->second.sent == note.sent && earlier->second.handled == note.handled;
  }
  const bool whole = static_cast<int>(workers.size()) ==
                     agent_.workers_.size();  // the numbers of a lost worker are lost
  round_.before = round_.answers;
  if (!still || (whole && sent != handled)) {
    tell_whom(workers);
    round_.next = now + round_.pause;
    round_.pause = std::min(2 * round_.pause, kLongestPause);
    return;
  }
  // A new job at the same address must not find this store, so the leader releases it before any
  // worker exits.
  agent_.options_.meeting_place.reset();
  for (const int worker : workers) {
    Note close;
    close.word = Word::close;
    say(worker, std::move(close));
  }
}

/// Sends the waiting workers the names of those they wait for, for their timeout errors.
void Agent::AgentClosing::tell_whom(const std::vector<int>& workers) {
  auto text = missing().text;
  if (text == told_ || text.empty()) return;
  told_ = std::move(text);
  for (const int worker : workers) {
    if (worker == agent_.workers_.self_id() || !here_.contains(worker)) continue;
    Note note;
    note.word = Word::waiting;
    note.waits_for = told_;
    say(worker, std::move(note));
  }
}

/// The workers that delay the shutdown: those that have not called it, else those that are busy.
Agent::AgentClosing::Missing Agent::AgentClosing::missing() const {
  Missing missing;
  const auto add = [&](int worker, const std::string& why) {
    missing.text += (missing.text.empty() ? "" : ", ") + agent_.workers_.describe(worker) + why;
    missing.workers.push_back(worker);
  };
  if (leader_ != agent_.workers_.self_id()) {
    if (leader_says_.empty()) {
      add(leader_, ", which has not called shutdown");
    } else {
      missing.text = leader_says_;
    }
    return missing;
  }
  for (const int worker : alive()) {
    if (!here_.contains(worker)) add(worker, ", which has not called shutdown");
  }
  if (!missing.workers.empty()) return missing;
  const auto& latest = round_.before.empty() ? round_.answers : round_.before;
  for (const int worker : alive()) {
    const auto note = latest.find(worker);
    if (note == latest.end()) {
      add(worker, ", which does not answer");
    } else if (note->second.busy) {
      add(worker, ", which has " + note->second.waits_for);
    }
  }
  return missing;
}

Status Agent::AgentClosing::run(TimePoint deadline) {
  const auto begin = agent_.clock().now();
  auto warn_at = begin + kWarnAfter;
  new_leader();
  while (!closed_) {
    const AgentLife::AgentUse use(agent_.life_);
    if (!use)
      return Status(Code::aborted,
                    "shutdown: RPC of worker '" + agent_.self().name() + "' was ended meanwhile");
    std::vector<Note> notes;
    {
      const std::lock_guard lock(mutex_);
      notes.swap(notes_);
      note_count_.store(0);
    }
    for (const Note& note : notes) hear(note);
    if (closed_) break;
    const auto now = agent_.clock().now();
    if (leader() != leader_) {
      new_leader();
      continue;
    }
    if (leader_ == agent_.workers_.self_id()) lead(now);
    if (closed_) break;
    if (now >= deadline) {
      auto whom = missing();
      return Status(Code::timed_out,
                    "shutdown: after " + describe(now - begin) + " worker '" +
                        agent_.self().name() + "' still waits for " + whom.text,
                    std::move(whom.workers));
    }
    if (now >= warn_at) {
      warn_at = now + 6 * kWarnAfter;
      log(LogLevel::warning,
          "shutdown: worker '" + agent_.self().name() + "' waits for " + missing().text);
    }
    auto until = std::min({deadline, warn_at, now + kLook});
    if (leader_ == agent_.workers_.self_id() && !round_.asked && round_.next > now)
      until = std::min(until, round_.next);
    agent_.wait([this] { return note_count_.load() > 0 || agent_.calls_.is_lost(leader_); }, until);
  }
  return {};
}

}  // namespace muster::rpc
