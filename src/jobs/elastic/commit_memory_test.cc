// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/elastic/commit_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <string_view>
#include <utility>

namespace muster::elastic {
namespace {

Descriptor again(const CommitMemory& memory) {
  return Descriptor(::fcntl(memory.descriptor(), F_DUPFD_CLOEXEC, 0));
}

void begin(CommitMemory& memory, const CommitId& id, std::string_view about,
           std::string_view data) {
  ASSERT_TRUE(memory.begin({id, 1, 2, about.size(), data.size()}).ok());
  std::memcpy(memory.description().data(), about.data(), about.size());
  std::memcpy(memory.data().data(), data.data(), data.size());
}

// spec: L7 what a process has written is there for another one that gets the descriptor
TEST(CommitMemory, IsReadByAnotherProcess) {
  auto memory = CommitMemory::make();
  ASSERT_TRUE(memory.ok());
  EXPECT_FALSE(memory->label());
  const std::string data(100'000, 'd');
  begin(*memory, {3, 7}, "about", data);
  memory->finish();
  memory->set_agreed();
  auto opened = CommitMemory::open(again(*memory));
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  ASSERT_TRUE(opened->label());
  EXPECT_EQ(opened->label()->id, (CommitId{3, 7}));
  EXPECT_EQ(opened->label()->rank, 1);
  EXPECT_EQ(opened->label()->world_size, 2);
  EXPECT_TRUE(opened->is_agreed());
  EXPECT_EQ(as_text(opened->held_description()), "about");
  EXPECT_EQ(as_text(opened->held_data()), data);
}

// spec: L7 a commit that a death has torn is none
TEST(CommitMemory, ATornCommitIsNone) {
  auto memory = CommitMemory::make();
  ASSERT_TRUE(memory.ok());
  begin(*memory, {1, 7}, "about", "data");
  memory->finish();
  begin(*memory, {1, 8}, "about", std::string(50'000, 'e'));
  const auto opened = CommitMemory::open(again(*memory));
  ASSERT_TRUE(opened.ok());
  EXPECT_FALSE(opened->label());
  EXPECT_FALSE(opened->is_agreed());
  memory->finish();
  ASSERT_TRUE(opened->label());
  EXPECT_EQ(opened->label()->id.number, 8);
}

// spec: L7 a descriptor of anything else is refused
TEST(CommitMemory, OtherFilesAreRefused) {
  Descriptor plain(::memfd_create("a test", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(plain.get(), 8192), 0);
  EXPECT_EQ(CommitMemory::open(std::move(plain)).status().code(), Code::refused);
  Descriptor sealed(::memfd_create("a test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(sealed.get(), 8192), 0);
  ASSERT_EQ(::fcntl(sealed.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  EXPECT_EQ(CommitMemory::open(std::move(sealed)).status().code(), Code::refused);
  EXPECT_EQ(CommitMemory::open(Descriptor(::open("/dev/null", O_RDWR))).status().code(),
            Code::refused);
}

// spec: L7 a commit beyond `ulimit -f` is an error, and the process goes on
TEST(CommitMemory, BeyondTheLimitOfFileSizesIsAnError) {
  auto memory = CommitMemory::make();
  ASSERT_TRUE(memory.ok());
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit low = before;
  low.rlim_cur = rlim_t{1} << 16;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &low), 0);
  const Status refused = memory->begin({{3, 7}, 1, 2, 5, std::size_t{1} << 20});
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(refused.code(), Code::exhausted);
  EXPECT_NE(refused.message().find("ulimit -f"), std::string::npos) << refused.message();
  begin(*memory, {3, 8}, "about", "data");
}

}  // namespace
}  // namespace muster::elastic
