// SPDX-License-Identifier: BSD-3-Clause
#include "core/trace/reader.h"

#include <algorithm>

#include "core/base/bytes.h"

namespace muster::trace {
namespace {

constexpr std::size_t kGroupsKept = 32;  // limit: memory

void put(ByteWriter& out, const Record& record) {
  out.put(record.ticket)
      .put(record.sequence)
      .put(record.start_ns)
      .put(record.end_ns)
      .put(record.bytes)
      .put(record.tag);
  out.put(record.peer)
      .put(record.thread)
      .put(static_cast<std::uint32_t>(record.group))
      .put(record.state)
      .put(record.dimensions);
  out.put(static_cast<std::uint8_t>(record.async)).put_text(record.name).put_text(record.dtype);
  out.put(static_cast<std::uint32_t>(record.shape.size()));
  for (const auto extent : record.shape) out.put(extent);
}

Record get_record(ByteReader& in) {
  Record record;
  record.ticket = in.get<std::uint64_t>();
  record.sequence = in.get<std::uint64_t>();
  record.start_ns = in.get<std::int64_t>();
  record.end_ns = in.get<std::int64_t>();
  record.bytes = in.get<std::uint64_t>();
  record.tag = in.get<std::int64_t>();
  record.peer = in.get<int>();
  record.thread = in.get<std::uint32_t>();
  record.group = in.get<std::uint32_t>();
  record.state = in.get<State>();
  record.dimensions = in.get<int>();
  record.async = in.get<std::uint8_t>() != 0;
  record.name = in.get_text();
  record.dtype = in.get_text();
  const auto extents = std::min<std::uint32_t>(in.get<std::uint32_t>(), 4);
  for (std::uint32_t i = 0; i < extents; ++i) record.shape.push_back(in.get<std::int64_t>());
  return record;
}

/// Members as a bit per job rank.
void put(ByteWriter& out, const GroupTrace& group) {
  out.put_text(group.name).put(group.size).put(group.rank).put(group.started).put(group.completed);
  std::string bits(
      group.members.empty() ? 0 : static_cast<std::size_t>(group.members.back()) / 8 + 1, '\0');
  for (const int member : group.members)
    bits[static_cast<std::size_t>(member) / 8] |= static_cast<char>(1 << member % 8);
  out.put_text(bits);
}

GroupTrace get_group(ByteReader& in) {
  GroupTrace group;
  group.name = in.get_text();
  group.size = in.get<int>();
  group.rank = in.get<int>();
  group.started = in.get<std::uint64_t>();
  group.completed = in.get<std::uint64_t>();
  const auto bits = in.get_text();
  for (int member = 0; member < kMembersShown && static_cast<std::size_t>(member) / 8 < bits.size();
       ++member) {
    if ((static_cast<unsigned char>(bits[static_cast<std::size_t>(member) / 8]) >> member % 8 &
         1) != 0)
      group.members.push_back(member);
  }
  return group;
}

bool is_sound(const RankTrace& trace) {
  if (trace.rank < 0 || trace.rank >= trace.world_size || trace.world_size > kMostRanks ||
      trace.life > Life::left)
    return false;
  return std::all_of(trace.records.begin(), trace.records.end(), [&](const Record& record) {
    return record.group < trace.groups.size() && record.state >= State::queued &&
           record.state <= State::failed;
  });
}

}  // namespace

RankTrace cut_to_latest(const RankTrace& trace) {
  RankTrace cut = trace;
  const std::size_t first =
      trace.groups.size() > kGroupsKept ? trace.groups.size() - kGroupsKept : 0;
  cut.groups.erase(cut.groups.begin(), cut.groups.begin() + static_cast<std::ptrdiff_t>(first));
  cut.records.clear();
  std::vector<bool> seen(trace.groups.size());
  for (auto at = trace.records.rbegin(); at != trace.records.rend(); ++at) {
    if (at->group < first || seen[at->group]) continue;
    seen[at->group] = true;
    cut.records.push_back(*at);
    cut.records.back().group -= first;
  }
  std::reverse(cut.records.begin(), cut.records.end());
  return cut;
}

RankTrace cut_to(RankTrace trace, std::size_t records) {
  if (trace.records.size() > records)
    trace.records.erase(trace.records.begin(),
                        trace.records.end() - static_cast<std::ptrdiff_t>(records));
  return trace;
}

std::string encode_trace(const RankTrace& trace) {
  ByteWriter out;
  out.put(kVersion)
      .put(wall_now_ns())
      .put(trace.rank)
      .put(trace.world_size)
      .put(trace.pid)
      .put(trace.since_ns)
      .put(trace.life);
  out.put(trace.calls)
      .put(trace.dropped)
      .put(trace.torn)
      .put(trace.failures)
      .put(trace.failure_at_ns);
  out.put_text(trace.path)
      .put_text(trace.host)
      .put_text(trace.boot)
      .put_text(trace.job)
      .put_text(trace.run_id)
      .put_text(trace.failure);
  out.put(static_cast<std::uint32_t>(trace.groups.size()));
  for (const auto& group : trace.groups) put(out, group);
  out.put(static_cast<std::uint32_t>(trace.records.size()));
  for (const auto& record : trace.records) put(out, record);
  return out.take();
}

std::optional<SentTrace> decode_trace(std::string_view bytes) {
  ByteReader in(bytes);
  SentTrace sent;
  auto& trace = sent.trace;
  const auto version = in.get<std::uint32_t>();
  if (version != kVersion) return std::nullopt;
  sent.as_of_ns = in.get<std::int64_t>();
  trace.rank = in.get<int>();
  trace.world_size = in.get<int>();
  trace.pid = in.get<std::int64_t>();
  trace.since_ns = in.get<std::int64_t>();
  trace.life = in.get<Life>();
  trace.calls = in.get<std::uint64_t>();
  trace.dropped = in.get<std::uint64_t>();
  trace.torn = in.get<std::uint64_t>();
  trace.failures = in.get<std::uint64_t>();
  trace.failure_at_ns = in.get<std::int64_t>();
  trace.path = in.get_text();
  trace.host = in.get_text();
  trace.boot = in.get_text();
  trace.job = in.get_text();
  trace.run_id = in.get_text();
  trace.failure = in.get_text();
  const auto groups = std::min<std::uint32_t>(in.get<std::uint32_t>(), kGroups);
  for (std::uint32_t i = 0; i < groups && in.ok(); ++i) trace.groups.push_back(get_group(in));
  const auto records = in.get<std::uint32_t>();
  for (std::uint32_t i = 0; i < records && in.ok(); ++i) trace.records.push_back(get_record(in));
  if (!in.at_end() || !is_sound(trace)) return std::nullopt;
  return sent;
}

void shift(RankTrace& trace, std::int64_t by_ns) {
  trace.since_ns += by_ns;
  if (trace.failures > 0) trace.failure_at_ns += by_ns;
  for (auto& record : trace.records) {
    record.start_ns += by_ns;
    if (record.end_ns != 0) record.end_ns += by_ns;
  }
}

}  // namespace muster::trace
