// SPDX-License-Identifier: BSD-3-Clause
#include "core/shm/arena/arena.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <thread>

#include "core/base/process/limits.h"
#include "core/shm/arena/arena_heap.h"
#include "core/shm/shared_mapping.h"
#include "testing/scratch_folder.h"

namespace muster::shm {
namespace {

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
  EXPECT_NE(memory.status().message().find("in use"), std::string::npos)
      << memory.status().message();
}

TEST(Arena, LargeBlocksReturnTheirPages) {
  Arena& arena = **Arena::of_process();
  const auto pages = [&] {
    struct stat file {};
    ::fstat(arena.descriptor(), &file);
    return static_cast<std::size_t>(file.st_blocks) * 512;
  };
  const std::size_t large = std::size_t{96} << 20, keep = std::size_t{16} << 20;
  arena.set_limits({.keep = keep});
  std::byte* const memory = arena.allocate(large).value();
  for (std::size_t at = 0; at < large; at += 4096) memory[at] = std::byte{1};
  EXPECT_GE(pages(), large);
  arena.free(memory);
  EXPECT_LT(pages(), large / 2);
  EXPECT_LE(arena.stats().bytes_kept, keep);
  EXPECT_GE(arena.stats().bytes_returned, large / 2);
  arena.trim();
  EXPECT_LT(pages(), std::size_t{16} << 20);
  EXPECT_EQ(arena.stats().bytes_kept, 0u);
  arena.set_limits({});
}

// Memory is committed once it is allocated: accesses raise no signal.
TEST(Arena, MemoryIsCommittedBeforeItIsTouched) {
  Arena& arena = **Arena::of_process();
  const auto pages = [&] {
    struct stat file {};
    ::fstat(arena.descriptor(), &file);
    return static_cast<std::size_t>(file.st_blocks) * 512;
  };
  arena.trim();
  const std::size_t before = pages(), bytes = std::size_t{24} << 20;
  std::byte* const memory = arena.allocate(bytes).value();
  EXPECT_GE(pages(), before + bytes);
  arena.free(memory);
}

TEST(Arena, LimitIsKept) {
  Arena& arena = **Arena::of_process();
  arena.trim();
  const std::size_t now = arena.stats().bytes_in_use;
  arena.set_limits({.most = now + (std::size_t{8} << 20)});
  std::byte* const half = arena.allocate(std::size_t{4} << 20).value();
  EXPECT_EQ(arena.allocate(std::size_t{9} << 20).status().code(), Code::exhausted);
  arena.free(half);
  // The kept half is in the way of an allocation that needs everything, and is returned.
  std::byte* const whole = arena.allocate(std::size_t{6} << 20).value();
  arena.free(whole);
  arena.set_limits({});
  std::byte* const more = arena.allocate(std::size_t{20} << 20).value();
  arena.free(more);
}

TEST(Arena, PeersThatMayOnlyReadCannotMapItToWrite) {
  const pid_t child = ::fork();  // the process's arena stays writable for the other tests
  if (child == 0) {
    Arena& arena = **Arena::of_process();
    std::byte* const memory = arena.allocate(100).value();
    memory[0] = std::byte{5};
    arena.make_read_only();
    memory[1] = std::byte{6};  // its owner still writes
    void* const writing =
        ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, arena.descriptor(), 0);
    void* const reading = ::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, arena.descriptor(), 0);
    const bool right =
        arena.is_read_only() && writing == MAP_FAILED && reading != MAP_FAILED &&
        static_cast<std::byte*>(reading)[*arena.offset_of(memory, 100) + 1] == std::byte{6};
    ::_exit(right ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

// spec: D7 memory that a stopped peer may still write to gets no other use until that peer has
// given it up
TEST(Arena, QuarantinedMemoryIsNotReusedOnceFreed) {
  Arena& arena = **Arena::of_process();
  for (const std::size_t bytes : {std::size_t{100}, std::size_t{100'000}, std::size_t{5'000'000}}) {
    SCOPED_TRACE(bytes);
    const std::size_t in_use = arena.bytes_in_use();
    bool held = true;
    std::byte* const exposed = arena.allocate(bytes).value();
    std::byte* const other = arena.allocate(bytes).value();
    arena.quarantine(exposed + bytes / 2, 10, [&held] { return held; });
    EXPECT_EQ(arena.stats().bytes_quarantined, 0u) << "it is in use as before";
    arena.free(exposed);
    arena.free(other);
    EXPECT_GE(arena.stats().bytes_quarantined, bytes);
    EXPECT_LT(arena.stats().bytes_quarantined, bytes + ArenaHeap::kPage);
    EXPECT_EQ(arena.bytes_in_use(), in_use);
    for (int i = 0; i < 3; ++i) {
      std::byte* const next = arena.allocate(bytes).value();
      EXPECT_NE(next, exposed);
      arena.free(next);
      arena.trim();
    }
    held = false;
    arena.trim();
    EXPECT_EQ(arena.stats().bytes_quarantined, 0u);
    EXPECT_EQ(arena.bytes_in_use(), in_use);
  }
}

// The limit applies to the sum; when it is reached, memory that no peer holds any more is found.
TEST(Arena, QuarantinedMemoryCountsForTheLimit) {
  constexpr std::size_t kBytes = std::size_t{32} << 20;
  Arena& arena = **Arena::of_process();
  arena.trim();
  bool held = true;
  std::byte* const exposed = arena.allocate(kBytes).value();
  arena.quarantine(exposed, kBytes, [&held] { return held; });
  arena.free(exposed);
  arena.set_limits({.most = arena.bytes_in_use() + kBytes + kBytes / 2, .keep = 0});
  const auto none = arena.allocate(kBytes);
  EXPECT_EQ(none.status().code(), Code::exhausted);
  EXPECT_NE(none.status().message().find(std::to_string(kBytes) + " more are quarantined"),
            std::string::npos)
      << none.status().message();
  held = false;
  const auto some = arena.allocate(kBytes);
  EXPECT_TRUE(some.ok()) << some.status().message();
  if (some.ok()) arena.free(*some);
  arena.set_limits({});
}

/// A peer's mapping of one block of the arena.
class PeersView {
 public:
  PeersView(const Arena& arena, const std::byte* memory, std::size_t bytes)
      : bytes_(bytes),
        memory_(static_cast<std::byte*>(
            ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, arena.descriptor(),
                   static_cast<off_t>(*arena.offset_of(memory, bytes))))) {}
  ~PeersView() { ::munmap(memory_, bytes_); }
  void fill(std::byte with) { std::fill_n(memory_, bytes_, with); }
  std::byte operator[](std::size_t at) const { return memory_[at]; }

 private:
  std::size_t bytes_;
  std::byte* memory_;
};

bool all_are(const std::byte* memory, std::size_t bytes, int value) {
  return std::all_of(memory, memory + bytes,
                     [value](std::byte byte) { return byte == static_cast<std::byte>(value); });
}

// spec: D7 who goes on after a failure does so with memory that a stopped rank which comes back
// leaves alone
TEST(Arena, QuarantinedMemoryIsPrivateWhileInUse) {
  constexpr std::size_t kBytes = 50 * ArenaHeap::kPage + 100;
  Arena& arena = **Arena::of_process();
  bool held = true;
  std::byte* const memory = arena.allocate(kBytes).value();
  std::fill_n(memory, kBytes, std::byte{1});
  PeersView peer(arena, memory, kBytes);
  for (int again = 0; again < 2; ++again) {  // two failed calls
    arena.quarantine(memory, kBytes, [&held] { return held; });
    EXPECT_TRUE(all_are(memory, kBytes, 1));
    peer.fill(std::byte{9});
    EXPECT_TRUE(all_are(memory, kBytes, 1)) << "a late store shows";
  }
  EXPECT_FALSE(arena.offset_of(memory, kBytes)) << "peers do not see what stands there";
  EXPECT_EQ(Arena::holder_of(memory), &arena);
  std::fill_n(memory, kBytes, std::byte{2});

  const pid_t child = ::fork();
  if (child == 0) {
    const bool same = all_are(memory, kBytes, 2);
    std::fill_n(memory, kBytes, std::byte{3});
    ::_exit(same && all_are(memory, kBytes, 3) ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(all_are(memory, kBytes, 2));

  arena.free(memory);
  EXPECT_GE(arena.stats().bytes_quarantined, kBytes);
  peer.fill(std::byte{9});
  held = false;
  arena.trim();
  EXPECT_EQ(arena.stats().bytes_quarantined, 0u);
  std::byte* const next = arena.allocate(kBytes).value();
  std::fill_n(next, kBytes, std::byte{4});
  ASSERT_TRUE(arena.offset_of(next, kBytes));
  const PeersView view(arena, next, kBytes);
  EXPECT_EQ(view[0], std::byte{4}) << "peers see what has the memory now";
  EXPECT_EQ(view[kBytes - 1], std::byte{4});
  arena.free(next);
}

// A slice: the rest of its block may be granted to other peers, which write to it.
TEST(Arena, QuarantiningAPartLeavesTheRestShared) {
  constexpr std::size_t kPage = ArenaHeap::kPage, kBytes = 10 * kPage;
  Arena& arena = **Arena::of_process();
  std::byte* const memory = arena.allocate(kBytes).value();
  std::fill_n(memory, kBytes, std::byte{1});
  PeersView peer(arena, memory, kBytes);
  bool held = true;
  arena.quarantine(memory + 2 * kPage + 100, 4 * kPage, [&held] { return held; });
  peer.fill(std::byte{9});
  for (std::size_t page = 0; page < 10; ++page) {
    SCOPED_TRACE(page);
    const bool own = page >= 3 && page < 6;
    EXPECT_TRUE(all_are(memory + page * kPage, kPage, own ? 1 : 9));
    EXPECT_EQ(arena.offset_of(memory + page * kPage, kPage).has_value(), !own);
  }
  held = false;
  arena.free(memory);
  arena.trim();
  EXPECT_EQ(arena.stats().bytes_quarantined, 0u);
}

// Another thread writes next to it all the time.
#if !defined(__SANITIZE_THREAD__)  // it takes the remapping for a write
TEST(Arena, NoStoreIsLostDuringIsolation) {
  constexpr std::size_t kPage = ArenaHeap::kPage, kPages = 500;
  Arena& arena = **Arena::of_process();
  std::byte* const memory = arena.allocate(kPages * kPage).value();
  std::fill_n(memory, kPages * kPage, std::byte{0});
  bool held = true;
  std::atomic<bool> over{false};
  std::uint64_t rounds = 0;
  std::thread writer([&] {
    for (; !over.load() || rounds < 10; ++rounds) {
      for (std::size_t page = 0; page < kPages; ++page)
        ++*reinterpret_cast<std::uint64_t*>(memory + page * kPage);
    }
  });
  for (std::size_t page = 0; page + 5 < kPages; page += 5)
    arena.quarantine(memory + page * kPage, 5 * kPage, [&held] { return held; });
  over = true;
  writer.join();
  for (std::size_t page = 0; page < kPages; ++page)
    ASSERT_EQ(*reinterpret_cast<std::uint64_t*>(memory + page * kPage), rounds);
  held = false;
  arena.free(memory);
  arena.trim();
  EXPECT_EQ(arena.stats().bytes_quarantined, 0u);
}
#endif

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
          faults += memory[0] != static_cast<std::byte>(id) ||
                    memory[bytes - 1] != static_cast<std::byte>(id);
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
  const testing::ScratchFolder folder;
  const Descriptor plain(::open(folder.file("plain").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_EQ(::ftruncate(plain.get(), 8192), 0);
  EXPECT_EQ(map_shared(plain.get(), 1).status().code(), Code::refused);
  const auto sealed = make_memory_file("muster-test", 8192);
  ASSERT_TRUE(sealed.ok());
  EXPECT_NE(::ftruncate(sealed->get(), 4096), 0);
  EXPECT_EQ(map_shared(sealed->get(), 8193).status().code(), Code::refused);
}

// A data loader's worker is forked while tensors are in the arena: it may read them and write to
// its own copy. Memory that it frees stays allocated in the parent.
TEST(Arena, ForkedChildNeitherTakesNorFrees) {
  Arena& arena = **Arena::of_process();
  std::byte* const memory = arena.allocate(100).value();
  std::memset(memory, 7, 100);
  const std::size_t before = arena.bytes_in_use();
  const pid_t child = ::fork();
  if (child == 0) {
    const bool readable = memory[99] == std::byte{7};
    arena.free(memory);
    const bool refused = arena.allocate(10).status().code() == Code::aborted &&
                         ::fcntl(arena.descriptor(), F_GETFD) == -1;
    // The child may create its own arena, which leaves the inherited memory alone.
    Arena& own = **Arena::of_process();
    std::byte* const mine = own.allocate(100).value();
    std::memset(mine, 9, 100);
    own.free(memory);
    const bool apart = &own != &arena && !own.offset_of(memory, 100) &&
                       memory[99] == std::byte{7} && own.bytes_in_use() > 0;
    own.free(mine);
    memory[0] = std::byte{8};
    const bool told = Arena::holder_of(memory) == &arena &&
                      Arena::holder_of(own.at(0, 1)) == &own &&
                      Arena::holder_of(reinterpret_cast<std::byte*>(&own)) == nullptr &&
                      memory[0] == std::byte{8};
    ::_exit(readable && refused && apart && told && own.bytes_in_use() == 0 ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(arena.bytes_in_use(), before);
  EXPECT_EQ(memory[0], std::byte{7}) << "a child's write shows in its parent";
  std::byte* const another = arena.allocate(100).value();
  EXPECT_NE(another, memory);
  arena.free(another);
  arena.free(memory);
}

// A child that joins a job as its own rank maps its parent's arena like any other peer's, not the
// inherited copy.
TEST(Arena, ForkedChildMapsTheParentsFileAnew) {
  Arena& arena = **Arena::of_process();
  std::byte* const memory = arena.allocate(64).value();
  const Descriptor passed(::fcntl(arena.descriptor(), F_DUPFD_CLOEXEC, 3));  // as over a socket
  const std::uint64_t offset = *arena.offset_of(memory, 64);
  memory[0] = std::byte{1};
  const pid_t child = ::fork();
  if (child == 0) {
    const auto mapping = map_shared(passed.get(), 1);
    if (!mapping.ok() || (*mapping)->memory() + offset == memory) ::_exit(1);
    (*mapping)->memory()[offset] = std::byte{2};
    ::_exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(memory[0], std::byte{2});
  arena.free(memory);
}

TEST(HostMemory, KnowsTheMachineAndItsControlGroups) {
  const HostMemory here = host_memory();
  EXPECT_GT(here.limit, std::size_t{64} << 20);
  EXPECT_GT(here.available, 0u);
  EXPECT_LE(here.available, here.limit);

  const std::filesystem::path root =
      std::filesystem::path(::testing::TempDir()) / ("host_memory_" + std::to_string(::getpid()));
  const auto write = [&](const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text;
  };
  write("proc/meminfo", "MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:    900 kB\n");
  EXPECT_EQ(host_memory(root).limit, 1000u * 1024);
  EXPECT_EQ(host_memory(root).available, 900u * 1024);
  write("proc/self/cgroup", "0::/jobs/one\n");
  write("sys/fs/cgroup/jobs/one/memory.max", "max\n");
  write("sys/fs/cgroup/jobs/memory.max", "500000\n");
  write("sys/fs/cgroup/jobs/memory.current", "400000\n");
  write("sys/fs/cgroup/jobs/memory.stat", "anon 250000\ninactive_file 100000\nactive_file 50000\n");
  EXPECT_EQ(host_memory(root).limit, 500'000u);
  EXPECT_EQ(host_memory(root).available, 250'000u);
  write("proc/self/cgroup", "5:cpu,memory:/old\n0::/\n");
  write("sys/fs/cgroup/memory/old/memory.limit_in_bytes", "300000\n");
  write("sys/fs/cgroup/memory/old/memory.usage_in_bytes", "400000\n");
  EXPECT_EQ(host_memory(root).limit, 300'000u);
  EXPECT_EQ(host_memory(root).available, 0u);
  std::filesystem::remove_all(root);
}

#if !defined(__SANITIZE_THREAD__)  // its shadow memory needs more than any limit
// spec: M1 where address space is limited (ulimit -v) there is no arena that peers could not map
TEST(Arena, ThereIsNoneWhereAddressSpaceIsLimited) {
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit most{std::size_t{1} << 45, std::size_t{1} << 45};
    if (::setrlimit(RLIMIT_AS, &most) != 0) ::_exit(2);
    const auto arena = Arena::of_process();
    const bool named = arena.status().message().find("ulimit -v") != std::string::npos;
    ::_exit(arena.status().code() == Code::exhausted && named ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}
#endif

}  // namespace
}  // namespace muster::shm
