// SPDX-License-Identifier: BSD-3-Clause
// How ranks find each other by a multicast address, and who does not disturb them.
#include <net/if.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <set>
#include <thread>

#include "core/security/secret.h"
#include "core/store/announcement.h"
#include "core/store/testing/rendezvous_job.h"

namespace muster::store {
namespace {

using namespace rendezvous_test;

std::string own_group(int kind) {
  return "239.77." + std::to_string(kind) + "." + std::to_string(::getpid() % 250 + 1);
}

// spec: B6.multicast a multicast address finds the peers and assigns ranks
TEST(Rendezvous, Multicast) {
  const Environment environment({});
  const int other = ::getpid() % 250 + 1;  // apart from other runs of this test
  for (const std::string& host :
       {"239.77.1." + std::to_string(other), "[ff15::77:" + std::to_string(other) + "]"}) {
    const std::string method = "tcp://" + host + ":" + std::to_string(20000 + ::getpid() % 10000);
    const Results first = on_threads(ranks_of(method, 4, false));
    expect_met(first);
    expect_met(on_threads(ranks_of(method, 3, true)));
  }
}

// spec: B6.multicast a multicast address on one host without a secret: `lo` has no route for that
// of IPv6
TEST(Rendezvous, MulticastWithoutASecretMeetsOnThisHost) {
  const testing::ScratchFolder folder;
  const Environment environment({{"MUSTER_SECRET", ""}, {"XDG_RUNTIME_DIR", folder.path()}});
  for (const std::string& host :
       {own_group(9), std::string("[ff15:1e18:5d4c:4cf0:d02d:b659:53ba:b0a7]")}) {
    const std::string method = "tcp://" + host + ":" + std::to_string(20000 + ::getpid() % 10000);
    expect_met(on_threads(ranks_of(method, 3, false)));
    expect_met(on_threads(ranks_of(method, 2, true)));
  }
}

// spec: B6 multicast: jobs with different group names or secrets do not see each other; who is
// missing is said
TEST(Rendezvous, MulticastKeepsJobsApart) {
  const Environment environment({});
  const std::string method = "tcp://239.77.2." + std::to_string(::getpid() % 250 + 1) + ":" +
                             std::to_string(20000 + ::getpid() % 10000);
  Child other_secret([&] {
    ::setenv("MUSTER_SECRET", "quite another secret", 1);
    return rendezvous({method, -1, 2, "red", seconds(1)}).status().code() == Code::timed_out;
  });
  const auto results =
      on_threads({{method, -1, 2, "red", seconds(1)}, {method, 1, 2, "blue", seconds(1)}});
  EXPECT_TRUE(mentions(results[0].status(), "1 of 2 processes")) << results[0].status().message();
  EXPECT_EQ(results[1].status().ranks(), std::vector<int>{0}) << results[1].status().message();
  EXPECT_TRUE(other_secret.succeeded());
}

/// The state of `process` in the kernel: R, S, T (stopped) ...
char kernel_state(pid_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string number, name;
  char state = '?';
  file >> number >> name >> state;
  return state;
}

/// Somebody who holds no secret, hears what a group is told, and says it again.
class Recorder {
 public:
  Recorder(const std::string& host, std::uint16_t port)
      : group_(*SocketAddress::numeric(host, port)),
        socket_(::socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) {
    const int on = 1;
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    EXPECT_EQ(::bind(socket_.get(), group_.raw(), group_.length()), 0);
    ip_mreqn request{};
    request.imr_multiaddr = reinterpret_cast<const sockaddr_in*>(group_.raw())->sin_addr;
    request.imr_ifindex = static_cast<int>(::if_nametoindex("lo"));
    EXPECT_EQ(::setsockopt(socket_.get(), IPPROTO_IP, IP_ADD_MEMBERSHIP, &request, sizeof request),
              0);
    ::setsockopt(socket_.get(), IPPROTO_IP, IP_MULTICAST_IF, &request, sizeof request);
  }
  void hear() {
    std::string packet(2000, '\0');
    for (;;) {
      const ssize_t n = ::recv(socket_.get(), packet.data(), packet.size(), 0);
      if (n <= 0) return;
      say(packet.substr(0, static_cast<std::size_t>(n)));
    }
  }
  void say(const std::string& packet) { packets_.push_back(packet); }
  std::size_t heard() const { return packets_.size(); }
  /// Says all again and again while `body` runs.
  template <class Body>
  void while_replaying(const Body& body) {
    std::atomic<bool> over = false;
    std::thread replaying([&] {
      while (!over) {
        for (const std::string& packet : packets_)
          ::sendto(socket_.get(), packet.data(), packet.size(), 0, group_.raw(), group_.length());
        std::this_thread::yield();
      }
    });
    body();
    over = true;
    replaying.join();
  }

 private:
  SocketAddress group_;
  Descriptor socket_;
  std::vector<std::string> packets_;
};

// spec: W6 what was heard of an earlier run with the same secret, said again, neither joins the job
// nor keeps it from starting
TEST(Rendezvous, RecordedAnnouncementsOfAnEarlierRunDoNothing) {
  const Environment environment({});
  const std::string host = own_group(3);
  const auto port = static_cast<std::uint16_t>(20000 + ::getpid() % 10000);
  const std::string method = "tcp://" + host + ":" + std::to_string(port);
  Recorder recorder(host, port);
  expect_met(on_threads(ranks_of(method, 3, false)));
  recorder.hear();
  ASSERT_GE(recorder.heard(), 3u);
  recorder.while_replaying([&] { expect_met(on_threads(ranks_of(method, 2, false))); });
  recorder.while_replaying([&] { expect_met(on_threads(ranks_of(method, 4, true))); });
}

// spec: B6 multicast: a process that stood still beyond its deadline takes that for nobody's
// silence
TEST(Rendezvous, MulticastIsMetAfterAPauseOfOnesOwn) {
  const Environment environment({});
  constexpr Duration kTimeout = seconds(6);
  const std::string host = own_group(10);
  const auto port = static_cast<std::uint16_t>(20000 + ::getpid() % 10000);
  const std::string method = "tcp://" + host + ":" + std::to_string(port);
  Recorder recorder(host, port);
  const TimePoint begin = steady_clock().now();
  const pid_t child = ::fork();
  if (child == 0) {
    const auto met = rendezvous({method, 1, 2, "", kTimeout});
    if (!met) std::fprintf(stderr, "%s\n", met.status().message().c_str());
    ::_exit(met ? 0 : 1);
  }
  while (recorder.heard() == 0) {
    recorder.hear();
    std::this_thread::yield();
  }
  ASSERT_EQ(::kill(child, SIGSTOP), 0);
  while (kernel_state(child) != 'T') std::this_thread::yield();
  Result<Rendezvous> here = Status(Code::internal, "not begun");
  std::thread other([&] { here = rendezvous({method, 0, 2, "", kLong}); });
  std::this_thread::sleep_until(begin + kTimeout + seconds(3));
  ASSERT_EQ(::kill(child, SIGCONT), 0);
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  other.join();
  EXPECT_TRUE(here.ok()) << here.status().message();
}

// spec: W6 one who has the secret and shouts, but hears nobody, is no member: it is gone, or a
// recording
TEST(Rendezvous, GhostsDoNotKeepAJobFromStarting) {
  const Environment environment({});
  const std::string host = own_group(4);
  const auto port = static_cast<std::uint16_t>(20000 + ::getpid() % 10000);
  Recorder ghosts(host, port);
  for (std::uint64_t id = 1; id <= 5; ++id)
    ghosts.say(encode({.id = id, .rank = -1, .world_size = 2, .store_port = 9}, short_hash(""),
                      *Secret::from_environment()));
  ghosts.while_replaying([&] {
    expect_met(on_threads(ranks_of("tcp://" + host + ":" + std::to_string(port), 2, false)));
  });
}

// spec: W7 by multicast, the one that opens the store listens where the others can come, not
// everywhere; without a secret of the job on loopback alone
TEST(Rendezvous, MulticastListensWhereItIsAsked) {
  const Environment environment({});
  const testing::ScratchFolder folder;
  const std::string method =
      "tcp://" + own_group(5) + ":" + std::to_string(20000 + ::getpid() % 10000);
  Child with_secret([&] {
    const auto joined = rendezvous({method, -1, 1, "", kLong});
    return joined.ok() && !listens_everywhere();
  });
  EXPECT_TRUE(with_secret.succeeded());
  Child without([&] {
    ::unsetenv("MUSTER_SECRET");
    ::setenv("XDG_RUNTIME_DIR", folder.path().c_str(), 1);
    const auto joined = rendezvous({method, -1, 1, "", kLong});
    for (const std::string& host : listening_addresses()) {
      if (!host.starts_with("127.") && host != "::1") return false;
    }
    return joined.ok();
  });
  EXPECT_TRUE(without.succeeded());
}

// spec: W6 recordings crowd nobody out: their counts rise once, those of running processes go on
TEST(HeardCounts, RepeatsThoseThatCountOn) {
  const Duration forgotten = seconds(3);
  HeardCounts heard(forgotten);
  TimePoint now{};
  const auto repeats = [&](std::uint64_t id) {
    const auto echoes = heard.next(now);
    return std::ranges::count(echoes, id, &Echo::id) == 1;
  };
  constexpr std::uint64_t kReal = 1'000'000;
  for (std::uint32_t count = 1; count <= 100; ++count) {
    now += std::chrono::milliseconds(50);
    // A thousand recordings of 20 announcements, each played again and again.
    for (std::uint64_t ghost = 1; ghost <= 1000; ++ghost) heard.note(ghost, count % 20, now);
    heard.note(kReal, count, now);
  }
  now += std::chrono::milliseconds(1);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(repeats(kReal));
  EXPECT_EQ(heard.next(now).size(), 1u);
  now += forgotten + std::chrono::milliseconds(1);
  EXPECT_TRUE(heard.next(now).empty());
}

// spec: W6 what comes makes nobody send more: announcements have one size
TEST(HeardCounts, HaveABound) {
  const Secret secret = Secret::given("the secret of announcements");
  HeardCounts heard(seconds(3), 100);
  TimePoint now{};
  for (std::uint64_t id = 1; id <= 100; ++id) heard.note(id, 1, now);
  heard.note(101, 1, now);
  std::set<std::uint64_t> seen;
  for (int i = 0; i < 4; ++i) {
    Announcement said{.id = 7, .heard = heard.next(now)};
    EXPECT_EQ(said.heard.size(), kEchoes);
    EXPECT_EQ(encode(said, short_hash(""), secret).size(), kAnnouncementBytes);
    for (const Echo& echo : said.heard) seen.insert(echo.id);
  }
  EXPECT_EQ(seen.size(), 100u) << "in turns, and no more than fit";
  now += seconds(4);
  heard.note(102, 1, now);
  const auto echoes = heard.next(now);
  ASSERT_EQ(echoes.size(), 1u);
  EXPECT_EQ(echoes[0].id, 102u) << "a new process takes the place of what no longer rises";
}

TEST(Announcement, FreshIsWhoHeardThisProcessLately) {
  const Announcement said{.id = 7, .heard = {{3, 10}, {5, 70}}};
  EXPECT_TRUE(is_fresh(said, 5, 70, 60));
  EXPECT_TRUE(is_fresh(said, 5, 129, 60));
  EXPECT_FALSE(is_fresh(said, 5, 130, 60)) << "too long ago";
  EXPECT_FALSE(is_fresh(said, 5, 69, 60)) << "a count that was never said";
  EXPECT_FALSE(is_fresh(said, 4, 10, 60)) << "another's";
}

}  // namespace
}  // namespace muster::store
