// SPDX-License-Identifier: BSD-3-Clause
// The least times of this machine, which no library can beat: a flag from one core to another, a
// core given to the next process, copies, and TCP on the loopback interface. bench/gates.py
// compares calls with them.
//
//   muster_bench_floors [--rounds N] [--json FILE]

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/socket.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <system_error>

#include "core/wait/topology.h"
#include "faces/cli/bench/measurement.h"
#include "faces/cli/parse.h"
#include "forked.h"

namespace {

using muster::cli::bench::median;
using muster_bench::Board;
using muster_bench::Clock;
using muster_bench::in_processes;
using muster_bench::meet;
using muster_bench::microseconds;

/// A figure of a process that runs elsewhere would be another's.
void bind_to(int core) {
  if (const auto bound = muster::bind_to_hardware_thread(core); !bound)
    throw std::runtime_error(bound.message());
}
/// Each process its own, as far as there are so many.
void bind_apart(int rank, const std::vector<int>& cores) {
  bind_to(cores[static_cast<std::size_t>(rank) % cores.size()]);
}

/// One way of a word that goes from one process to another and back, microseconds. Processes of one
/// core give it away while they wait.
double time_hops(int first_core, int second_core) {
  constexpr int kTrips = 20000;
  return in_processes(2, [&](int rank, Board& board) {
    bind_to(rank == 0 ? first_core : second_core);
    const auto wait_for = [&](const std::atomic<int>& flag, int value) {
      while (flag.load(std::memory_order_acquire) != value)
        if (first_core == second_core) ::sched_yield();
    };
    meet(board, 2);
    const auto start = Clock::now();
    for (int trip = 1; trip <= kTrips; ++trip) {
      if (rank == 0) board.there.store(trip, std::memory_order_release);
      wait_for(rank == 0 ? board.back : board.there, trip);
      if (rank == 1) board.back.store(trip, std::memory_order_release);
    }
    board.figures[rank] = microseconds(Clock::now() - start) / (2.0 * kTrips);
  });
}

/// A copy of `bytes` that has just been written, by `at_once` processes at the same time; the
/// median of the slowest.
double time_copies(std::size_t bytes, const std::vector<int>& cores, int at_once) {
  const int copies =
      static_cast<int>(std::clamp<std::size_t>((std::size_t{256} << 20) / bytes, 8, 400));
  return in_processes(at_once, [&](int rank, Board& board) {
    bind_apart(rank, cores);
    std::vector<char> from(bytes, 1), to(bytes, 2);
    std::vector<double> times;
    meet(board, at_once);
    for (int i = 0; i < copies; ++i) {
      std::memset(from.data(), i, bytes);
      // Together each time, as ranks are.
      board.there.fetch_add(1);
      while (board.there.load(std::memory_order_acquire) < (i + 1) * at_once) {
      }
      const auto start = Clock::now();
      std::memcpy(to.data(), from.data(), bytes);
      asm volatile("" : : "r"(to.data()) : "memory");  // the copy is wanted
      times.push_back(microseconds(Clock::now() - start));
    }
    board.figures[rank] = median(times);
  });
}

[[noreturn]] void give_up(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

/// The two ends of one connection over the loopback interface, by rank; blocking, without Nagle's
/// delay.
class Loopback {
 public:
  Loopback() {
    listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    address_.sin_family = AF_INET;
    address_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address_;
    if (listener_ < 0 || ::bind(listener_, reinterpret_cast<sockaddr*>(&address_), size) != 0 ||
        ::listen(listener_, 1) != 0 ||
        ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address_), &size) != 0)
      give_up("listening on the loopback interface");
  }
  ~Loopback() { ::close(listener_); }
  Loopback(const Loopback&) = delete;
  Loopback& operator=(const Loopback&) = delete;

  int end(int rank) const {
    const int one = 1;
    const int stream = rank == 0 ? ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC)
                                 : ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (stream < 0 ||
        (rank == 1 &&
         ::connect(stream, reinterpret_cast<const sockaddr*>(&address_), sizeof address_) != 0) ||
        ::setsockopt(stream, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) != 0)
      give_up("connecting over the loopback interface");
    return stream;
  }

 private:
  int listener_ = -1;
  sockaddr_in address_{};
};

void send_all(int stream, const char* data, std::size_t bytes) {
  while (bytes > 0) {
    const ssize_t sent = ::send(stream, data, bytes, MSG_NOSIGNAL);
    if (sent < 0) give_up("sending over the loopback interface");
    data += sent;
    bytes -= static_cast<std::size_t>(sent);
  }
}

void receive_all(int stream, char* data, std::size_t bytes, bool spinning) {
  while (bytes > 0) {
    const ssize_t got = ::recv(stream, data, bytes, spinning ? MSG_DONTWAIT : 0);
    if (got < 0 && errno == EAGAIN) continue;
    if (got <= 0) give_up("receiving over the loopback interface");
    data += got;
    bytes -= static_cast<std::size_t>(got);
  }
}

/// Four bytes there and back, both ends looking for them all the time.
double time_round_trips(const std::vector<int>& cores) {
  constexpr int kTrips = 5000;
  const Loopback loopback;
  return in_processes(2, [&](int rank, Board& board) {
    bind_apart(rank, cores);
    const int stream = loopback.end(rank);
    char word[4] = {};
    meet(board, 2);
    const auto start = Clock::now();
    for (int trip = 0; trip < kTrips; ++trip) {
      if (rank == 0) send_all(stream, word, sizeof word);
      receive_all(stream, word, sizeof word, true);
      if (rank == 1) send_all(stream, word, sizeof word);
    }
    board.figures[rank] = microseconds(Clock::now() - start) / kTrips;
    ::close(stream);
  });
}

/// `bytes` in one stream, until the last one is there; `at_once` of them are given to the system at
/// a time.
double time_stream(std::size_t bytes, std::size_t at_once, const std::vector<int>& cores) {
  constexpr int kTimes = 9;
  const Loopback loopback;
  return in_processes(2, [&](int rank, Board& board) {
    bind_apart(rank, cores);
    const int stream = loopback.end(rank);
    std::vector<char> data(bytes, 1);
    std::vector<double> times;
    meet(board, 2);
    for (int i = 0; i < kTimes; ++i) {
      char go = 0;
      if (rank == 0) {
        std::memset(data.data(), i, bytes);
        receive_all(stream, &go, 1, true);
        for (std::size_t sent = 0; sent < bytes; sent += at_once)
          send_all(stream, data.data() + sent, std::min(at_once, bytes - sent));
      } else {
        const auto start = Clock::now();
        send_all(stream, &go, 1);
        receive_all(stream, data.data(), bytes, false);
        times.push_back(microseconds(Clock::now() - start));
      }
    }
    if (rank == 1) board.figures[rank] = median(times);
    ::close(stream);
  });
}

/// As fast as it goes, however much is given at a time.
double time_best_stream(std::size_t bytes, const std::vector<int>& cores) {
  double best = -1;
  for (const std::size_t at_once : {std::size_t{64} << 10, std::size_t{256} << 10,
                                    std::size_t{1} << 20, std::size_t{4} << 20, bytes}) {
    const double us = time_stream(bytes, at_once, cores);
    if (us < 0) return us;
    if (best < 0 || us < best) best = us;
  }
  return best;
}

struct Floor {
  std::string what;
  std::size_t bytes = 0;
  int at_once = 1;
  std::function<double()> measure;
};

}  // namespace

int main(int count, char** words) {
  int rounds = 3;
  std::string json;
  CLI::App app(
      "What this machine itself takes, which no library can be faster than: microseconds, medians "
      "of the rounds.\n"
      "hop: a word from one core to another. switch: the same between two processes of one core. "
      "copy: bytes just written, by one process\n"
      "and by 2, 4 ... at the same time, up to one on every core. tcp round trip: 4 bytes there "
      "and back. tcp stream: 64 MiB one way,\n"
      "by the best of several sizes of a write; the ends of both on cores of their own.",
      "muster-lab floors");
  app.add_option("--rounds", rounds, "how often everything is repeated, in turn")
      ->check(CLI::Range(1, 100))
      ->capture_default_str();
  app.add_option("--json", json, "also append the rows to this file, one JSON object a line");
  if (const auto stop = muster::cli::parse(app, {words + 1, words + count})) return *stop;

  const auto cores = muster::own_cores();
  if (cores.empty()) return 1;
  const int most = std::min(muster::usable_cores(), static_cast<int>(muster_bench::kMostRanks));
  std::vector<Floor> floors;
  if (cores.size() > 1)
    floors.push_back({"hop", 0, 1, [&] { return time_hops(cores[0], cores[1]); }});
  floors.push_back({"switch", 0, 1, [&] { return time_hops(cores[0], cores[0]); }});
  for (const std::size_t bytes : {std::size_t{64} << 10, std::size_t{1} << 20,
                                  std::size_t{16} << 20, std::size_t{64} << 20}) {
    floors.push_back({"copy", bytes, 1, [&cores, bytes] { return time_copies(bytes, cores, 1); }});
    for (int at_once = 2; at_once < 2 * most; at_once *= 2) {
      const int copies = std::min(at_once, most);
      floors.push_back({"copy", bytes, copies,
                        [&cores, bytes, copies] { return time_copies(bytes, cores, copies); }});
    }
  }
  floors.push_back({"tcp round trip", 4, 1, [&] { return time_round_trips(cores); }});
  floors.push_back({"tcp stream", std::size_t{64} << 20, 1,
                    [&] { return time_best_stream(std::size_t{64} << 20, cores); }});

  std::printf("%-16s %12s %8s %12s\n", "", "bytes", "at once", "us");
  for (const Floor& floor : floors) {
    std::vector<double> times;
    for (int round = 0; round < rounds; ++round) times.push_back(floor.measure());
    const double us = median(times);
    if (us < 0) return 1;
    std::printf("%-16s %12zu %8d %12.2f\n", floor.what.c_str(), floor.bytes, floor.at_once, us);
    std::fflush(stdout);
    if (json.empty()) continue;
    std::ofstream(json, std::ios::app)
        << R"({"floor":")" << floor.what << R"(","bytes":)" << floor.bytes << R"(,"at_once":)"
        << floor.at_once << R"(,"cores":)" << muster::usable_cores() << R"(,"us":)" << us << "}\n";
  }
  return 0;
}
