// SPDX-License-Identifier: BSD-3-Clause
#include "core/trace/responder.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/bytes.h"
#include "core/base/threads/thread_start.h"
#include "core/security/secret.h"
#include "core/store/factory.h"
#include "core/store/job_keys.h"
#include "core/trace/analysis.h"
#include "core/trace/reader.h"
#include "core/trace/run_directory.h"

namespace muster::trace {
namespace {

constexpr Duration kStoreTimeout = std::chrono::seconds(2);
constexpr Duration kShortest = std::chrono::milliseconds(1);  // limit: negative would mean none
using store::kJobKey;
/// Answers of one rank that have not been fetched yet; several processes may ask at once.
constexpr std::size_t kKeptAnswers = 8;  // limit: memory of the store
/// Size of one answer, and of all kept answers together.
constexpr std::size_t kMostAnswerBytes = std::size_t{4} << 20;  // limit: memory of the store

std::string questions_of(int rank) { return "trace/ask/" + std::to_string(rank); }
std::string answer_key(const std::string& id, int rank) {
  return "trace/answer/" + id + "/" + std::to_string(rank);
}
std::string published_key(int rank) {
  return "trace/" + std::to_string(rank);
}  // peer_traces.cc writes it

struct Question {
  std::string id;
  std::uint64_t records = 0;
  std::vector<int> about;  ///< at most kMostAbout; empty: the rank that is asked
  bool links = false;      ///< ends the question where it is true, so that older ranks read others
};

std::string encode(const Question& question) {
  ByteWriter out;
  out.put(kVersion)
      .put_text(question.id)
      .put(question.records)
      .put(static_cast<std::uint32_t>(question.about.size()));
  for (const int rank : question.about) out.put(rank);
  if (question.links) out.put(std::uint8_t{1});
  return out.take();
}

std::optional<Question> decode_question(std::string_view bytes) {
  ByteReader in(bytes);
  Question question;
  const auto version = in.get<std::uint32_t>();
  question.id = in.get_text();
  question.records = in.get<std::uint64_t>();
  const auto ranks = in.get<std::uint32_t>();
  for (std::uint32_t i = 0; i < ranks && in.ok(); ++i) question.about.push_back(in.get<int>());
  question.links = !in.at_end() && in.get<std::uint8_t>() != 0;
  if (version != kVersion || !in.at_end() || question.about.size() > kMostAbout ||
      question.id.size() > 64 || question.id.find('/') != std::string::npos)
    return std::nullopt;
  std::sort(question.about.begin(), question.about.end());
  question.about.erase(std::unique(question.about.begin(), question.about.end()),
                       question.about.end());
  return question;
}

/// The latest calls that were asked for, or of each group only the latest if they are too many for
/// `room`; empty where these are too many, too.
std::string encode_within(std::size_t room, const RankTrace& trace, std::uint64_t records) {
  std::string bytes = encode_trace(cut_to(trace, static_cast<std::size_t>(records)));
  if (bytes.size() > room) bytes = encode_trace(cut_to_latest(trace));
  return bytes.size() > room ? std::string() : bytes;
}

/// At most `kMostAnswerBytes`, whatever is asked; every trace is read once.
std::string answer_to(const Question& question, const Recorder& recorder,
                      const RankReport& report) {
  ByteWriter links;
  links.put(static_cast<std::uint32_t>(report.links.size()));
  for (const auto& [peer, figures] : report.links)
    links.put(peer)
        .put(static_cast<std::int64_t>(figures.round_trip.count()))
        .put(figures.bytes_per_s)
        .put(figures.sent)
        .put(figures.resent);
  const std::string told = links.take();
  std::vector<std::string> traces;
  std::size_t room = kMostAnswerBytes - std::min(told.size(), kMostAnswerBytes);
  const auto add = [&](const RankTrace& trace) {
    if (std::string bytes = encode_within(room, trace, question.records); !bytes.empty()) {
      room -= bytes.size();
      traces.push_back(std::move(bytes));
    }
  };
  if (const auto mine = read_trace(recorder.path())) {
    if (question.about.empty()) add(*mine);
    for (const int rank : question.about) {
      if (rank < 0 || rank >= mine->world_size) continue;
      const auto theirs = read_trace(recorder.directory() + "/" + trace_name(rank));
      // In a directory that hosts share, whether a rank of another host lives cannot be seen here.
      if (theirs && theirs->boot == mine->boot && theirs->host == mine->host) add(*theirs);
    }
  }
  ByteWriter out;
  out.put(report.refusals).put(static_cast<std::uint32_t>(traces.size()));
  for (const std::string& each : traces) out.put_text(each);
  return out.take() + told;
}

struct Answer {
  RankReport report;  ///< of the rank that answers
  std::vector<RankTrace> traces{};
};

/// Times moved to this host's clock; absent where it cannot be read.
std::optional<Answer> decode_answer(std::string_view bytes) {
  ByteReader in(bytes);
  Answer answer;
  answer.report.refusals = in.get<std::uint64_t>();
  const auto count = in.get<std::uint32_t>();
  for (std::uint32_t i = 0; i < count && in.ok(); ++i) {
    auto sent = decode_trace(in.get_text());
    if (!sent) continue;
    shift(sent->trace, wall_now_ns() - sent->as_of_ns);
    answer.traces.push_back(std::move(sent->trace));
  }
  const auto links = in.at_end() ? 0 : in.get<std::uint32_t>();
  for (std::uint32_t i = 0; i < links && in.ok(); ++i) {
    const int peer = in.get<int>();
    LinkFigures& figures = answer.report.links[peer];
    figures.round_trip = std::chrono::microseconds(in.get<std::int64_t>());
    figures.bytes_per_s = in.get<std::uint64_t>();
    figures.sent = in.get<std::uint64_t>();
    figures.resent = in.get<std::uint64_t>();
  }
  return in.ok() ? std::optional(std::move(answer)) : std::nullopt;
}

/// Whether users of other processes and hosts reach it.
bool is_served(std::shared_ptr<store::Store> store) {
  while (auto below = store::underlying_store(*store)) store = std::move(below);
  return std::string_view(store->kind()) == "tcp";
}

}  // namespace

// Shared with the thread, which outlives the responder if the store hangs.
struct TraceResponder::State {
  std::shared_ptr<Recorder> recorder;
  std::shared_ptr<store::Store> store;  // the job's, then a clone
  int rank = 0;
  std::function<RankReport(bool links)> report;
  std::mutex mutex;
  std::condition_variable changed;
  // `store` until the thread is connected, and these, under the mutex.
  bool connected = false;
  bool stopping = false;
  bool ended = false;
  std::thread thread;

  /// A connection of its own, made on the thread: no rank's start waits for it. False: there is
  /// none.
  bool connect() {
    std::shared_ptr<store::Store> job;
    {
      const std::lock_guard lock(mutex);
      job = store;
    }
    auto clone = job->clone();
    if (!clone.ok()) return false;
    (*clone)->set_timeout(kStoreTimeout);
    const std::lock_guard lock(mutex);
    store = std::move(*clone);
    connected = true;
    return true;
  }
  bool stops() {
    const std::lock_guard lock(mutex);
    return stopping;
  }

  void run() {
    if (connect()) {
      if (stops()) {
        forget_job();  // `stop` could not
      } else {
        answer_all();
      }
    }
    const std::lock_guard lock(mutex);
    ended = true;
    changed.notify_all();
  }

  /// No observer asks this job any more.
  void forget_job() {
    if (rank == 0) static_cast<void>(store->delete_key(kJobKey));
  }

  /// Answers that stand in the store, oldest first.
  struct KeptAnswer {
    std::string key;
    std::size_t bytes = 0;
  };

  /// The asking process deletes the answer that it has fetched.
  bool was_fetched(const KeptAnswer& answer) {
    const auto there = store->check(std::span(&answer.key, 1));
    return there.ok() && !*there;
  }

  /// Drops unfetched answers, oldest first: the processes that asked may have ended.
  void make_room(std::deque<KeptAnswer>& kept, std::size_t bytes) {
    const auto is_full = [&] {
      std::size_t total = bytes;
      for (const KeptAnswer& each : kept) total += each.bytes;
      return !kept.empty() && (kept.size() >= kKeptAnswers || total > kMostAnswerBytes);
    };
    if (is_full()) std::erase_if(kept, [&](const KeptAnswer& each) { return was_fetched(each); });
    for (; is_full(); kept.pop_front()) static_cast<void>(store->delete_key(kept.front().key));
  }

  void answer_all() {
    std::deque<KeptAnswer> kept;
    for (;;) {
      const auto bytes = store->queue_pop(questions_of(rank), true, Duration(-1));
      if (!bytes.ok() || stops()) break;
      const auto question = decode_question(*bytes);
      if (!question) continue;
      const std::string answer =
          answer_to(*question, *recorder, report ? report(question->links) : RankReport());
      make_room(kept, answer.size());
      kept.push_back({answer_key(question->id, rank), answer.size()});
      if (!store->set(kept.back().key, answer).ok()) return;
    }
    // No observer may delete them once the job has ended.
    if (stops())
      for (const KeptAnswer& each : kept) static_cast<void>(store->delete_key(each.key));
  }
};

std::unique_ptr<TraceResponder> TraceResponder::start(std::shared_ptr<Recorder> recorder,
                                                      const std::shared_ptr<store::Store>& job,
                                                      std::function<RankReport(bool)> report) {
  if (!recorder || !job || !is_served(job)) return nullptr;
  const auto mine = read_trace(recorder->path());
  if (!mine) return nullptr;
  auto state = std::make_shared<State>();
  state->recorder = std::move(recorder);
  state->store = job;
  state->rank = mine->rank;
  state->report = std::move(report);
  if (mine->rank == 0)
    static_cast<void>(job->set(
        kJobKey, encode(store::JobAnnouncement{mine->job, mine->world_size, mine->since_ns})));
  auto thread = start_thread("the thread that answers `muster trace`", [state] { state->run(); });
  if (!thread.ok()) return nullptr;
  state->thread = std::move(*thread);
  return std::unique_ptr<TraceResponder>(new TraceResponder(std::move(state)));
}

TraceResponder::TraceResponder(std::shared_ptr<State> state) : state_(std::move(state)) {}

TraceResponder::~TraceResponder() { stop(); }

void TraceResponder::stop() {
  const auto state = std::exchange(state_, nullptr);
  if (state == nullptr) return;
  if (mark_.forked()) {
    state->thread.detach();  // the parent's
    new auto(state);         // and so are its connections
    return;
  }
  std::unique_lock lock(state->mutex);
  state->stopping = true;
  if (!state->ended) {
    // Before the thread is connected, `store` is the job's, which may wait for long: the thread
    // then sees `stopping` once it is.
    if (state->connected) {
      lock.unlock();
      state->forget_job();
      static_cast<void>(state->store->queue_push(questions_of(state->rank), ""));
      lock.lock();
    }
    state->changed.wait_for(lock, kStoreTimeout, [&] { return state->ended; });
  }
  // A store that hangs must not hold up the end of the job: the thread then lives on until its
  // connection ends.
  const bool ended = state->ended;
  lock.unlock();
  ended ? state->thread.join() : state->thread.detach();
}

namespace {

/// One round of questions to the ranks of one job.
class Asking {
 public:
  Asking(store::Store& store, std::string prefix, store::JobAnnouncement announced,
         const AskOptions& options)
      : store_(store),
        prefix_(std::move(prefix)),
        announced_(std::move(announced)),
        options_(options) {}

  Result<AskedJob> run() {
    std::vector<int> all(static_cast<std::size_t>(announced_.world_size));
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int>(i);
    for (auto& trace : ask(all, {})) found_.emplace(trace.rank, std::move(trace));
    const auto silent = missing();
    ask_neighbours(silent);
    look_up_last_words();
    if (found_.empty()) {
      return Status(Code::timed_out,
                    "none of the " + std::to_string(announced_.world_size) + " ranks of job " +
                        announced_.job +
                        " answers: it has ended without destroy_process_group, or keeps no traces "
                        "(MUSTER_TRACE_ENTRIES=0)");
    }
    AskedJob asked;
    asked.notes = std::move(notes_);
    asked.refusals = std::move(refusals_);
    asked.links = std::move(links_);
    if (const auto unknown = missing(); !unknown.empty())
      asked.notes.push_back(list_ranks(unknown) + (unknown.size() == 1 ? " does" : " do") +
                            " not answer, and nothing else is known of " +
                            (unknown.size() == 1 ? "it" : "them"));
    for (auto& [rank, trace] : found_) asked.job.ranks.push_back(std::move(trace));
    return asked;
  }

 private:
  std::string key(const std::string& name) const { return prefix_ + name; }

  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (int rank = 0; rank < announced_.world_size; ++rank)
      if (!found_.contains(rank)) ranks.push_back(rank);
    return ranks;
  }

  /// Asks all of `ranks` and returns the traces in the answers; some may not answer.
  std::vector<RankTrace> ask(const std::vector<int>& ranks, const std::vector<int>& about) {
    const Question question{random_name(12), options_.records, about,
                            options_.links && about.empty()};
    std::vector<int> asked;
    for (const int rank : ranks) {
      const auto waiting = store_.queue_len(key(questions_of(rank)));
      if (!waiting.ok() || *waiting >= store::kMostQuestions) continue;
      if (store_.queue_push(key(questions_of(rank)), encode(question)).ok()) asked.push_back(rank);
    }
    const TimePoint deadline = deadline_after(steady_clock(), options_.patience);
    std::vector<RankTrace> said;
    for (const int rank : asked) {
      const auto place = key(answer_key(question.id, rank));
      const auto answer =
          store_.get(place, std::max<Duration>(time_left(steady_clock(), deadline), kShortest));
      if (!answer.ok()) continue;
      static_cast<void>(store_.delete_key(place));
      auto told = decode_answer(*answer);
      if (!told) continue;
      refusals_[rank] = told->report.refusals;
      for (const auto& [peer, figures] : told->report.links)
        if (peer >= 0 && peer < announced_.world_size) links_[{rank, peer}] = figures;
      for (auto& trace : told->traces) {
        const bool wanted = about.empty()
                                ? trace.rank == rank
                                : std::find(about.begin(), about.end(), trace.rank) != about.end();
        if (wanted && trace.world_size == announced_.world_size) said.push_back(std::move(trace));
      }
    }
    return said;
  }

  /// Asks one rank of the same host about those that are stopped or dead.
  void ask_neighbours(const std::vector<int>& silent) {
    if (silent.empty()) return;
    std::map<std::tuple<std::string, std::string, std::string>, int> one_of_each_folder;
    for (const auto& [rank, trace] : found_)
      one_of_each_folder.emplace(
          std::tuple(trace.host, trace.boot, trace.path.substr(0, trace.path.rfind('/'))), rank);
    std::vector<int> neighbours;
    for (const auto& [folder, rank] : one_of_each_folder) neighbours.push_back(rank);
    for (std::size_t at = 0; at < silent.size(); at += kMostAbout) {
      const std::vector<int> some(
          silent.begin() + static_cast<std::ptrdiff_t>(at),
          silent.begin() + static_cast<std::ptrdiff_t>(std::min(at + kMostAbout, silent.size())));
      for (auto& trace : ask(neighbours, some)) {
        const int rank = trace.rank;
        if (!found_.emplace(rank, std::move(trace)).second) continue;
        notes_.push_back(
            "rank " + std::to_string(rank) +
            " does not answer; what is shown was read from its file by another rank of its host");
      }
    }
  }

  /// In jobs on several hosts every rank publishes what it did last.
  void look_up_last_words() {
    for (const int rank : missing()) {
      const std::string place = key(published_key(rank));
      const auto there = store_.check(std::span(&place, 1));
      if (!there.ok() || !*there) continue;
      const auto bytes = store_.get(place);
      auto word = bytes.ok() ? decode_trace(*bytes) : std::nullopt;
      if (!word || word->trace.rank != rank) continue;
      found_.emplace(rank, std::move(word->trace));
      notes_.push_back(
          "rank " + std::to_string(rank) +
          " does not answer, nor does any rank of its host; what is shown is what it published "
          "last, " +
          muster::describe(Duration(std::max<std::int64_t>(wall_now_ns() - word->as_of_ns, 0))) +
          " ago");
    }
  }

  store::Store& store_;
  const std::string prefix_;
  const store::JobAnnouncement announced_;
  const AskOptions options_;
  std::map<int, RankTrace> found_;
  std::map<int, std::uint64_t> refusals_;
  std::map<std::pair<int, int>, LinkFigures> links_;
  std::vector<std::string> notes_;
};

}  // namespace

Result<AskedJob> ask_job(store::Store& store, const AskOptions& options) {
  const auto keys = store.list_keys();
  if (!keys.ok()) return keys.status();
  std::string prefix;
  std::optional<store::JobAnnouncement> latest;
  for (const auto& key : *keys) {
    if (key != kJobKey && !key.ends_with("/" + std::string(kJobKey))) continue;
    const auto bytes = store.get(key);
    auto job = bytes.ok() ? store::decode_job(*bytes) : std::nullopt;
    if (!job || (latest && latest->since_ns > job->since_ns)) continue;
    latest = std::move(job);
    prefix = key.substr(0, key.size() - kJobKey.size());
  }
  if (!latest) {
    return Status(Code::invalid_argument,
                  "no job that can be asked runs on this store: it has ended, has not begun, or "
                  "keeps no traces (MUSTER_TRACE_ENTRIES=0)");
  }
  return Asking(store, std::move(prefix), std::move(*latest), options).run();
}

}  // namespace muster::trace
