// SPDX-License-Identifier: BSD-3-Clause
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <set>

#include "core/base/environment.h"
#include "core/net/socket_address.h"
#include "core/security/secret.h"
#include "testing/dump.h"
#include "testing/scratch_folder.h"

namespace muster {
namespace {

/// A directory of its own and an environment without any word of secrets.
class SecretTest : public ::testing::Test {
 protected:
  SecretTest() {
    for (const char* name :
         {"MUSTER_SECRET", "MUSTER_SECRET_FD", "MUSTER_SECRET_FILE", "MUSTER_INSECURE"})
      ::unsetenv(name);
    ::setenv("XDG_RUNTIME_DIR", directory.c_str(), 1);
  }
  ~SecretTest() override {
    for (const char* name : {"MUSTER_SECRET", "MUSTER_SECRET_FD", "MUSTER_SECRET_FILE",
                             "MUSTER_INSECURE", "XDG_RUNTIME_DIR"})
      ::unsetenv(name);
  }
  static bool same(const Secret& a, const Secret& b) {
    const auto message = as_bytes("message");
    return equal_in_constant_time(a.prove(message), b.prove(message));
  }
  /// A file of this user with these permissions.
  std::string file_of(const std::string& name, const std::string& text, mode_t mode = 0600) {
    const std::string path = directory + "/" + name;
    std::ofstream(path) << text;
    ::chmod(path.c_str(), mode);
    return path;
  }
  testing::ScratchFolder folder;
  const std::string directory = folder.path();
};

// Test cases 2 and 6 of RFC 4231: the latter's key is longer than a block.
TEST_F(SecretTest, ProvesWithHmacSha256) {
  EXPECT_EQ(hexadecimal(Secret::given("Jefe").prove(as_bytes("what do ya want for nothing?"))),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(
      hexadecimal(Secret::given(std::string(131, '\xaa'))
                      .prove(as_bytes("Test Using Larger Than Block-Size Key - Hash Key First"))),
      "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST_F(SecretTest, ShortHashIsSha256Cut) {
  EXPECT_EQ(hexadecimal(short_hash("abc")), "ba7816bf8f01cfea414140de5dae2223");
}

TEST_F(SecretTest, ComparesInFull) {
  EXPECT_TRUE(equal_in_constant_time(as_bytes("abc"), as_bytes("abc")));
  EXPECT_FALSE(equal_in_constant_time(as_bytes("abc"), as_bytes("abd")));
  EXPECT_FALSE(equal_in_constant_time(as_bytes("abc"), as_bytes("ab")));
  EXPECT_TRUE(equal_in_constant_time({}, {}));
}

TEST_F(SecretTest, RandomTextsDiffer) {
  std::set<std::string> seen;
  for (int i = 0; i < 100; ++i) seen.insert(Secret::random_text());
  EXPECT_EQ(seen.size(), 100u);
  EXPECT_TRUE(seen.begin()->starts_with("muster-secret-"));
  EXPECT_EQ(seen.begin()->size(), 14u + 64 + 1 + 8);
}

TEST_F(SecretTest, GivenByVariableOrFile) {
  ::setenv("MUSTER_SECRET", "sixteen letters!", 1);
  const auto variable = Secret::from_environment();
  ASSERT_TRUE(variable.ok());
  EXPECT_EQ(variable->kind(), Secret::Kind::given);
  const std::string path = file_of("file", "sixteen letters!\n");
  ::setenv("MUSTER_SECRET_FILE", path.c_str(), 1);
  ::unsetenv("MUSTER_SECRET");
  const auto file = Secret::from_environment();
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_TRUE(same(*file, *variable));
  ::setenv("MUSTER_SECRET", "another secret that counts first", 1);
  EXPECT_FALSE(same(*Secret::from_environment(), *file));
}

TEST_F(SecretTest, ErrorsNameTheVariable) {
  ::setenv("MUSTER_SECRET", "fifteen letters", 1);
  EXPECT_NE(Secret::from_environment().status().message().find("MUSTER_SECRET has 15"),
            std::string::npos);
  ::unsetenv("MUSTER_SECRET");
  ::setenv("MUSTER_SECRET_FILE", "/no/such/file", 1);
  EXPECT_NE(Secret::from_environment().status().message().find("MUSTER_SECRET_FILE"),
            std::string::npos);
  const std::string path = file_of("short", "short");
  ::setenv("MUSTER_SECRET_FILE", path.c_str(), 1);
  EXPECT_NE(Secret::from_environment().status().message().find("5 characters"), std::string::npos);
}

// spec: W4.stretched a chosen text is stretched: what is captured tells nothing that a hash could
// be tried against; the same text gives the same key in every process
TEST_F(SecretTest, ChosenTextsAreStretchedAndRandomOnesAreNot) {
  ::setenv("MUSTER_SECRET", "sixteen letters!", 1);
  const auto chosen = Secret::from_environment();
  ASSERT_TRUE(chosen.ok()) << chosen.status().message();
  EXPECT_FALSE(same(*chosen, Secret::given("sixteen letters!")));
  // Argon2id, 3 passes over 64 MiB, one lane, salt "muster secret v1", 32 bytes.
  EXPECT_TRUE(same(
      *chosen, Secret::given("3d90880037f0c9fac3a1ec3380ce227753227fe1085408843b1b9a1aba85d18b")));
  const std::string random = Secret::random_text();
  ::setenv("MUSTER_SECRET", random.c_str(), 1);
  EXPECT_TRUE(same(*Secret::from_environment(), Secret::given(random)));
}

// spec: W4 only the form of `muster secret` counts as random: 64 digits that somebody chose do not
TEST_F(SecretTest, DigitsAloneAreNoProofOfRandomness) {
  std::string digits;
  for (int i = 0; i < 4; ++i) digits += "0123456789abcdef";
  ::setenv("MUSTER_SECRET", digits.c_str(), 1);
  const auto secret = Secret::from_environment();
  ASSERT_TRUE(secret.ok()) << secret.status().message();
  EXPECT_FALSE(same(*secret, Secret::given(digits)));
}

// spec: W4 a secret that was copied badly is told from one that was chosen
TEST_F(SecretTest, DamagedTextsAreNamed) {
  const std::string whole = Secret::random_text();
  std::string changed = whole;
  changed[20] = changed[20] == 'a' ? 'b' : 'a';
  for (const std::string& damaged :
       {changed, whole.substr(0, whole.size() - 1), whole + "0", std::string("muster-secret-")}) {
    ::setenv("MUSTER_SECRET", damaged.c_str(), 1);
    const Status refused = Secret::from_environment().status();
    EXPECT_EQ(refused.code(), Code::invalid_argument) << damaged;
    EXPECT_NE(refused.message().find("check digits"), std::string::npos) << refused.message();
  }
}

// spec: W4 stretching takes 0.1 s: a process stretches a text once, and what it hands on is not
// stretched again
TEST_F(SecretTest, ATextIsStretchedOnce) {
  ::setenv("MUSTER_SECRET", "a text that is stretched once", 1);
  const std::uint64_t before = stretched_texts();
  const auto first = Secret::from_environment();
  ASSERT_TRUE(first.ok());
  std::vector<std::future<Result<Secret>>> others;
  for (int i = 0; i < 4; ++i)
    others.push_back(std::async(std::launch::async, [] { return Secret::from_environment(); }));
  for (auto& other : others) EXPECT_TRUE(same(*other.get(), *first));
  EXPECT_EQ(stretched_texts(), before + 1);
  const auto file = first->sealed();
  ASSERT_TRUE(file.ok());
  ::unsetenv("MUSTER_SECRET");
  ::setenv("MUSTER_SECRET_FD", ("1:" + std::to_string(file->get())).c_str(), 1);
  EXPECT_TRUE(same(*Secret::from_environment(), *first));
  EXPECT_EQ(stretched_texts(), before + 1);
}

// spec: W1 an observers' key is made of the secret, tells nothing of it, and joins nothing
TEST_F(SecretTest, AnObserversKeyOnlyObserves) {
  const Secret whole = Secret::given(Secret::random_text());
  const std::string text = whole.observer_text();
  EXPECT_TRUE(text.starts_with("muster-observer-"));
  EXPECT_FALSE(same(whole.observer(), whole));
  EXPECT_FALSE(whole.is_observer());
  ::setenv("MUSTER_SECRET", text.c_str(), 1);
  const Status refused = Secret::from_environment().status();
  EXPECT_EQ(refused.code(), Code::refused);
  EXPECT_NE(refused.message().find("needs the job's secret"), std::string::npos);
  const auto observer = Secret::from_environment(Secret::Use::observe);
  ASSERT_TRUE(observer.ok()) << observer.status().message();
  EXPECT_TRUE(observer->is_observer());
  EXPECT_TRUE(same(*observer, whole.observer()));
  EXPECT_TRUE(same(observer->observer(), *observer));
}

// spec: W4.weak weak secrets are refused, and the message says what makes a good one
TEST_F(SecretTest, TextsOfFewCharactersAreRefused) {
  for (const char* weak : {"aaaaaaaaaaaaaaaaaaaaaaaa", "passwordpassword", "12341234123412341234",
                           "0000000000000000000000000000000000000000000000000000000000000000"}) {
    ::setenv("MUSTER_SECRET", weak, 1);
    const Status refused = Secret::from_environment().status();
    EXPECT_EQ(refused.code(), Code::invalid_argument) << weak;
    EXPECT_NE(refused.message().find("MUSTER_SECRET is made of"), std::string::npos)
        << refused.message();
    EXPECT_NE(refused.message().find("muster secret"), std::string::npos) << refused.message();
  }
}

// spec: W3 a secret's file that others can read, or that is another user's or a link, is refused by
// name
TEST_F(SecretTest, FilesThatOthersReadAreRefused) {
  const auto refused = [&](const std::string& path, const std::string& why) {
    ::setenv("MUSTER_SECRET_FILE", path.c_str(), 1);
    const Status status = Secret::from_environment().status();
    EXPECT_EQ(status.code(), Code::refused) << path;
    EXPECT_NE(status.message().find(path), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(why), std::string::npos) << status.message();
  };
  const std::string text = "sixteen letters!";
  refused(file_of("group", text, 0640), "mode 0640");
  refused(file_of("world", text, 0604), "chmod go-rwx");
  std::filesystem::create_symlink(file_of("good", text), directory + "/link");
  refused(directory + "/link", "symbolic link");
}

// spec: W4 workers inherit the secret in a sealed memory file; one without the descriptor finds it
// with the launcher
TEST_F(SecretTest, HandedDownInASealedFile) {
  const Secret mine = Secret::given(Secret::random_text());
  auto file = mine.sealed();
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_LT(::write(file->get(), "x", 1), 0) << "nobody can change it any more";
  EXPECT_LT(::ftruncate(file->get(), 0), 0);
  const auto found = [&](const std::string& place) {
    ::setenv("MUSTER_SECRET_FD", place.c_str(), 1);
    return Secret::from_environment();
  };
  const std::string own = std::to_string(::getpid()), number = std::to_string(file->get());
  for (const std::string& place : {"1:" + number, own + ":" + number}) {
    const auto secret = found(place);
    ASSERT_TRUE(secret.ok()) << secret.status().message();
    EXPECT_TRUE(same(*secret, mine));
  }
  // Another file at that number here: the launcher's own is looked at.
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(file->get());
    const auto secret = found(std::to_string(::getppid()) + ":" + number);
    ::_exit(secret.ok() && same(*secret, mine) ? 0 : 1);
  }
  int ended = 1;
  ::waitpid(child, &ended, 0);
  EXPECT_EQ(ended, 0);
  file->reset();
  for (const std::string& place : {own + ":" + number, std::string("nonsense"), std::string("7:")})
    EXPECT_NE(found(place).status().message().find("MUSTER_SECRET_FD is"), std::string::npos);
  ::setenv("MUSTER_SECRET", "sixteen letters!", 1);
  EXPECT_TRUE(found("nonsense").ok()) << "the variable goes before it";
}

// spec: W4 a program that a worker starts as another user (su, runuser) gets the descriptor and not
// the secret; and none gets the descriptor from a process that has read it
TEST_F(SecretTest, AnotherUserThatInheritsTheFileReadsNothing) {
  const Secret mine = Secret::given(Secret::random_text());
  const auto file = mine.sealed();
  ASSERT_TRUE(file.ok()) << file.status().message();
  ASSERT_EQ(::fcntl(file->get(), F_SETFD, 0), 0);
  const std::string number = std::to_string(file->get());
  char byte = 0;
  EXPECT_LT(::pread(file->get(), &byte, 1, 0), 0) << "the descriptor itself";
  void* const mapped = ::mmap(nullptr, 1, PROT_READ, MAP_PRIVATE, file->get(), 0);
  EXPECT_EQ(mapped, MAP_FAILED);
  ::setenv("MUSTER_SECRET_FD", ("1:" + number).c_str(), 1);
  if (::geteuid() == 0) {
    const pid_t child = ::fork();
    if (child == 0) {
      constexpr uid_t kNobody = 65534;
      const bool changed = ::setresuid(kNobody, kNobody, kNobody) == 0;
      const int opened = ::open(("/proc/self/fd/" + number).c_str(), O_RDONLY);
      ::_exit(changed && opened < 0 && !Secret::from_environment().ok() ? 0 : 1);
    }
    int ended = 1;
    ::waitpid(child, &ended, 0);
    EXPECT_EQ(ended, 0) << "another user has read it";
  }
  EXPECT_EQ(::fcntl(file->get(), F_GETFD), 0) << "a script passes it on to what needs it";
  EXPECT_TRUE(same(*Secret::from_environment(), mine));
  EXPECT_EQ(::fcntl(file->get(), F_GETFD), FD_CLOEXEC);
}

// spec: W4 what a launcher has read of its environment does not stay there
TEST_F(SecretTest, TheVariableCanBeWiped) {
  ::setenv("MUSTER_SECRET", "sixteen letters!", 1);
  const char* text = std::getenv("MUSTER_SECRET");
  wipe_env("MUSTER_SECRET");
  EXPECT_EQ(std::getenv("MUSTER_SECRET"), nullptr);
  EXPECT_EQ(std::count(text, text + 16, '\0'), 16);
  wipe_env("MUSTER_SECRET");
}

/// Whether core dumps leave out the page at `address` ("dd" among its flags).
bool is_left_out_of_dumps(const void* address) {
  std::ifstream maps("/proc/self/smaps");
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  bool within = false;
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2)
      within = begin <= wanted && wanted < end;
    if (within && line.starts_with("VmFlags:")) return line.find(" dd") != std::string::npos;
  }
  return false;
}

// spec: W4 core dumps leave the secret out
TEST_F(SecretTest, DumpsLeaveItOut) {
  const SecretBytes bytes(as_bytes("a key"));
  const std::string ordinary = "a text that is longer than what a string keeps inside";
  EXPECT_TRUE(is_left_out_of_dumps(bytes.view().data()));
  EXPECT_FALSE(is_left_out_of_dumps(ordinary.data()));
  const SecretBytes copy = bytes;
  EXPECT_EQ(copy.view().data(), bytes.view().data()) << "one place, however many hold it";
}

// spec: W4 nor does anything that was made on the way to the key
TEST_F(SecretTest, DumpsShowNoCopy) {
  // Each in a process of its own, so that the second holds no remains of how the first has made it.
  const std::string path = directory + "/dumped", hidden = directory + "/hidden";
  const auto in_child = [](const auto& body) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(body() ? 0 : 1);
    int ended = 1;
    ::waitpid(child, &ended, 0);
    return ended == 0;
  };
  ASSERT_TRUE(in_child([&] {
    const std::string text = Secret::random_text();
    file_of("dumped", text + "\n");
    file_of("hidden", testing::HiddenText(text.substr(14, 64)).hidden);
    return true;
  }));
  ::setenv("MUSTER_SECRET_FILE", path.c_str(), 1);
  EXPECT_TRUE(in_child([&] {
    testing::HiddenText needle("");
    needle.hidden.resize(64);
    std::ifstream(hidden).read(needle.hidden.data(), 64);
    const auto secret = Secret::from_environment();
    std::size_t looked_at = 0;
    return secret.ok() && !testing::dump_shows(::getpid(), needle, looked_at) &&
           looked_at > 100'000;
  }));
}

TEST_F(SecretTest, InsecureMustBeSaidAloud) {
  ::setenv("MUSTER_INSECURE", "1", 1);
  const auto open = Secret::from_environment();
  ASSERT_TRUE(open.ok());
  EXPECT_EQ(open->kind(), Secret::Kind::open);
  EXPECT_TRUE(same(*open, *Secret::from_environment()));
  ::setenv("MUSTER_INSECURE", "0", 1);
  EXPECT_EQ(Secret::from_environment()->kind(), Secret::Kind::host);
}

TEST_F(SecretTest, HostKeyIsSharedByThisUserAlone) {
  std::vector<std::future<Result<Secret>>> ranks;
  for (int i = 0; i < 8; ++i)
    ranks.push_back(std::async(std::launch::async, [] { return Secret::from_environment(); }));
  const auto one = Secret::from_environment();
  ASSERT_TRUE(one.ok()) << one.status().message();
  EXPECT_EQ(one->kind(), Secret::Kind::host);
  for (auto& rank : ranks) {
    const auto other = rank.get();
    ASSERT_TRUE(other.ok()) << other.status().message();
    EXPECT_TRUE(same(*one, *other)) << "two ranks that started at once must find one key";
  }
  struct stat info {};
  ASSERT_EQ(::stat((directory + "/muster").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
  ASSERT_EQ(::stat((directory + "/muster/secret").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_EQ(info.st_size, 32);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory + "/muster"), {}), 1)
      << "no temporary file may stay";
}

TEST_F(SecretTest, HostKeyInAnOpenDirectoryIsRefused) {
  std::filesystem::create_directory(directory + "/muster");
  ::chmod((directory + "/muster").c_str(), 0755);
  const Status open = Secret::from_environment().status();
  EXPECT_EQ(open.code(), Code::refused);
  EXPECT_NE(open.message().find("chmod go-rwx"), std::string::npos) << open.message();
  std::filesystem::remove(directory + "/muster");
  std::filesystem::create_directory(directory + "/elsewhere");
  std::filesystem::create_directory_symlink(directory + "/elsewhere", directory + "/muster");
  EXPECT_EQ(Secret::from_environment().status().code(), Code::refused)
      << "a link may lead anywhere";
}

TEST_F(SecretTest, DamagedHostKeyIsReported) {
  std::filesystem::create_directory(directory + "/muster");
  ::chmod((directory + "/muster").c_str(), 0700);
  file_of("muster/secret", "short");
  EXPECT_NE(Secret::from_environment().status().message().find("damaged"), std::string::npos);
}

}  // namespace
}  // namespace muster
