// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/process/temporary_folder.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <optional>

namespace muster {
namespace {

/// Sets another TMPDIR while it lives.
class OtherPlace {
 public:
  explicit OtherPlace(const std::string& path) {
    if (const char* before = ::getenv("TMPDIR")) before_ = before;
    ::setenv("TMPDIR", path.c_str(), 1);
  }
  ~OtherPlace() { before_ ? ::setenv("TMPDIR", before_->c_str(), 1) : ::unsetenv("TMPDIR"); }

 private:
  std::optional<std::string> before_;
};

TEST(TemporaryFolder, GoesWithAllItHolds) {
  std::string path;
  {
    const TemporaryFolder one("muster-test-"), other("muster-test-");
    path = one.path();
    EXPECT_NE(path, other.path());
    EXPECT_NE(path.find("/muster-test-"), std::string::npos);
    std::filesystem::create_directories(path + "/a/b");
    std::ofstream(path + "/a/b/file") << "text";
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(TemporaryFolder, StaysWhereAForkedChildEnds) {
  std::optional<TemporaryFolder> folder(std::in_place, "muster-test-");
  const std::string path = folder->path();
  const pid_t child = ::fork();
  if (child == 0) {
    folder.reset();
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(std::filesystem::exists(path));
  folder.reset();
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(TemporaryFolder, OfAKilledProcessIsRemovedByTheNext) {
  const TemporaryFolder place("muster-test-");
  const OtherPlace other(place.path());
  const TemporaryFolder living("inner-");
  ASSERT_TRUE(make_temporary_folder("inner-").ok());  // it stays
  const pid_t child = ::fork();
  if (child == 0) {
    new TemporaryFolder("inner-");
    ::raise(SIGKILL);
  }
  ::waitpid(child, nullptr, 0);
  const auto count = [&] {
    return std::distance(std::filesystem::directory_iterator(place.path()), {});
  };
  EXPECT_EQ(count(), 3) << "nothing could remove that of the killed one";
  const TemporaryFolder next("inner-");
  EXPECT_EQ(count(), 3);
  EXPECT_TRUE(std::filesystem::exists(living.path()));
  EXPECT_TRUE(std::filesystem::exists(next.path()));
}

TEST(TemporaryFolder, StandsWhereTheSystemIsToldTo) {
  const TemporaryFolder outer("muster-test-");
  const OtherPlace place(outer.path());
  const auto made = make_temporary_folder("inner-");
  ASSERT_TRUE(made.ok()) << made.status().message();
  EXPECT_EQ(made->find(outer.path() + "/inner-"), 0u);
  EXPECT_TRUE(std::filesystem::exists(*made)) << "it stays";
}

TEST(TemporaryFolder, ThatCannotBeMadeIsTold) {
  const OtherPlace place("/nowhere/at/all");
  EXPECT_TRUE(TemporaryFolder("muster-test-").path().empty());
  const auto made = make_temporary_folder("muster-test-");
  ASSERT_FALSE(made.ok());
  EXPECT_NE(made.status().message().find("TMPDIR"), std::string::npos) << made.status().message();
}

}  // namespace
}  // namespace muster
