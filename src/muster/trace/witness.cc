#include "muster/trace/witness.h"

#include <algorithm>
#include <chrono>

#include "muster/base/bytes.h"
#include "muster/trace/analysis.h"
#include "muster/trace/run_directory.h"

namespace muster::trace {
namespace {

constexpr auto kInterval = std::chrono::seconds(1);
constexpr auto kStoreTimeout = std::chrono::seconds(1);
constexpr std::size_t kGroupsPublished = 32;
constexpr std::size_t kTold = 8;
/// Causes travel to the other ranks in at most 4 KiB.
constexpr std::size_t kLongestText = 2400;

std::string key_of(int rank) { return "trace/" + std::to_string(rank); }

void put(ByteWriter& out, const Record& record) {
  out.put(record.sequence).put(record.start_ns).put(record.end_ns).put(record.bytes).put(record.tag).put(record.peer);
  out.put(static_cast<std::uint32_t>(record.group)).put(record.state).put(record.dimensions);
  out.put_text(record.name).put_text(record.dtype).put(static_cast<std::uint32_t>(record.shape.size()));
  for (const auto extent : record.shape) out.put(extent);
}

Record get_record(ByteReader& in) {
  Record record;
  record.sequence = in.get<std::uint64_t>();
  record.start_ns = in.get<std::int64_t>();
  record.end_ns = in.get<std::int64_t>();
  record.bytes = in.get<std::uint64_t>();
  record.tag = in.get<std::int64_t>();
  record.peer = in.get<int>();
  record.group = in.get<std::uint32_t>();
  record.state = in.get<State>();
  record.dimensions = in.get<int>();
  record.name = in.get_text();
  record.dtype = in.get_text();
  const auto extents = std::min<std::uint32_t>(in.get<std::uint32_t>(), 4);
  for (std::uint32_t i = 0; i < extents; ++i) record.shape.push_back(in.get<std::int64_t>());
  return record;
}

bool contains(const std::vector<int>& ranks, int rank) { return std::find(ranks.begin(), ranks.end(), rank) != ranks.end(); }

}  // namespace

std::string encode_latest(const RankTrace& trace) {
  const std::size_t first = trace.groups.size() > kGroupsPublished ? trace.groups.size() - kGroupsPublished : 0;
  ByteWriter out;
  out.put(kVersion).put(trace.rank).put(trace.world_size).put(trace.pid).put(trace.calls);
  out.put_text(trace.host).put_text(trace.boot);
  out.put(static_cast<std::uint32_t>(trace.groups.size() - first));
  std::vector<const Record*> latest;
  for (std::size_t i = first; i < trace.groups.size(); ++i) {
    const auto& group = trace.groups[i];
    out.put_text(group.name).put(group.size).put(group.rank).put(group.started).put(group.completed);
    const auto at = std::find_if(trace.records.rbegin(), trace.records.rend(), [&](const Record& record) { return record.group == i; });
    if (at != trace.records.rend()) latest.push_back(&*at);
  }
  std::sort(latest.begin(), latest.end(), [](const auto* a, const auto* b) { return a->ticket < b->ticket; });
  out.put(static_cast<std::uint32_t>(latest.size()));
  for (const auto* record : latest) {
    Record moved = *record;
    moved.group -= first;
    put(out, moved);
  }
  return out.take();
}

std::optional<RankTrace> decode_latest(std::string_view bytes) {
  ByteReader in(bytes);
  RankTrace trace;
  const auto version = in.get<std::uint32_t>();
  trace.rank = in.get<int>();
  trace.world_size = in.get<int>();
  trace.pid = in.get<std::int64_t>();
  trace.calls = in.get<std::uint64_t>();
  trace.host = in.get_text();
  trace.boot = in.get_text();
  trace.life = Life::running;  // as far as this rank knows
  const auto groups = std::min<std::uint32_t>(in.get<std::uint32_t>(), kGroupsPublished);
  for (std::uint32_t i = 0; i < groups; ++i) {
    GroupTrace group;
    group.name = in.get_text();
    group.size = in.get<std::int32_t>();
    group.rank = in.get<std::int32_t>();
    group.started = in.get<std::uint64_t>();
    group.completed = in.get<std::uint64_t>();
    trace.groups.push_back(std::move(group));
  }
  const auto records = std::min<std::uint32_t>(in.get<std::uint32_t>(), kGroupsPublished);
  for (std::uint32_t i = 0; i < records && in.ok(); ++i) {
    trace.records.push_back(get_record(in));
    if (trace.records.back().group >= trace.groups.size()) return std::nullopt;
  }
  if (version != kVersion || !in.at_end()) return std::nullopt;
  return trace;
}

Witness::Witness(std::shared_ptr<Recorder> recorder, std::shared_ptr<store::Store> store, std::vector<int> elsewhere)
    : recorder_(std::move(recorder)), elsewhere_(std::move(elsewhere)) {
  if (elsewhere_.empty() || store == nullptr) return;
  auto clone = store->clone();
  if (!clone) return;
  store_ = std::move(*clone);
  store_->set_timeout(kStoreTimeout);
  thread_ = std::thread([this] { publish(); });
}

Witness::~Witness() { stop(); }

void Witness::stop() {
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

void Witness::publish() {
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

JobTrace Witness::look(std::span<const int> only) const {
  const auto wanted = [&](int rank) { return only.empty() || std::find(only.begin(), only.end(), rank) != only.end(); };
  JobTrace job;
  job.directory = recorder_->directory();
  if (only.empty()) {
    if (auto here = read_job(job.directory)) job.ranks = std::move(here->ranks);
  } else {
    for (const int rank : only) {
      if (auto trace = read_trace(job.directory + "/" + trace_name(rank))) job.ranks.push_back(std::move(*trace));
    }
  }
  // Where the directory is shared between hosts, what another host's rank writes there need not be seen here.
  std::erase_if(job.ranks, [&](const RankTrace& trace) { return contains(elsewhere_, trace.rank); });
  std::shared_ptr<store::Store> store;
  {
    const std::lock_guard guard(lock_);
    store = store_;
  }
  const TimePoint limit = steady_clock().now() + kStoreTimeout;
  for (std::size_t i = 0; store != nullptr && i < elsewhere_.size() && steady_clock().now() < limit; ++i) {
    if (!wanted(elsewhere_[i])) continue;
    const std::string key = key_of(elsewhere_[i]);
    const auto there = store->check(std::span(&key, 1));
    if (!there.ok()) break;
    if (!*there) continue;
    const auto bytes = store->get(key, kStoreTimeout);
    if (!bytes.ok()) break;
    if (auto trace = decode_latest(*bytes)) job.ranks.push_back(std::move(*trace));
  }
  std::sort(job.ranks.begin(), job.ranks.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; });
  return job;
}

std::string Witness::tell(const std::string& group, std::span<const int> ranks) const {
  if (ranks.empty()) return {};
  const auto job = look(ranks.first(std::min(ranks.size(), kTold)));
  std::string text;
  for (const auto& trace : job.ranks) text += "; " + last_act(trace, group, wall_now_ns());
  return text.size() > kLongestText ? std::string() : text;
}

Testimony testify(const JobTrace& job, const std::string& group, std::uint64_t sequence, std::span<const int> members, int me,
                  const std::vector<int>& awaited) {
  Testimony testimony{awaited, {}};
  const auto* mine = job.rank(me);
  // Of two groups of one name nobody can say here which is meant.
  if (mine == nullptr || mine->group(group + " #2") != nullptr) return testimony;
  const auto now = wall_now_ns();
  std::vector<int> outside, inside, unknown;
  for (const int member : members) {
    if (member == me) continue;
    const auto* trace = job.rank(member);
    const auto* there = trace != nullptr ? trace->group(group) : nullptr;
    auto& place = trace == nullptr ? unknown : there != nullptr && there->started >= sequence ? inside : outside;
    place.push_back(member);
  }
  std::vector<int> late;
  std::copy_if(outside.begin(), outside.end(), std::back_inserter(late), [&](int rank) { return contains(awaited, rank); });
  if (late.empty()) late = outside;
  if (!late.empty()) testimony.missing = late;

  std::vector<std::string> sentences;
  if (!outside.empty()) sentences.push_back(list_ranks(outside) + (outside.size() == 1 ? " has" : " have") + " not entered this call");
  if (!inside.empty()) sentences.push_back(list_ranks(inside) + (inside.size() == 1 ? " has" : " have") + " entered it");
  if (!unknown.empty()) sentences.push_back("nothing is known of " + list_ranks(unknown));
  std::vector<int> order = testimony.missing;
  for (const auto* rest : {&outside, &inside}) {
    for (const int rank : *rest) {
      if (!contains(order, rank)) order.push_back(rank);
    }
  }
  for (std::size_t i = 0; i < order.size() && i < kTold; ++i) {
    if (const auto* trace = job.rank(order[i])) sentences.push_back(last_act(*trace, group, now));
  }
  for (const auto& sentence : sentences) {
    if (testimony.text.size() + sentence.size() > kLongestText) break;
    testimony.text += (testimony.text.empty() ? "" : "; ") + sentence;
  }
  return testimony;
}

}  // namespace muster::trace
