// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/run/rendezvous_conf.h"

#include <chrono>
#include <cstdlib>
#include <map>
#include <set>
#include <sstream>

namespace muster::cli {
namespace {

/// Keys of torchrun's --rdzv-conf that ask for what muster does anyway: the launcher that can
/// listen at the endpoint serves (is_host), the store is a TCP store (store_type) with the
/// launcher's limits (read_timeout), nothing is polled (heartbeat_timeout, close_timeout), and a
/// node's number is --node-rank (rank).
const std::set<std::string> kWithoutMeaning = {"is_host",           "store_type",    "read_timeout",
                                               "heartbeat_timeout", "close_timeout", "rank"};

}  // namespace

Result<Duration> parse_seconds(const std::string& option, const std::string& word) {
  char* end = nullptr;
  const double value = std::strtod(word.c_str(), &end);
  if (word.empty() || *end != '\0' || !(value >= 0) || value > 1e8) {
    return Status(Code::invalid_argument,
                  option + ": \"" + word + "\" is not a number of seconds from 0 to 100000000");
  }
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(value));
}

Status take_rendezvous_conf(const std::string& text, launch::RunOptions& options) {
  Duration interval = std::chrono::seconds(5);  // torchrun's, if only one of the two is given
  Duration silence{0};
  std::int64_t attempts = 3;
  bool alive = false;
  std::istringstream pairs(text);
  for (std::string pair; std::getline(pairs, pair, ',');) {
    const std::size_t equals = pair.find('=');
    const std::string key = pair.substr(0, equals);
    const std::string word = equals == std::string::npos ? "" : pair.substr(equals + 1);
    const std::string name = "--rdzv-conf " + key;
    const std::map<std::string, Duration*> durations = {
        {"join_timeout", &options.join_timeout},
        {"timeout", &options.join_timeout},
        {"last_call_timeout", &options.last_call},
        {"keep_alive_interval", &interval},
        {"service_timeout", &silence},
        {"stopped_timeout", &options.stopped_timeout},
        {"blacklist_cooldown", &options.blacklist_cooldown}};
    if (const auto known = durations.find(key); known != durations.end()) {
      auto value = parse_seconds(name, word);
      if (!value) return value.status();
      *known->second = *value;
      alive = alive || key == "keep_alive_interval";
      if (key == "service_timeout") options.service_timeout = silence;
    } else if (key == "keep_alive_max_attempt" || key == "blacklist_after") {
      auto value = launch::parse_whole(name, word, key == "blacklist_after" ? 0 : 1, 1000);
      if (!value) return value.status();
      if (key == "blacklist_after") {
        options.blacklist_after = static_cast<int>(*value);
      } else {
        attempts = *value;
        alive = true;
      }
    } else if (key == "majority") {
      auto value = launch::parse_whole(name, word, 0, 1);
      if (!value) return value.status();
      options.majority = *value == 1;
    } else if (kWithoutMeaning.contains(key)) {
      continue;
    } else {
      return Status(Code::invalid_argument,
                    "--rdzv-conf: \"" + key +
                        "\" is not known; there are join_timeout (or timeout), last_call_timeout, "
                        "keep_alive_interval, keep_alive_max_attempt, service_timeout, "
                        "stopped_timeout, blacklist_after, blacklist_cooldown and majority");
    }
  }
  if (alive) options.node_ttl = interval * attempts;
  if (!options.node_ttl || *options.node_ttl > Duration::zero()) return {};
  return Status(
      Code::invalid_argument,
      "--rdzv-conf: with keep_alive_interval=0 every node would be taken for dead at once");
}

}  // namespace muster::cli
