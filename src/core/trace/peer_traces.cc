// SPDX-License-Identifier: BSD-3-Clause
#include "core/trace/peer_traces.h"

#include <algorithm>
#include <chrono>
#include <iterator>

#include "core/base/threads/thread_start.h"
#include "core/trace/analysis.h"
#include "core/trace/reader.h"
#include "core/trace/run_directory.h"

namespace muster::trace {
namespace {

constexpr auto kInterval = std::chrono::seconds(1);
constexpr auto kStoreTimeout = std::chrono::seconds(1);
constexpr std::size_t kTold = 8;
/// Causes travel to the other ranks in at most 4 KiB.
constexpr std::size_t kLongestText = 2400;  // limit: text of an error

std::string key_of(int rank) { return "trace/" + std::to_string(rank); }

/// The latest group of this name that a rank has created: after a shrink, a new group may have the
/// name of one that has ended.
const GroupTrace* latest_group(const RankTrace& trace, const std::string& name) {
  for (auto at = trace.groups.rbegin(); at != trace.groups.rend(); ++at) {
    if (at->name == name || at->name.starts_with(name + " #")) return &*at;
  }
  return nullptr;
}

/// The latest of this name with these members; null where the rank has not made it.
const GroupTrace* group_meant(const RankTrace& trace, const std::string& name,
                              std::span<const int> members) {
  const auto* group = latest_group(trace, name);
  if (group == nullptr || group->members.empty()) return group;
  std::vector<int> shown;
  std::copy_if(members.begin(), members.end(), std::back_inserter(shown),
               [](int rank) { return rank < kMembersShown; });
  std::sort(shown.begin(), shown.end());
  return group->members == shown ? group : nullptr;
}

bool contains(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

}  // namespace

std::string encode_latest(const RankTrace& trace) { return encode_trace(cut_to_latest(trace)); }

std::optional<RankTrace> decode_latest(std::string_view bytes) {
  auto sent = decode_trace(bytes);
  if (!sent) return std::nullopt;
  sent->trace.life = Life::running;  // as far as this rank knows
  return std::move(sent->trace);
}

PeerTraces::PeerTraces(std::shared_ptr<Recorder> recorder, std::shared_ptr<store::Store> store,
                       std::vector<int> elsewhere)
    : recorder_(std::move(recorder)), elsewhere_(std::move(elsewhere)) {
  if (elsewhere_.empty() || store == nullptr) return;
  auto clone = store->clone();
  if (!clone) return;
  store_ = std::move(*clone);
  store_->set_timeout(kStoreTimeout);
  auto thread = start_thread("the thread that publishes this rank's trace", [this] { publish(); });
  if (thread.ok()) thread_ = std::move(*thread);  // otherwise nothing is published
}

PeerTraces::~PeerTraces() { stop(); }

void PeerTraces::stop() {
  if (mark_.forked()) {
    if (thread_.joinable()) thread_.detach();  // the parent's
    return;
  }
  {
    const std::lock_guard guard(lock_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  const std::lock_guard guard(lock_);
  store_ = nullptr;
}

void PeerTraces::publish() {
  std::uint64_t told = 0;
  const int rank = [&] {
    const auto mine = read_trace(recorder_->path());
    return mine ? mine->rank : -1;
  }();
  std::unique_lock guard(lock_);
  while (!changed_.wait_for(guard, kInterval, [this] { return stop_; })) {
    const auto changes = recorder_->changes();
    if (changes == told) continue;
    guard.unlock();
    const auto mine = read_trace(recorder_->path());
    if (mine && store_->set(key_of(rank), encode_latest(*mine)).ok()) told = changes;
    guard.lock();
  }
}

JobTrace PeerTraces::look(std::span<const int> only) const {
  const auto wanted = [&](int rank) {
    return only.empty() || std::find(only.begin(), only.end(), rank) != only.end();
  };
  JobTrace job;
  job.directory = recorder_->directory();
  if (only.empty()) {
    if (auto here = read_job(job.directory)) job.ranks = std::move(here->ranks);
  } else {
    for (const int rank : only) {
      if (auto trace = read_trace(job.directory + "/" + trace_name(rank)))
        job.ranks.push_back(std::move(*trace));
    }
  }
  // If hosts share the directory, writes of a rank on another host may not be visible here.
  std::erase_if(job.ranks,
                [&](const RankTrace& trace) { return contains(elsewhere_, trace.rank); });
  std::shared_ptr<store::Store> store;
  {
    const std::lock_guard guard(lock_);
    store = store_;
  }
  const TimePoint limit = steady_clock().now() + kStoreTimeout;
  for (std::size_t i = 0; store != nullptr && i < elsewhere_.size() && steady_clock().now() < limit;
       ++i) {
    if (!wanted(elsewhere_[i])) continue;
    const std::string key = key_of(elsewhere_[i]);
    const auto there = store->check(std::span(&key, 1));
    if (!there.ok()) break;
    if (!*there) continue;
    const auto bytes = store->get(key, kStoreTimeout);
    if (!bytes.ok()) break;
    if (auto trace = decode_latest(*bytes)) job.ranks.push_back(std::move(*trace));
  }
  std::sort(job.ranks.begin(), job.ranks.end(),
            [](const auto& a, const auto& b) { return a.rank < b.rank; });
  return job;
}

std::string PeerTraces::tell(const std::string& group, std::span<const int> ranks) const {
  if (ranks.empty()) return {};
  const auto job = look(ranks.first(std::min(ranks.size(), kTold)));
  std::string text;
  for (const auto& trace : job.ranks) {
    const auto* latest = latest_group(trace, group);
    text += "; " + last_act(trace, latest != nullptr ? latest->name : group, wall_now_ns());
  }
  return text.size() > kLongestText ? std::string() : text;
}

PeerReport report_peers(const JobTrace& job, const std::string& group, std::uint64_t sequence,
                        std::span<const int> members, int me, const std::vector<int>& awaited) {
  PeerReport report{awaited, {}};
  const auto* mine = job.rank(me);
  if (mine == nullptr || group_meant(*mine, group, members) == nullptr) return report;
  const auto now = wall_now_ns();
  std::vector<int> outside, inside, unknown;
  for (const int member : members) {
    if (member == me) continue;
    const auto* trace = job.rank(member);
    const auto* there = trace != nullptr ? group_meant(*trace, group, members) : nullptr;
    auto& place = trace == nullptr                                 ? unknown
                  : there != nullptr && there->started >= sequence ? inside
                                                                   : outside;
    place.push_back(member);
  }
  std::vector<int> late;
  std::copy_if(outside.begin(), outside.end(), std::back_inserter(late),
               [&](int rank) { return contains(awaited, rank); });
  if (late.empty()) late = outside;
  if (!late.empty()) report.missing = late;

  std::vector<std::string> sentences;
  if (!outside.empty())
    sentences.push_back(list_ranks(outside) + (outside.size() == 1 ? " has" : " have") +
                        " not entered this call");
  if (!inside.empty())
    sentences.push_back(list_ranks(inside) + (inside.size() == 1 ? " has" : " have") +
                        " entered it");
  if (!unknown.empty()) sentences.push_back("nothing is known of " + list_ranks(unknown));
  std::vector<int> order = report.missing;
  for (const auto* rest : {&outside, &inside}) {
    for (const int rank : *rest) {
      if (!contains(order, rank)) order.push_back(rank);
    }
  }
  for (std::size_t i = 0; i < order.size() && i < kTold; ++i) {
    const auto* trace = job.rank(order[i]);
    if (trace == nullptr) continue;
    const auto* there = group_meant(*trace, group, members);
    sentences.push_back(
        last_act(*trace, there != nullptr ? there->name : group + " of these members", now));
  }
  for (const auto& sentence : sentences) {
    if (report.text.size() + sentence.size() > kLongestText) break;
    report.text += (report.text.empty() ? "" : "; ") + sentence;
  }
  return report;
}

}  // namespace muster::trace
