#include "core/shm/copy_past_caches.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

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

}  // namespace
}  // namespace muster::shm
