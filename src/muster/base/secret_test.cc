#include "muster/base/secret.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <set>

#include "muster/base/socket_address.h"
#include "muster/testing/scratch_folder.h"

namespace muster {
namespace {

/// A directory of its own and an environment without any word of secrets.
class SecretTest : public ::testing::Test {
 protected:
  SecretTest() {
    for (const char* name : {"MUSTER_SECRET", "MUSTER_SECRET_FILE", "MUSTER_INSECURE"})
      ::unsetenv(name);
    ::setenv("XDG_RUNTIME_DIR", directory.c_str(), 1);
  }
  ~SecretTest() override {
    for (const char* name :
         {"MUSTER_SECRET", "MUSTER_SECRET_FILE", "MUSTER_INSECURE", "XDG_RUNTIME_DIR"})
      ::unsetenv(name);
  }
  static bool same(const Secret& a, const Secret& b) {
    const auto message = as_bytes("message");
    return equal_in_constant_time(a.prove(message), b.prove(message));
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
  EXPECT_EQ(seen.begin()->size(), 64u);
  EXPECT_EQ(seen.begin()->find_first_not_of("0123456789abcdef"), std::string::npos);
}

TEST_F(SecretTest, GivenByVariableOrFile) {
  ::setenv("MUSTER_SECRET", "sixteen letters!", 1);
  const auto variable = Secret::from_environment();
  ASSERT_TRUE(variable.ok());
  EXPECT_EQ(variable->kind(), Secret::Kind::given);
  EXPECT_TRUE(same(*variable, Secret::given("sixteen letters!")));
  const std::string path = directory + "/file";
  std::ofstream(path) << "sixteen letters!\n";
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
  const std::string path = directory + "/short";
  std::ofstream(path) << "short";
  ::setenv("MUSTER_SECRET_FILE", path.c_str(), 1);
  EXPECT_NE(Secret::from_environment().status().message().find("5 characters"), std::string::npos);
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
    ranks.push_back(std::async(std::launch::async, Secret::from_environment));
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
  EXPECT_NE(open.message().find("0700"), std::string::npos) << open.message();
  std::filesystem::remove(directory + "/muster");
  std::filesystem::create_directory(directory + "/elsewhere");
  std::filesystem::create_directory_symlink(directory + "/elsewhere", directory + "/muster");
  EXPECT_EQ(Secret::from_environment().status().code(), Code::refused)
      << "a link may lead anywhere";
}

TEST_F(SecretTest, DamagedHostKeyIsReported) {
  std::filesystem::create_directory(directory + "/muster");
  ::chmod((directory + "/muster").c_str(), 0700);
  std::ofstream(directory + "/muster/secret") << "short";
  EXPECT_NE(Secret::from_environment().status().message().find("damaged"), std::string::npos);
}

}  // namespace
}  // namespace muster
