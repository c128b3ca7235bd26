// SPDX-License-Identifier: BSD-3-Clause
#include "core/shm/region_memory.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <fstream>
#include <random>
#include <set>
#include <string>
#include <thread>

#include "core/shm/region_layout.h"
#include "core/shm/shared_mapping.h"
#include "core/shm/testing/region_memory.h"

namespace muster::shm {
namespace {
class RegionMemory : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Kinds, RegionMemory, ::testing::Values(true, false), [](const auto& info) {
  return info.param ? "memory_file" : "ordinary_memory";
});

TEST_P(RegionMemory, SegmentsAreZeroedAlignedAndApart) {
  TestRegion memory(shape_of(2), GetParam());
  auto region = memory.open(0);
  auto peer = memory.open(1);
  std::set<std::uint64_t> offsets;
  for (int round = 0; round < 50; ++round) {
    const std::size_t bytes = 1 + static_cast<std::size_t>(round) * 1777;
    const std::uint64_t offset = (round % 2 == 0 ? region : peer)->claim(bytes).value();
    EXPECT_EQ(offset % 64, 0u);
    EXPECT_EQ(region->at(offset), peer->at(offset));
    for (std::size_t i = 0; i < bytes; ++i) ASSERT_EQ(region->at(offset)[i], std::byte{0});
    std::memset(region->at(offset), 0xff, bytes);
    EXPECT_TRUE(offsets.insert(offset).second);
    if (round % 3 == 2) {
      peer->release(*offsets.begin());
      offsets.erase(offsets.begin());
    }
  }
}

TEST_P(RegionMemory, HeapThatIsFullSaysSoAndServesAgainAfterARelease) {
  TestRegion memory(shape_of(2, 4096, std::size_t{1} << 20), GetParam());
  auto region = memory.open(0);
  std::vector<std::uint64_t> taken;
  for (;;) {
    const auto offset = region->claim(100'000);
    if (!offset) {
      EXPECT_EQ(offset.status().code(), Code::exhausted);
      break;
    }
    taken.push_back(*offset);
  }
  EXPECT_EQ(taken.size(), 8u);
  EXPECT_EQ(region->claim(std::size_t{1} << 40).status().code(), Code::exhausted);
  EXPECT_EQ(region->claim(SIZE_MAX).status().code(), Code::exhausted);
  region->release(taken.back());
  region->release(taken.back());  // a second release is a no-op
  // At the limit, the larger block is split for small ones.
  EXPECT_TRUE(region->claim(10).ok());
  EXPECT_TRUE(region->claim(10).ok());
  EXPECT_FALSE(region->claim(100'000).ok());
}

// Threads claim, fill, check and release: no block is claimed twice at a time, and claimed memory
// is zero.
TEST_P(RegionMemory, HeapSupportsConcurrentClaims) {
  TestRegion memory(shape_of(4), GetParam());
  std::vector<std::thread> threads;
  std::atomic<int> faults{0};
  for (int rank = 0; rank < 4; ++rank) {
    threads.emplace_back([&, rank] {
      auto region = memory.open(rank);
      std::mt19937_64 random(static_cast<unsigned>(rank));
      std::vector<std::pair<std::uint64_t, std::size_t>> mine;
      const auto mark = static_cast<std::byte>(rank + 1);
      for (int round = 0; round < 2000; ++round) {
        if (mine.size() > 8 || (!mine.empty() && random() % 2 == 0)) {
          const std::size_t at = random() % mine.size();
          const auto [offset, bytes] = mine[at];
          for (std::size_t i = 0; i < bytes; i += 512) faults += region->at(offset)[i] != mark;
          region->release(offset);
          mine.erase(mine.begin() + static_cast<std::ptrdiff_t>(at));
        } else {
          const std::size_t bytes = 512 * (1 + random() % 40);
          const auto offset = region->claim(bytes);
          if (!offset) continue;
          for (std::size_t i = 0; i < bytes; i += 512) {
            faults += region->at(*offset)[i] != std::byte{0};
            region->at(*offset)[i] = mark;
          }
          mine.emplace_back(*offset, bytes);
        }
      }
      for (const auto& [offset, bytes] : mine) region->release(offset);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(faults.load(), 0);
}

TEST(RegionMemoryFile, ReleasedSegmentsReturnTheirPages) {
  TestRegion memory(shape_of(2), true);
  auto region = memory.open(0);
  const auto blocks = [&] {
    struct stat file {};
    ::fstat(memory.file.get(), &file);
    return file.st_blocks * 512;
  };
  const auto before = blocks();
  const std::uint64_t offset = region->claim(std::size_t{1} << 24).value();
  std::memset(region->at(offset), 1, std::size_t{1} << 24);
  EXPECT_GE(blocks(), before + (1 << 24));
  region->release(offset);
  EXPECT_LT(blocks(), before + (1 << 20));
}

TEST(RegionMemoryFile, ManyRanksAndALargeHeapCostPagesOnlyAsTheyAreUsed) {
  TestRegion memory(shape_of(64, 128 * 1024, std::size_t{1} << 33), true);
  struct stat file {};
  ::fstat(memory.file.get(), &file);
  EXPECT_GT(file.st_size, std::int64_t{8} << 30);
  EXPECT_LT(file.st_blocks * 512, 1 << 20);
}

TEST(RegionMemoryFile, HeaderThatLiesIsRefused) {
  TestRegion memory(shape_of(2), true);
  RegionShape other = memory.shape;
  other.nonce = 77;
  EXPECT_EQ(open_region(memory.memory, other, 0, memory.owner).status().code(), Code::refused);
  other = memory.shape;
  other.ring_bytes *= 2;
  EXPECT_EQ(open_region(memory.memory, other, 0, memory.owner).status().code(), Code::refused);
  EXPECT_EQ(open_region(memory.memory, shape_of(3), 0, memory.owner).status().code(),
            Code::refused);
  EXPECT_EQ(open_region(memory.memory, memory.shape, 2, memory.owner).status().code(),
            Code::invalid_argument);
  std::memset(memory.memory, 0, 8);
  EXPECT_EQ(open_region(memory.memory, memory.shape, 0, memory.owner).status().code(),
            Code::refused);
}

// Processes are killed at random moments of claiming and releasing: the survivor continues, and
// never gets a block that another process holds.
TEST(RegionMemoryProcesses, HeapSurvivesRanksThatAreKilledWhileTheyUseIt) {
  TestRegion memory(shape_of(3, 4096, std::size_t{1} << 28), true);
  auto region = memory.open(0);
  const std::uint64_t held = region->claim(9000).value();
  std::memset(region->at(held), 0x5a, 9000);
  std::mt19937_64 random(11);
  for (int round = 0; round < 30; ++round) {
    const pid_t child = in_child([&] {
      auto mine = memory.open(1);
      for (std::uint64_t at = 0;; ++at) {
        const auto offset = mine->claim(4096 << (at % 3));
        if (offset.ok()) mine->release(*offset);
      }
      return false;
    });
    for (std::uint64_t i = 0, rounds = random() % 3000; i < rounds; ++i) {
      const auto offset = region->claim(8192);
      ASSERT_TRUE(offset.ok()) << offset.status().message();
      ASSERT_EQ(region->at(*offset)[0], std::byte{0});
      region->at(*offset)[0] = std::byte{1};
      region->release(*offset);
    }
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }
  for (int i = 0; i < 9000; ++i) ASSERT_EQ(region->at(held)[i], std::byte{0x5a});
  EXPECT_TRUE(region->claim(std::size_t{1} << 20).ok());
}

// A rank's memory is readable once the rank is present, and only if the word at the probe's address
// matches.
TEST(RegionMemoryProcesses, MemoryOfAnotherProcessIsReadInPlace) {
  TestRegion memory(shape_of(3), true);
  auto region = memory.open(0);
  auto neighbour = memory.open(2);  // a thread of this process
  EXPECT_TRUE(region->can_read(2));
  EXPECT_FALSE(region->can_read(1));
  int told[2], over[2];
  ASSERT_EQ(::pipe(told), 0);
  ASSERT_EQ(::pipe(over), 0);
  const pid_t child = in_child([&] {
    auto mine = memory.open(1);
    std::array<std::byte, 5000> data{};
    for (std::size_t i = 0; i < data.size(); ++i) data[i] = pattern(i);
    const auto address = reinterpret_cast<std::uint64_t>(data.data());
    char last = 0;
    return ::write(told[1], &address, sizeof(address)) == sizeof(address) &&
           ::read(over[0], &last, 1) == 1;
  });
  std::uint64_t address = 0;
  ASSERT_EQ(::read(told[0], &address, sizeof(address)), static_cast<ssize_t>(sizeof(address)));
  if (!region->can_read(1)) {
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    GTEST_SKIP() << "the system does not let processes read each other's memory "
                    "(kernel.yama.ptrace_scope, or a filter of system calls)";
  }
  std::vector<std::byte> copy(5000);
  ASSERT_TRUE(region->read(1, address, copy));
  for (std::size_t i = 0; i < copy.size(); ++i) ASSERT_EQ(copy[i], pattern(i));
  EXPECT_FALSE(region->read(1, 16, copy));

  auto* read_probes =
      reinterpret_cast<ReadProbe*>(memory.memory + layout_of(memory.shape).read_probes);
  const std::uint64_t word = read_probes[1].word;
  read_probes[1].word = word + 2;  // of another process that reused its pid
  EXPECT_FALSE(memory.open(2)->can_read(1));
  EXPECT_FALSE(region->read(1, address, copy)) << "nor does who has read there before";
  read_probes[1].word = word;
  EXPECT_TRUE(region->read(1, address, copy));

  ASSERT_EQ(::write(over[1], "!", 1), 1);
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_FALSE(region->read(1, address, copy));
  for (const int end : {told[0], told[1], over[0], over[1]}) ::close(end);
}

// The kernel's page of clock data (vvar) stands for driver mappings: only its own process can read
// it.
TEST(RegionMemoryProcesses, MemoryThatADriverHasMappedIsNotReadable) {
  TestRegion memory(shape_of(1), true);
  auto region = memory.open(0);
  std::ifstream maps("/proc/self/maps");
  std::uint64_t address = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("[vvar") != std::string::npos) address = std::stoull(line, nullptr, 16);
  }
  if (address == 0) GTEST_SKIP() << "no page of clock data here";
  std::array<std::byte, 1> byte{};
  EXPECT_FALSE(region->read(0, address, byte));
  EXPECT_TRUE(region->read(0, reinterpret_cast<std::uint64_t>(&address), byte));
}

}  // namespace
}  // namespace muster::shm
