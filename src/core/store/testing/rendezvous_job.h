// SPDX-License-Identifier: BSD-3-Clause
/// Support for rendezvous tests: ranks as threads and as processes, their environment, and the
/// expected results.
#pragma once

#include "core/rendezvous/rendezvous.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <future>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/net/socket_address.h"
#include "core/store/factory.h"
#include "core/store/testing/long_wait.h"
#include "core/store/testing/tcp_servers.h"
#include "testing/reserved_port.h"
#include "testing/scratch_folder.h"

namespace muster::store::rendezvous_test {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Results = std::vector<Result<Rendezvous>>;

inline constexpr Duration kShort = milliseconds(300);

/// Sets environment variables for a scope; an empty value removes one.
class Environment {
 public:
  explicit Environment(const std::map<std::string, std::string>& values) {
    for (const char* name :
         {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "MUSTER_AGENT_STORE",
          "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID",
          "MUSTER_EPOCH", "MUSTER_SECRET", "MUSTER_SECRET_FD", "MUSTER_SECRET_FILE",
          "MUSTER_INSECURE", "MUSTER_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME",
          // of a scheduler that these tests may run under
          "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"}) {
      change(name, "");
    }
    change("MUSTER_SECRET", "the secret of the rendezvous tests");
    for (const auto& [name, value] : values) change(name, value);
  }
  ~Environment() {
    for (auto entry = before_.rbegin(); entry != before_.rend(); ++entry)
      put(entry->first, entry->second);
  }

 private:
  void change(const std::string& name, const std::string& value) {
    const char* old = std::getenv(name.c_str());
    before_.emplace_back(name, old == nullptr ? "" : old);
    put(name, value);
  }
  static void put(const std::string& name, const std::string& value) {
    if (value.empty()) {
      ::unsetenv(name.c_str());
    } else {
      ::setenv(name.c_str(), value.c_str(), 1);
    }
  }
  std::vector<std::pair<std::string, std::string>> before_;
};

inline Results on_threads(const std::vector<RendezvousOptions>& ranks) {
  std::vector<std::future<Result<Rendezvous>>> running;
  for (const auto& options : ranks)
    running.push_back(std::async(std::launch::async, [options] { return rendezvous(options); }));
  Results results;
  for (auto& each : running) results.push_back(each.get());
  return results;
}

inline std::vector<RendezvousOptions> ranks_of(const std::string& method, int world_size,
                                               bool give_ranks, Duration timeout = kLong,
                                               const std::string& group = "") {
  std::vector<RendezvousOptions> all;
  for (int rank = 0; rank < world_size; ++rank)
    all.push_back({method, give_ranks ? rank : -1, world_size, group, timeout});
  return all;
}

/// Expects that all ranks have met: each rank once, one job, and a working store.
inline void expect_met(const Results& results) {
  std::set<int> ranks;
  std::set<std::string> jobs;
  for (const auto& result : results) {
    ASSERT_TRUE(result.ok()) << result.status().message();
    ranks.insert(result->rank);
    jobs.insert(result->job);
    EXPECT_EQ(result->world_size, static_cast<int>(results.size()));
    ASSERT_TRUE(
        result->store->set("from " + std::to_string(result->rank), std::to_string(result->rank))
            .ok());
  }
  EXPECT_EQ(ranks.size(), results.size());
  EXPECT_EQ(*ranks.begin(), 0);
  EXPECT_EQ(*ranks.rbegin(), static_cast<int>(results.size()) - 1);
  EXPECT_EQ(jobs.size(), 1u);
  for (const auto& result : results) {
    for (const int rank : ranks)
      EXPECT_EQ(*result->store->get("from " + std::to_string(rank)), std::to_string(rank));
  }
}

/// Runs `body` in a child process; succeeded() tells whether it returned true.
class Child {
 public:
  explicit Child(const std::function<bool()>& body) : pid_(::fork()) {
    if (pid_ == 0) ::_exit(body() ? 0 : 1);
  }
  ~Child() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
  }
  bool succeeded() {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  void kill() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_;
};

/// The addresses at which this process listens for TCP connections, without ports.
inline std::set<std::string> listening_addresses() {
  std::set<std::string> hosts;
  for (int fd = 0; fd < 1024; ++fd) {
    int listens = 0;
    socklen_t length = sizeof listens;
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) != 0 || listens == 0)
      continue;
    const auto name = SocketAddress::local_of(fd);
    if (name.ok() && (name->family() == AF_INET || name->family() == AF_INET6))
      hosts.insert(name->host());
  }
  return hosts;
}
inline bool listens_everywhere() {
  const auto hosts = listening_addresses();
  return hosts.contains("0.0.0.0") || hosts.contains("::");
}

}  // namespace muster::store::rendezvous_test
