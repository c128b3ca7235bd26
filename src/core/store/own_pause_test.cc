// SPDX-License-Identifier: BSD-3-Clause
// A client that stood still for longer than its patience takes what came meanwhile.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "core/store/testing/tcp_servers.h"
#include "testing/limits.h"
#include "testing/scratch_folder.h"

namespace muster::store {
namespace {

using std::chrono::milliseconds;

constexpr Duration kClientsPatience = milliseconds(1000);
/// More than the client's patience and what it adds for the server's answer.
constexpr Duration kPause = milliseconds(2500);

char state_of(pid_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string number, name;
  char state = '?';
  file >> number >> name >> state;
  return state;
}

bool comes_to(pid_t process, char state) {
  const TimePoint limit = steady_clock().now() + muster::testing::kMustHappen;
  while (state_of(process) != state) {
    if (steady_clock().now() > limit) return false;
    std::this_thread::yield();
  }
  return true;
}

/// A child waits for a key, stands still, and goes on when its patience is over. The key is set
/// while it stands still. False if this process was too slow to set it within the patience.
bool expect_that_it_sees_the_key(const std::function<std::shared_ptr<Store>()>& open, Store& here) {
  int asking[2];
  if (::pipe(asking) != 0) throw std::runtime_error("no pipe");
  const TimePoint begin = steady_clock().now();
  const pid_t child = ::fork();
  if (child == 0) {
    const auto store = open();
    store->set_timeout(kClientsPatience);
    // The client prepares everything that it needs once: from the word on it sleeps only for the
    // key.
    const bool ready = store->set("ready", "yes").ok() && store->get("ready").ok();
    if (::write(asking[1], ready ? "y" : "n", 1) != 1) ::_exit(3);
    const auto got = store->get("key");
    if (!got) std::fprintf(stderr, "%s\n", got.status().message().c_str());
    ::_exit(got && *got == "value" ? 0 : 1);
  }
  char word = 'n';
  EXPECT_EQ(::read(asking[0], &word, 1), 1);
  EXPECT_EQ(word, 'y');
  EXPECT_TRUE(comes_to(child, 'S'));
  ::kill(child, SIGSTOP);
  EXPECT_TRUE(comes_to(child, 'T'));
  EXPECT_TRUE(here.set("key", "value").ok());
  const bool in_time = steady_clock().now() - begin < kClientsPatience;
  std::this_thread::sleep_for(kPause);  // the fault itself
  ::kill(child, SIGCONT);
  int ended = -1;
  EXPECT_EQ(::waitpid(child, &ended, 0), child);
  if (in_time) {
    EXPECT_EQ(ended, 0);
  }
  ::close(asking[0]);
  ::close(asking[1]);
  return in_time;
}

// spec: C7 the time that a client itself stood still is no verdict: an answer that came meanwhile
// counts, over the Unix socket and over TCP
TEST(OwnPause, OfAClientOfTheTcpStore) {
  for (const bool within_host : {true, false}) {
    SCOPED_TRACE(within_host);
    for (bool in_time = false; !in_time;) {
      const auto server = made(make_tcp_store(server_options()));
      ASSERT_NE(server, nullptr);
      auto options = client_options(*server);
      options.within_host = within_host;
      in_time = expect_that_it_sees_the_key([&] { return made(make_tcp_store(options)); }, *server);
    }
  }
}

// spec: C7 the same of a file
TEST(OwnPause, OfAUserOfTheFileStore) {
  for (bool in_time = false; !in_time;) {
    const muster::testing::ScratchFolder folder;
    const std::string path = folder.path() + "/store";
    const auto open = [&] { return *make_file_store(path); };
    const auto here = open();
    in_time = expect_that_it_sees_the_key(open, *here);
  }
}

}  // namespace
}  // namespace muster::store
