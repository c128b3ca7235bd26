// SPDX-License-Identifier: BSD-3-Clause
#define ASIO_STANDALONE
#define ASIO_NO_DEPRECATED
// One thread runs the loop, and handlers are posted to it under a lock. Asio's fences, which
// ThreadSanitizer does not support, are therefore not needed.
#define ASIO_DISABLE_FENCED_BLOCK
#include "core/store/server/tcp_server.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <asio/io_context.hpp>
#include <asio/posix/stream_descriptor.hpp>
#include <asio/post.hpp>
#include <asio/steady_timer.hpp>
#include <atomic>
#include <cerrno>
#include <thread>
#include <unordered_map>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/log/log.h"
#include "core/base/process/fork_guard.h"
#include "core/base/threads/thread_start.h"
#include "core/net/socket_address.h"
#include "core/net/unix_socket.h"
#include "core/store/client/tcp_socket.h"
#include "core/store/server/lingering_servers.h"
#include "core/store/server/store_server.h"
#include "core/tunables/tunables_fixed.h"
#include "muster/clock.h"

namespace muster::store {
namespace {

using asio::posix::descriptor_base;
constexpr int kBacklog = 4096;
constexpr int kAcceptsPerTurn = 64;
constexpr std::size_t kPieces = 64;
constexpr Duration kLastWords = std::chrono::seconds(1);
/// How long a server outlives a failed attempt to join.
constexpr Duration kLinger = std::chrono::seconds(30);
constexpr Duration kWarningInterval = std::chrono::seconds(30);
constexpr Duration kNoFilesPause =
    std::chrono::milliseconds(20);  // limit: descriptors have run out

/// A descriptor that Asio polls and that is closed in forked children. Asio only waits for
/// readiness; reads and writes are plain system calls.
struct WatchedSocket {
  WatchedSocket(asio::io_context& io, Descriptor fd) : watch(io), socket(std::move(fd)) {
    watch.assign(socket.get());
  }
  ~WatchedSocket() { watch.release(); }
  asio::posix::stream_descriptor watch;
  GuardedDescriptor socket;
};

/// Listens at an address where a server of an earlier job of this process may linger.
Result<Descriptor> listen_in_place(const SocketAddress& address, bool dual_stack = false) {
  LingeringServers::of_process().make_room(address);
  return listen_on(address, kBacklog, dual_stack);
}

Result<std::vector<Descriptor>> listen_everywhere(std::uint16_t port) {
  std::vector<Descriptor> sockets;
  auto six = listen_in_place(*SocketAddress::numeric("::", port), true);
  if (six) {
    sockets.push_back(std::move(*six));
    return sockets;
  }
  auto four = listen_in_place(*SocketAddress::numeric("0.0.0.0", port));  // a host without IPv6
  if (!four) return four.status();
  sockets.push_back(std::move(*four));
  return sockets;
}

/// Listens on every address of the host name that belongs to this host, all with the same port.
Result<std::vector<Descriptor>> listen_at(const std::string& host, std::uint16_t port,
                                          TimePoint deadline) {
  if (host.empty()) return listen_everywhere(port);
  const auto addresses = resolve(host, port, deadline);
  if (!addresses) return addresses.status();
  std::vector<Descriptor> sockets;
  std::uint16_t chosen = port;
  std::string found;
  for (const SocketAddress& address : *addresses) {
    found += (found.empty() ? "" : ", ") + address.host();
    if (!is_of_this_host(address)) continue;
    auto socket = listen_in_place(*SocketAddress::numeric(address.host(), chosen));
    if (!socket && port == 0 && !sockets.empty())
      continue;  // a port that is free for one address family may be taken for the other
    if (!socket)
      return socket.status().with_context("the store at " + host +
                                          " cannot be opened; another job may use this port");
    if (const auto name = SocketAddress::local_of(socket->get())) chosen = name->port();
    sockets.push_back(std::move(*socket));
  }
  if (sockets.empty()) {
    return Status(Code::network, "the store cannot be opened at \"" + host + "\": its addresses (" +
                                     found +
                                     ") are not this host's; give a name or address of this host, "
                                     "or 0.0.0.0 for all interfaces");
  }
  return sockets;
}

Result<std::vector<Descriptor>> adopt(Descriptor listener, std::uint16_t port) {
  const int descriptor = listener.get();
  const std::string name = "the listen descriptor " + std::to_string(descriptor);
  const auto bound = SocketAddress::local_of(descriptor);
  // listen() would bind an unbound socket to a free port on every interface.
  if (!bound || bound->port() == 0)
    return Status(Code::invalid_argument, name + " is not a bound TCP socket" +
                                              (bound ? "" : ": " + bound.status().message()));
  if (port != 0 && port != bound->port()) {
    return Status(Code::invalid_argument,
                  name + " is bound to " + bound->text() + ", and the store's port was given as " +
                      std::to_string(port) + "; give that socket's port, or 0");
  }
  const int flags = ::fcntl(descriptor, F_GETFL);
  if (flags < 0 || ::fcntl(descriptor, F_SETFL, flags | O_NONBLOCK) != 0 ||
      ::fcntl(descriptor, F_SETFD, FD_CLOEXEC) != 0 || ::listen(descriptor, kBacklog) != 0) {
    return Status(Code::invalid_argument,
                  name + " is not a bound TCP socket: " + errno_text(errno));
  }
  std::vector<Descriptor> sockets;
  sockets.push_back(std::move(listener));
  return sockets;
}

bool is_wildcard(const SocketAddress& address) {
  const std::string host = address.host();
  return host == "::" || host == "0.0.0.0";
}

std::uint16_t port_of(int socket) {
  const auto name = SocketAddress::local_of(socket);
  return name ? name->port() : 0;
}

class AsioServer final : public TcpServer {
 public:
  AsioServer(TcpServerOptions options, std::vector<Descriptor> listeners)
      : port_(port_of(listeners.front().get())),
        timer_(io_),
        pause_(io_),
        linger_(io_),
        machine_({.secret = std::move(options.secret),
                  .job = store_job(port_, options.job, Handshake::Role::store),
                  .observed_job = store_job(port_, options.job, Handshake::Role::observer)}) {
    for (Descriptor& each : listeners) {
      const auto name = SocketAddress::local_of(each.get());
      if (name) addresses_.push_back(*name);
      listeners_.push_back(std::make_unique<ListeningSocket>(io_, std::move(each)));
      if (!name) continue;
      auto local = listen_locally(local_name_of(*name));
      if (local)
        listeners_.push_back(std::make_unique<ListeningSocket>(io_, std::move(*local), true));
    }
    for (auto& listener : listeners_) watch_listener(*listener);
  }

  Status serve() {
    auto thread = start_thread("the thread of the store's server", [this] {
      pthread_setname_np(pthread_self(), "muster-store");
      io_.run();
    });
    if (!thread.ok()) return thread.status();
    thread_ = std::move(*thread);
    return {};
  }

  ~AsioServer() override {
    if (!thread_.joinable()) return;
    if (mark_.forked()) {  // in a forked child the thread does not exist
      thread_.detach();
      return;
    }
    asio::post(io_, [this] { begin_end(); });
    thread_.join();
  }

  std::uint16_t port() const override { return port_; }
  bool excludes(const SocketAddress& address) const override {
    return std::ranges::any_of(addresses_, [&](const SocketAddress& own) {
      return own.port() == address.port() &&
             (own.host() == address.host() || is_wildcard(own) || is_wildcard(address));
    });
  }
  void begin_to_linger() override {
    lingers_ = true;
    has_ranks_ = true;  // until its thread knows
    asio::post(io_, [this] { begin_lingering(); });
  }
  bool lingers() const override { return lingers_; }
  bool has_ended() const override { return ended_; }
  bool has_ranks() const override { return has_ranks_ && !ended_ && !mark_.forked(); }

 private:
  using Connection = StoreServer::Connection;
  /// A TCP socket, or the Unix socket beside it for clients of this host.
  struct ListeningSocket : WatchedSocket {
    ListeningSocket(asio::io_context& io, Descriptor fd, bool is_local = false)
        : WatchedSocket(io, std::move(fd)), local(is_local) {}
    const bool local;
  };
  struct Session : WatchedSocket {
    using WatchedSocket::WatchedSocket;
    bool awaits_read = false;
    bool awaits_write = false;
  };

  void watch_listener(ListeningSocket& listener) {
    listener.watch.async_wait(descriptor_base::wait_read,
                              [this, &listener](const asio::error_code& error) {
                                if (!error && !ending_) accept_some(listener);
                              });
  }

  void accept_some(ListeningSocket& listener) {
    for (int i = 0; i < kAcceptsPerTurn; ++i) {
      sockaddr_storage name;
      socklen_t length = sizeof name;
      Descriptor socket(::accept4(listener.socket.get(), reinterpret_cast<sockaddr*>(&name),
                                  &length, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (socket) {
        if (listener.local) {
          open_local(std::move(socket));
        } else {
          open(std::move(socket), SocketAddress(reinterpret_cast<const sockaddr*>(&name), length));
        }
        continue;
      }
      if (errno == EAGAIN || errno == EWOULDBLOCK) break;
      if (lacks_room(errno)) return pause_accepting(listener);
    }
    pump();
    if (!ending_) watch_listener(listener);
  }

  /// New connections wait in the kernel's queue until a descriptor is free; existing ones are not
  /// affected.
  void pause_accepting(ListeningSocket& listener) {
    if (now() >= next_warning_) {
      log(LogLevel::warning, "the store has no file descriptors left (" + errno_text(errno) +
                                 "); new connections wait; raise the limit with ulimit -n");
      next_warning_ = now() + kWarningInterval;
    }
    pump();
    pause_.expires_after(kNoFilesPause);
    pause_.async_wait([this, &listener](const asio::error_code& error) {
      if (error || ending_) return;
      for (auto& each : listeners_) {
        if (each.get() != &listener) each->watch.cancel();
      }
      for (auto& each : listeners_) accept_some(*each);
    });
  }

  void open(Descriptor socket, const SocketAddress& peer) {
    tune_tcp(socket.get());
    const auto own = SocketAddress::local_of(socket.get());
    const bool same_host = peer.is_loopback() || (own && own->host() == peer.host());
    add(std::move(socket), peer.text(),
        same_host ? StoreServer::ListenerWay::tcp_same_host : StoreServer::ListenerWay::tcp);
  }

  void open_local(Descriptor socket) {
    if (is_same_user(socket.get()))
      return add(std::move(socket), "a process of this host",
                 StoreServer::ListenerWay::unix_socket);
    machine_.on_refused("the store refused a process of another user of this host", now());
  }

  void add(Descriptor socket, const std::string& peer, StoreServer::ListenerWay way) {
    const Connection number = next_connection_++;
    const auto [entry, fresh] =
        sessions_.emplace(number, std::make_unique<Session>(io_, std::move(socket)));
    machine_.on_open(number, peer, way, now());
    watch_reading(number, *entry->second);
  }

  void watch_reading(Connection number, Session& session) {
    if (session.awaits_read) return;
    session.awaits_read = true;
    session.watch.async_wait(descriptor_base::wait_read,
                             [this, number](const asio::error_code& error) {
                               if (error) return;
                               const auto entry = sessions_.find(number);
                               if (entry == sessions_.end()) return;
                               entry->second->awaits_read = false;
                               read_some(number, *entry->second);
                               pump();
                             });
  }

  void read_some(Connection number, Session& session) {
    if (!machine_.wants_read(number)) return;  // `pump` watches again when it does
    const ssize_t n = ::recv(session.socket.get(), buffer_.data(), buffer_.size(), 0);
    if (n > 0) {
      machine_.on_bytes(number, ConstBytes(buffer_).first(static_cast<std::size_t>(n)), now());
    } else if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
      return drop(number);
    }
    if (machine_.wants_read(number)) watch_reading(number, session);
  }

  void drop(Connection number) {
    sessions_.erase(number);
    machine_.on_closed(number, now());
  }

  /// Carries out the actions that the state machine has requested since the last call.
  void pump() {
    for (auto changed = machine_.take_changed(); !changed.empty();
         changed = machine_.take_changed()) {
      for (const Connection number : changed) {
        const auto entry = sessions_.find(number);
        if (entry == sessions_.end()) continue;
        Session& session = *entry->second;
        if (!session.awaits_write && !flush(number, session)) continue;
        if (machine_.wants_close(number)) {
          ::shutdown(session.socket.get(), SHUT_WR);
          drop(number);
        } else if (machine_.wants_read(number)) {
          watch_reading(number, session);
        }
      }
    }
    set_timer();
    if (ending_) return end_when_silent();
    has_ranks_ = machine_.has_ranks();
    if (lingering_ && !has_ranks_ && !machine_.has_news_for_late_ranks()) begin_end();
  }

  /// Writes what fits; false if the connection has ended.
  bool flush(Connection number, Session& session) {
    for (;;) {
      const auto pieces = machine_.output(number, kPieces);
      if (pieces.empty()) return true;
      std::array<iovec, kPieces> list;
      for (std::size_t i = 0; i < pieces.size(); ++i)
        list[i] = {const_cast<std::byte*>(pieces[i].data()), pieces[i].size()};
      msghdr message{};
      message.msg_iov = list.data();
      message.msg_iovlen = pieces.size();
      const ssize_t n = ::sendmsg(session.socket.get(), &message, MSG_NOSIGNAL);
      if (n >= 0) {
        machine_.on_written(number, static_cast<std::size_t>(n), now());
      } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
        watch_writing(number, session);
        return true;
      } else if (errno != EINTR) {
        drop(number);
        return false;
      }
    }
  }

  void watch_writing(Connection number, Session& session) {
    session.awaits_write = true;
    session.watch.async_wait(descriptor_base::wait_write,
                             [this, number](const asio::error_code& error) {
                               if (error) return;
                               const auto entry = sessions_.find(number);
                               if (entry == sessions_.end()) return;
                               entry->second->awaits_write = false;
                               if (flush(number, *entry->second) && machine_.wants_read(number))
                                 watch_reading(number, *entry->second);
                               pump();
                             });
  }

  void set_timer() {
    const TimePoint next = machine_.next_timer();
    if (next == timer_at_) return;
    timer_at_ = next;
    timer_.cancel();
    if (next == TimePoint::max()) return;
    timer_.expires_at(next);
    timer_.async_wait([this](const asio::error_code& error) {
      if (error) return;
      timer_at_ = TimePoint::max();
      machine_.on_time(now());
      pump();
    });
  }

  /// Ends once nobody needs the server, or after the limit.
  void begin_lingering() {
    lingering_ = true;
    linger_.expires_after(kLinger);
    linger_.async_wait([this](const asio::error_code& error) {
      if (!error && !ending_) begin_end();
    });
    pump();
  }

  void begin_end() {
    ending_ = true;
    for (auto& listener : listeners_) listener->watch.cancel();
    pause_.expires_after(kLastWords);
    pause_.async_wait([this](const asio::error_code&) { finish(); });
    pump();
  }

  void end_when_silent() {
    for (const auto& [number, session] : sessions_) {
      if (session->awaits_write) return;
    }
    finish();
  }

  void finish() {
    for (auto& [number, session] : sessions_) ::shutdown(session->socket.get(), SHUT_WR);
    sessions_.clear();
    listeners_.clear();
    ended_ = true;
    io_.stop();
  }

  static TimePoint now() { return steady_clock().now(); }

  // Other threads use `io_` (to post), the first two and the atomics. All else belongs to the
  // server's thread, which `serve` starts after the constructor, so it needs no lock.
  const std::uint16_t port_;
  std::vector<SocketAddress> addresses_;  // at which it listens for TCP connections
  asio::io_context io_{1};
  asio::steady_timer timer_;
  asio::steady_timer pause_;
  asio::steady_timer linger_;
  TimePoint timer_at_ = TimePoint::max();
  StoreServer machine_;
  std::vector<std::unique_ptr<ListeningSocket>> listeners_;
  std::unordered_map<Connection, std::unique_ptr<Session>> sessions_;
  Connection next_connection_ = 1;
  std::array<std::byte, fixed::kIoBuffer> buffer_;
  bool ending_ = false;
  bool lingering_ = false;
  std::atomic<bool> lingers_{false};
  std::atomic<bool> has_ranks_{false};
  std::atomic<bool> ended_{false};
  TimePoint next_warning_{};
  ProcessMark mark_;
  std::thread thread_;
};

}  // namespace

void TcpServer::linger(std::shared_ptr<TcpServer> server) {
  server->begin_to_linger();
  LingeringServers::of_process().add(std::move(server));
}

Result<std::shared_ptr<TcpServer>> TcpServer::start(TcpServerOptions options) {
  auto listeners = options.listener ? adopt(std::move(options.listener), options.port)
                                    : listen_at(options.host, options.port, options.deadline);
  if (!listeners) return listeners.status();
  const auto bound = SocketAddress::local_of(listeners->front().get());
  for (const std::string& more : options.also_at) {
    const auto address = SocketAddress::numeric(more, bound ? bound->port() : options.port);
    if (!address) return address.status().with_context("an address for the store to listen at");
    if (auto socket = listen_in_place(*address)) listeners->push_back(std::move(*socket));
  }
  auto server = std::make_shared<AsioServer>(std::move(options), std::move(*listeners));
  if (Status serves = server->serve(); !serves) return serves;
  return std::shared_ptr<TcpServer>(std::move(server));
}

}  // namespace muster::store
