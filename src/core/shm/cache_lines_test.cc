// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "core/shm/cache_lines.h"

namespace muster::shm {
namespace {

TEST(CopyPastCaches, CopiesEveryLengthFromAndToEverywhere) {
  std::vector<std::byte> from(100'200);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 11 + i / 256);
  for (const std::size_t bytes : {0, 1, 15, 63, 64, 65, 127, 128, 191, 4096, 4097, 100'000}) {
    for (const std::size_t at : {0, 1, 16, 33, 63}) {
      for (const std::size_t shift : {0, 1, 40}) {
        SCOPED_TRACE(::testing::Message() << bytes << " bytes from " << shift << " to " << at);
        alignas(64) static std::byte to[100'200];
        std::fill(std::begin(to), std::end(to), std::byte{0xee});
        copy_past_caches(to + 1 + at, from.data() + shift, bytes);
        const auto differs = std::mismatch(to + 1 + at, to + 1 + at + bytes,
                                           from.begin() + static_cast<std::ptrdiff_t>(shift));
        EXPECT_EQ(differs.first, to + 1 + at + bytes);
        EXPECT_EQ(to[at], std::byte{0xee});
        EXPECT_EQ(to[1 + at + bytes], std::byte{0xee});
      }
    }
  }
}

std::vector<std::byte> numbered(std::size_t bytes, int salt = 0) {
  std::vector<std::byte> all(bytes);
  for (std::size_t i = 0; i < bytes; ++i)
    all[i] = static_cast<std::byte>(i * 7 + i / 251 + static_cast<std::size_t>(salt));
  return all;
}

TEST(ReclaimLines, CopiesAndPreservesTheSource) {
  for (const std::size_t bytes : {0, 1, 63, 64, 65, 2047, 2048, 2049, 4095, 4096, 4097, 100'000}) {
    for (const std::size_t shift : {0, 1, 40}) {
      for (const bool past_caches : {false, true}) {
        SCOPED_TRACE(::testing::Message() << bytes << " bytes from " << shift
                                          << (past_caches ? ", past the caches" : ""));
        const auto before = numbered(bytes + shift + 64);
        auto from = before;
        std::vector<std::byte> to(bytes + 2, std::byte{0xee});
        copy_and_reclaim_lines(to.data() + 1, from.data() + shift, bytes, past_caches);
        EXPECT_EQ(from, before);
        EXPECT_EQ(to.front(), std::byte{0xee});
        EXPECT_EQ(to.back(), std::byte{0xee});
        EXPECT_TRUE(std::equal(to.begin() + 1, to.end() - 1,
                               before.begin() + static_cast<std::ptrdiff_t>(shift)));
      }
    }
  }
}

// Slices of several readers are adjacent, and share lines.
TEST(ReclaimLines, TheRestOfALineMayBelongToOthers) {
  constexpr std::size_t kBytes = 1000;
  auto memory = numbered(2 * kBytes);
  const auto before = memory;
  const auto after = numbered(kBytes, 3);
  std::thread writer([&] {
    for (int time = 0; time < 100; ++time)
      std::copy(after.begin(), after.end(), memory.begin() + kBytes);
  });
  std::vector<std::byte> copied(kBytes);
  for (int time = 0; time < 100; ++time) {
    reclaim_lines(memory.data(), kBytes);
    copy_and_reclaim_lines(copied.data(), memory.data(), kBytes);
  }
  writer.join();
  EXPECT_TRUE(std::equal(memory.begin(), memory.begin() + kBytes, before.begin()));
  EXPECT_TRUE(std::equal(memory.begin() + kBytes, memory.end(), after.begin()));
}

TEST(ReclaimLines, SeveralReadersReclaimTheSameLines) {
  if (!kConcurrentReclaim || !writes_back_lines())
    GTEST_SKIP() << "no reader reclaims lines here, or a race detector is looking";
  constexpr std::size_t kBytes = 10'000;
  auto memory = numbered(kBytes);
  const auto before = memory;
  std::vector<std::vector<std::byte>> copies(3, std::vector<std::byte>(kBytes));
  std::vector<std::thread> readers;
  for (auto& copy : copies) {
    readers.emplace_back([&memory, &copy] {
      for (int time = 0; time < 100; ++time)
        copy_and_reclaim_lines(copy.data(), memory.data(), copy.size());
    });
  }
  for (auto& reader : readers) reader.join();
  EXPECT_EQ(memory, before);
  for (const auto& copy : copies) EXPECT_EQ(copy, before);
}

}  // namespace
}  // namespace muster::shm
