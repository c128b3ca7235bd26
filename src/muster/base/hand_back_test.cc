#include "muster/base/hand_back.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <vector>

namespace muster {
namespace {

std::vector<std::byte> numbered(std::size_t bytes, int salt = 0) {
  std::vector<std::byte> all(bytes);
  for (std::size_t i = 0; i < bytes; ++i) all[i] = static_cast<std::byte>(i * 7 + i / 251 + static_cast<std::size_t>(salt));
  return all;
}

TEST(HandBack, CopiesAndLeavesWhatStandsThere) {
  for (const std::size_t bytes : {0, 1, 63, 64, 65, 4095, 4096, 4097, 100'000}) {
    for (const std::size_t shift : {0, 1, 40}) {
      SCOPED_TRACE(::testing::Message() << bytes << " bytes from " << shift);
      const auto before = numbered(bytes + shift + 64);
      auto from = before;
      std::vector<std::byte> to(bytes + 2, std::byte{0xee});
      copy_and_hand_back(to.data() + 1, from.data() + shift, bytes);
      EXPECT_EQ(from, before);
      EXPECT_EQ(to.front(), std::byte{0xee});
      EXPECT_EQ(to.back(), std::byte{0xee});
      EXPECT_TRUE(std::equal(to.begin() + 1, to.end() - 1, before.begin() + static_cast<std::ptrdiff_t>(shift)));
    }
  }
}

// Slices of several readers lie side by side, in the same lines too.
TEST(HandBack, NeighboursInALineMayBeAnybodys) {
  constexpr std::size_t kBytes = 1000;
  auto memory = numbered(2 * kBytes);
  const auto before = memory;
  const auto after = numbered(kBytes, 3);
  std::thread writer([&] {
    for (int time = 0; time < 100; ++time) std::copy(after.begin(), after.end(), memory.begin() + kBytes);
  });
  for (int time = 0; time < 100; ++time) hand_back(memory.data(), kBytes);
  writer.join();
  EXPECT_TRUE(std::equal(memory.begin(), memory.begin() + kBytes, before.begin()));
  EXPECT_TRUE(std::equal(memory.begin() + kBytes, memory.end(), after.begin()));
}

}  // namespace
}  // namespace muster
