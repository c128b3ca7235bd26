// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/format/files/disk.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <vector>

#include "testing/scratch_folder.h"

namespace muster::shards {
namespace {

// spec: S4 a file of a checkpoint beyond the limit on file sizes is an error that says so
TEST(FileWriter, AFileBeyondTheLimitIsAnErrorThatNamesIt) {
  const muster::testing::ScratchFolder scratch;
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit low = before;
  low.rlim_cur = 4096;
  auto file = FileWriter::create(scratch.file("shard"));
  ASSERT_TRUE(file.ok()) << file.status().message();
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &low), 0);
  const Status refused = file->write(std::vector<std::byte>(8192));
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(refused.code(), Code::exhausted);
  EXPECT_NE(refused.message().find("ulimit -f"), std::string::npos) << refused.message();
}

}  // namespace
}  // namespace muster::shards
