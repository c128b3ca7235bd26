// SPDX-License-Identifier: BSD-3-Clause
// The deaths that the trainers of tests/elastic are told to die, and where they tell of themselves.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "muster/distributed.h"

namespace muster::testing {

struct PlannedKill {
  std::int64_t step = -1;
  int rank = -1;
  std::string phase;
  int microseconds = 0;
  std::string victim{};
};

/// Parses the kills from the words `first` to `count`.
inline std::vector<PlannedKill> planned(int first, int count, char** words) {
  std::vector<PlannedKill> kills;
  for (int i = first; i < count; ++i) {
    std::istringstream word(words[i]);
    PlannedKill kill;
    char colon = 0;
    word >> kill.step >> colon >> kill.rank >> colon;
    std::getline(word, kill.phase, ':');
    word >> kill.microseconds >> colon >> kill.victim;
    kills.push_back(kill);
  }
  return kills;
}

inline long long now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

/// The agent's children: workers and spares.
inline std::vector<pid_t> processes_of(pid_t agent) {
  const std::string id = std::to_string(agent);
  std::ifstream children("/proc/" + id + "/task/" + id + "/children");
  return std::vector<pid_t>(std::istream_iterator<pid_t>(children), std::istream_iterator<pid_t>());
}

inline std::FILE* open_log() {
  const char* path = std::getenv("ELASTIC_TRAINER_LOG");
  std::FILE* log = path == nullptr ? stdout : std::fopen(path, "a");
  std::setvbuf(log, nullptr, _IOLBF, BUFSIZ);  // each line is one write
  return log;
}
inline std::FILE* const told = open_log();

[[noreturn]] inline void kill_victim(const std::string& victim) {
  std::fprintf(told, "dies at %lld\n", now_ns());
  const pid_t agent = ::getppid();
  if (victim == "workers") {
    for (const pid_t each : processes_of(agent))
      if (each != ::getpid()) ::kill(each, SIGKILL);
  } else if (victim != "worker") {
    // It starts no process between the reading of its children and its end.
    ::kill(agent, SIGSTOP);
    if (victim == "host") {
      for (const pid_t each : processes_of(agent))
        if (each != ::getpid()) ::kill(each, SIGKILL);
    }
    ::kill(agent, SIGKILL);
  }
  if (victim != "agent") ::kill(::getpid(), SIGKILL);
  for (;;) ::pause();
}

/// While it lives a phase runs in which this rank may be killed; it is at the end at the latest.
class Phase {
 public:
  Phase(const char* name, const PlannedKill& kill, std::int64_t step) {
    if (kill.phase != name || kill.step != step || kill.rank != muster::get_rank()) return;
    killer_ = std::thread([wait = kill.microseconds, victim = kill.victim] {
      std::this_thread::sleep_for(std::chrono::microseconds(wait));
      kill_victim(victim);
    });
  }
  ~Phase() {
    if (killer_.joinable()) killer_.join();
  }
  Phase(const Phase&) = delete;
  Phase& operator=(const Phase&) = delete;

 private:
  std::thread killer_;
};

inline std::uint64_t hash_of(const torch::nn::Module& net) {
  std::uint64_t hash = 1469598103934665603ULL;
  for (const at::Tensor& parameter : net.parameters()) {
    const auto* bytes = static_cast<const unsigned char*>(parameter.const_data_ptr());
    for (std::size_t i = 0; i < parameter.nbytes(); ++i)
      hash = (hash ^ bytes[i]) * 1099511628211ULL;
  }
  return hash;
}

}  // namespace muster::testing
