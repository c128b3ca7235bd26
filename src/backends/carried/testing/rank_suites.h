// SPDX-License-Identifier: BSD-3-Clause
/// The tests' ranks, below tensors: what they do with the calls of a library.
///
///   PROGRAM suite SECONDS | messages | calls | failures | mismatches | killed
///
/// Prints "rank R: WHAT" for what is wrong and exits with 1, or prints "right R".
#pragma once

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "backends/carried/testing/mismatches.h"
#include "backends/carried/testing/rank.h"
#include "core/base/log/log.h"
#include "core/collective/testing/suite_cells.h"
#include "core/transport/job_fabric.h"
#include "testing/budget.h"
#include "testing/limits.h"

namespace muster::carried::test {

using collective::suite::Answers;
using collective::suite::Cell;
using collective::suite::Player;
using std::chrono::milliseconds;
using std::chrono::seconds;

inline TestJob join() {
  store::RendezvousOptions options;
  options.timeout = muster::testing::kMustHappen;
  auto found = tested.join(options);
  if (!found) {
    std::printf("cannot start: %s\n", found.status().message().c_str());
    std::exit(1);
  }
  my_rank = found->rank;
  transport::JobFabricOptions fabric_options;
  fabric_options.deadline = soon();
  fabric_options.rules = &collective::fingerprint_rules();
  auto fabric = transport::join_fabric(*found, fabric_options);
  if (!fabric) {
    report(fabric.status().message());
    std::exit(1);
  }
  return {std::move(*found), std::move(*fabric)};
}

// ---- the cells of core/collective/suite_test.cc

inline void play_suite(const TestJob& job, double budget) {
  const Group group = job.world();
  const int ranks = group->size();
  const std::uint64_t seed = testing::test_seed();
  std::mt19937_64 random(seed * 1000 + 700 + static_cast<std::uint64_t>(ranks));
  auto cells = collective::suite::draw_cells(random, ranks);
  const auto end = steady_clock().now() +
                   std::chrono::duration_cast<Duration>(std::chrono::duration<double>(budget));
  std::size_t played = 0;
  for (Cell& cell : cells) {
    cell.any_order = true;
    Values go{played < 2 || steady_clock().now() < end ? 1 : 0};
    Args word = args_of(Op::broadcast, {}, go, 0);
    word.inputs.clear();
    expect_ok(group->run(word, soon()), "broadcast");
    if (go[0] == 0 || problems > 0) break;
    Answers answers(cell);
    const std::string wrong = Player(answers, my_rank).play(*group);
    if (!wrong.empty()) {
      report(cell.text(testing::Wire::shm) + ": " + wrong);
      if (group->failure().ok()) group->abort("a cell has failed");
      break;
    }
    ++played;
  }
  if (problems == 0) close(group);
  if (my_rank == 0)
    std::printf("played %zu of %zu cells with seed %llu\n", played, cells.size(),
                static_cast<unsigned long long>(seed));
}

// ---- messages

inline void exchange_messages(const TestJob& job) {
  const Group group = job.world();
  const int next = (my_rank + 1) % group->size();
  const int previous = (my_rank + group->size() - 1) % group->size();
  const auto bytes = [](Values& values) { return std::as_writable_bytes(std::span(values)); };
  // Sizes beside the limit of small messages, tags that MPI has and has not.
  std::int64_t number = 0;
  for (const std::uint64_t tag : {std::uint64_t{0}, std::uint64_t{77}, std::uint64_t{1} << 40}) {
    for (const std::size_t count : {0, 1, 511, 512, 513, 100'000}) {
      Values sent(count, 1000 * my_rank + ++number), got(count, -1);
      const auto send = group->send(next, tag, bytes(sent), DType::int64, soon());
      const auto receive = group->receive(count % 2 == 0 ? previous : transport::kAnyMember, tag,
                                          bytes(got), DType::int64, soon());
      expect_ok(receive->wait(TimePoint::max()), "receive");
      expect_ok(send->wait(TimePoint::max()), "send");
      expect(got == Values(count, 1000 * previous + number), "wrong data");
      expect(receive->source() == previous, "wrong source");
      expect(receive->bytes() == count * sizeof(std::int64_t), "wrong number of bytes");
    }
  }
  // Many at once, small and large, with one tag, keep their order.
  std::vector<Values> out, in;
  std::vector<collective::PendingRef> pending;
  for (std::size_t i = 0; i < 20; ++i) {
    out.emplace_back(i % 3 == 0 ? 5000 : 3, static_cast<std::int64_t>(i));
    in.emplace_back(out.back().size(), -1);
  }
  for (std::size_t i = 0; i < in.size(); ++i)
    pending.push_back(group->receive(previous, 5, bytes(in[i]), DType::int64, soon()));
  for (auto& values : out)
    pending.push_back(group->send(next, 5, bytes(values), DType::int64, soon()));
  for (const auto& each : pending) expect_ok(each->wait(TimePoint::max()), "one of many");
  expect(in == out, "messages of one tag changed places");
  // A message of another size or dtype is named, small or large, and the next one is received.
  for (const std::size_t count : {4, 4000}) {
    Values sent(count, 9), wrong(count + 1), right(count);
    std::vector<double> doubles(count);
    const auto one = group->send(next, 6, bytes(sent), DType::int64, soon());
    const auto two = group->send(next, 6, bytes(sent), DType::int64, soon());
    const auto three = group->send(next, 6, bytes(sent), DType::int64, soon());
    expect_says(group->receive(previous, 6, bytes(wrong), DType::int64, soon())->wait(soon()),
                {tested.wrong_size}, "a wrong size");
    expect_says(group
                    ->receive(previous, 6, std::as_writable_bytes(std::span(doubles)),
                              DType::float64, soon())
                    ->wait(soon()),
                {"int64", "float64"}, "a wrong dtype");
    expect_ok(group->receive(previous, 6, bytes(right), DType::int64, soon())->wait(soon()),
              "the right one");
    expect(right == sent, "wrong data after wrong receives");
    for (const auto& each : {one, two, three}) expect_ok(each->wait(soon()), "its send");
  }
  // A receive that nobody serves is cancelled at its deadline; the group goes on.
  Values none(1), sum(1);
  expect_says(
      group
          ->receive(previous, 8, bytes(none), DType::int64, steady_clock().now() + milliseconds(50))
          ->wait(soon()),
      {"did not complete within", "whether the sender has sent"}, "a receive of nothing");
  expect_ok(group->run(sum_of({1}, sum), soon()), "all_reduce afterwards");
  close(group);
}

// ---- calls

inline void make_calls(const TestJob& job) {
  const Group group = job.world();
  const int ranks = group->size();
  // Many started ones, waited for in another order, and one dropped.
  std::vector<Values> out(50, Values(1));
  std::vector<Values> in;
  std::vector<collective::PendingRef> pending;
  for (std::size_t i = 0; i < out.size(); ++i) in.push_back({static_cast<std::int64_t>(i)});
  for (std::size_t i = 0; i < out.size(); ++i)
    pending.push_back(group->start(sum_of(in[i], out[i]), soon()));
  pending[7] = nullptr;
  for (std::size_t i = out.size(); i-- > 0;)
    if (pending[i] != nullptr) expect_ok(pending[i]->wait(TimePoint::max()), "a started call");
  for (std::size_t i = 0; i < out.size(); ++i)
    expect(out[i][0] == static_cast<std::int64_t>(i) * ranks, "a wrong sum");
  // Sums that are reduced in several rounds, in place and not, with other calls in between.
  std::vector<Values> large, sums(3, Values(1'500'001));
  for (std::size_t i = 0; i < sums.size(); ++i) {
    large.emplace_back(sums[i].size());
    std::iota(large[i].begin(), large[i].end(), my_rank + static_cast<std::int64_t>(i));
  }
  pending.clear();
  sums[2] = large[2];
  for (std::size_t i = 0; i < sums.size(); ++i) {
    pending.push_back(group->start(sum_of(i == 2 ? sums[2] : large[i], sums[i]), soon()));
    pending.push_back(group->start(sum_of(in[i], out[i]), soon()));
  }
  for (const auto& each : pending) expect_ok(each->wait(TimePoint::max()), "a large call");
  for (std::size_t i = 0; i < sums.size(); ++i) {
    bool right = true;
    for (std::size_t k = 0; k < sums[i].size(); ++k)
      right =
          right && sums[i][k] == ranks * static_cast<std::int64_t>(i + k) + ranks * (ranks - 1) / 2;
    expect(right, "a wrong sum in several rounds");
  }
  // One that nobody waits for ends all the same.
  const auto unwatched = group->start(Args{}, soon());
  std::atomic<bool> told{false};
  unwatched->when_settled([&](const Status& status) { told.store(status.ok()); });
  while (!told.load()) std::this_thread::yield();
  expect(group->sequence() == 57, "sequence " + std::to_string(group->sequence()));
  // Sixteen-bit sums round once.
  std::vector<std::uint16_t> halves(3, my_rank == 0 ? 0x3c00 : 0x1000), total(3);
  Args args;
  args.op = Op::all_reduce;
  args.dtype = DType::float16;
  args.inputs = {std::as_bytes(std::span(halves))};
  args.outputs = {std::as_writable_bytes(std::span(total))};
  expect_ok(group->run(args, soon()), "float16");
  const int places = (ranks - 1) / 2 + ((ranks - 1) % 2 == 1 && (ranks - 1) / 2 % 2 == 1 ? 1 : 0);
  expect(total[1] == 0x3c00 + places, "float16 rounds more than once");
  // Groups of some ranks, in another order, used from two threads at once.
  std::vector<int> members;
  for (int rank = ranks - 1; rank >= 0; --rank)
    if (rank != 1 || ranks < 3) members.push_back(rank);
  if (std::find(members.begin(), members.end(), my_rank) != members.end()) {
    const Group one = job.make(members, "one"), two = job.make(members, "two");
    const auto use = [&](const Group& used) {
      for (std::int64_t i = 0; i < 20; ++i) {
        Values value{my_rank == members[0] ? i : -1};
        Args word = args_of(Op::broadcast, {}, value, 0);
        word.inputs.clear();
        expect_ok(used->run(word, soon()), "broadcast in " + used->name());
        expect(value[0] == i, "a wrong value in " + used->name());
      }
    };
    std::thread other([&] { use(two); });
    use(one);
    other.join();
    close(one);
    close(two);
  }
  // A call that every member refuses counts, and the group goes on.
  for (int i = 0; i < 3; ++i) group->refuse(Op::broadcast);
  Values sum(1);
  expect_ok(group->run(sum_of({2}, sum), soon()), "after refused calls");
  expect(sum[0] == 2 * ranks, "a wrong sum after refused calls");
  close(group);
  expect_says(group->run(Args{}, soon()), {"has been closed"}, "a call after the close");
}

// ---- failures: each on a group of its own

inline void fail_calls(const TestJob& job) {
  const auto now = [] { return steady_clock().now(); };
  const std::string cannot_cancel = tested.name + " cannot cancel";
  Values in{1}, out(1);
  // Two members wait in different calls.
  {
    const Group group = job.world("different");
    Args barrier;
    Args word = args_of(Op::broadcast, {}, out, 0);
    word.inputs.clear();
    // A broadcast's root may return: it then learns of it in its next call.
    Status status = my_rank == 1 ? group->run(barrier, soon()) : group->run(word, soon());
    if (status.ok()) status = group->run(sum_of(in, out), soon());
    expect_says(status, {"broadcast", "barrier", "rank 1"}, "different calls");
  }
  // At DETAIL all members compare each call first.
  {
    const Group group = job.world("detail");
    set_debug_level(DebugLevel::DETAIL);
    expect_ok(group->run(sum_of(in, out), soon()), "at DETAIL");
    expect(out[0] == group->size(), "a wrong sum at DETAIL");
    const auto started = group->start(sum_of(in, out), soon());
    expect_ok(started->wait(TimePoint::max()), "started at DETAIL");
    const Group sync = job.world("sync");  // the others' calls have ended as well
    expect_ok(sync->run(Args{}, soon()), "barrier");
    close(sync);
    Values two{1, 2}, both(2);
    const auto before = now();
    expect_says(
        my_rank == 1 ? group->run(sum_of(two, both), soon()) : group->run(sum_of(in, out), soon()),
        {"rank 1", "1 element", "2 elements"}, "different sizes at DETAIL");
    expect(now() - before < seconds(20), "that took too long");
    set_debug_level(DebugLevel::OFF);
  }
  // Messages of another size than expected are named without that, too.
  {
    const Group group = job.world("sizes");
    Values two{1, 2}, both(2);
    expect_says(
        my_rank == 1 ? group->run(sum_of(two, both), soon()) : group->run(sum_of(in, out), soon()),
        {"rank 1", "1 element", "2 elements"}, "different sizes");
    const Group other = job.world("small and large");
    Values many(5000, 1), all(5000);
    expect_says(
        my_rank == 1 ? other->run(sum_of(many, all), soon()) : other->run(sum_of(in, out), soon()),
        {"rank 1", "1 element", "5000 elements"}, "small and large");
  }
  // One member refuses a call that the others make.
  {
    const Group group = job.world("refused");
    if (my_rank == 1) {
      group->refuse(Op::all_reduce);
      expect_says(group->run(sum_of(in, out), soon()), {"rank 1"}, "after its refusal");
    } else {
      expect_says(group->run(sum_of(in, out), soon()), {"rank 1"}, "a call that rank 1 refused");
    }
  }
  // A member closes while another is in a call.
  {
    const Group group = job.world("skipped");
    if (my_rank == 1) {
      expect_says(group->close(soon()), {"rank 1 skipped a call"}, "closing early");
    } else {
      expect_says(group->run(sum_of(in, out), soon()), {"rank 1 skipped a call"},
                  "a call that rank 1 skipped");
    }
  }
  // Abort ends a call elsewhere.
  {
    const Group group = job.world("aborted");
    if (my_rank == 1) {
      group->abort("enough");
    } else {
      expect_says(group->run(sum_of(in, out), soon()), {"rank 1 aborted", "enough"},
                  "a call of an aborted group");
    }
  }
  // A deadline fails the group for good, and says why; a new group goes on.
  {
    const Group group = job.world("late");
    if (my_rank == 1) {
      while (group->failure().ok()) std::this_thread::yield();
    } else {
      const auto started = group->start(sum_of(in, out), now() + milliseconds(200));
      const Status status = started->wait(TimePoint::max());
      expect_says(status, {"all_reduce", cannot_cancel.c_str()}, "a late call");
      expect(status.code() == Code::timed_out, "the code of a late call");
    }
    expect(group->keeps_memory() == (my_rank != 1 && !tested.compares_calls),
           "what the library may still write to");
    expect_says(group->run(sum_of(in, out), soon()), {cannot_cancel.c_str()}, "a poisoned group");
    const Group other = job.world("afterwards");
    expect_ok(other->run(sum_of(in, out), soon()), "a new group");
    close(other);
  }
}

// ---- a rank that is killed: the others learn of it, name it and live

inline void kill_a_rank(const TestJob& job) {
  const Group group = job.world();
  // Sums by messages, and by MPI's own reduction of more ranks: both are given up.
  Values in(300'000, 1), out(in.size());
  // Its end may come before that of another rank's first call.
  Status status = group->run(sum_of(in, out), soon());
  if (my_rank == 1) static_cast<void>(::raise(SIGKILL));
  while (status.ok()) status = group->run(sum_of(in, out), soon());
  expect_says(status, {"rank 1"}, "a call after rank 1 was killed");
  expect(status.code() != Code::timed_out, "the death was noticed at the deadline alone");
}

inline int run(TestedLibrary library, const std::vector<std::string>& words) {
  if (words.empty()) return 2;
  tested = std::move(library);
  const TestJob job = join();
  if (words[0] == "suite") play_suite(job, std::strtod(words.at(1).c_str(), nullptr));
  if (words[0] == "messages") exchange_messages(job);
  if (words[0] == "calls") make_calls(job);
  if (words[0] == "failures") fail_calls(job);
  if (words[0] == "mismatches") fail_large_sums(job);
  if (words[0] == "killed") kill_a_rank(job);
  if (my_rank == 0)
    std::printf("%s on %d ranks of %s\n", words[0].c_str(), job.found.world_size,
                tested.text().c_str());
  if (problems == 0) std::printf("right %d\n", my_rank);
  std::fflush(stdout);
  // mpirun may end all ranks as soon as one has left without MPI_Finalize.
  if ((words[0] == "failures" || words[0] == "mismatches") && problems == 0)
    static_cast<void>(job.world("end")->run(Args{}, soon()));
  return problems == 0 ? 0 : 1;
}

}  // namespace muster::carried::test
