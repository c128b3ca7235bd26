#include "core/security/trusted_place.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "core/base/process/temporary_folder.h"

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
    const Status status = judged(path("mine/bin/program"));
    EXPECT_EQ(status.code(), Code::refused);
    EXPECT_EQ(status.message().find(path(at) + " "), 0u) << status.message();
    EXPECT_NE(status.message().find(why), std::string::npos) << status.message();
  }
  /// By a program of root's.
  static Status judged(const std::string& place) { return check_trusted_place(place, "/bin/sh"); }

 private:
  const TemporaryFolder folder_{"muster-test-"};  // below /tmp, to which all may write
};

// spec: W3 a program that was looked for counts where it and all above it are this user's or root's
TEST_F(TrustedPlace, OnesOwnAndRootsAreTrusted) {
  EXPECT_TRUE(judged(path("mine/bin/program")).ok());
  EXPECT_TRUE(judged("/bin/sh").ok()) << "by links of root's";
  fs::create_symlink("mine/bin", path("link"));
  EXPECT_TRUE(judged(path("link/../bin/program")).ok());
  EXPECT_EQ(judged(path("mine/none")).code(), Code::invalid_argument);
  fs::create_symlink("circle", path("circle"));
  EXPECT_EQ(judged(path("circle")).code(), Code::invalid_argument);
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
  EXPECT_TRUE(judged(path("mine/bin/program")).ok());
  EXPECT_EQ(::lchown(path("mine/bin").c_str(), kAnother, kAnother), 0);
  expect_refused("mine/bin", "belongs to user 12345");
}

// spec: W3 whoever could have replaced the program itself is trusted: its owner, and a group that
// may write to its folder; nobody else is
TEST_F(TrustedPlace, WhoOwnsTheProgramIsTrusted) {
  if (::geteuid() != 0) GTEST_SKIP() << "giving files away needs root";
  constexpr uid_t kColleague = 12345, kProject = 23456, kUnknown = 65534;
  const std::string program = path("mine/bin/program"), beside = path("mine/bin/python");
  std::ofstream(beside) << "#!/bin/sh\n";
  EXPECT_EQ(::chmod(beside.c_str(), 0755), 0);
  for (const std::string& each : {program, beside})
    EXPECT_EQ(::chown(each.c_str(), kColleague, kColleague), 0);
  EXPECT_TRUE(check_trusted_place(beside, program).ok());
  EXPECT_EQ(check_trusted_place(beside, "/bin/sh").code(), Code::refused);

  for (const std::string& each : {path("mine"), path("mine/bin"), program, beside}) {
    EXPECT_EQ(::chown(each.c_str(), 0, kProject), 0);
    EXPECT_EQ(::chmod(each.c_str(), 0775), 0);
  }
  EXPECT_TRUE(check_trusted_place(beside, program).ok());
  EXPECT_EQ(check_trusted_place(beside, "/bin/sh").code(), Code::refused);

  // Those of a group that may write to a sticky folder alone cannot replace what is in it.
  for (const std::string& each : {path("mine/bin"), program})
    EXPECT_EQ(::chmod(each.c_str(), 0755), 0);
  EXPECT_EQ(::chmod(path("mine").c_str(), 01775), 0);
  EXPECT_EQ(check_trusted_place(beside, program).code(), Code::refused);

  // As where a user namespace maps this user alone: what is not above the program may be anyone's.
  for (const std::string& each : {path("mine"), path("mine/bin"), beside}) {
    EXPECT_EQ(::chown(each.c_str(), each == beside ? 0 : kUnknown, 0), 0);
    EXPECT_EQ(::chmod(each.c_str(), 0755), 0);
  }
  EXPECT_TRUE(check_trusted_place(beside, program).ok());
  EXPECT_EQ(::chown(beside.c_str(), kUnknown, 0), 0);
  const Status status = check_trusted_place(beside, program);
  EXPECT_EQ(status.code(), Code::refused);
  EXPECT_NE(status.message().find("may have no number here"), std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace muster
