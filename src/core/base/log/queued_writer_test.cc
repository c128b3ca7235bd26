// SPDX-License-Identifier: BSD-3-Clause
// Writing by a thread, to readers that stand still and disks that refuse.

#include "core/base/log/queued_writer.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <future>
#include <string>
#include <vector>

#include "core/base/threads/thread_start.h"
#include "testing/limits.h"

namespace muster {
namespace {

struct Pipe {
  Pipe() {
    std::array<int, 2> ends{};
    EXPECT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
    from.reset(ends[0]);
    to.reset(ends[1]);
  }
  std::string read(std::size_t bytes) const {
    std::string text;
    std::array<char, 65536> some{};
    while (text.size() < bytes) {
      const ssize_t got = ::read(from.get(), some.data(), some.size());
      if (got <= 0) break;
      text.append(some.data(), static_cast<std::size_t>(got));
    }
    return text;
  }
  Descriptor from, to;
};

// spec: J3 a console that nobody reads never blocks the launcher, and loses nothing once somebody
// does
TEST(QueuedWriter, LosesNothingOfWhatASlowReaderTakes) {
  const Pipe pipe;
  QueuedWriter writer({.thread = "a test's thread", .fd = pipe.to.get()});
  std::string all;
  for (int line = 0; line < 1000; ++line) {
    const std::string text = std::to_string(line) + std::string(1000, 'z') + "\n";
    EXPECT_TRUE(writer.put(text));
    all += text;
  }
  EXPECT_GT(writer.queued(), 0U);
  EXPECT_EQ(pipe.read(all.size()), all);
  EXPECT_EQ(writer.finish(testing::kMustHappen, testing::kMustHappen), 0U);
  EXPECT_EQ(writer.queued(), 0U);
}

// spec: J3.logs a disk that hangs in the middle of a write holds nobody up, the writer's owner
// neither
TEST(QueuedWriter, NobodyWaitsForAWriteThatHangs) {
  struct Disk {
    std::promise<void> entered, repaired;
    std::promise<std::string> taken;
  };
  auto disk = std::make_shared<Disk>();
  {
    QueuedWriter writer(
        {.thread = "a test's thread", .write = [disk, first = true](std::string_view text) mutable {
           if (std::exchange(first, false)) {
             disk->entered.set_value();
             disk->repaired.get_future().wait();
           } else {
             disk->taken.set_value(std::string(text));
           }
           return static_cast<ssize_t>(text.size());
         }});
    EXPECT_TRUE(writer.put("first\n"));
    disk->entered.get_future().wait();
    EXPECT_TRUE(writer.put("second\n"));
    EXPECT_EQ(writer.queued(), 13U);
    EXPECT_EQ(writer.finish(std::chrono::milliseconds(1), std::chrono::milliseconds(1)), 2U);
  }
  disk->repaired.set_value();
  EXPECT_EQ(disk->taken.get_future().get(), "second\n") << "the thread writes the rest";
}

// spec: L13 what cannot be written is told, once, and the next output is tried again
TEST(QueuedWriter, TellsOfAFullDiskOnce) {
  std::vector<int> errors;
  bool full = true;
  std::string taken;
  QueuedWriter writer({.thread = "a test's thread",
                       .write =
                           [&](std::string_view text) {
                             if (full) {
                               errno = ENOSPC;
                               return ssize_t{-1};
                             }
                             taken += text;
                             return static_cast<ssize_t>(text.size());
                           },
                       .may_block = false,
                       .on_error = [&](int error) { errors.push_back(error); }});
  for (int line = 0; line < 3; ++line) writer.put("refused\n");
  EXPECT_EQ(errors, std::vector<int>{ENOSPC});
  EXPECT_EQ(writer.queued(), 0U);
  full = false;
  writer.put("a line\n");
  EXPECT_EQ(taken, "a line\n");
  full = true;
  writer.put("refused\n");
  EXPECT_EQ(errors, (std::vector<int>{ENOSPC, ENOSPC}));
}

// spec: L13.events what is refused comes with the next line, in order
TEST(QueuedWriter, KeepsWhatIsRefused) {
  bool full = true;
  std::string taken;
  QueuedWriter writer({.thread = "a test's thread",
                       .write =
                           [&](std::string_view text) {
                             if (full && taken.size() >= 2) {
                               errno = ENOSPC;
                               return ssize_t{-1};
                             }
                             const std::string_view some = full ? text.substr(0, 2) : text;
                             taken += some;
                             return static_cast<ssize_t>(some.size());
                           },
                       .may_block = false,
                       .keeps_refused = true});
  writer.put("one\n");
  EXPECT_EQ(taken, "on") << "a line that is torn";
  EXPECT_EQ(writer.finish(testing::kMustHappen, testing::kMustHappen), 1U)
      << "tried again, refused again";
  full = false;
  writer.put("two\n");
  EXPECT_EQ(writer.finish(testing::kMustHappen, testing::kMustHappen), 0U);
  EXPECT_EQ(taken, "one\ntwo\n");
}

// spec: H2 log: without a thread, the bytes are written by who puts them
TEST(QueuedWriter, WritesWithoutAThread) {
  const Pipe pipe;
  QueuedWriter writer({.thread = "a test's thread", .fd = pipe.to.get()});
  const NoNewThreads refused;
  EXPECT_TRUE(writer.put("a line\n"));
  EXPECT_EQ(writer.queued(), 0U);
  EXPECT_EQ(pipe.read(7), "a line\n");
}

// spec: L13.events lines that others append to the same pipe do not come into the middle of ours
TEST(QueuedWriter, WritesWholeLines) {
  const Pipe pipe;
  std::vector<std::string> pieces;
  {
    QueuedWriter writer({.thread = "a test's thread",
                         .write =
                             [&, calls = 0](std::string_view text) mutable {
                               if (calls++ == 0) {
                                 errno = EAGAIN;
                                 return ssize_t{-1};
                               }
                               pieces.emplace_back(text);
                               return static_cast<ssize_t>(text.size());
                             },
                         .may_block = false});
    const NoNewThreads refused;
    for (int line = 0; line < 100; ++line) writer.put(std::string(99, 'x') + "\n");
    writer.put(std::string(10'000, 'y') + "\n");
    writer.finish(testing::kMustHappen, testing::kMustHappen);
  }
  std::size_t bytes = 0;
  for (const std::string& piece : pieces) {
    EXPECT_EQ(piece.back(), '\n');
    bytes += piece.size();
  }
  EXPECT_EQ(bytes, 20'001U);
}

}  // namespace
}  // namespace muster
