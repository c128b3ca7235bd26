// The search for the addresses of a name, and its deadline: `socket_address.h`.
#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "core/base/threads/thread_start.h"
#include "core/net/socket_address.h"

namespace muster {
namespace {

using Addresses = Result<std::vector<SocketAddress>>;

bool only_digits(const std::string& host) {
  return !host.empty() &&
         std::all_of(host.begin(), host.end(), [](char c) { return c >= '0' && c <= '9'; });
}

Addresses search(const std::string& host, std::uint16_t port, const Resolver& resolver) {
  if (!only_digits(host)) return resolver(host, port);
  // A closing dot makes the resolver read digits as a name; it must not be handed an address of one
  // number.
  auto found = resolver(host + ".", port);
  if (found) return found;
  return Status(Code::network, "cannot find the address of " + describe_host(host) + ": " +
                                   found.status().message());
}

}  // namespace

std::string describe_host(const std::string& name) {
  return "host \"" + name +
         (only_digits(name) ? "\" (digits only: taken as a name, not as an address)" : "\"");
}

/// Shared with the thread, which may outlive the search.
struct NameSearch::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<Addresses> answer;

  void give(Addresses found) {
    {
      const std::lock_guard lock(mutex);
      answer = std::move(found);
    }
    changed.notify_all();
  }
};

NameSearch::NameSearch(const std::string& host, std::uint16_t port, Resolver resolver)
    : state_(std::make_shared<State>()) {
  if (host.empty()) {
    state_->give(Status(Code::invalid_argument, "the host name is empty"));
  } else if (auto address = SocketAddress::numeric(host, port)) {
    state_->give(std::vector<SocketAddress>{*address});
  } else {
    const bool brackets = host.size() >= 2 && host.front() == '[' && host.back() == ']';
    ask(brackets ? host.substr(1, host.size() - 2) : host, port, std::move(resolver));
  }
}

void NameSearch::ask(std::string name, std::uint16_t port, Resolver resolver) {
  auto thread = start_thread("the thread that finds the address of " + describe_host(name),
                             [state = state_, name, port, resolver = std::move(resolver)] {
                               state->give(search(name, port, resolver));
                             });
  if (!thread.ok()) return state_->give(thread.status());
  thread->detach();
}

const Addresses* NameSearch::wait(TimePoint until) {
  std::unique_lock lock(state_->mutex);
  const auto there = [&] { return state_->answer.has_value(); };
  if (until == TimePoint::max()) {
    state_->changed.wait(lock, there);
  } else {
    state_->changed.wait_until(lock, until, there);
  }
  return state_->answer ? &*state_->answer : nullptr;
}

Addresses resolve(const std::string& host, std::uint16_t port, TimePoint deadline,
                  Resolver resolver) {
  const TimePoint begin = steady_clock().now();
  NameSearch search(host, port, std::move(resolver));
  if (const Addresses* answer = search.wait(deadline)) return *answer;
  return Status(Code::timed_out,
                "cannot find the address of " + describe_host(host) +
                    ": the resolver did not answer within " +
                    describe(steady_clock().now() - begin) +
                    "; check the name and this host's name service, or give a numeric address");
}

}  // namespace muster
