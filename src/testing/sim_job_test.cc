// SPDX-License-Identifier: BSD-3-Clause
// Whole jobs on the simulated network: the same result or a named error, never a hang, and the same
// run for the same seed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/collective/communicator.h"
#include "core/collective/select/tuning.h"
#include "testing/budget.h"
#include "testing/rank_processes.h"
#include "testing/seed.h"
#include "testing/sim_network.h"

namespace muster::testing {
namespace {

using collective::Args;
using collective::Communicator;
using collective::Op;
using collective::Reduce;

constexpr auto kOpTimeout = std::chrono::seconds(20);

template <class T>
ConstBytes bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}
template <class T>
MutableBytes bytes_of(std::vector<T>& values) {
  return std::as_writable_bytes(std::span(values));
}

/// The job's calls, which every rank knows beforehand: drawn from the seed alone.
struct Script {
  struct Call {
    Op op;
    std::size_t count;
    int root;
    Duration compute;
  };
  std::vector<Call> calls;

  Script(std::uint64_t seed, int ranks, int length) {
    std::mt19937_64 random(seed);
    const Op ops[] = {Op::all_reduce,     Op::broadcast, Op::all_gather, Op::all_to_all,
                      Op::reduce_scatter, Op::barrier,   Op::reduce,     Op::gather,
                      Op::scatter,        Op::send};
    const std::size_t counts[] = {0, 1, 6, 7, 1000, 4097, 70000};
    for (int i = 0; i < length; ++i) {
      calls.push_back({ops[random() % std::size(ops)], counts[random() % std::size(counts)],
                       static_cast<int>(random() % static_cast<unsigned>(ranks)),
                       std::chrono::microseconds(random() % 500)});
    }
  }
};

std::int64_t element(int rank, int call, std::size_t index) {
  return rank * 1000003 + call * 7919 + static_cast<std::int64_t>(index);
}

std::vector<std::int64_t> values_of(int rank, int call, std::size_t count) {
  std::vector<std::int64_t> out(count);
  for (std::size_t i = 0; i < count; ++i) out[i] = element(rank, call, i);
  return out;
}

std::int64_t sum_over_ranks(int ranks, int call, std::size_t index) {
  std::int64_t sum = 0;
  for (int r = 0; r < ranks; ++r) sum += element(r, call, index);
  return sum;
}

Status expect(bool right, const Script::Call& call) {
  return right ? Status()
               : Status(Code::internal,
                        "WRONG RESULT of " + std::string(collective::info(call.op).name));
}

Status ring_exchange(Communicator& group, int number, const Script::Call& call,
                     TimePoint deadline) {
  const int n = group.size();
  const int next = (group.rank() + 1) % n;
  const int before = (group.rank() + n - 1) % n;
  const auto mine = values_of(group.rank(), number, call.count);
  std::vector<std::int64_t> theirs(call.count);
  auto receive = group.receive(before, static_cast<std::uint64_t>(number), bytes_of(theirs),
                               DType::int64, deadline);
  auto send =
      group.send(next, static_cast<std::uint64_t>(number), bytes_of(mine), DType::int64, deadline);
  const Status received =
      receive->wait(TimePoint::max());  // until the call's own deadline: the buffers must be quiet
  const Status sent = send->wait(TimePoint::max());
  if (!received) return received;
  if (!sent) return sent;
  return expect(theirs == values_of(before, number, call.count), call);
}

/// Makes one call of the script and checks its result.
Status play(Communicator& group, int number, const Script::Call& call, TimePoint deadline) {
  const int n = group.size();
  const int me = group.rank();
  if (call.op == Op::send) return ring_exchange(group, number, call, deadline);
  const bool lists_in = collective::info(call.op).lists_input;
  const bool lists_out = collective::info(call.op).lists_output;
  const bool rooted = collective::info(call.op).rooted;
  auto input =
      values_of(me, number, lists_in ? call.count * static_cast<std::size_t>(n) : call.count);
  std::vector<std::int64_t> output(
      lists_out ? call.count * static_cast<std::size_t>(n) : call.count, -1);
  Args args;
  args.op = call.op;
  args.dtype = DType::int64;
  args.reduce = Reduce::sum;
  args.root = rooted ? call.root : -1;
  const auto slice = [&](auto& values, int r) {
    return bytes_of(values).subspan(static_cast<std::size_t>(r) * call.count * 8, call.count * 8);
  };
  const bool root = !rooted || call.root == me;
  if (call.op == Op::broadcast) {
    output = input;
    args.outputs = {bytes_of(output)};
  } else if (call.op != Op::barrier) {
    if (!lists_in) args.inputs = {bytes_of(std::as_const(input))};
    for (int r = 0; lists_in && r < n && (call.op != Op::scatter || root); ++r)
      args.inputs.push_back(slice(std::as_const(input), r));
    if (!lists_out && (call.op != Op::reduce || root)) args.outputs = {bytes_of(output)};
    for (int r = 0; lists_out && r < n && (call.op != Op::gather || root); ++r)
      args.outputs.push_back(slice(output, r));
  }
  const Status status = group.run(args, deadline);
  if (!status) return status;
  for (std::size_t i = 0; i < call.count; ++i) {
    const std::size_t at = lists_in ? static_cast<std::size_t>(me) * call.count + i : i;
    bool right = true;
    switch (call.op) {
      case Op::all_reduce: right = output[i] == sum_over_ranks(n, number, i); break;
      case Op::reduce: right = !root || output[i] == sum_over_ranks(n, number, i); break;
      case Op::broadcast: right = output[i] == element(call.root, number, i); break;
      case Op::scatter: right = output[i] == element(call.root, number, at); break;
      case Op::reduce_scatter: right = output[i] == sum_over_ranks(n, number, at); break;
      case Op::all_gather:
      case Op::gather:
        for (int r = 0; r < n && root; ++r)
          right = right &&
                  output[static_cast<std::size_t>(r) * call.count + i] == element(r, number, i);
        break;
      case Op::all_to_all:
        for (int r = 0; r < n; ++r)
          right = right &&
                  output[static_cast<std::size_t>(r) * call.count + i] == element(r, number, at);
        break;
      default: break;
    }
    if (!right) return expect(false, call);
  }
  return {};
}

/// In every other job pieces go along a tree, which so few ranks would not use.
std::shared_ptr<const collective::Tuning> tuning_of(std::uint64_t seed) {
  auto tuning = std::make_shared<collective::Tuning>();
  if (seed % 2 == 0)
    tuning->forced = {{Op::gather, collective::Algorithm::tree},
                      {Op::scatter, collective::Algorithm::tree}};
  return tuning;
}

SimReport play_job(const SimOptions& options, int length) {
  if (std::getenv("MUSTER_SIM_VERBOSE") != nullptr)
    std::fprintf(stderr, "%s\n", describe_options(options).c_str());
  const int n = static_cast<int>(options.hosts.size());
  const Script script(options.seed, n, length);
  return run_sim_job(options, [&](SimRank& self) -> Status {
    auto fabric = self.join();
    if (!fabric) return fabric.status();
    std::vector<int> members(static_cast<std::size_t>(n));
    std::iota(members.begin(), members.end(), 0);
    collective::CommunicatorOptions group_options;
    group_options.timeout = kOpTimeout;
    group_options.tuning = tuning_of(options.seed);
    auto group = Communicator::create(*fabric, members, group_options);
    if (!group) return group.status();
    for (int i = 0; i < length; ++i) {
      const auto& call = script.calls[static_cast<std::size_t>(i)];
      self.compute(call.compute);
      const Status status = play(**group, i, call, deadline_after(self.clock(), kOpTimeout));
      if (!status) return status.with_context("call " + std::to_string(i));
    }
    return (*group)->close(deadline_after(self.clock(), kOpTimeout));
  });
}

SimOptions draw_options(std::uint64_t seed, bool faults) {
  std::mt19937_64 random(seed * 0x9e3779b97f4a7c15ull + 1);
  SimOptions options;
  options.seed = seed;
  const int n = 2 + static_cast<int>(random() % 5);
  const int hosts = 1 + static_cast<int>(random() % 3);
  for (int r = 0; r < n; ++r) options.hosts.push_back(r * hosts / n);
  options.regions = random() % 4 != 0;
  options.encrypted = random() % 4 == 0;
  if (!faults) return options;
  SimFault fault;
  fault.at = TimePoint(std::chrono::seconds(1)) + std::chrono::microseconds(random() % 40000);
  fault.rank = static_cast<int>(random() % static_cast<unsigned>(n));
  fault.other = static_cast<int>(random() % static_cast<unsigned>(n));
  fault.kind = static_cast<SimFault::Kind>(random() % 3);
  if (fault.kind == SimFault::Kind::partition &&
      options.hosts[static_cast<std::size_t>(fault.rank)] ==
          options.hosts[static_cast<std::size_t>(fault.other)]) {
    fault.kind = SimFault::Kind::kill;
  }
  options.faults.push_back(fault);
  return options;
}

/// A job runs in one thread: the thread sanitizer finds little there and makes it thirty times
/// slower.
int seeds() { return test_rounds(300, 10000) / (kSanitized ? 3 : 1); }

TEST(SimJob, EverySeedWithoutFaultsGivesTheRightResults) {
  const std::uint64_t first = test_seed();
  for (int i = 0; i < seeds() / 2; ++i) {
    const std::uint64_t seed = first + static_cast<std::uint64_t>(i);
    const SimOptions options = draw_options(seed, false);
    const SimReport report = play_job(options, 12);
    for (std::size_t r = 0; r < report.ranks.size(); ++r) {
      ASSERT_EQ(report.ranks[r].end, SimOutcome::End::finished)
          << describe_options(options) << ": rank " << r << " never ended";
      ASSERT_TRUE(report.ranks[r].status.ok()) << describe_options(options) << ": rank " << r
                                               << ": " << report.ranks[r].status.message();
    }
  }
}

/// The failure of a job under one fault, in words; empty if there is none.
std::string fault_trouble(const SimOptions& options, const SimReport& report) {
  for (std::size_t r = 0; r < report.ranks.size(); ++r) {
    const SimOutcome& outcome = report.ranks[r];
    const std::string who = describe_options(options) + ": rank " + std::to_string(r);
    if (outcome.end == SimOutcome::End::hung) return who + " hangs\n";
    if (outcome.end != SimOutcome::End::finished || outcome.status.ok()) continue;
    if (outcome.status.message().find("WRONG RESULT") != std::string::npos)
      return who + ": " + outcome.status.message() + "\n";
    const bool cut_off =
        outcome.status.message().find("the simulated store does not answer") != std::string::npos;
    if (cut_off && options.faults.front().kind == SimFault::Kind::partition)
      continue;  // the store is no rank
    if (outcome.status.ranks().empty())
      return who + " names nobody: " + outcome.status.message() + "\n";
    const SimFault& fault = options.faults.front();
    if (fault.kind != SimFault::Kind::partition &&
        outcome.status.ranks() != std::vector<int>{fault.rank}) {
      return who + " blames another: " + outcome.status.message() + "\n";
    }
  }
  return {};
}

/// A batch of jobs with faults in a child process, since what they abandon stays: '+' for each job
/// that the fault hit, then the troubles.
std::string play_faulty_batch(std::uint64_t first, int count) {
  std::string hits;
  std::string troubles;
  for (int i = 0; i < count; ++i) {
    const SimOptions options = draw_options(first + static_cast<std::uint64_t>(i), true);
    const SimReport report = play_job(options, 40);
    if (std::any_of(report.ranks.begin(), report.ranks.end(),
                    [](const SimOutcome& outcome) { return !outcome.status.ok(); }))
      hits += '+';
    troubles += fault_trouble(options, report);
  }
  return hits + "." + troubles;
}

TEST(SimJob, EverySeedWithAFaultEndsWithTheResultOrANamedError) {
  constexpr int kBatch = 25;
  std::size_t hits = 0;
  for (int done = 0; done < seeds() / 2; done += kBatch) {
    const std::uint64_t first = test_seed() + 1000000 + static_cast<std::uint64_t>(done);
    RankProcesses child(1, [first](int) { return play_faulty_batch(first, kBatch); });
    const RankEnd end = child.join(std::chrono::minutes(5)).front();
    const std::size_t dot = end.report.find('.');
    ASSERT_NE(dot, std::string::npos)
        << "the batch from seed " << first << " ended with wait status " << end.wait_status;
    ASSERT_EQ(end.report.substr(dot + 1), "");
    hits += dot;
  }
  EXPECT_GT(hits, static_cast<std::size_t>(seeds() / 8)) << "most faults came too late to matter";
}

TEST(SimJob, TheSameSeedGivesTheSameRun) {
  const SimOptions options = draw_options(test_seed(), false);
  const SimReport first = play_job(options, 20);
  const SimReport second = play_job(options, 20);
  EXPECT_EQ(first.digest, second.digest);
  EXPECT_EQ(first.switches, second.switches);
  EXPECT_EQ(first.elapsed, second.elapsed);
}

// Eight small calls that are started together take little longer than one: nobody waits for answers
// in between.
TEST(SimJob, SmallCallsTravelTogether) {
  const auto time_of = [](int calls, std::size_t count) {
    SimOptions options;
    options.hosts = {0, 1, 2};
    options.min_delay = options.max_delay = std::chrono::milliseconds(2);
    Duration took{};
    const SimReport report = run_sim_job(options, [&](SimRank& rank) -> Status {
      auto fabric = rank.join();
      if (!fabric.ok()) return fabric.status();
      auto group = Communicator::create(*fabric, {0, 1, 2}, {});
      if (!group.ok()) return group.status();
      const TimePoint deadline = deadline_after(rank.clock(), kOpTimeout);
      if (Status met = (*group)->run(Args{}, deadline); !met) return met;
      const TimePoint start = rank.clock().now();
      std::vector<std::vector<std::int64_t>> in(static_cast<std::size_t>(calls),
                                                std::vector<std::int64_t>(count, 1)),
          out = in;
      std::vector<collective::PendingRef> pending;
      for (std::size_t i = 0; i < in.size(); ++i) {
        Args args;
        args.op = Op::all_reduce;
        args.dtype = DType::int64;
        args.inputs = {bytes_of(std::as_const(in[i]))};
        args.outputs = {bytes_of(out[i])};
        pending.push_back((*group)->start(args, deadline));
      }
      for (const auto& each : pending) {
        if (Status done = each->wait(TimePoint::max()); !done) return done;
      }
      for (const auto& each : out) {
        if (each != std::vector<std::int64_t>(count, 3))
          return Status(Code::internal, "WRONG RESULT");
      }
      if (rank.rank() == 0) took = rank.clock().now() - start;
      return (*group)->close(deadline);
    });
    for (const auto& outcome : report.ranks)
      EXPECT_TRUE(outcome.status.ok()) << outcome.status.message();
    return took;
  };
  const Duration one = time_of(1, 8);
  EXPECT_GE(one, std::chrono::milliseconds(2));
  EXPECT_LT(time_of(8, 8), 2 * one);
  EXPECT_GT(time_of(8, 8192), 4 * one) << "large ones go one after another";
}

}  // namespace
}  // namespace muster::testing
