#include "muster/transport/arena.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <random>
#include <thread>

#include "muster/transport/arena_heap.h"
#include "muster/transport/shared_mapping.h"

namespace muster::transport {
namespace {

TEST(ArenaHeap, BlocksAreAlignedApartAndComeBack) {
  ArenaHeap heap(std::size_t{1} << 30, std::size_t{1} << 20);
  std::mt19937_64 random(5);
  std::map<std::uint64_t, std::size_t> used;
  std::vector<ArenaHeap::Range> punch;
  for (int round = 0; round < 20'000; ++round) {
    if (random() % 100 < 55) {
      const std::size_t bytes = random() % 3 == 0 ? random() % 500'000 : random() % 40'000;
      const auto offset = heap.allocate(bytes);
      ASSERT_TRUE(offset);
      ASSERT_EQ(*offset % ArenaHeap::kAlignment, 0u);
      const auto next = used.lower_bound(*offset);
      if (next != used.end()) {
        ASSERT_GE(next->first, *offset + bytes);
      }
      if (next != used.begin()) {
        ASSERT_LE(std::prev(next)->first + std::prev(next)->second, *offset);
      }
      used.emplace(*offset, std::max<std::size_t>(bytes, 1));
    } else if (!used.empty()) {
      auto at = used.lower_bound(random() % (used.rbegin()->first + 1));
      punch.clear();
      ASSERT_TRUE(heap.free(at->first, punch));
      used.erase(at);
      for (const auto& range : punch) {
        const auto inside = used.lower_bound(range.offset);
        if (inside != used.end()) {
          ASSERT_GE(inside->first, range.offset + range.bytes) << "memory in use would be punched";
        }
      }
      ASSERT_LE(heap.bytes_kept(), std::size_t{1} << 20);
    }
  }
  for (const auto& [offset, bytes] : used) ASSERT_TRUE(heap.free(offset, punch));
  EXPECT_EQ(heap.bytes_in_use(), 0u);
}

TEST(ArenaHeap, NeighboursAreJoinedAndTheLimitHolds) {
  ArenaHeap heap(std::size_t{1} << 20, 0);
  std::vector<std::uint64_t> quarters;
  std::vector<ArenaHeap::Range> punch;
  for (int i = 0; i < 4; ++i) quarters.push_back(heap.allocate(1 << 18).value());
  EXPECT_FALSE(heap.allocate(40'000));
  EXPECT_FALSE(heap.allocate(SIZE_MAX));
  for (const int i : {0, 2, 3, 1}) EXPECT_TRUE(heap.free(quarters[static_cast<std::size_t>(i)], punch));
  EXPECT_FALSE(heap.free(quarters[0], punch)) << "given back twice";
  EXPECT_EQ(heap.allocate(1 << 20), 0u);
}

TEST(Arena, MemoryIsAlignedAndKnowsWhereItStands) {
  Arena& arena = **Arena::of_process();
  EXPECT_EQ(&arena, *Arena::of_process());
  EXPECT_EQ(&arena, Arena::if_made());
  std::byte* const nothing = arena.allocate(0).value();
  EXPECT_NE(nothing, nullptr);
  std::byte* const memory = arena.allocate(100'000).value();
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 64, 0u);
  const auto offset = arena.offset_of(memory, 100'000);
  ASSERT_TRUE(offset);
  EXPECT_EQ(arena.at(*offset, 100'000), memory);
  std::vector<std::byte> elsewhere(10);
  EXPECT_FALSE(arena.offset_of(elsewhere.data(), 10));
  EXPECT_FALSE(arena.offset_of(memory, SIZE_MAX));
  EXPECT_EQ(arena.at(*offset, SIZE_MAX), nullptr);
  EXPECT_EQ(arena.at(UINT64_MAX, 1), nullptr);
  arena.free(memory);
  arena.free(nothing);
  arena.free(nullptr);
}

TEST(Arena, TooMuchIsRefusedByName) {
  const auto memory = (*Arena::of_process())->allocate(std::size_t{1} << 50);
  EXPECT_EQ(memory.status().code(), Code::exhausted);
  EXPECT_NE(memory.status().message().find("in use"), std::string::npos) << memory.status().message();
}

TEST(Arena, LargeBlocksGiveTheirPagesBack) {
  Arena& arena = **Arena::of_process();
  const auto pages = [&] {
    struct stat file {};
    ::fstat(arena.descriptor(), &file);
    return static_cast<std::size_t>(file.st_blocks) * 512;
  };
  const std::size_t large = std::size_t{400} << 20;
  std::byte* const memory = arena.allocate(large).value();
  for (std::size_t at = 0; at < large; at += 4096) memory[at] = std::byte{1};
  EXPECT_GE(pages(), large);
  arena.free(memory);
  EXPECT_LT(pages(), large / 2);
}

TEST(Arena, ThreadsShareIt) {
  Arena& arena = **Arena::of_process();
  const std::size_t before = arena.bytes_in_use();
  std::vector<std::thread> threads;
  std::atomic<int> faults{0};
  for (int id = 1; id <= 4; ++id) {
    threads.emplace_back([&, id] {
      std::mt19937_64 random(static_cast<unsigned>(id));
      std::vector<std::pair<std::byte*, std::size_t>> mine;
      for (int round = 0; round < 3000; ++round) {
        if (mine.size() < 10) {
          const std::size_t bytes = 1 + random() % 60'000;
          std::byte* const memory = arena.allocate(bytes).value();
          memory[0] = memory[bytes - 1] = static_cast<std::byte>(id);
          mine.emplace_back(memory, bytes);
        } else {
          const auto [memory, bytes] = mine.back();
          faults += memory[0] != static_cast<std::byte>(id) || memory[bytes - 1] != static_cast<std::byte>(id);
          arena.free(memory);
          mine.pop_back();
        }
      }
      for (const auto& [memory, bytes] : mine) arena.free(memory);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(faults.load(), 0);
  EXPECT_EQ(arena.bytes_in_use(), before);
}

TEST(Arena, AnotherMappingOfItsFileInThisProcessIsTheSame) {
  Arena& arena = **Arena::of_process();
  std::byte* const memory = arena.allocate(64).value();
  const auto mapping = map_shared(arena.descriptor(), 1);
  ASSERT_TRUE(mapping.ok()) << mapping.status().message();
  EXPECT_EQ((*mapping)->memory() + *arena.offset_of(memory, 64), memory);
  arena.free(memory);
}

TEST(Arena, FilesThatCouldShrinkAreNotMapped) {
  char name[] = "/tmp/muster-arena-test-XXXXXX";
  const Descriptor plain(::mkstemp(name));
  ::unlink(name);
  ASSERT_EQ(::ftruncate(plain.get(), 8192), 0);
  EXPECT_EQ(map_shared(plain.get(), 1).status().code(), Code::refused);
  const auto sealed = make_memory_file("muster-test", 8192);
  ASSERT_TRUE(sealed.ok());
  EXPECT_NE(::ftruncate(sealed->get(), 4096), 0);
  EXPECT_EQ(map_shared(sealed->get(), 8193).status().code(), Code::refused);
}

// A data loader's worker is forked while tensors stand in the arena: it may read them, and what it frees stays its parent's.
TEST(Arena, ForkedChildNeitherTakesNorFrees) {
  Arena& arena = **Arena::of_process();
  std::byte* const memory = arena.allocate(100).value();
  std::memset(memory, 7, 100);
  const std::size_t before = arena.bytes_in_use();
  const pid_t child = ::fork();
  if (child == 0) {
    const bool readable = memory[99] == std::byte{7};
    arena.free(memory);
    const bool refused = arena.allocate(10).status().code() == Code::aborted && ::fcntl(arena.descriptor(), F_GETFD) == -1;
    // It may have one of its own, which leaves what it inherited alone.
    Arena& own = **Arena::of_process();
    std::byte* const mine = own.allocate(100).value();
    std::memset(mine, 9, 100);
    own.free(memory);
    const bool apart = &own != &arena && !own.offset_of(memory, 100) && memory[99] == std::byte{7} && own.bytes_in_use() > 0;
    own.free(mine);
    ::_exit(readable && refused && apart && own.bytes_in_use() == 0 ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(arena.bytes_in_use(), before);
  std::byte* const another = arena.allocate(100).value();
  EXPECT_NE(another, memory);
  arena.free(another);
  arena.free(memory);
}

}  // namespace
}  // namespace muster::transport
