// SPDX-License-Identifier: BSD-3-Clause
#include <sys/prctl.h>

#include <algorithm>
#include <deque>
#include <limits>
#include <optional>
#include <thread>
#include <vector>

#include "core/collective/call.h"
#include "core/collective/testing/region_job.h"
#include "core/shm/cache_lines.h"
#include "testing/budget.h"
#include "testing/seed.h"

namespace muster::collective::region {
namespace {

// A failure in the middle of any operation, at any point, ends every member's task at once with
// that failure.
TEST(RegionFailure, EndsEveryTaskPromptly) {
  Random random(testing::test_seed());
  for (int op = 0; op <= static_cast<int>(Op::barrier); ++op) {
    for (int round = testing::test_rounds(12, 60); round > 0; --round) {
      const int members = 2 + static_cast<int>(draw(random, 3));
      RegionJob job(members);
      const std::size_t counts[] = {
          3, 3000, testing::kSanitized ? 150'000u : 400'000u};  // the last uses several windows
      TestCall call(shape_of(static_cast<Op>(op), counts[draw(random, 3)], 0.5), members, 1,
                    random);
      auto tasks = start(job, call);
      const int late = static_cast<int>(draw(random, static_cast<std::size_t>(members)));
      for (std::size_t steps = draw(random, 20); steps > 0; --steps) {
        const int member = static_cast<int>(draw(random, static_cast<std::size_t>(members)));
        if (member != late) tasks[RegionJob::at(member)].step();
      }
      job.channels[RegionJob::at(late)]->fail(Status(Code::peer_failed, "rank 99 died", {99}));
      ASSERT_TRUE(finish(tasks, 20)) << call.describe();
      for (int member = 0; member < members; ++member) {
        Status status = tasks[RegionJob::at(member)].result();
        if (status) continue;  // it had all its data before
        EXPECT_EQ(status.ranks(), std::vector<int>{99}) << call.describe();
      }
      EXPECT_FALSE(job.channels[0]->failure().ok());
      // Every later call fails too.
      TestCall next(shape_of(Op::barrier, 0, 0), members, 2, random);
      auto more = start(job, next);
      ASSERT_TRUE(finish(more, 1));
      EXPECT_EQ(more[0].result().ranks(), std::vector<int>{99});
    }
  }
}

// A member that has returned had all members' data. The others have everything that they need too,
// and return success whatever fails then.
TEST(RegionFailure, IfOneMemberSucceedsAllDo) {
  Random random(testing::test_seed());
  for (const Op op :
       {Op::barrier, Op::all_reduce, Op::all_gather, Op::reduce_scatter, Op::all_to_all}) {
    for (const std::size_t count : {3, 3000, 150'000}) {
      for (int round = 4; round > 0; --round) {
        const int members = 2 + static_cast<int>(draw(random, 2));
        RegionJob job(members);
        const double arena = static_cast<double>(draw(random, 2));
        std::uint64_t sequence = 1;
        if (draw(random, 2) == 0) {  // afterwards all know who can read whose memory
          TestCall before(shape_of(op, count, arena), members, sequence++, random);
          auto first = start(job, before);
          ASSERT_TRUE(finish(first)) << before.describe();
        }
        TestCall call(shape_of(op, count, arena), members, sequence, random);
        auto tasks = start(job, call);
        int quick = 0;
        for (int steps = 0; !tasks[RegionJob::at(quick)].step(); ++steps) {
          ASSERT_LT(steps, 100'000) << call.describe();
          quick = static_cast<int>(draw(random, static_cast<std::size_t>(members)));
        }
        job.channels[RegionJob::at(quick)]->fail(
            Status(Code::aborted, "it went its way", {job_rank(quick)}));
        ASSERT_TRUE(finish(tasks)) << call.describe();
        for (int member = 0; member < members; ++member) {
          const Status status = tasks[RegionJob::at(member)].result();
          ASSERT_TRUE(status.ok()) << call.describe() << ": " << status.message();
          EXPECT_TRUE(call.check(member));
        }
      }
    }
  }
}

// The sender of arena memory fails while a member reads it. The reader cannot know what it read, so
// it does not report success.
TEST(RegionFailure, ArenaReadFromAnAbortedMemberIsNoSuccess) {
  Random random(1);
  RegionJob job(2);
  TestCall call(shape_of(Op::broadcast, 100'000, 1), 2, 1, random);
  auto tasks = start(job, call);
  EXPECT_FALSE(tasks[0].step());
  tasks[0] = {};  // its owner dropped it: the memory may hold anything now
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(tasks[1].step());
  job.channels[1]->fail(Status(Code::timed_out, "too late", {10}));
  EXPECT_TRUE(tasks[1].step());
  EXPECT_EQ(tasks[1].result().code(), Code::timed_out);
}

// The same if the data is read in the sender's process, and if that memory is gone.
TEST(RegionFailure, MemoryReadFromAnAbortedMemberIsNoSuccess) {
  for (const bool unmapped : {false, true}) {
    SCOPED_TRACE(unmapped);
    Random random(1);
    RegionJob job(3, {}, true);
    CallShape shape = shape_of(Op::scatter, direct_read_bytes(3), 0);
    shape.dtype = DType::uint8;
    TestCall first(shape, 3, 1, random);
    auto tasks = start(job, first);
    ASSERT_TRUE(finish(tasks));  // the sender now knows that its readers can read its memory

    TestCall call(shape, 3, 2, random);
    Args given = call.args(0);
    void* const mapping = ::mmap(nullptr, direct_read_bytes(3), PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(mapping, MAP_FAILED);
    given.inputs[1] = {static_cast<const std::byte*>(mapping), direct_read_bytes(3)};
    tasks[0] = job.run(0, given, call.fingerprint(0));
    tasks[1] = job.run(1, call.args(1), call.fingerprint(1));
    EXPECT_FALSE(tasks[0].step());
    if (unmapped) {
      ::munmap(mapping, direct_read_bytes(3));
      while (!tasks[1].step()) std::this_thread::yield();  // it waits for a better cause
      const Status status = tasks[1].result();
      EXPECT_EQ(status.code(), Code::peer_failed);
      EXPECT_EQ(status.ranks(), std::vector<int>{job_rank(0)});
      EXPECT_NE(status.message().find(std::to_string(direct_read_bytes(3)) + " bytes"),
                std::string::npos)
          << status.message();
      ASSERT_TRUE(tasks[0].step());
      continue;
    }
    tasks[0] = {};  // its owner dropped it: the memory may hold anything now
    for (int i = 0; i < 10; ++i) EXPECT_FALSE(tasks[1].step());
    job.channels[1]->fail(Status(Code::timed_out, "too late", {10}));
    EXPECT_TRUE(tasks[1].step());
    EXPECT_EQ(tasks[1].result().code(), Code::timed_out);
    ::munmap(mapping, direct_read_bytes(3));
  }
}

/// all_to_all of three: the first member sends slices that are read in place, the others small ones
/// that fit into lines or slots.
class OneSendsMuch {
 public:
  explicit OneSendsMuch(std::uint64_t sequence) {
    for (int member = 0; member < kMembers; ++member) {
      Args& mine = args_.emplace_back();
      mine.op = Op::all_to_all;
      for (int other = 0; other < kMembers; ++other) {
        const auto give = static_cast<std::byte>(10 * member + other);
        mine.inputs.emplace_back(memory_.emplace_back(bytes(member), give));
        mine.outputs.emplace_back(memory_.emplace_back(bytes(other)));
      }
    }
    for (const Args& mine : args_) calls_.push_back(fingerprint_of(mine, sequence));
  }
  std::vector<Task<Status>> start(RegionJob& job) const {
    std::vector<Task<Status>> tasks;
    for (int member = 0; member < kMembers; ++member)
      tasks.push_back(job.run(member, args_[RegionJob::at(member)], calls_[RegionJob::at(member)]));
    return tasks;
  }
  bool right(int member) const {
    for (int giver = 0; giver < kMembers; ++giver) {
      const auto give = static_cast<std::byte>(10 * giver + member);
      const MutableBytes got = args_[RegionJob::at(member)].outputs[RegionJob::at(giver)];
      if (!std::all_of(got.begin(), got.end(), [give](std::byte byte) { return byte == give; }))
        return false;
    }
    return true;
  }

 private:
  static constexpr int kMembers = 3;
  static std::size_t bytes(int giver) { return giver == 0 ? direct_read_bytes(kMembers) : 1000; }
  std::deque<std::vector<std::byte>> memory_;
  std::vector<Args> args_;
  std::vector<transport::Fingerprint> calls_;
};

// The second member has read all its data and is read by no one: it returns. So the member whose
// memory is read must leave it to the third member too.
TEST(RegionFailure, AMemberReadInPlaceWaitsForReadersThatHaveBegun) {
  RegionJob job(3, {}, true);
  const OneSendsMuch before(1), call(2);
  auto first = before.start(job);
  ASSERT_TRUE(finish(first));  // the first now knows that the others can read its memory
  auto tasks = call.start(job);
  EXPECT_FALSE(tasks[2].step());
  EXPECT_FALSE(tasks[0].step());
  const auto completes = [&](int reader) {
    return tasks[RegionJob::at(reader)].step() || tasks[RegionJob::at(reader)].step();
  };
  ASSERT_TRUE(completes(1));  // in two steps if it was large
  ASSERT_TRUE(tasks[1].result().ok());
  job.channels[1]->fail(Status(Code::aborted, "it went its way", {job_rank(1)}));
  EXPECT_FALSE(tasks[0].step());
  EXPECT_TRUE(completes(2));
  EXPECT_TRUE(tasks[2].result().ok()) << "it has all it needs";
  EXPECT_TRUE(tasks[0].step());
  EXPECT_TRUE(tasks[0].result().ok());
  for (int member = 0; member < 3; ++member) EXPECT_TRUE(call.right(member));
}

// A root without any senders fails at once: its readers do not depend on whether others have
// returned.
TEST(RegionFailure, ARootReadInPlaceFailsAtOnce) {
  Random random(1);
  RegionJob job(3, {}, true);
  CallShape shape = shape_of(Op::scatter, direct_read_bytes(3), 0);
  shape.dtype = DType::uint8;
  TestCall before(shape, 3, 1, random), call(shape, 3, 2, random);
  auto first = start(job, before);
  ASSERT_TRUE(finish(first));
  auto tasks = start(job, call);
  EXPECT_FALSE(tasks[1].step());  // has begun
  EXPECT_FALSE(tasks[0].step());
  job.channels[2]->fail(Status(Code::peer_failed, "rank 99 died", {99}));
  EXPECT_TRUE(tasks[0].step());
  EXPECT_FALSE(tasks[0].result().ok());
  ASSERT_TRUE(finish(tasks));
}

// Peers do not try to read memory of a process that is not dumpable (prctl).
TEST(RegionFailure, MemoryOfANonDumpableProcessGoesThroughWindows) {
  Random random(1);
  RegionJob job(3, {}, true);
  CallShape shape = shape_of(Op::scatter, direct_read_bytes(3), 0);
  shape.dtype = DType::uint8;
  for (std::uint64_t sequence = 1; sequence <= 4; ++sequence) {
    const bool closed = sequence == 3;
    ASSERT_EQ(::prctl(PR_SET_DUMPABLE, closed ? 0 : 1), 0);
    TestCall call(shape, 3, sequence, random);
    auto tasks = start(job, call);
    // A root with all slices in windows is done; a root that is read in place waits.
    EXPECT_EQ(tasks[0].step(), (closed || sequence == 1) && job.windows_hold(shape.count))
        << sequence;
    EXPECT_EQ(job.stays(0, sequence, 1), !closed && sequence > 1) << sequence;
    ASSERT_TRUE(finish(tasks));
    for (int member = 0; member < 3; ++member) EXPECT_TRUE(call.check(member));
  }
}

// A member that failed may reuse its output: no peer that begins later stores into it.
TEST(RegionFailure, OutputsOfAnAbortedMemberAreNotWritten) {
  Random random(1);
  RegionJob job(2);
  for (auto& channel : job.channels) channel->spread = nullptr;
  TestCall call(shape_of(Op::all_reduce, 400'000, 1), 2, 1, random);
  auto tasks = start(job, call);
  EXPECT_FALSE(tasks[0].step());
  job.channels[0]->fail(Status(Code::timed_out, "too late"));
  ASSERT_TRUE(tasks[0].step());
  EXPECT_EQ(tasks[0].result().code(), Code::timed_out);
  const MutableBytes output = call.args(0).outputs[0];
  std::fill(output.begin(), output.end(), std::byte{0x77});
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(tasks[1].step());
  EXPECT_TRUE(std::all_of(output.begin(), output.end(),
                          [](std::byte byte) { return byte == std::byte{0x77}; }));
  job.channels[1]->fail(Status(Code::timed_out, "too late"));
  EXPECT_TRUE(tasks[1].step());
}

/// A member fails in a call that one peer has begun and another one has not.
void expect_to_wait_for_peers_that_have_begun(Op op, std::size_t count) {
  for (const bool dies : {false, true}) {
    Random random(1);
    RegionJob job(3, {}, {}, false);
    for (auto& channel : job.channels) channel->spread = nullptr;
    TestCall call(shape_of(op, count, 1), 3, 1, random);
    auto tasks = start(job, call);
    EXPECT_FALSE(tasks[0].step());
    EXPECT_FALSE(tasks[1].step());  // has begun; the third has not
    job.channels[0]->fail(Status(Code::timed_out, "too late"));
    EXPECT_FALSE(tasks[0].step());
    if (dies) {
      job.fabric.dead = job_rank(1);
    } else {
      job.channels[1]->fail(Status(Code::timed_out, "too late"));
      EXPECT_TRUE(tasks[1].step());
    }
    EXPECT_TRUE(tasks[0].step());
  }
}

// The reverse: a peer may be storing already, so the failed member's task ends when the peer has
// noticed, or is dead.
TEST(RegionFailure, AFailedMemberWaitsForPeersThatMayBeStoringIntoItsOutput) {
  expect_to_wait_for_peers_that_have_begun(Op::all_reduce, 400'000);
}

// The same for inputs in the arena whose reader reclaims their lines.
TEST(RegionFailure, AFailedMemberWaitsForPeersThatMayReclaimItsInputs) {
  if (!shm::writes_back_lines()) GTEST_SKIP() << "no reader reclaims lines here";
  expect_to_wait_for_peers_that_have_begun(Op::reduce_scatter, 40'000);
}

/// In memory that earlier calls have used.
void expect_right_sums(Buffer& first, Buffer& second) {
  RegionJob job(2);
  const MutableBytes both[] = {first.bytes(), second.bytes()};
  std::vector<Args> args(2);
  std::vector<transport::Fingerprint> calls;
  for (std::size_t member = 0; member < 2; ++member) {
    auto* const values = reinterpret_cast<float*>(both[member].data());
    std::fill_n(values, both[member].size() / sizeof(float), static_cast<float>(member + 1));
    args[member].op = Op::all_reduce;
    args[member].dtype = DType::float32;
    args[member].inputs.emplace_back(both[member]);
    args[member].outputs.push_back(both[member]);
    calls.push_back(fingerprint_of(args[member], 1));
  }
  std::vector<Task<Status>> tasks;
  for (int member = 0; member < 2; ++member)
    tasks.push_back(job.run(member, args[RegionJob::at(member)], calls[RegionJob::at(member)]));
  ASSERT_TRUE(finish(tasks));
  for (const MutableBytes bytes : both) {
    const auto* const values = reinterpret_cast<const float*>(bytes.data());
    EXPECT_TRUE(std::all_of(values, values + bytes.size() / sizeof(float),
                            [](float value) { return value == 3.0f; }));
  }
}

/// A member of three fails in a call, or its task is dropped, after a peer has begun that call and
/// stopped in it.
void expect_exposed_memory_to_be_quarantined(Op op, bool dropped) {
  shm::Arena& arena = **shm::Arena::of_process();
  constexpr int kMembers = 3;
  constexpr std::size_t kEach = 400'000;
  RegionJob job(kMembers, {}, {}, false);
  for (auto& channel : job.channels) channel->spread = nullptr;
  std::vector<std::optional<Buffer>> memory(kMembers);
  std::vector<std::vector<std::byte>> taken(kMembers, std::vector<std::byte>(kEach));
  std::vector<Args> args(kMembers);
  std::vector<transport::Fingerprint> calls;
  for (std::size_t member = 0; member < kMembers; ++member) {
    const bool lists = info(op).lists_input;
    const MutableBytes whole =
        memory[member].emplace(lists ? kMembers * kEach : kEach, true).bytes();
    args[member].op = op;
    args[member].dtype = DType::float32;
    for (std::size_t slice = 0; slice < (lists ? kMembers : 1); ++slice)
      args[member].inputs.emplace_back(whole.subspan(slice * kEach, kEach));
    args[member].outputs.push_back(lists ? MutableBytes(taken[member]) : whole);
    calls.push_back(fingerprint_of(args[member], 1));
  }
  auto failed = job.run(0, args[0], calls[0]);
  auto stopped = job.run(1, args[1], calls[1]);
  EXPECT_FALSE(failed.step());
  EXPECT_FALSE(stopped.step());
  if (dropped) {
    failed = {};
  } else {
    job.channels[0]->fail(Status(Code::timed_out, "too late"));
    while (!failed.step()) std::this_thread::yield();  // gives up waiting after 50 ms
  }
  expect_right_sums(*memory[0], *memory[2]);
  arena.trim();
  const auto before = arena.stats();
  memory[0].reset();
  arena.trim();
  EXPECT_GE(arena.stats().bytes_quarantined, before.bytes_quarantined + kEach);
  EXPECT_EQ(arena.stats().bytes_kept, 0u);
  job.groups[0].reset();  // the quarantine outlives the member
  job.channels[1]->fail(Status(Code::timed_out, "too late"));
  EXPECT_TRUE(stopped.step());
  arena.trim();
  EXPECT_EQ(arena.stats().bytes_quarantined, before.bytes_quarantined);
}

// The failed member does not wait forever. Memory that a peer may still write to is then not reused
// before that peer has aborted.
// spec: D7 who goes on after a failure does so with memory that a stopped rank which comes back
// leaves alone
TEST(RegionFailure, MemoryThatAPeerMayWriteIsQuarantined) {
  for (const bool dropped : {false, true})
    expect_exposed_memory_to_be_quarantined(Op::all_reduce, dropped);
}

TEST(RegionFailure, MemoryThatAPeerMayReclaimIsQuarantined) {
  if (!shm::writes_back_lines()) GTEST_SKIP() << "no reader reclaims lines here";
  for (const bool dropped : {false, true})
    expect_exposed_memory_to_be_quarantined(Op::reduce_scatter, dropped);
}

// A member that has all its data, but whose peer has aborted, does not touch the memory that the
// peer granted, and fails with it.
TEST(RegionFailure, GrantedInputsOfAnAbortedMemberAreNotReduced) {
  if (!shm::writes_back_lines()) GTEST_SKIP() << "no reader reclaims lines here";
  Random random(1);
  RegionJob job(2);
  for (auto& channel : job.channels) channel->spread = nullptr;
  TestCall call(shape_of(Op::reduce_scatter, 40'000, 1), 2, 1, random);
  auto tasks = start(job, call);
  EXPECT_FALSE(tasks[0].step());
  job.channels[0]->fail(Status(Code::timed_out, "too late"));
  EXPECT_TRUE(tasks[0].step());
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(tasks[1].step());
  job.channels[1]->fail(Status(Code::timed_out, "too late"));
  EXPECT_TRUE(tasks[1].step());
  EXPECT_EQ(tasks[1].result().code(), Code::timed_out);
}

TEST(RegionFailure, ArenaThatCannotBeMappedIsNamed) {
  Random random(1);
  RegionJob job(2, [](int, std::uint64_t, std::size_t) -> std::byte* { return nullptr; });
  for (const Op op : {Op::broadcast, Op::all_reduce}) {
    TestCall call(shape_of(op, 400'000, 1), 2, 1, random);
    auto tasks = start(job, call);
    ASSERT_TRUE(finish(
        tasks,
        std::numeric_limits<int>::max()));  // a death that explains it would have had time to show
    EXPECT_EQ(tasks[1].result().code(), Code::exhausted);
  }
}

// A deadline error names the members that have not arrived, not those that wait for them in turn.
TEST(RegionFailure, NamesTheMissingMembers) {
  Random random(1);
  for (const std::size_t count : {std::size_t{1}, std::size_t{400'000}}) {
    RegionJob job(3);
    TestCall call(shape_of(Op::all_reduce, count, 0), 3, 1, random);
    auto tasks = start(job, call);
    EXPECT_FALSE(tasks[0].step());
    EXPECT_EQ(job.groups[0]->awaited(), (std::vector<int>{job_rank(1), job_rank(2)}));
    EXPECT_FALSE(tasks[2].step());
    EXPECT_FALSE(tasks[0].step());
    EXPECT_EQ(job.groups[0]->awaited(), std::vector<int>{job_rank(1)});
    EXPECT_EQ(job.groups[1]->awaited(), std::vector<int>{});
    EXPECT_EQ(job.groups[0]->heard(1).sequence, 0u);
    ASSERT_TRUE(finish(tasks));
    EXPECT_EQ(job.groups[0]->awaited(), std::vector<int>{});
    EXPECT_EQ(job.groups[0]->heard(1), call.fingerprint(1));
  }
}

// A sender of small data does not wait for its readers, up to the length of the ring. Then it waits
// for those that have not arrived.
TEST(RegionFailure, ASenderRunsAheadByTheRingOfLines) {
  Random random(1);
  RegionJob job(3);
  CallShape shape = shape_of(Op::broadcast, 100, 0);
  std::vector<std::unique_ptr<TestCall>> calls;
  for (std::uint64_t sequence = 1; sequence <= kRegionSlots + 1; ++sequence) {
    calls.push_back(std::make_unique<TestCall>(shape, 3, sequence, random));
    Task<Status> task = job.run(0, calls.back()->args(0), calls.back()->fingerprint(0));
    if (sequence <= kRegionSlots) {
      ASSERT_TRUE(task.step());
      ASSERT_TRUE(calls.back()->check(0));
      continue;
    }
    for (int look = 0; look < 3; ++look) EXPECT_FALSE(task.step());
    EXPECT_EQ(job.groups[0]->awaited(), (std::vector<int>{job_rank(1), job_rank(2)}));
    for (int member : {1, 2}) {
      Task<Status> reader = job.run(member, calls[0]->args(member), calls[0]->fingerprint(member));
      ASSERT_TRUE(reader.step());
      ASSERT_TRUE(calls[0]->check(member));
    }
  }
}

// And it continues as they arrive, however rarely the members poll each other's lines.
TEST(RegionFailure, ASenderContinuesAsItsReadersArrive) {
  Random random(1);
  for (const Op op : {Op::broadcast, Op::gather}) {
    RegionJob job(3);
    const CallShape shape = shape_of(op, 3, 0);
    std::vector<std::unique_ptr<TestCall>> calls;
    const auto call = [&](std::uint64_t sequence) -> TestCall& {
      while (calls.size() < sequence)
        calls.push_back(std::make_unique<TestCall>(shape, 3, calls.size() + 1, random));
      return *calls[sequence - 1];
    };
    const auto play = [&](int member, std::uint64_t sequence) {
      Task<Status> task =
          job.run(member, call(sequence).args(member), call(sequence).fingerprint(member));
      const bool over = task.step();
      EXPECT_TRUE(!over || call(sequence).check(member));
      return over;
    };
    // In a gather one member sends, and two are behind it: the root and the other sender.
    const int ahead = op == Op::broadcast ? 0 : 1;
    for (std::uint64_t sequence = 1; sequence <= kRegionSlots; ++sequence)
      ASSERT_TRUE(play(ahead, sequence)) << sequence;
    constexpr std::uint64_t kCome = kRegionSlots / 2;
    for (std::uint64_t sequence = 1; sequence <= kCome; ++sequence) {
      if (op == Op::broadcast) {
        ASSERT_TRUE(play(1, sequence));
        ASSERT_TRUE(play(2, sequence));
      } else {
        ASSERT_TRUE(play(2, sequence));
        ASSERT_TRUE(play(0, sequence));
      }
    }
    // Members publish `seen` in batches of an eighth of the ring.
    for (std::uint64_t sequence = kRegionSlots + 1;
         sequence <= kRegionSlots + kCome - kRegionSlots / 8; ++sequence)
      ASSERT_TRUE(play(ahead, sequence)) << sequence;
  }
}

}  // namespace
}  // namespace muster::collective::region
