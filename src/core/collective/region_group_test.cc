// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/region_group.h"

#include <algorithm>
#include <iterator>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "core/collective/testing/region_job.h"
#include "core/shm/cache_lines.h"
#include "testing/budget.h"
#include "testing/limits.h"
#include "testing/seed.h"

namespace muster::collective::region {
namespace {

constexpr int kSizes[] = {2, 3, 4, 5, 8};
constexpr std::size_t kMostBytes =
    testing::kSanitized ? 12'000'000 : 40'000'000;  // in all buffers of a call

// Element counts around every limit: the line, the slot, a share, a window, several windows.
std::vector<std::size_t> counts_for(Op op, DType dtype, int members, Random& random) {
  const std::size_t element = size_of(dtype);
  const SegmentLayout layout(members);
  const std::size_t chunk = info(op).lists_input ? layout.column_bytes : layout.window_bytes;
  std::vector<std::size_t> counts{
      0, 1, 2, 47, 4097 / element + 1, (2 * chunk + 8 * 1024) / element + draw(random, 100)};
  const std::size_t one_shot = 64 * 1024 / static_cast<std::size_t>(members);
  for (std::size_t bytes :
       {kInlineBytes, std::size_t{12 * 1024}, kSlotBytes, one_shot, std::size_t{64 * 1024},
        std::size_t{128 * 1024}, chunk, (kWindows + 2) * chunk}) {
    counts.push_back(bytes / element - 1 + draw(random, 3));
  }
  return counts;
}

const char* seed_text() {
  static const std::string text = "MUSTER_TEST_SEED=" + std::to_string(testing::test_seed());
  return text.c_str();
}

// All sizes of one operation, back to back on one group per number of members, stepped in random
// order.
void run_operation(Op op, bool uneven, bool oversubscribed = false) {
  SCOPED_TRACE(seed_text());
  std::vector<int> sizes(std::begin(kSizes), std::end(kSizes));
  if (testing::kSanitized && !testing::long_tests()) {
    std::mt19937_64 any(testing::test_seed() + static_cast<std::uint64_t>(op));
    std::shuffle(sizes.begin(), sizes.end(), any);
    sizes.resize(3);
  }
  for (int members : sizes) {
    Random random(testing::test_seed() + static_cast<std::uint64_t>(members));
    RegionJob job(members, {}, {}, oversubscribed);
    std::vector<std::unique_ptr<TestCall>> calls;
    std::uint64_t sequence = 0;
    const int rounds = testing::test_rounds(testing::kSanitized ? 1 : 2, 12);
    for (int round = 0; round < rounds; ++round) {
      CallShape shape;
      shape.op = op;
      shape.uneven = uneven;
      const int dtypes = info(op).reduces ? kReducibleDTypes : kDTypes;
      do {
        shape.dtype = static_cast<DType>(draw(random, static_cast<std::size_t>(dtypes)));
        shape.reduce = static_cast<Reduce>(draw(random, kReduces));
      } while (info(op).reduces && !reduce_supports(shape.reduce, shape.dtype));
      const double arenas[] = {0, 0.5, 1};
      for (std::size_t count : counts_for(op, shape.dtype, members, random)) {
        const std::size_t everywhere =
            count * size_of(shape.dtype) * static_cast<std::size_t>(members * members);
        if (everywhere > kMostBytes && !testing::whole_matrices()) continue;
        shape.count = count;
        shape.root = static_cast<int>(draw(random, static_cast<std::size_t>(members)));
        shape.arena = arenas[draw(random, 3)];
        calls.push_back(std::make_unique<TestCall>(shape, members, ++sequence, random));
      }
      ASSERT_TRUE(run_in_random_order(job, calls, random));
      calls.clear();
    }
  }
}

// spec: F2 broadcast over shared memory, every size class, root and mix of memory
TEST(RegionGroup, Broadcast) { run_operation(Op::broadcast, false); }
// spec: F2 the same where several readers reclaim their root's lines
TEST(RegionGroup, BroadcastToRanksThatShareCores) { run_operation(Op::broadcast, false, true); }
// spec: F3 all_reduce over shared memory: in place or not, the same bits on every rank
TEST(RegionGroup, AllReduce) { run_operation(Op::all_reduce, false); }
// spec: F3 the same where all members reclaim each other's results
TEST(RegionGroup, AllReduceOfRanksThatShareCores) { run_operation(Op::all_reduce, false, true); }
// spec: F4 reduce over shared memory: the root holds the result, the others' tensors are left as
// they were
TEST(RegionGroup, Reduce) { run_operation(Op::reduce, false); }
// spec: F4 the same where ranks share cores: the root reduces for all whose inputs are private
TEST(RegionGroup, ReduceOfRanksThatShareCores) { run_operation(Op::reduce, false, true); }
// spec: F5 all_gather over shared memory
TEST(RegionGroup, AllGather) { run_operation(Op::all_gather, false); }
// spec: F5 the same where all members reclaim each other's lines
TEST(RegionGroup, AllGatherOfRanksThatShareCores) { run_operation(Op::all_gather, true, true); }
// spec: F5 all_gather of uneven sizes over shared memory
TEST(RegionGroup, AllGatherUneven) { run_operation(Op::all_gather, true); }
// spec: F7 gather over shared memory
TEST(RegionGroup, Gather) { run_operation(Op::gather, false); }
// spec: F8 scatter over shared memory
TEST(RegionGroup, Scatter) { run_operation(Op::scatter, false); }
// spec: F9 reduce_scatter over shared memory
TEST(RegionGroup, ReduceScatter) { run_operation(Op::reduce_scatter, false); }
// spec: F9 the same where ranks share cores: data in the arena is staged too
TEST(RegionGroup, ReduceScatterOfRanksThatShareCores) {
  run_operation(Op::reduce_scatter, true, true);
}
// spec: F9 reduce_scatter of uneven sizes over shared memory
TEST(RegionGroup, ReduceScatterUneven) { run_operation(Op::reduce_scatter, true); }
// spec: F12 all_to_all over shared memory
TEST(RegionGroup, AllToAll) { run_operation(Op::all_to_all, false); }
// spec: F12 the same where ranks share cores: data in the arena is staged too
TEST(RegionGroup, AllToAllOfRanksThatShareCores) { run_operation(Op::all_to_all, true, true); }
// spec: F11 uneven and empty splits, over shared memory; F12 uneven lists
TEST(RegionGroup, AllToAllUneven) { run_operation(Op::all_to_all, true); }

// spec: F13 barrier: nobody leaves before the last has come
TEST(RegionGroup, BarrierHoldsEveryone) {
  for (int members : kSizes) {
    RegionJob job(members);
    Args args;
    std::vector<Task<Status>> tasks;
    for (std::uint64_t sequence = 1; sequence < 50; ++sequence) {
      const transport::Fingerprint call = fingerprint_of(args, sequence);
      const int last = static_cast<int>(sequence) % members;
      tasks.clear();
      for (int member = 0; member < members; ++member) tasks.push_back(job.run(member, args, call));
      for (int pass = 0; pass < 3; ++pass) {
        for (int member = 0; member < members; ++member) {
          if (member != last) {
            ASSERT_FALSE(tasks[RegionJob::at(member)].step());
          }
        }
      }
      ASSERT_TRUE(tasks[RegionJob::at(last)].step());
      for (int member = 0; member < members; ++member) {
        ASSERT_TRUE(tasks[RegionJob::at(member)].step());
        ASSERT_TRUE(tasks[RegionJob::at(member)].result().ok());
      }
    }
  }
}

CallShape random_shape(Random& random, int members, std::size_t most_bytes) {
  CallShape shape;
  shape.op = static_cast<Op>(draw(random, static_cast<std::size_t>(Op::barrier) + 1));
  const OpInfo& row = info(shape.op);
  do {
    shape.dtype = static_cast<DType>(
        draw(random, static_cast<std::size_t>(row.reduces ? kReducibleDTypes : kDTypes)));
    shape.reduce = static_cast<Reduce>(draw(random, kReduces));
  } while (row.reduces && !reduce_supports(shape.reduce, shape.dtype));
  // Small sizes as often as large ones.
  const std::size_t most = std::size_t{1}
                           << draw(random, static_cast<std::size_t>(std::bit_width(most_bytes)));
  shape.count = draw(random, most) / size_of(shape.dtype);
  shape.uneven = row.size_rule == SizeRule::free && draw(random, 2) == 0;
  shape.root = static_cast<int>(draw(random, static_cast<std::size_t>(members)));
  return shape;
}

TEST(RegionGroup, AWindowOfAVeryLargeGroupHasAColumnForEveryMember) {
  for (const int members : {2, 16, 17, 4096, 4097, 10'000, 100'000}) {
    const SegmentLayout layout(members);
    EXPECT_GE(layout.column_bytes, kCacheLine) << members;
    EXPECT_LE(layout.column_bytes * layout.members, layout.window_bytes) << members;
  }
}

// Windows last used long ago, and counters that have not moved since, still compare correctly after
// more calls than positions can tell apart.
// spec: F3 F7 a group of any age
TEST(RegionGroup, CallsGoOnAfterHalfOfAllPositions) {
  constexpr int kMembers = 3;
  Random random(testing::test_seed());
  for (const Op between : {Op::all_gather, Op::all_reduce}) {
    RegionJob job(kMembers, {}, false);
    std::uint64_t sequence = 0;
    const auto play = [&](Op op, std::size_t count) {
      std::vector<std::unique_ptr<TestCall>> calls;
      for (int i = 0; i < 3; ++i)
        calls.push_back(std::make_unique<TestCall>(CallShape{.op = op,
                                                             .dtype = DType::float64,
                                                             .count = count,
                                                             .root = i % kMembers,
                                                             .arena = 0.0},
                                                   kMembers, ++sequence, random));
      return run_in_random_order(job, calls, random);
    };
    // Passes through several windows.
    constexpr std::size_t kLarge = 160'000;
    ASSERT_TRUE(play(Op::all_reduce, kLarge)) << info(between).name;
    for (int jump = 1; jump <= 3; ++jump) {
      // As in a group that makes small calls, which use no windows, and refreshes itself
      // periodically.
      const std::uint64_t half = std::uint64_t{1} << 39;
      const std::uint64_t target = sequence / kRefreshEvery * kRefreshEvery +
                                   half / 2 * static_cast<std::uint64_t>(jump % 3 + 1);
      for (std::uint64_t at = sequence / kRefreshEvery + 1; at < target / kRefreshEvery;
           at += half / 4 / kRefreshEvery) {
        sequence = at * kRefreshEvery - 3;
        for (auto& group : job.groups) static_cast<RegionMember&>(*group).count_from(sequence);
        ASSERT_TRUE(play(Op::barrier, 0)) << info(between).name << " after " << sequence;
      }
      ASSERT_TRUE(play(between, kLarge)) << info(between).name << " after " << sequence;
      ASSERT_TRUE(play(Op::reduce, kLarge)) << info(between).name << " after " << sequence;
    }
  }
}

// With many members the columns of a window are narrow: a member's data may exceed one step
// although all of it is in lines and slots. The last member to arrive finds all lines and needs no
// task.
// spec: F9 reduce_scatter, uneven, on 32 ranks
TEST(RegionGroup, SmallCallsOfManyMembersAreReducedWhole) {
  constexpr int kMembers = 32;
  constexpr std::size_t kLong = 3072;
  ASSERT_GT(kLong * sizeof(float), SegmentLayout(kMembers).column_bytes);
  RegionJob job(kMembers);
  std::vector<std::vector<float>> inputs, outputs;
  std::vector<Args> args(kMembers);
  for (int member = 0; member < kMembers; ++member) {
    inputs.emplace_back(kLong + kMembers - 1, static_cast<float>(member + 1));
    outputs.emplace_back(member == kMembers - 1 ? kLong : 1, 0.0F);
  }
  for (std::size_t member = 0; member < kMembers; ++member) {
    Args& call = args[member];
    call.op = Op::reduce_scatter;
    call.dtype = DType::float32;
    const ConstBytes all = std::as_bytes(std::span(inputs[member]));
    for (std::size_t to = 0; to < kMembers; ++to) {
      call.inputs.push_back(all.subspan(to * sizeof(float), outputs[to].size() * sizeof(float)));
    }
    call.outputs = {std::as_writable_bytes(std::span(outputs[member]))};
  }
  const transport::Fingerprint fingerprint = fingerprint_of(args[0], 1);
  for (int member = 0; member < kMembers; ++member) {
    InlineStart call(fingerprint);
    const bool over = job.groups[RegionJob::at(member)]->inline_calls().try_inline(
        args[RegionJob::at(member)], call.starting);
    EXPECT_EQ(over, member == kMembers - 1) << "member " << member;
    EXPECT_TRUE(call.record.started) << "member " << member;
  }
  for (int member = 0; member < kMembers - 1; ++member) {
    auto task = job.groups[RegionJob::at(member)]->run(args[RegionJob::at(member)], fingerprint);
    ASSERT_TRUE(task.step());
    ASSERT_TRUE(task.result().ok());
  }
  for (const auto& output : outputs) {
    for (const float value : output) ASSERT_EQ(value, kMembers * (kMembers + 1) / 2);
  }
}

// All members together write more than the caches hold: streaming stores are used, from windows and
// from the arena, for whole lines and parts.
TEST(RegionGroup, DataLargerThanTheCachesArrivesIntact) {
  const std::pair<Op, int> cases[] = {{Op::all_gather, 2}, {Op::broadcast, 3}};
  for (const auto& [op, members] : cases) {
    for (const double arena : {0.0, 1.0}) {
      SCOPED_TRACE(::testing::Message() << info(op).name << ", share in the arena " << arena);
      Random random(testing::test_seed());
      RegionJob job(members);
      CallShape shape;
      shape.op = op;
      shape.dtype = DType::uint8;
      const auto size = static_cast<std::size_t>(members);
      shape.count = tunables().past_caches / (op == Op::broadcast ? size : size * size) + 3;
      shape.arena = arena;
      TestCall call(shape, members, 1, random);
      std::vector<Task<Status>> tasks;
      for (int member = 0; member < members; ++member)
        tasks.push_back(job.run(member, call.args(member), call.fingerprint(member)));
      ASSERT_TRUE(finish(tasks));
      for (int member = 0; member < members; ++member) {
        EXPECT_TRUE(tasks[static_cast<std::size_t>(member)].result().ok());
        EXPECT_TRUE(call.check(member));
      }
    }
  }
}

// Every operation after every other, with members running ahead as far as they can: no line, slot
// or window is overwritten too early.
// spec: F15 every dtype of the table is drawn; F16 zero elements among them
TEST(RegionGroup, RandomCallsBackToBack) {
  SCOPED_TRACE(seed_text());
  const int rounds = testing::test_rounds(testing::kSanitized ? 4 : 12, 400);
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE(round);
    Random random(testing::test_seed() * 1000 + static_cast<std::uint64_t>(round));
    const int members = kSizes[draw(random, std::size(kSizes))];
    RegionJob job(members);
    std::uint64_t sequence = 0;
    for (int batch = 0; batch < 6; ++batch) {
      std::vector<std::unique_ptr<TestCall>> calls;
      const bool large = batch % 3 == 2;
      for (int i = 0; i < (large ? 10 : 150); ++i) {
        calls.push_back(std::make_unique<TestCall>(
            random_shape(random, members, large ? 2'000'000 : 2'000), members, ++sequence, random));
      }
      ASSERT_TRUE(run_in_random_order(job, calls, random));
    }
  }
}

// Waits as a real rank does: polls several times, then sleeps until woken.
Status drive(Task<Status>& task, shm::Mailbox& mailbox) {
  for (;;) {
    for (int look = 0; look < 20; ++look) {
      if (task.step()) return task.result();
      std::this_thread::yield();
    }
    const std::uint32_t ticket = mailbox.prepare_sleep();
    if (task.step()) {
      mailbox.cancel_sleep();
      return task.result();
    }
    mailbox.sleep(ticket, muster::testing::kMustHappen);  // a lost wakeup makes the test very slow
  }
}

// Ranks as threads on one mapping; they sleep when there is nothing to do.
TEST(RegionThreads, SleepWhenThereIsNothingToDo) {
  SCOPED_TRACE(seed_text());
  for (const auto& [members, oversubscribed] : {std::pair{2, false}, {4, false}, {4, true}}) {
    SCOPED_TRACE(::testing::Message()
                 << members << (oversubscribed ? " members on one core" : " members"));
    Random random(testing::test_seed() + 77);
    RegionJob job(members, {}, {}, oversubscribed);
    std::vector<std::unique_ptr<TestCall>> calls;
    const auto count = static_cast<std::size_t>(testing::test_rounds(300, 5000));
    for (std::size_t i = 1; i <= count; ++i) {
      calls.push_back(std::make_unique<TestCall>(
          random_shape(random, members, i % 10 == 0 ? 1'500'000 : 5'000), members, i, random));
    }
    std::vector<::testing::AssertionResult> results(RegionJob::at(members),
                                                    ::testing::AssertionSuccess());
    std::vector<std::thread> threads;
    for (int member = 0; member < members; ++member) {
      threads.emplace_back([&, member] {
        const std::size_t index = RegionJob::at(member);
        for (auto& call : calls) {
          Task<Status> task = job.run(member, call->args(member), call->fingerprint(member));
          const Status status = drive(task, job.regions[index]->mailbox(member));
          results[index] =
              status ? call->check(member) : ::testing::AssertionFailure() << status.message();
          if (!results[index]) {
            job.channels[index]->fail(Status(Code::aborted, "a check failed"));
            return;
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (auto& result : results) EXPECT_TRUE(result);
  }
}

}  // namespace
}  // namespace muster::collective::region
