// SPDX-License-Identifier: BSD-3-Clause
#include "backends/nccl/call_watch.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <span>
#include <utility>

#include "core/base/log/log.h"
#include "core/base/threads/thread_start.h"
#include "core/group/errors.h"
#include "core/tunables/tunables.h"
#include "muster/init.h"

namespace muster::nccl {
namespace {

/// How many calls a thread asks the device about when it makes another: as many end meanwhile, on
/// average, and one that does not end holds up no other.
constexpr std::size_t kEndedByCallers = 4;

constexpr auto kCallWatchThread = "the thread that watches the calls of a group of NCCL";

std::string listed(const std::vector<int>& ranks) {
  std::string out = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i)
    out += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return out;
}

}  // namespace

struct CallWatch::WatchedCall {
  transport::Fingerprint mine;
  std::vector<transport::Fingerprint> all;
  collective::PendingRef exchange;  // null: a message, or a group of one member
  std::shared_ptr<NcclWork> work;   // null: refused here
  std::string name;
  TimePoint deadline{};
  Duration timeout{};
  std::atomic<bool> agreed{false};
};

CallWatch::CallWatch(WatchTerms terms) : terms_(std::move(terms)) {}

CallWatch::~CallWatch() { stop(); }

void CallWatch::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  // A call that is done stays so, whatever becomes of the group.
  const std::lock_guard looking(looking_);
  for (const auto& entry : entries()) {
    if (!entry->agreed || entry->work == nullptr || !entry->work->is_done()) continue;
    entry->work->release();
    remove(entry);
  }
}

std::shared_ptr<CallWatch::WatchedCall> CallWatch::enter(const transport::Fingerprint& fingerprint,
                                                         std::shared_ptr<NcclWork> work,
                                                         TimePoint deadline) {
  auto entry = std::make_shared<WatchedCall>();
  entry->mine = fingerprint;
  entry->name = std::string(collective::info(static_cast<collective::Op>(fingerprint.op)).name);
  entry->deadline = deadline;
  if (work != nullptr) {
    entry->name = work->terms().name;
    entry->timeout = work->terms().timeout;
  }
  entry->work = std::move(work);
  if (terms_.links->size() > 1) {
    entry->all.resize(static_cast<std::size_t>(terms_.links->size()));
    collective::Args args;
    args.op = collective::Op::all_gather;
    args.inputs = {std::as_bytes(std::span(&entry->mine, 1))};
    for (auto& one : entry->all) args.outputs.push_back(std::as_writable_bytes(std::span(&one, 1)));
    collective::CallRecord record(deadline);
    entry->exchange = terms_.links->start(std::move(args), record, entry);
  } else {
    entry->agreed = true;
  }
  add(entry);
  return entry;
}

void CallWatch::watch(std::shared_ptr<NcclWork> work) {
  auto entry = std::make_shared<WatchedCall>();
  entry->name = work->terms().name;
  entry->deadline = work->terms().deadline;
  entry->timeout = work->terms().timeout;
  entry->work = std::move(work);
  entry->agreed = true;
  add(entry);
}

void CallWatch::add(const std::shared_ptr<WatchedCall>& entry) {
  end_done();
  Status failed;
  bool wakes = false;  // otherwise the thread looks again within nccl_look
  {
    const std::lock_guard lock(mutex_);
    if (ended_) failed = terms_.failure->why();
    wakes = is_idle_;
    if (failed.ok()) entries_.push_back(entry);
    if (!thread_.joinable() && !stopping_)
      thread_ = group::take(start_thread(kCallWatchThread, [this] { run(); }));
  }
  if (!failed.ok() && entry->work != nullptr)
    entry->work->fail(
        std::make_exception_ptr(DistBackendError(failed.message(), failed.code(), failed.ranks())));
  if (wakes) wake_.notify_all();
}

std::string CallWatch::words(const WatchedCall& entry) const {
  const auto number = entry.mine.sequence;
  return entry.name + (number == 0 ? "" : " number " + std::to_string(number)) + " on group " +
         terms_.group_name + " (backend nccl)";
}

void CallWatch::compare(WatchedCall& entry) {
  const auto& rules = collective::fingerprint_rules();
  for (std::size_t i = 1; i < entry.all.size(); ++i) {
    if (rules.agree(entry.all[0], entry.all[i])) continue;
    const int first = terms_.first_ranks[0], other = terms_.first_ranks[i];
    // The digest has what the rules have no words for (`fingerprint`).
    auto alike = entry.all[i];
    alike.digest = entry.all[0].digest;
    fail(Status(Code::mismatch,
                "the members of group " + terms_.group_name +
                    " (backend nccl) made different calls as number " +
                    std::to_string(entry.mine.sequence) + ": rank " + std::to_string(first) +
                    " called " + rules.describe(entry.all[0]) + ", rank " + std::to_string(other) +
                    " called " + rules.describe(entry.all[i]) +
                    (rules.agree(entry.all[0], alike)
                         ? ", whose tensors differ in type, sizes or device"
                         : "") +
                    "; every member must make the same calls in the same order, on its devices in "
                    "the same turns",
                {first, other}),
         true);  // the others find the same
    return;
  }
  entry.agreed = true;
}

/// `awaited`: the ranks whose fingerprints are missing, as far as the links know.
Status CallWatch::late(const WatchedCall& entry, const std::vector<int>& awaited) const {
  trace::PeerReport known{awaited, {}};
  if (terms_.peer_traces != nullptr) {
    const auto job = terms_.peer_traces->look();
    const bool apart = std::ranges::any_of(job.ranks, [this](const trace::RankTrace& rank) {
      return rank.group(terms_.traced_apart_as) != nullptr;
    });
    const auto me = terms_.first_ranks[static_cast<std::size_t>(terms_.links->rank())];
    known = trace::report_peers(job, apart ? terms_.traced_apart_as : terms_.group_name,
                                entry.mine.sequence, terms_.first_ranks, me, awaited);
  }
  return Status(Code::timed_out,
                words(entry) + ": " +
                    (known.missing.empty() ? "some rank" : listed(known.missing)) +
                    " had not entered the call within " + describe(entry.timeout) +
                    (known.text.empty() ? "" : " (" + known.text + ")") +
                    "; see what it is doing (`muster trace`), or give the group a longer timeout",
                known.missing);
}

/// The members' fingerprints have come, or will not come.
void CallWatch::settle(WatchedCall& entry) {
  const auto status = entry.exchange->wait(TimePoint::max());
  if (status.ok()) return compare(entry);
  // The others may have waited for this member; they say for how long.
  const int me = terms_.first_ranks[static_cast<std::size_t>(terms_.links->rank())];
  const bool is_late = status.code() == Code::timed_out &&
                       std::ranges::find(status.ranks(), me) == status.ranks().end();
  fail(is_late ? late(entry, status.ranks()) : as_told(status).with_context(words(entry)), true);
}

/// The others had a timeout because of this member, which had none: what it has computed is right.
Status CallWatch::as_told(const Status& status) const {
  const int me = terms_.first_ranks[static_cast<std::size_t>(terms_.links->rank())];
  const auto& ranks = status.ranks();
  if (status.code() != Code::timed_out || std::ranges::find(ranks, me) == ranks.end())
    return status;
  return Status(Code::peer_failed, "the other ranks have given up on this one: " + status.message(),
                ranks);
}

/// All members have entered it, or it is a message.
Status CallWatch::not_done(const WatchedCall& entry) const {
  const auto within = " within " + describe(entry.timeout);
  const auto& other_end = entry.work->terms().other_end;
  if (!other_end.empty() && !entry.work->is_launched())
    return Status(
        Code::timed_out,
        words(entry) + ": " +
            (!entry.work->is_ready()
                 ? "what precedes it on the current stream of the call was not done" + within
                 : entry.work->why_not_launched() + within +
                       (entry.work->waits_for_peer() ? ", or its device had not got that far"
                                                     : "")) +
            "; see what the ranks are doing (`muster trace`), or give the group a longer timeout");
  return Status(
      Code::timed_out,
      words(entry) + ": " +
          (entry.exchange != nullptr ? "every member entered the call, and NCCL" : "NCCL") +
          " had not carried it out" + within +
          "; NCCL_DEBUG=INFO shows what NCCL does, and a longer timeout gives it time");
}

/// Returns whether the call has ended.
bool CallWatch::look_at(WatchedCall& entry) {
  const auto now = steady_clock().now();
  if (!entry.agreed && entry.exchange->done()) settle(entry);
  if (entry.agreed && (entry.work == nullptr || entry.work->is_done())) {
    if (entry.work != nullptr) entry.work->release();
    return true;
  }
  if (entry.agreed && entry.work != nullptr && terms_.handling != ErrorHandling::none)
    if (const auto error = entry.work->device_error(); !error.empty()) {
      fail(Status(Code::internal, words(entry) + ": its device reports: " + error));
      return false;
    }
  const auto limit = entry.agreed ? entry.deadline : TimePoint::max();
  if (now >= limit && terms_.handling != ErrorHandling::none) fail(not_done(entry));
  return false;
}

std::deque<std::shared_ptr<CallWatch::WatchedCall>> CallWatch::entries(std::size_t at_most) {
  const std::lock_guard lock(mutex_);
  const auto count = std::min(at_most, entries_.size());
  return {entries_.begin(), entries_.begin() + static_cast<std::ptrdiff_t>(count)};
}

void CallWatch::fail_if_links_failed() {
  const auto status = terms_.links->failure();
  if (status.ok()) return;
  for (const auto& entry : entries()) {
    if (entry->agreed) continue;
    // Calls on the links end when the links fail, at once or within nccl_end_grace.
    static_cast<void>(
        entry->exchange->wait(deadline_after(steady_clock(), tunables().nccl_end_grace)));
    if (entry->exchange->done()) settle(*entry);
    if (terms_.failure->failed()) return;
  }
  fail(as_told(status).with_context("group " + terms_.group_name + " (backend nccl)"), true);
}

void CallWatch::look() {
  const std::lock_guard looking(looking_);
  for (const auto& entry : entries()) {
    const bool ended = look_at(*entry);
    if (terms_.failure->failed()) return;
    if (ended) remove(entry);
  }
  fail_if_links_failed();
  if (terms_.failure->failed()) return;
  if (terms_.handling == ErrorHandling::none) return;
  if (const auto error = terms_.async_error(); !error.empty()) fail_as_reported(error);
}

void CallWatch::fail_as_reported(const std::string& error) {
  const auto calls = entries();
  const auto under_way = std::ranges::find_if(
      calls, [](const auto& entry) { return entry->work != nullptr && !entry->work->is_done(); });
  const auto me = terms_.first_ranks[static_cast<std::size_t>(terms_.links->rank())];
  fail(Status(
      Code::internal,
      "NCCL reported an error to rank " + std::to_string(me) + " during " +
          (under_way != calls.end() ? words(**under_way) : "calls on group " + terms_.group_name) +
          ": " + error));
}

/// On a thread that makes a call: ends the oldest calls that the device has done, so that their
/// tensors are released before the watch looks again. No call wakes the watch for that, which would
/// cost more than it does to ask the device here.
void CallWatch::end_done() {
  const std::unique_lock looking(looking_, std::try_to_lock);
  if (!looking.owns_lock()) return;
  const QueriesDuringCapture allowed;
  for (const auto& entry : entries(kEndedByCallers)) {
    if (!look_at(*entry)) {
      if (terms_.failure->failed()) return;
      continue;
    }
    remove(entry);
  }
}

void CallWatch::remove(const std::shared_ptr<WatchedCall>& entry) {
  {
    const std::lock_guard lock(mutex_);
    std::erase(entries_, entry);
  }
  changed_.notify_all();
}

void CallWatch::run() {
  const QueriesDuringCapture allowed;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      const auto something = [this] {
        return stopping_ || !entries_.empty() || (terms_.failure->failed() && !ended_);
      };
      is_idle_ = true;
      wake_.wait(lock, something);
      is_idle_ = false;
      if (stopping_) return;
    }
    if (!terms_.failure->failed()) look();
    if (terms_.failure->failed()) {
      end_all(terms_.failure->why());
      continue;
    }
    std::unique_lock lock(mutex_);
    if (!stopping_ && !entries_.empty()) wake_.wait_for(lock, tunables().nccl_look);
  }
}

ErrorHandling CallWatch::handling_of(const Status& why) const {
  if (terms_.handling != ErrorHandling::unset) return terms_.handling;
  return why.code() == Code::timed_out ? ErrorHandling::abort_and_end : ErrorHandling::abort;
}

/// Keeps the tensors of those that are not done for as long as the process lives.
void CallWatch::keep(const std::deque<std::shared_ptr<WatchedCall>>& entries) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::shared_ptr<NcclWork>>;
  std::size_t count = 0;
  const std::lock_guard lock(mutex);
  for (const auto& entry : entries) {
    if (entry->work == nullptr || entry->work->is_done()) continue;
    kept->push_back(entry->work);
    ++count;
  }
  if (count > 0)
    log(LogLevel::error, "group " + terms_.group_name + " (backend nccl): the tensors of " +
                             std::to_string(count) +
                             " calls are never freed, since NCCL may still use them");
}

/// On the watch's thread. The Works fail last: the user of a failed Work may free its tensors,
/// which NCCL uses until its communicators have been stopped. If that has no end, the calls that
/// are not done keep their tensors for as long as the process lives.
void CallWatch::end_all(const Status& why) {
  bool told;
  {
    const std::lock_guard lock(mutex_);
    told = std::exchange(told_, true);
  }
  if (!told) terms_.links->abort(why.message());
  const auto handling = handling_of(why);
  const bool ends = handling == ErrorHandling::abort_and_end || handling == ErrorHandling::end;
  const bool stopped = handling != ErrorHandling::end && handling != ErrorHandling::none &&
                       terms_.stop_communicators();
  if (ends && why.code() != Code::aborted) {
    log(LogLevel::error,
        why.message() + (terms_.handling == ErrorHandling::unset
                             ? "; the process ends, since what it has computed after that call may "
                               "be wrong (TORCH_NCCL_ASYNC_ERROR_HANDLING=2 lets it live)"
                             : "; TORCH_NCCL_ASYNC_ERROR_HANDLING says that the process ends"));
    note_failure(why.message());
    std::_Exit(1);
  }
  fail_rest(stopped);
}

void CallWatch::fail_rest(bool stopped) {
  const auto why = terms_.failure->why();
  const auto error =
      std::make_exception_ptr(DistBackendError(why.message(), why.code(), why.ranks()));
  std::deque<std::shared_ptr<WatchedCall>> entries;
  {
    const std::lock_guard lock(mutex_);
    entries.swap(entries_);
    ended_ = true;
  }
  if (!stopped) keep(entries);
  for (const auto& entry : entries) {
    if (entry->work != nullptr) entry->work->fail(error);
    // The links still read and write the entry until they have ended too; they hold it.
  }
  changed_.notify_all();
}

void CallWatch::fail(const Status& why, bool told) {
  {
    // The thread acts on a failure under the lock: it must not see this one without `told_`.
    const std::lock_guard lock(mutex_);
    if (!terms_.failure->set(why)) return;
    told_ = told;
    if (!thread_.joinable() && !stopping_)
      thread_ = group::take(start_thread(kCallWatchThread, [this] { run(); }));
  }
  wake_.notify_all();
}

void CallWatch::wait_for_agreement(const std::shared_ptr<WatchedCall>& entry) {
  const auto has_ended = [this] {
    const std::lock_guard lock(mutex_);
    return ended_;
  };
  // An earlier call may fail the group; the other members then do not enter this one.
  while (entry->exchange != nullptr && !entry->exchange->done() && !has_ended())
    static_cast<void>(entry->exchange->wait(deadline_after(steady_clock(), tunables().nccl_look)));
  if (entry->exchange != nullptr && entry->exchange->done()) {
    const std::lock_guard looking(looking_);
    if (!entry->agreed && !terms_.failure->failed()) settle(*entry);
  }
  std::unique_lock lock(mutex_);
  while (!entry->agreed && !ended_) changed_.wait_for(lock, tunables().nccl_look);
  if (!ended_) return;
  const auto why = terms_.failure->why();
  terms_.failure->show();
  throw DistBackendError(why.message(), why.code(), why.ranks());
}

void CallWatch::wait_until_ended(TimePoint deadline) {
  std::unique_lock lock(mutex_);
  const auto ended = [this] { return ended_ || stopping_ || !terms_.failure->failed(); };
  if (deadline == TimePoint::max())
    changed_.wait(lock, ended);
  else
    changed_.wait_until(lock, deadline, ended);
}

Status CallWatch::drain(TimePoint deadline, DrainScope what) {
  wake_.notify_all();
  std::unique_lock lock(mutex_);
  const auto first = [&] {
    return std::ranges::find_if(entries_, [&](const auto& entry) {
      return what == DrainScope::everything || entry->mine.sequence != 0;
    });
  };
  const auto quiet = [&] { return first() == entries_.end() || ended_; };
  if (deadline == TimePoint::max())
    changed_.wait(lock, quiet);
  else
    changed_.wait_until(lock, deadline, quiet);
  if (ended_) return terms_.failure->why();
  if (quiet()) return {};
  return Status(Code::timed_out,
                words(**first()) + " was not done " +
                    (what == DrainScope::everything ? "when the group ended"
                                                    : "before the group is split or grown"));
}

}  // namespace muster::nccl
