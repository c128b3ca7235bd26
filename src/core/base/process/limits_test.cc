// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>

#include "core/base/descriptor.h"
#include "core/base/log/log.h"
#include "core/base/process/limits.h"

namespace muster {
namespace {

constexpr rlim_t kLimit = 4096;

class LowFileLimit : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before_), 0);
    rlimit low = before_;
    low.rlim_cur = kLimit;
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &low), 0);
  }
  void TearDown() override { ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before_), 0); }

 private:
  rlimit before_{};
};

// A file that grows beyond the limit is an error, and the process goes on
TEST_F(LowFileLimit, AWriteBeyondItFailsAndTheProcessGoesOn) {
  const Descriptor file(::memfd_create("muster-test", MFD_CLOEXEC));
  ASSERT_TRUE(file);
  const std::array<char, 2 * kLimit> bytes{};
  {
    const FileSizeSignalBlock block;
    EXPECT_EQ(::write(file.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(kLimit));
    EXPECT_LT(::write(file.get(), bytes.data(), bytes.size()), 0);
    EXPECT_EQ(errno, EFBIG);
    EXPECT_LT(::ftruncate(file.get(), 2 * kLimit), 0);
  }
  EXPECT_EQ(errno, EFBIG) << "the caller reads it afterwards";
  sigset_t now;
  ASSERT_EQ(::pthread_sigmask(SIG_SETMASK, nullptr, &now), 0);
  EXPECT_EQ(::sigismember(&now, SIGXFSZ), 0);
  EXPECT_NE(errno_text(EFBIG).find("ulimit -f"), std::string::npos) << errno_text(EFBIG);
}

// The log of a process whose standard error is a file that is full.
TEST_F(LowFileLimit, TheLogLosesLinesAndTheProcessGoesOn) {
  const Descriptor file(::memfd_create("muster-test", MFD_CLOEXEC));
  const Descriptor before(::dup(STDERR_FILENO));
  ASSERT_TRUE(file && before);
  ASSERT_EQ(::dup2(file.get(), STDERR_FILENO), STDERR_FILENO);
  for (int line = 0; line < 4; ++line) log(LogLevel::warning, std::string(kLimit / 2, 'x'));
  EXPECT_EQ(::dup2(before.get(), STDERR_FILENO), STDERR_FILENO);
}

}  // namespace
}  // namespace muster
