// SPDX-License-Identifier: BSD-3-Clause
#include "core/shm/shared_mapping.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

namespace muster::shm {
namespace {

// The system would end the process by SIGXFSZ.
TEST(SharedMapping, AFileBeyondTheLimitIsAnErrorThatNamesIt) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit low = before;
  low.rlim_cur = 1 << 20;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &low), 0);
  const auto refused = make_memory_file("muster-test", std::size_t{2} << 20);
  const auto fits = make_memory_file("muster-test", std::size_t{1} << 20);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(refused.status().code(), Code::exhausted);
  EXPECT_NE(refused.status().message().find("ulimit -f"), std::string::npos)
      << refused.status().message();
  EXPECT_TRUE(fits.ok()) << fits.status().message();
}

}  // namespace
}  // namespace muster::shm
