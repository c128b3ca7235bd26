// SPDX-License-Identifier: BSD-3-Clause
/// The tests' fake of the API of Kubernetes (fake_kubernetes.py) as a process. Header-only.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "core/store/http/connection.h"
#include "jobs/membership/factory.h"
#include "testing/limits.h"
#include "testing/reserved_port.h"
#include "testing/scratch_folder.h"

namespace muster::testing {

class KubernetesApi {
 public:
  static bool installed() { return ::access("/usr/bin/python3", X_OK) == 0; }
  static constexpr const char* kMissing = "python3 is not installed";

  /// With files (PEM), it serves TLS.
  explicit KubernetesApi(std::string certificate = {}, std::string key = {})
      : certificate_(std::move(certificate)), key_(std::move(key)) {
    accept_tokens("first");
    show_token("first");
    start();
  }
  ~KubernetesApi() { kill(); }
  KubernetesApi(const KubernetesApi&) = delete;
  KubernetesApi& operator=(const KubernetesApi&) = delete;

  std::string server() const {
    return (certificate_.empty() ? "http://127.0.0.1:" : "https://127.0.0.1:") +
           std::to_string(port_);
  }
  std::string token_file() const { return folder_.file("token"); }
  membership::KubernetesOptions options() const {
    return {.server = server(),
            .token_file = token_file(),
            .authority_file = certificate_,
            .name_space = "jobs"};
  }
  /// Those that the server accepts, one a line.
  void accept_tokens(const std::string& tokens) { put("tokens", tokens); }
  /// The one that its clients send.
  void show_token(const std::string& token) { put("token", token + "\n"); }

  void kill() {
    if (process_ < 0) return;
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
    process_ = -1;
  }
  /// Returns once it serves.
  void start() {
    std::vector<std::string> words{"/usr/bin/python3", script(), std::to_string(port_),
                                   folder_.file("state"), folder_.file("tokens")};
    if (!certificate_.empty()) words.insert(words.end(), {certificate_, key_});
    std::vector<char*> arguments;
    arguments.reserve(words.size() + 1);
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    process_ = ::fork();
    if (process_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::execv(arguments.front(), arguments.data());
      ::_exit(127);
    }
    for (int attempt = 0; attempt < 600; ++attempt) {
      if (ask("GET", "/readyz").http_status == 200) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    ADD_FAILURE() << "the fake of Kubernetes did not start within 30 s";
  }
  /// Forgets changes that watchers have not seen: they end with 410.
  void compact() { ask("POST", "/compact"); }
  /// All watches that run say what is no event.
  void garble() { ask("POST", "/garble"); }
  /// How many reads and writes were refused for their tokens.
  struct Refused {
    int reads, writes;
  };
  /// Returns once each is more than in `known`; -1: no answer within the time.
  Refused refused(const Refused& known) const {
    const std::string path =
        "/refused?reads=" + std::to_string(known.reads) + "&writes=" + std::to_string(known.writes);
    const auto said = nlohmann::json::parse(ask("GET", path).received, nullptr, false);
    if (said.is_discarded()) return {-1, -1};
    return {said.value("reads", -1), said.value("writes", -1)};
  }
  store::HttpTransfer ask(const char* method, const std::string& path,
                          const std::string& body = {}) const {
    const auto connection =
        store::curl_connections({.authority = certificate_, .certificate = {}, .key = {}})();
    connection->start({.endpoint = server(),
                       .path = path,
                       .body = body,
                       .authorization = "Bearer first",
                       .method = method});
    const TimePoint limit = deadline_after(steady_clock(), muster::testing::kMustHappen);
    while (!connection->transfer().ended && steady_clock().now() < limit) connection->drive(limit);
    return connection->transfer();
  }

 private:
  /// In the source tree, which is above this program.
  static std::string script() {
    std::string name = "src/testing/fake_kubernetes.py";
    std::filesystem::path folder = std::filesystem::read_symlink("/proc/self/exe");
    while (folder.has_relative_path()) {
      folder = folder.parent_path();
      if (std::filesystem::exists(folder / name)) return folder / name;
    }
    return name;
  }
  void put(const std::string& name, const std::string& text) const {
    const std::string path = folder_.file(name), fresh = path + ".new";
    std::ofstream(fresh) << text;
    if (::rename(fresh.c_str(), path.c_str()) != 0) std::abort();
  }

  const std::string certificate_, key_;
  const ScratchFolder folder_;
  const std::uint16_t port_ = reserve_port();
  pid_t process_ = -1;
};

}  // namespace muster::testing
