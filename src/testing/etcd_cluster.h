// SPDX-License-Identifier: BSD-3-Clause
/// Debian's etcd as a cluster of one or three on this host, for tests. Header-only.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "core/store/http/connection.h"
#include "testing/limits.h"
#include "testing/reserved_port.h"

namespace muster::testing {

class EtcdCluster {
 public:
  struct Options {
    int members = 1;
    /// PEM files with which the members serve TLS; empty: they do not.
    std::string certificate{};
    std::string key{};
  };

  /// Whether there is an etcd to be started.
  static bool installed() {
    static const bool found = [] {
      for (const char* path : {"/usr/bin/etcd", "/usr/local/bin/etcd"})
        if (::access(path, X_OK) == 0) return true;
      return false;
    }();
    return found;
  }
  static constexpr const char* kMissing =
      "etcd is not installed: apt-get install etcd-server, or tools/setup as root";

  EtcdCluster() : EtcdCluster(Options()) {}
  explicit EtcdCluster(const Options& options) : options_(options) {
    std::string folder = std::filesystem::exists("/dev/shm") ? "/dev/shm" : "/tmp";
    folder += "/muster-etcd-XXXXXX";  // in memory: a test shall not wait for a disk
    if (::mkdtemp(folder.data()) == nullptr) std::abort();
    folder_ = folder;
    std::string cluster;
    for (int i = 0; i < options_.members; ++i) {
      members_.push_back({"m" + std::to_string(i), reserve_port(), reserve_port(), -1});
      cluster += (i == 0 ? "" : ",") + members_.back().name +
                 "=http://127.0.0.1:" + std::to_string(members_.back().peer_port);
    }
    cluster_ = cluster;
    for (int i = 0; i < options_.members; ++i) start(i);
    for (int i = 0; i < options_.members; ++i) await(i);
  }
  ~EtcdCluster() {
    for (int i = 0; i < options_.members; ++i) kill(i);
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  EtcdCluster(const EtcdCluster&) = delete;
  EtcdCluster& operator=(const EtcdCluster&) = delete;

  std::string endpoint(int member) const {
    return scheme() +
           "127.0.0.1:" + std::to_string(members_[static_cast<std::size_t>(member)].client_port);
  }
  std::vector<std::string> endpoints() const {
    std::vector<std::string> all;
    all.reserve(static_cast<std::size_t>(options_.members));
    for (int i = 0; i < options_.members; ++i) all.push_back(endpoint(i));
    return all;
  }
  /// By SIGKILL.
  void kill(int member) { end(member, SIGKILL); }
  /// Stops or continues: a member that is cut off, and that returns.
  void stop(int member) { ::kill(process(member), SIGSTOP); }
  void resume(int member) { ::kill(process(member), SIGCONT); }
  void start(int member) {
    Member& self = members_[static_cast<std::size_t>(member)];
    const std::string peer = "http://127.0.0.1:" + std::to_string(self.peer_port);
    std::vector<std::string> words{"etcd",
                                   "--name",
                                   self.name,
                                   "--data-dir",
                                   folder_ + "/" + self.name,
                                   "--listen-client-urls",
                                   endpoint(member),
                                   "--advertise-client-urls",
                                   endpoint(member),
                                   "--listen-peer-urls",
                                   peer,
                                   "--initial-advertise-peer-urls",
                                   peer,
                                   "--initial-cluster",
                                   cluster_,
                                   "--initial-cluster-token",
                                   folder_,
                                   "--logger",
                                   "zap",
                                   "--log-level",
                                   "error"};
    if (options_.members == 1)
      words.insert(words.end(), {"--heartbeat-interval", "20", "--election-timeout", "200"});
    if (!options_.certificate.empty())
      words.insert(words.end(), {"--cert-file", options_.certificate, "--key-file", options_.key});
    std::vector<char*> arguments;
    arguments.reserve(words.size() + 1);
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    const std::string log = folder_ + "/" + self.name + ".log";
    self.process = ::fork();
    if (self.process != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int out = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    ::dup2(out, 1);
    ::dup2(out, 2);
    ::unsetenv("ETCD_UNSUPPORTED_ARCH");
    ::execvp("etcd", arguments.data());
    ::_exit(127);
  }
  /// The member that leads; -1: none within 20 s.
  int leader() {
    for (int attempt = 0; attempt < 200; ++attempt) {
      for (int i = 0; i < options_.members; ++i) {
        if (members_[static_cast<std::size_t>(i)].process < 0) continue;
        const std::string status = status_of(i);
        const std::string own = field(status, "member_id");
        if (!own.empty() && own == field(status, "leader")) return i;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    return -1;
  }
  /// The body of the member's answer; empty: there was none.
  std::string post(int member, const std::string& path, const std::string& body,
                   const std::string& token = {},
                   Duration patience = muster::testing::kMustHappen) {
    const auto connection = store::curl_connections(
        {.authority = options_.certificate, .certificate = {}, .key = {}})();
    connection->start({endpoint(member), path, body, token});
    const TimePoint limit = deadline_after(steady_clock(), patience);
    while (!connection->transfer().ended && steady_clock().now() < limit) connection->drive(limit);
    return connection->transfer().received;
  }

 private:
  struct Member {
    std::string name;
    std::uint16_t client_port;
    std::uint16_t peer_port;
    pid_t process;
  };

  std::string status_of(int member) {
    return post(member, "/v3/maintenance/status", "{}", {}, std::chrono::seconds(2));
  }
  std::string scheme() const { return options_.certificate.empty() ? "http://" : "https://"; }
  pid_t process(int member) const { return members_[static_cast<std::size_t>(member)].process; }
  void end(int member, int signal) {
    pid_t& process = members_[static_cast<std::size_t>(member)].process;
    if (process < 0) return;
    ::kill(process, signal);
    ::waitpid(process, nullptr, 0);
    process = -1;
  }
  void await(int member) {
    for (int attempt = 0; attempt < 400; ++attempt) {
      const std::string status = status_of(member);
      const std::string leader = field(status, "leader");
      if (!leader.empty() && leader != "0") return;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    std::ifstream log(folder_ + "/" + members_[static_cast<std::size_t>(member)].name + ".log");
    ADD_FAILURE() << "etcd did not start within 20 s: "
                  << std::string(std::istreambuf_iterator<char>(log), {});
  }
  static std::string field(const std::string& json, const std::string& name) {
    const std::string before = "\"" + name + "\":\"";
    const std::size_t at = json.find(before);
    if (at == std::string::npos) return {};
    const std::size_t begin = at + before.size();
    return json.substr(begin, json.find('"', begin) - begin);
  }

  const Options options_;
  std::string folder_;
  std::string cluster_;
  std::vector<Member> members_;
};

}  // namespace muster::testing
