// The monitored barrier of groups whose backends cannot carry its messages. Keys of barrier n of a
// group in the job's store:
//   <member>  it has arrived        hello    rank 0 has arrived
//   verdict   rank 0's: empty if all have arrived, else the missing ranks and the text it throws
//   left      counts members that have read the verdict; the last one deletes the remaining keys
#include <algorithm>
#include <chrono>
#include <optional>

#include "core/base/bytes.h"
#include "core/group/debugging/monitored_barrier.h"
#include "core/group/errors.h"
#include "core/group/group_core.h"

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
