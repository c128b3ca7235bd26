#include "muster/base/trusted_place.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "muster/base/temporary_folder.h"

namespace muster {
namespace {

namespace fs = std::filesystem;

class TrustedPlace : public ::testing::Test {
 protected:
  TrustedPlace() {
    fs::create_directories(path("mine/bin"));
    std::ofstream(path("mine/bin/program")) << "#!/bin/sh\n";
    for (const char* each : {"mine", "mine/bin", "mine/bin/program"})
      EXPECT_EQ(::chmod(path(each).c_str(), 0755), 0);
  }
  std::string path(const std::string& name) const { return folder_.path() + "/" + name; }
  void expect_refused(const std::string& at, const std::string& why) const {
    const Status judged = check_trusted_place(path("mine/bin/program"));
    EXPECT_EQ(judged.code(), Code::refused);
    EXPECT_EQ(judged.message().find(path(at) + " "), 0u) << judged.message();
    EXPECT_NE(judged.message().find(why), std::string::npos) << judged.message();
  }

 private:
  const TemporaryFolder folder_{"muster-test-"};  // below /tmp, to which all may write
};

// spec: W3 a program that was looked for counts where it and all above it are this user's or root's
TEST_F(TrustedPlace, OnesOwnAndRootsAreTrusted) {
  EXPECT_TRUE(check_trusted_place(path("mine/bin/program")).ok());
  EXPECT_TRUE(check_trusted_place("/bin/sh").ok()) << "by links of root's";
  fs::create_symlink("mine/bin", path("link"));
  EXPECT_TRUE(check_trusted_place(path("link/../bin/program")).ok());
  EXPECT_EQ(check_trusted_place(path("mine/none")).code(), Code::invalid_argument);
  fs::create_symlink("circle", path("circle"));
  EXPECT_EQ(check_trusted_place(path("circle")).code(), Code::invalid_argument);
}

// spec: W3 a file or folder that others can write to is refused by name, also far above
TEST_F(TrustedPlace, WhatOthersCanWriteIsNot) {
  for (const char* each : {"mine", "mine/bin", "mine/bin/program"}) {
    for (const mode_t loose : {0775U, 0757U}) {
      EXPECT_EQ(::chmod(path(each).c_str(), loose), 0);
      expect_refused(each, "written by others");
    }
    EXPECT_EQ(::chmod(path(each).c_str(), 0755), 0);
  }
  EXPECT_TRUE(is_trusted_place(path("mine/bin/program")));
}

// spec: W3 another user's file, folder or link is refused by name
TEST_F(TrustedPlace, AnothersIsNot) {
  if (::geteuid() != 0) GTEST_SKIP() << "giving files away needs root";
  constexpr uid_t kAnother = 12345;
  for (const char* each : {"mine", "mine/bin", "mine/bin/program"}) {
    EXPECT_EQ(::chown(path(each).c_str(), kAnother, kAnother), 0);
    expect_refused(each, "belongs to user 12345");
    EXPECT_EQ(::chown(path(each).c_str(), 0, 0), 0);
  }
  fs::rename(path("mine/bin"), path("other"));
  fs::create_symlink(path("other"), path("mine/bin"));
  EXPECT_TRUE(check_trusted_place(path("mine/bin/program")).ok());
  EXPECT_EQ(::lchown(path("mine/bin").c_str(), kAnother, kAnother), 0);
  expect_refused("mine/bin", "belongs to user 12345");
}

}  // namespace
}  // namespace muster
