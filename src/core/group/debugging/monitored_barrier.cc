// SPDX-License-Identifier: BSD-3-Clause
// The barrier that names missing ranks: `debug.h`.
//
// Three kinds of messages of equal size, each with its own tag. They carry the barrier's number, so
// that leftovers of a failed barrier are not taken for the next one's:
//   token    every other member -> rank 0: it has arrived
//   hello    rank 0 -> every other member: it has arrived
//   verdict  rank 0 -> every other member: all have arrived, or the text rank 0 throws
// Members wait for the hello up to the timeout. After it, rank 0 needs at most its own timeout to
// send the verdict.

#include "core/group/debugging/monitored_barrier.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>

#include "core/base/bytes.h"
#include "core/group/call/call_builder.h"
#include "core/group/errors.h"
#include "core/group/group_core.h"
#include "core/group/resolve.h"
#include "core/trace/analysis.h"
#include "core/trace/reader.h"
#include "core/trace/run_directory.h"
#include "muster/debug.h"

namespace muster {
namespace {

/// Just below the engine's tags, where programs are unlikely to have any.
enum BarrierTag : std::int64_t { kToken = (std::int64_t{1} << 62) - 0x6D62, kHello, kVerdict };
/// The content of each message.
struct BarrierMessage {
  std::int64_t barrier = 0;
  std::int64_t code = 0;  // the verdict's
  std::int64_t ranks = 0;
  std::int64_t bytes = 0;
  std::int32_t missing[32] = {};
  char text[1888] = {};
};
static_assert(sizeof(BarrierMessage) == 2048);

struct SentMessage {
  at::Tensor tensor = at::empty({sizeof(BarrierMessage)}, at::kByte);
  BarrierMessage* message;
  WorkRef work;

  SentMessage() : message(new (tensor.mutable_data_ptr()) BarrierMessage) {}
};

SentMessage exchange(ProcessGroup& group, Op op, int peer, BarrierTag tag, SentMessage sent,
                     Duration timeout) {
  Call call(group, op, "monitored_barrier", timeout, true);
  CallBuilder(call).peer("peer", {}, peer, tag);
  op == Op::send ? CallBuilder(call).add_input(sent.tensor)
                 : CallBuilder(call).add_output(sent.tensor);
  CallBuilder(call).check();
  sent.work = core_of(group).submit(call);
  return sent;
}

void send(ProcessGroup& group, int peer, BarrierTag tag, const BarrierMessage& message) {
  SentMessage sent;
  *sent.message = message;
  // The Work need not be kept.
  exchange(group, Op::send, peer, tag, std::move(sent), Duration(-1));
}

/// Receives the message of this barrier; skips those of earlier barriers that this rank abandoned.
BarrierMessage receive(ProcessGroup& group, int peer, BarrierTag tag, std::int64_t barrier,
                       TimePoint deadline) {
  for (;;) {
    const auto got =
        exchange(group, Op::recv, peer, tag, SentMessage(), time_left(steady_clock(), deadline));
    got.work->wait();
    if (got.message->barrier >= barrier) return *got.message;
  }
}

/// For a rank that is only late: the last act in its trace. If the trace is not on this host, the
/// receive's own error.
std::string why_late(const ProcessGroup& group, int rank, const DistError& error) {
  const auto& recorder = core_of(group).parts().recorder;
  if (error.code() != Code::timed_out || recorder == nullptr) return error.what();
  const auto mine = trace::read_trace(recorder->path()),
             trace = trace::read_trace(recorder->directory() + "/" + trace::trace_name(rank));
  if (!mine.ok() || !trace.ok() || trace->boot != mine->boot || trace->host != mine->host)
    return error.what();
  const auto number = std::to_string(rank);
  return "monitored_barrier on group " + group.name() + ": nothing came from rank " + number +
         "; " + trace::last_act(*trace, group.name(), trace::wall_now_ns()) + "; see what rank " +
         number +
         " is doing (`muster trace`), or give the barrier a longer timeout if it is only slow";
}

struct LateRanks {
  std::vector<int> missing;  // by their original ranks
  Code code = Code::ok;
  std::string why;

  void add(const ProcessGroup& group, int rank, const DistError& error) {
    missing.push_back(rank);
    if (code != Code::ok) return;
    code = error.code();
    why = why_late(group, rank, error);
  }
};

LateRanks collect(ProcessGroup& group, std::int64_t barrier, TimePoint deadline, bool all) {
  const auto& ranks = core_of(group).parts().first_ranks;
  std::vector<SentMessage> tokens(ranks.size());
  for (std::size_t i = 1; i < ranks.size(); ++i)
    tokens[i] = exchange(group, Op::recv, static_cast<int>(i), kToken, SentMessage(),
                         time_left(steady_clock(), deadline));
  LateRanks found;
  for (std::size_t i = 1; i < ranks.size() && (all || found.missing.empty()); ++i) {
    try {
      tokens[i].work->wait();
      if (tokens[i].message->barrier < barrier)
        receive(group, static_cast<int>(i), kToken, barrier, deadline);
    } catch (const DistError& error) {
      found.add(group, ranks[i], error);
    }
  }
  // If the group itself has failed, its failure names the cause better than the receives it ended.
  if (const auto failure = group.failure(); !failure.ok() && !failure.ranks().empty()) {
    found.missing = failure.ranks();
    found.code = failure.code();
    found.why = failure.message();
  }
  return found;
}

void lead(ProcessGroup& group, std::int64_t barrier, Duration timeout, bool all) {
  const auto deadline = deadline_after(steady_clock(), timeout);
  const int size = group.size();
  for (int peer = 1; peer < size; ++peer) send(group, peer, kHello, {.barrier = barrier});
  const auto found = collect(group, barrier, deadline, all);
  const auto text = found.missing.empty()
                        ? std::string()
                        : group::failed_text(found.missing, timeout, found.why, all);
  BarrierMessage verdict{.barrier = barrier, .code = static_cast<std::int64_t>(found.code)};
  verdict.ranks =
      static_cast<std::int64_t>(std::min(found.missing.size(), std::size(verdict.missing)));
  std::copy_n(found.missing.begin(), verdict.ranks, verdict.missing);
  verdict.bytes = static_cast<std::int64_t>(std::min(text.size(), sizeof verdict.text));
  std::memcpy(verdict.text, text.data(), static_cast<std::size_t>(verdict.bytes));
  try {
    for (int peer = 1; peer < size; ++peer) send(group, peer, kVerdict, verdict);
  } catch (const DistError&) {
    // Otherwise the group's failure tells them why there is no verdict.
    if (found.missing.empty()) throw;
  }
  if (!found.missing.empty()) throw DistBackendError(text, found.code, found.missing);
}

void follow(ProcessGroup& group, std::int64_t barrier, Duration timeout) {
  send(group, 0, kToken, {.barrier = barrier});
  BarrierMessage verdict;
  try {
    receive(group, 0, kHello, barrier, deadline_after(steady_clock(), timeout));
    auto limit = deadline_after(steady_clock(), timeout);
    if (limit < TimePoint::max() - group::kVerdictGrace) limit += group::kVerdictGrace;
    verdict = receive(group, 0, kVerdict, barrier, limit);
  } catch (const DistError& error) {
    const auto ranks = error.code() == Code::timed_out || error.ranks().empty()
                           ? std::vector<int>{core_of(group).first_rank_of(0)}
                           : error.ranks();
    throw DistBackendError(group::failed_text(ranks, timeout, error.what()), error.code(), ranks);
  }
  if (verdict.code == static_cast<std::int64_t>(Code::ok)) return;
  const auto ranks = std::clamp<std::int64_t>(verdict.ranks, 0, std::size(verdict.missing));
  const auto bytes = std::clamp<std::int64_t>(verdict.bytes, 0, sizeof verdict.text);
  group::throw_verdict(group, std::string(verdict.text, static_cast<std::size_t>(bytes)),
                       std::vector<int>(verdict.missing, verdict.missing + ranks));
}

/// Whether a backend of the group can carry the messages.
bool has_message_backend(const ProcessGroup& group) {
  const auto& backends = core_of(group).parts().backends;
  return std::any_of(
      backends.begin(), backends.end(), [why = std::string()](const auto& entry) mutable {
        return entry.first == c10::DeviceType::CPU &&
               entry.second->supports(Op::send, at::kByte, c10::DeviceType::CPU, &why) &&
               entry.second->supports(Op::recv, at::kByte, c10::DeviceType::CPU, &why);
      });
}

}  // namespace

void monitored_barrier(const MonitoredBarrierOptions& options) {
  const auto group = group::acting(options.group, "monitored_barrier");
  if (!group) return;
  const auto barrier = static_cast<std::int64_t>(core_of(group).next_monitored_barrier());
  if (group->size() == 1) return;
  const auto timeout = options.timeout.value_or(group->timeout());
  if (!has_message_backend(*group)) {
    group::monitored_barrier_over_store(*group, barrier, timeout, options.wait_all_ranks);
  } else if (group->rank() == 0) {
    lead(*group, barrier, timeout, options.wait_all_ranks);
  } else {
    follow(*group, barrier, timeout);
  }
}

}  // namespace muster

// The monitored barrier of groups whose backends cannot carry its messages. Keys of barrier n of a
// group in the job's store:
//   <member>  it has arrived        hello    rank 0 has arrived
//   verdict   rank 0's: empty if all have arrived, else the missing ranks and the text it throws
//   left      counts members that have read the verdict; the last one deletes the remaining keys

namespace muster::group {
namespace {

std::string encode(const std::vector<int>& missing, const std::string& text) {
  if (missing.empty()) return {};
  ByteWriter out;
  out.put_text(text);
  for (const int rank : missing) out.put(rank);
  return out.take();
}

class StoreBarrier {
 public:
  StoreBarrier(ProcessGroup& group, std::int64_t barrier, Duration timeout)
      : group_(group),
        store_(core_of(group).store()),
        prefix_("monitored_barrier/" + group.name() + "/" + std::to_string(barrier) + "/"),
        timeout_(timeout),
        deadline_(deadline_after(steady_clock(), timeout)) {
    if (store_ == nullptr)
      throw DistBackendError(
          "monitored_barrier on group " + group.name() +
              ": no backend of the group can carry its messages, and the job's store is gone",
          Code::unsupported);
  }

  void lead(bool all) {
    check(store_->set(prefix_ + "hello", ""));
    std::vector<int> missing;
    for (int member = 1; member < group_.size() && (all || missing.empty()); ++member)
      if (!has_arrived(member)) missing.push_back(core_of(group_).first_rank_of(member));
    const auto why = "monitored_barrier on group " + group_.name() + ": nothing came from " +
                     (missing.size() == 1 ? "it" : "them") + " through the job's store; see what " +
                     (missing.size() == 1 ? "it is" : "they are") + " doing (`muster trace`)";
    const auto text = failed_text(missing, timeout_, why, all);
    check(store_->set(prefix_ + "verdict", encode(missing, text)));
    if (!missing.empty()) throw DistBackendError(text, Code::timed_out, missing);
    for (int member = 1; member < group_.size(); ++member) remove_key(std::to_string(member));
  }

  void follow() {
    check(store_->set(prefix_ + std::to_string(group_.rank()), ""));
    wait_for_leader("hello", deadline_);
    auto limit = deadline_after(steady_clock(), timeout_);
    if (limit < TimePoint::max() - kVerdictGrace) limit += kVerdictGrace;
    const auto verdict = wait_for_leader("verdict", limit);
    if (verdict.empty()) {
      const auto left = store_->add(prefix_ + "left", 1);
      if (!left.ok() || *left < group_.size() - 1) return;
      for (const char* key : {"hello", "verdict", "left"}) remove_key(key);
      return;
    }
    ByteReader in(verdict);
    const std::string text(in.get_text());
    std::vector<int> missing;
    while (in.ok() && in.left() > 0) missing.push_back(in.get<int>());
    throw_verdict(group_, text, std::move(missing));
  }

 private:
  static void check(const Status& status) {
    if (!status.ok()) raise_from_store(status.with_context("monitored_barrier"));
  }
  void remove_key(const std::string& key) {
    static_cast<void>(store_->delete_key(prefix_ + key));
  }  // a file store cannot delete

  bool has_arrived(int member) {
    const std::string key = prefix_ + std::to_string(member);
    const auto there = store_->check({&key, 1});
    check(there.status());
    if (*there) return true;
    const auto status = store_->wait({&key, 1}, time_left(steady_clock(), deadline_));
    if (status.code() != Code::timed_out) check(status);
    return status.ok();
  }

  std::string wait_for_leader(const char* key, TimePoint limit) {
    const auto value = store_->get(prefix_ + key, time_left(steady_clock(), limit));
    if (value.ok()) return *value;
    if (value.status().code() != Code::timed_out) check(value.status());
    const std::vector<int> leader{core_of(group_).first_rank_of(0)};
    throw DistBackendError(failed_text(leader, timeout_, value.status().message()), Code::timed_out,
                           leader);
  }

  ProcessGroup& group_;
  const std::shared_ptr<store::Store> store_;
  const std::string prefix_;
  const Duration timeout_;
  const TimePoint deadline_;
};

}  // namespace

std::string failed_text(const std::vector<int>& ranks, Duration timeout, const std::string& why,
                        bool all) {
  std::string names;
  for (const int rank : ranks) names += (names.empty() ? "" : ", ") + std::to_string(rank);
  return (ranks.size() == 1 && !all ? "Rank " : "Ranks ") + names +
         " failed to pass monitoredBarrier in " +
         std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(timeout).count()) +
         " ms\n Original exception:\n" + why;
}

void throw_verdict(const ProcessGroup& group, const std::string& text, std::vector<int> missing) {
  throw DistBackendError("Rank " + std::to_string(core_of(group).first_rank_of(group.rank())) +
                             " reached monitoredBarrier, which failed; rank " +
                             std::to_string(core_of(group).first_rank_of(0)) + " says: " + text,
                         Code::timed_out, std::move(missing));
}

void monitored_barrier_over_store(ProcessGroup& group, std::int64_t barrier, Duration timeout,
                                  bool all) {
  StoreBarrier over(group, barrier, timeout);
  group.rank() == 0 ? over.lead(all) : over.follow();
}

}  // namespace muster::group
