// SPDX-License-Identifier: BSD-3-Clause
// `muster run --hosts` through OpenSSH, to a server of this test on loopback.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "core/base/descriptor.h"
#include "core/net/socket_address.h"
#include "faces/cli/testing/launched.h"
#include "testing/reserved_port.h"
#include "testing/scratch_folder.h"

namespace muster::cli::testing {
namespace {

using Lines = std::vector<std::string>;

constexpr const char* kServer = "/usr/sbin/sshd";  // it insists on a whole path

/// A server with keys of its own, for this user only.
class HostsOverSsh : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::access(kServer, X_OK) != 0 || std::system("command -v ssh-keygen >/dev/null") != 0)
      GTEST_SKIP() << "openssh-server is not installed: MUSTER_SERVICES=ON tools/setup";
    // Debian makes it when its service starts. Only a server of root's looks for it.
    if (::geteuid() == 0) ::mkdir("/run/sshd", 0755);
    for (const char* name : {"host", "user", "other"}) {
      const std::string make = "ssh-keygen -q -t ed25519 -N '' -f " + folder_.file(name);
      ASSERT_EQ(std::system(make.c_str()), 0);
    }
    const std::string key = contents(folder_.file("host.pub"));
    std::ofstream(folder_.file("known"))
        << "[127.0.0.1]:" << port_ << ",[localhost]:" << port_ << ",[::1]:" << port_ << " " << key;
    std::ofstream(folder_.file("server"))
        << "Port " << port_ << "\nListenAddress 127.0.0.1\nListenAddress ::1\nHostKey "
        << folder_.file("host") << "\nAuthorizedKeysFile " << folder_.file("user.pub")
        << "\nPidFile none\nUsePAM no\nStrictModes no\nPasswordAuthentication no\n"
           "KbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n";
    start_server();
  }
  void TearDown() override {
    if (server_ <= 0) return;
    ::kill(server_, SIGTERM);
    while (::waitpid(server_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }

  /// The ssh of a user with that key.
  std::string ssh(const std::string& user = "user") {
    const std::string file = folder_.file("client-" + user);
    std::ofstream(file) << "Port " << port_ << "\nIdentityFile " << folder_.file(user)
                        << "\nIdentitiesOnly yes\nIdentityAgent none\nUserKnownHostsFile "
                        << folder_.file("known")
                        << "\nGlobalKnownHostsFile /dev/null\nStrictHostKeyChecking yes\n";
    return "ssh -F " + file;
  }
  std::vector<std::string> words(const std::string& hosts, std::vector<std::string> rest) {
    std::vector<std::string> all = {"run",
                                    "--hosts",
                                    hosts,
                                    "--ssh",
                                    ssh(),
                                    "--master-port",
                                    std::to_string(muster::testing::reserve_port())};
    all.insert(all.end(), rest.begin(), rest.end());
    return all;
  }

 private:
  void start_server() {
    int said[2];
    ASSERT_EQ(::pipe2(said, O_CLOEXEC), 0);
    said_.reset(said[0]);  // open to the end: what the server says later fits into the pipe
    const std::string file = folder_.file("server");
    server_ = ::fork();
    ASSERT_GE(server_, 0);
    if (server_ == 0) {
      ::dup2(said[1], 2);
      ::execl(kServer, kServer, "-D", "-e", "-f", file.c_str(), nullptr);
      ::_exit(127);
    }
    ::close(said[1]);
    std::string text;
    char piece[1024];
    // It takes the addresses from the last one on, and needs one of them.
    while (!contains(text, "Server listening on 127.0.0.1")) {
      const ssize_t got = ::read(said_.get(), piece, sizeof piece);
      ASSERT_GT(got, 0) << text;
      text.append(piece, static_cast<std::size_t>(got));
    }
  }

 protected:
  const muster::testing::ScratchFolder folder_;

 private:
  const std::uint16_t port_ = muster::testing::reserve_port();
  Descriptor said_;
  pid_t server_ = -1;
};

std::vector<pid_t> children_of(pid_t parent) {
  const std::string number = std::to_string(parent);
  std::istringstream list(contents("/proc/" + number + "/task/" + number + "/children"));
  std::vector<pid_t> children;
  for (pid_t child = 0; list >> child;) children.push_back(child);
  return children;
}

// spec: V5.hosts over a real sshd: ranks of two nodes meet, and the program's words are whole
TEST_F(HostsOverSsh, ANodeOnEachMachine) {
  const std::string script = "echo $RANK $WORLD_SIZE \"$1\"; exec " + kWorker + " meet";
  const Outcome outcome =
      run(words("127.0.0.1:2,localhost", {"sh", "-c", script, "-", "it's \"$HOME\" & more"}));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(sorted_lines(outcome.out),
            (Lines{"[0] 0 3 it's \"$HOME\" & more", "[0] met 012", "[1] 1 3 it's \"$HOME\" & more",
                   "[1] met 012", "[2] 2 3 it's \"$HOME\" & more", "[2] met 012"}));
}

// spec: V5.hosts over a real sshd: addresses of IPv6, at the first of which the nodes meet
TEST_F(HostsOverSsh, AddressesOfIPv6) {
  if (!listen_on(*SocketAddress::numeric("::1", 0), 1)) GTEST_SKIP() << "no IPv6 here";
  const Outcome outcome =
      run(words("[::1]:2,localhost", {"sh", "-c", "exec " + kWorker + " meet"}));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(sorted_lines(outcome.out), (Lines{"[0] met 012", "[1] met 012", "[2] met 012"}));
}

// spec: V5.hosts over a real sshd: a failure's exit code, and a signal to the launcher
TEST_F(HostsOverSsh, HowItEnds) {
  const std::string script = kWorker + " meet; test $RANK = 1 && exit 7; exec " + kWorker + " wait";
  const Outcome failed = run(words("127.0.0.1,localhost", {"sh", "-c", script}));
  EXPECT_EQ(failed.code, 7) << failed.err;
  EXPECT_TRUE(contains(failed.err, "FAILED: rank 1")) << failed.err;
  Launched launched(words("127.0.0.1,localhost", {kWorker, "wait", "0"}));
  ASSERT_TRUE(launched.wait_for_output("ready", 2));
  launched.signal(SIGINT);
  const Outcome stopped = launched.finish();
  EXPECT_EQ(stopped.code, 128 + SIGINT) << stopped.err;
  EXPECT_EQ(count_of(stopped.out, "got SIG"), 2) << stopped.out;
}

// spec: V5.hosts over a real sshd: a login that is refused is named, with what ssh said
TEST_F(HostsOverSsh, ALoginThatIsRefused) {
  auto with_other_key = words("127.0.0.1", {"true"});
  with_other_key[4] = ssh("other");
  const Outcome outcome = run(with_other_key);
  EXPECT_EQ(outcome.code, 255) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "FAILED: the node on 127.0.0.1: ssh ended with exit code 255"))
      << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "Permission denied")) << outcome.err;
}

// spec: V5.hosts over a real sshd: when one connection is lost all workers end
TEST_F(HostsOverSsh, ALostConnectionEndsAllNodes) {
  Fifo alive;
  const std::string script = "exec 9>" + alive.path() + "; exec " + kWorker + " wait 0";
  Launched launched(words("127.0.0.1,localhost", {"sh", "-c", script}));
  ASSERT_TRUE(alive.open());
  ASSERT_TRUE(launched.wait_for_output("ready", 2));
  const auto clients = children_of(launched.pid());
  ASSERT_EQ(clients.size(), 2U);
  ASSERT_EQ(::kill(clients.back(), SIGKILL), 0);
  EXPECT_TRUE(alive.wait_for_end());
  const Outcome outcome = launched.finish();
  EXPECT_EQ(outcome.code, 128 + SIGKILL) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "ssh ended with SIGKILL")) << outcome.err;
}

// spec: V5.hosts over a real sshd: a launcher that is killed leaves no worker
TEST_F(HostsOverSsh, NodesEndWithTheirLauncher) {
  Fifo alive;
  const std::string script = "exec 9>" + alive.path() + "; exec " + kWorker + " wait 0";
  Launched launched(words("127.0.0.1,localhost", {"sh", "-c", script}));
  ASSERT_TRUE(alive.open());
  ASSERT_TRUE(launched.wait_for_output("ready", 2));
  launched.signal(SIGKILL);
  EXPECT_TRUE(alive.wait_for_end());
}

}  // namespace
}  // namespace muster::cli::testing
