// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "core/base/process/temporary_folder.h"
#include "core/security/own_files.h"
#include "testing/scratch_folder.h"

namespace muster {
namespace {

const OwnRules kRules{.name = "the ledger"};

class OwnFiles : public ::testing::Test {
 protected:
  std::string file(const std::string& name, mode_t mode = 0600, const std::string& text = "text") {
    const std::string path = folder.file(name);
    std::ofstream(path) << text;
    ::chmod(path.c_str(), mode);
    return path;
  }
  static std::string contents(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }
  template <class Opened>
  static void refused(const Opened& opened, const std::string& path, const std::string& why) {
    ASSERT_FALSE(opened.ok()) << path;
    const std::string& message = opened.status().message();
    EXPECT_EQ(opened.status().code(), Code::refused) << message;
    EXPECT_NE(message.find("the ledger " + path), std::string::npos) << message;
    EXPECT_NE(message.find(why), std::string::npos) << message;
  }
  testing::ScratchFolder folder;
};

TEST_F(OwnFiles, MakesAndOpensWhatIsThisUsers) {
  const std::string path = folder.file("new");
  ASSERT_TRUE(open_own_file(path, O_RDWR | O_CREAT, kRules).ok());
  struct stat info {};
  ASSERT_EQ(::stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  const auto old = open_own_file(file("old", 0644), O_RDONLY, kRules);
  ASSERT_TRUE(old.ok()) << old.status().message();
  EXPECT_EQ(::fcntl(old->get(), F_GETFL) & O_NONBLOCK, 0);
  EXPECT_TRUE(open_own_folder(folder.path(), kRules).ok());
  EXPECT_TRUE(make_own_folder(folder.file("made"), kRules).ok());
  EXPECT_TRUE(make_own_folder(folder.file("made"), kRules).ok()) << "it may be there";
}

// spec: W3.modes loose modes are refused by name, with what to do
TEST_F(OwnFiles, LooseModes) {
  refused(open_own_file(file("group", 0620), O_RDONLY, kRules), folder.file("group"), "mode 0620");
  refused(open_own_file(file("all", 0602), O_RDONLY, kRules), folder.file("all"), "chmod go-w");
  const OwnRules closed{.name = "the ledger", .closed = 077};
  refused(open_own_file(file("read", 0640), O_RDONLY, closed), folder.file("read"), "read");
  std::filesystem::create_directory(folder.file("open"));
  ::chmod(folder.file("open").c_str(), 0777);
  refused(open_own_folder(folder.file("open"), kRules), folder.file("open"), "written");
  refused(make_own_folder(folder.file("open"), kRules), folder.file("open"), "written");
}

// spec: W3.links links are refused by name, and what they lead to stays as it is
TEST_F(OwnFiles, Links) {
  const std::string target = file("target");
  std::filesystem::create_symlink(target, folder.file("link"));
  refused(open_own_file(folder.file("link"), O_RDWR | O_CREAT | O_TRUNC, kRules),
          folder.file("link"), "symbolic link");
  EXPECT_EQ(contents(target), "text");
  std::filesystem::create_symlink(folder.file("nothing"), folder.file("dangling"));
  refused(open_own_file(folder.file("dangling"), O_RDWR | O_CREAT, kRules), folder.file("dangling"),
          "symbolic link");
  EXPECT_FALSE(std::filesystem::exists(folder.file("nothing")));
  std::filesystem::create_directory_symlink(folder.path(), folder.file("folder"));
  refused(open_own_folder(folder.file("folder"), kRules), folder.file("folder"), "symbolic link");
}

// spec: W3 a file with a second name, which others may have laid, is refused and stays as it is
TEST_F(OwnFiles, FilesWithSeveralNames) {
  const std::string target = file("target");
  std::filesystem::create_hard_link(target, folder.file("second"));
  refused(open_own_file(folder.file("second"), O_RDWR | O_CREAT | O_TRUNC, kRules),
          folder.file("second"), "2 names");
  EXPECT_EQ(contents(target), "text");
}

// spec: W3.others files of other users are refused by name
TEST_F(OwnFiles, FilesOfOthers) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make a file another user's";
  const std::string path = file("theirs", 0644);
  ASSERT_EQ(::chown(path.c_str(), 65534, 65534), 0);
  refused(open_own_file(path, O_RDWR | O_CREAT | O_TRUNC, kRules), path, "belongs to user 65534");
  EXPECT_EQ(contents(path), "text") << "not emptied either";
  std::filesystem::create_directory(folder.file("place"));
  ASSERT_EQ(::chown(folder.file("place").c_str(), 65534, 65534), 0);
  refused(open_own_folder(folder.file("place"), kRules), folder.file("place"), "user 65534");
  const OwnRules looking{.name = "the ledger", .root_may_look = true};
  EXPECT_TRUE(open_own_file(path, O_RDONLY, looking).ok());
}

TEST_F(OwnFiles, OtherThingsInAFilesPlace) {
  ASSERT_EQ(::mkfifo(folder.file("pipe").c_str(), 0600), 0);
  refused(open_own_file(folder.file("pipe"), O_RDONLY, kRules), folder.file("pipe"),
          "no regular file");
  refused(open_own_file(folder.path(), O_RDONLY, kRules), folder.path(), "no regular file");
}

TEST_F(OwnFiles, WhatCannotBeOpenedIsTold) {
  const auto nowhere = open_own_file(folder.file("none/file"), O_RDWR | O_CREAT, kRules);
  ASSERT_FALSE(nowhere.ok());
  EXPECT_EQ(nowhere.status().code(), Code::invalid_argument);
  EXPECT_NE(nowhere.status().message().find("directory does not exist"), std::string::npos);
  const auto none = open_own_file(folder.file("none"), O_RDONLY, kRules);
  EXPECT_NE(none.status().message().find("no such file"), std::string::npos)
      << none.status().message();
}

// srun, su and containers pass on what belongs to another session.
TEST_F(OwnFiles, ARuntimeFolderThatIsNotOursDoesNotCount) {
  const std::string fallback = "/tmp/muster-" + std::to_string(::geteuid());
  const auto folder_with = [](const char* runtime) {
    runtime != nullptr ? ::setenv("XDG_RUNTIME_DIR", runtime, 1) : ::unsetenv("XDG_RUNTIME_DIR");
    const std::string found = own_runtime_folder();
    ::unsetenv("XDG_RUNTIME_DIR");
    return found;
  };
  EXPECT_EQ(folder_with(folder.path().c_str()), folder.path() + "/muster");
  EXPECT_EQ(folder_with(nullptr), fallback);
  EXPECT_EQ(folder_with((folder.path() + "/missing").c_str()), fallback);
  EXPECT_EQ(folder_with(file("a file").c_str()), fallback);
  // Root can give the folder away; for others, the root folder is another user's.
  if (::geteuid() == 0) {
    ASSERT_EQ(::chown(folder.path().c_str(), 12345, 12345), 0);
    EXPECT_EQ(folder_with(folder.path().c_str()), fallback);
    ASSERT_EQ(::chown(folder.path().c_str(), 0, 0), 0);
  } else {
    EXPECT_EQ(folder_with("/"), fallback);
  }
  ASSERT_EQ(::chmod(folder.path().c_str(), 0777), 0);
  EXPECT_EQ(folder_with(folder.path().c_str()), fallback) << "others may write there";
}

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

// spec: W3 those who could have replaced the program itself are trusted: its owner, and a group
// that may write to its folder; nobody else is
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
