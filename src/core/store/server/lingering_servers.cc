// SPDX-License-Identifier: BSD-3-Clause
#include "core/store/server/lingering_servers.h"

#include <algorithm>
#include <cstdlib>
#include <thread>
#include <utility>

#include "core/base/process/fork_guard.h"
#include "muster/clock.h"

namespace muster::store {
namespace {

/// At the process's exit: how long servers are waited for, and how often they are polled.
constexpr Duration kLingerAtExit = std::chrono::seconds(2);
constexpr Duration kExitPoll = std::chrono::milliseconds(2);  // limit: of an ending process

}  // namespace

LingeringServers& LingeringServers::of_process() {
  static constinit PerProcess<LingeringServers> one;
  return one.get();
}

LingeringServers::LingeringServers() {
  // If it cannot be registered, ranks that are told late see the end of the process instead.
  static_cast<void>(std::atexit([] { of_process().end_all(); }));
}

void LingeringServers::add(std::shared_ptr<TcpServer> server) {
  end([](const TcpServer& each) { return each.has_ended(); });
  const std::lock_guard lock(mutex_);
  servers_.push_back(std::move(server));
}

void LingeringServers::make_room(const SocketAddress& address) {
  if (address.port() == 0) return;
  end([&address](const TcpServer& each) { return each.excludes(address); });
}

template <class Which>
void LingeringServers::end(const Which& which) {
  std::vector<std::shared_ptr<TcpServer>> gone;  // end without the lock
  const std::lock_guard lock(mutex_);
  std::erase_if(servers_, [&](auto& each) {
    const bool goes = which(*each);
    if (goes) gone.push_back(std::move(each));
    return goes;
  });
}

void LingeringServers::end_all() {
  const TimePoint limit = steady_clock().now() + kLingerAtExit;
  const auto needed = [&] {
    const std::lock_guard lock(mutex_);
    return std::ranges::any_of(servers_, [](const auto& each) { return each->has_ranks(); });
  };
  while (needed() && steady_clock().now() < limit) std::this_thread::sleep_for(kExitPoll);
  end([](const TcpServer&) { return true; });
}

}  // namespace muster::store
