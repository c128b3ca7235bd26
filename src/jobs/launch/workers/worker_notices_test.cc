// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/workers/worker_notices.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <string>
#include <vector>

#include "core/base/process/launcher_socket.h"
#include "testing/process_usage.h"

namespace muster::launch {
namespace {

WorkerChannel channel() {
  auto made = make_worker_channel();
  EXPECT_TRUE(made.ok());
  return std::move(*made);
}

// spec: L6 what the launcher tells a worker that stays comes whole, and its end is known
TEST(WorkerNotice, ComesWhole) {
  WorkerChannel ends = channel();
  EXPECT_TRUE(is_launcher_socket(ends.worker.get()));
  const WorkerNotice notice{WorkerNoticeKind::epoch,
                            7,
                            3,
                            {5, 8, 1, 2, 1, 4, 5, 8},
                            "[::1]:29400",
                            "host-a",
                            29500,
                            41,
                            6,
                            "because"};
  const WorkerNotice leave{.kind = WorkerNoticeKind::leave, .reason = std::string(100'000, 'x')};
  tell_worker(ends.launcher.get(), notice);
  tell_worker(ends.launcher.get(), leave);
  ends.launcher.reset();
  std::vector<Descriptor> none;
  const auto first = read_worker_notice(ends.worker.get(), none);
  const auto second = read_worker_notice(ends.worker.get(), none);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(first->epoch, 7);
  EXPECT_EQ(first->restarts, 3);
  EXPECT_EQ(first->ranks, notice.ranks);
  EXPECT_EQ(first->agent_store, "[::1]:29400");
  EXPECT_EQ(first->master_addr, "host-a");
  EXPECT_EQ(first->master_port, 29500);
  EXPECT_EQ(first->committed, 41);
  EXPECT_EQ(first->state_in, 6);
  EXPECT_EQ(first->reason, "because");
  EXPECT_EQ(second->kind, WorkerNoticeKind::leave);
  EXPECT_EQ(read_worker_notice(ends.worker.get(), none).status().code(), Code::closed);
}

// spec: L6 that training has ended is known to the launcher, also when the worker has died since
// and has not read all notices
TEST(WorkerNotice, TheEndOfTrainingSurvivesTheWorker) {
  WorkerChannel ends = channel();
  EXPECT_FALSE(take_words(ends.launcher.get()).trained);
  tell_worker(ends.launcher.get(), {});
  tell_trained(ends.worker.get());
  ends.worker.reset();
  EXPECT_TRUE(take_words(ends.launcher.get()).trained);
  EXPECT_FALSE(take_words(ends.launcher.get()).trained);
  tell_worker(ends.launcher.get(), {});  // no SIGPIPE, though the worker is gone
}

// spec: L14.lost_state the newest commit that a worker told of, and the loss of all of them, are
// known to the launcher after the worker's end
TEST(WorkerNotice, CommitsAndTheirLossSurviveTheWorker) {
  WorkerChannel ends = channel();
  tell_committed(ends.worker.get(), 7);
  tell_committed(ends.worker.get(), 9);
  EXPECT_EQ(take_words(ends.launcher.get()).committed, 9);
  tell_committed(ends.worker.get(), 10);
  tell_lost(ends.worker.get(), 1'000'000'000'000, 0);
  tell_committed(ends.worker.get(), 1);
  ends.worker.reset();
  const WorkerWords words = take_words(ends.launcher.get());
  EXPECT_EQ(words.committed, 1);
  EXPECT_EQ(words.lost, 1'000'000'000'000);
  EXPECT_EQ(take_words(ends.launcher.get()).lost, 0);
  ends = channel();
  tell_lost(ends.worker.get(), 800, 650);
  const WorkerWords partly = take_words(ends.launcher.get());
  EXPECT_EQ(partly.lost, 800);
  EXPECT_EQ(partly.kept, 650);
  EXPECT_EQ(partly.committed, 650);
}

// spec: L14.node a launcher hears in which epoch its worker got the job's state, also after its
// end, and nothing of a state that was lost since
TEST(WorkerNotice, WhoHasTheStateReachesTheLauncher) {
  WorkerChannel ends = channel();
  EXPECT_EQ(take_words(ends.launcher.get()).state, HeldState{});
  tell_state(ends.worker.get(), {3, false}, 650);
  tell_committed(ends.worker.get(), 660);
  WorkerWords words = take_words(ends.launcher.get());
  EXPECT_EQ(words.state, (HeldState{3, false}));
  EXPECT_EQ(words.committed, 660);
  tell_state(ends.worker.get(), {4, true}, 700);
  ends.worker.reset();
  words = take_words(ends.launcher.get());
  EXPECT_EQ(words.state, (HeldState{4, true}));
  EXPECT_EQ(words.committed, 700);
  ends = channel();
  tell_state(ends.worker.get(), {5, false}, 700);
  constexpr char kTornState = 6;
  ASSERT_EQ(::send(ends.worker.get(), &kTornState, 1, 0), 1);
  words = take_words(ends.launcher.get());
  EXPECT_EQ(words.state, (HeldState{5, false})) << "a torn word takes nothing back";
  EXPECT_EQ(words.committed, 700);
  tell_lost(ends.worker.get(), 700, 0);
  EXPECT_EQ(take_words(ends.launcher.get()).state, HeldState{});
}

// spec: L15 a launcher hears why a worker cannot go on and whom it blames, also after its end; what
// is too much for a message is cut off
TEST(WorkerNotice, TroubleReachesTheLauncher) {
  WorkerChannel ends = channel();
  EXPECT_FALSE(take_words(ends.launcher.get()).trouble);
  tell_trouble(ends.worker.get(), {3, {0, 7}, "rank 7 does not answer"});
  const GroupTrouble expected{4, {2}, "rank 2 does not answer"};
  tell_trouble(ends.worker.get(), expected);
  EXPECT_EQ(take_words(ends.launcher.get()).trouble, expected) << "the last one";
  tell_trouble(ends.worker.get(), {5, std::vector<int>(10'000, 1), std::string(100'000, 'x')});
  ends.worker.reset();
  const WorkerWords words = take_words(ends.launcher.get());
  ASSERT_TRUE(words.trouble);
  EXPECT_EQ(words.trouble->blamed.size(), kMostBlamed);
  EXPECT_EQ(words.trouble->text.size(), 2048u);
}

// spec: L15 a launcher hears that a worker is about to end
TEST(WorkerNotice, AnEndIsAnnounced) {
  WorkerChannel ends = channel();
  EXPECT_EQ(take_words(ends.launcher.get()).ending, 0);
  tell_ending(ends.worker.get(), 4);
  EXPECT_EQ(take_words(ends.launcher.get()).ending, 4);
}

// spec: L14.lost_state a launcher that reads nothing holds up no worker that commits
TEST(WorkerNotice, TellingOfCommitsWaitsForNoLauncher) {
  const WorkerChannel ends = channel();
  for (int i = 1; i <= 10'000; ++i) tell_committed(ends.worker.get(), i);
  EXPECT_GT(take_words(ends.launcher.get()).committed, 0);
}

// spec: L6 a worker whose socket is full holds up no launcher
TEST(WorkerNotice, AWorkerThatDoesNotReadHoldsNoLauncherUp) {
  const WorkerChannel ends = channel();
  const WorkerNotice notice{.reason = std::string(2000, 'x')};
  for (int i = 0; i < 10'000; ++i) tell_worker(ends.launcher.get(), notice);
  std::vector<Descriptor> none;
  EXPECT_EQ(read_worker_notice(ends.worker.get(), none)->reason, notice.reason);
}

Descriptor memory_with(char letter) {
  Descriptor file(::memfd_create("a test", MFD_CLOEXEC));
  EXPECT_EQ(::pwrite(file.get(), &letter, 1, 0), 1);
  return file;
}

char letter_in(const Descriptor& file) {
  char letter = 0;
  EXPECT_EQ(::pread(file.get(), &letter, 1, 0), 1);
  return letter;
}

// spec: L7 memory that a worker has given its launcher outlives it, and reaches the worker that
// takes its place, before all other notices
TEST(WorkerNotice, MemoriesOutliveTheirWorker) {
  std::vector<Descriptor> kept;
  {
    WorkerChannel dead = channel();
    const Descriptor first = memory_with('a'), second = memory_with('b'), third = memory_with('c');
    EXPECT_TRUE(give_memories(dead.worker.get(), std::array{first.get()}).ok());
    EXPECT_TRUE(give_memories(dead.worker.get(), std::array{second.get(), third.get()}).ok());
    tell_trained(dead.worker.get());
    dead.worker.reset();
    WorkerWords words = take_words(dead.launcher.get());
    EXPECT_TRUE(words.trained);
    ASSERT_TRUE(words.memories.has_value());
    kept = std::move(*words.memories);
    EXPECT_FALSE(take_words(dead.launcher.get()).memories.has_value());
  }
  const WorkerChannel next = channel();
  EXPECT_FALSE(has_worker_notice(next.worker.get()));
  EXPECT_TRUE(tell_memories(next.launcher.get(), kept).ok());
  tell_worker(next.launcher.get(), {.epoch = 3});
  kept.clear();
  EXPECT_TRUE(has_worker_notice(next.worker.get()));
  std::vector<Descriptor> got;
  const auto first = read_worker_notice(next.worker.get(), got);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(first->kind, WorkerNoticeKind::memories);
  ASSERT_EQ(got.size(), 2U);
  EXPECT_EQ(letter_in(got[0]), 'b');
  EXPECT_EQ(letter_in(got[1]), 'c');
  const auto second = read_worker_notice(next.worker.get(), got);
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(second->epoch, 3);
  EXPECT_EQ(got.size(), 2U);
}

// spec: L14.node a worker of a node that was left out gives its last commit when it is asked, or
// says that it has none
TEST(WorkerNotice, ACommitIsHandedOver) {
  WorkerChannel ends = channel();
  tell_worker(ends.launcher.get(), {.kind = WorkerNoticeKind::hand_over});
  std::vector<Descriptor> none;
  const auto notice = read_worker_notice(ends.worker.get(), none);
  ASSERT_TRUE(notice.ok());
  EXPECT_EQ(notice->kind, WorkerNoticeKind::hand_over);
  EXPECT_FALSE(take_words(ends.launcher.get()).handed_over);
  EXPECT_TRUE(hand_over(ends.worker.get(), -1).ok());
  WorkerWords words = take_words(ends.launcher.get());
  ASSERT_TRUE(words.handed_over);
  EXPECT_TRUE(words.handed_over->empty());
  EXPECT_TRUE(hand_over(ends.worker.get(), memory_with('a').get()).ok());
  ends.worker.reset();
  words = take_words(ends.launcher.get());
  ASSERT_TRUE(words.handed_over && words.handed_over->size() == 1);
  EXPECT_EQ(letter_in(words.handed_over->front()), 'a');
}

// spec: L7 more memory files than a message takes are refused by name
TEST(WorkerNotice, TooManyMemoriesAreRefused) {
  const WorkerChannel ends = channel();
  const std::vector<int> many(kMostMemories + 1, ends.launcher.get());
  EXPECT_EQ(give_memories(ends.worker.get(), many).code(), Code::exhausted);
}

/// The descriptor that the next file opened by this process will get.
std::size_t next_descriptor() { return static_cast<std::size_t>(Descriptor(::dup(0)).get()); }

// spec: L7 memory files for which a launcher has no descriptor are missed by name; it never holds a
// part of them for the whole
TEST(WorkerNotice, MemoriesThatDoNotFitAreMissed) {
  const WorkerChannel ends = channel();
  const Descriptor one = memory_with('a'), other = memory_with('b');
  const std::array both{one.get(), other.get()};
  {
    EXPECT_TRUE(give_memories(ends.worker.get(), both).ok());
    const testing::DescriptorLimit one_more(next_descriptor() + 1);
    const WorkerWords words = take_words(ends.launcher.get());
    EXPECT_TRUE(words.memories_missed);
    EXPECT_FALSE(words.memories.has_value());
  }
  EXPECT_TRUE(give_memories(ends.worker.get(), both).ok());
  const WorkerWords words = take_words(ends.launcher.get());
  EXPECT_FALSE(words.memories_missed);
  ASSERT_TRUE(words.memories.has_value());
  EXPECT_EQ(words.memories->size(), 2U);
  EXPECT_TRUE(hand_over(ends.worker.get(), one.get()).ok());
  const testing::DescriptorLimit none(next_descriptor());
  EXPECT_TRUE(take_words(ends.launcher.get()).memories_missed) << "which is not to have none";
}

// spec: L7 a worker that has no descriptors for what its launcher holds hears the rest of the
// notice
TEST(WorkerNotice, AWorkerWithoutDescriptorsHearsItsEpoch) {
  const WorkerChannel ends = channel();
  std::vector<Descriptor> held;
  held.push_back(memory_with('a'));
  held.push_back(memory_with('b'));
  EXPECT_TRUE(tell_memories(ends.launcher.get(), held).ok());
  tell_worker(ends.launcher.get(), {.epoch = 3});
  std::vector<Descriptor> got;
  {
    const testing::DescriptorLimit one_more(next_descriptor() + 1);
    EXPECT_EQ(read_worker_notice(ends.worker.get(), got)->kind, WorkerNoticeKind::memories);
  }
  EXPECT_TRUE(got.empty());
  EXPECT_EQ(read_worker_notice(ends.worker.get(), got)->epoch, 3);
}

// spec: L7 what is said to a process that has ended is no error of this one
TEST(WorkerNotice, TheEndOfTheOtherIsKnown) {
  WorkerChannel ends = channel();
  EXPECT_FALSE(take_words(ends.launcher.get()).at_end);
  ends.worker.reset();
  EXPECT_TRUE(take_words(ends.launcher.get()).at_end);
  std::vector<Descriptor> held;
  held.push_back(memory_with('a'));
  EXPECT_EQ(tell_memories(ends.launcher.get(), held).code(), Code::closed);
}

}  // namespace
}  // namespace muster::launch
