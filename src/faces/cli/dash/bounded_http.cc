// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/dash/bounded_http.h"

#if MUSTER_HTTPLIB
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "core/base/descriptor.h"
#include "core/base/threads/thread_start.h"

namespace muster::cli {
namespace {

constexpr int kBacklogOfPeers = 128;                         // limit: peers that wait
constexpr std::size_t kMostThreads = 32;                     // limit: memory
constexpr std::size_t kLongestHead = std::size_t{16} << 10;  // limit: memory of a peer

constexpr int kSlowestAnswer = 6;  // limits for a whole answer

bool is_needed(std::string_view header) {
  static constexpr std::array<std::string_view, 2> kNeeded = {"host:", "authorization:"};
  return std::ranges::any_of(kNeeded, [header](std::string_view name) {
    return std::ranges::equal(header.substr(0, name.size()), name, [](unsigned char a, char b) {
      return std::tolower(a) == static_cast<unsigned char>(b);
    });
  });
}

/// The request line and the headers that the page needs, of a head that ends with an empty line.
/// The library would read the others before anybody has shown a token, ranges by a std::regex,
/// which overflows the stack on a long one. Empty: the head has a line that the library would
/// divide at another place than this function.
std::string needed_of(std::string_view head) {
  std::string needed;
  while (!head.empty()) {
    const std::size_t end = head.find("\r\n");
    const std::string_view line = head.substr(0, end);
    head.remove_prefix(end + 2);
    if (line.find('\n') != std::string_view::npos) return {};
    if (needed.empty() || line.empty() || is_needed(line)) needed.append(line).append("\r\n");
  }
  return needed;
}

/// A peer's connection: its request within a limit, and an answer of which it takes a part within
/// the same limit, again and again.
class PeerStream final : public httplib::Stream {
 public:
  PeerStream(int socket, Duration limit)
      : socket_(socket), limit_(limit), deadline_(deadline_after(steady_clock(), limit)) {}

  bool is_readable() const override { return heard_ ? read_ < head_.size() : wait_for(POLLIN); }
  bool is_writable() const override { return true; }  // `write` waits

  ssize_t read(char* to, std::size_t size) override {
    if (!heard_ && !hear()) return -1;
    const std::size_t count = std::min(size, head_.size() - read_);
    std::memcpy(to, head_.data() + read_, count);
    read_ += count;
    return static_cast<ssize_t>(count);
  }

  // The limit may have passed while the answer was made.
  ssize_t write(const char* from, std::size_t size) override {
    if (last_ == TimePoint::max()) last_ = deadline_after(steady_clock(), kSlowestAnswer * limit_);
    deadline_ = std::min(deadline_after(steady_clock(), limit_), last_);
    std::size_t sent = 0;
    while (sent < size) {
      if (!wait_for(POLLOUT)) return -1;
      const ssize_t count = ::send(socket_, from + sent, size - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (count < 0 && errno != EINTR && errno != EAGAIN) return -1;
      if (count <= 0) continue;
      sent += static_cast<std::size_t>(count);
      deadline_ = std::min(deadline_after(steady_clock(), limit_), last_);
    }
    return static_cast<ssize_t>(size);
  }

  void get_remote_ip_and_port(std::string& ip, int& port) const override { ip = "", port = 0; }
  void get_local_ip_and_port(std::string& ip, int& port) const override { ip = "", port = 0; }
  // The library refuses what select() could not watch. Nothing selects here.
  socket_t socket() const override { return 0; }

 private:
  bool wait_for(short events) const {
    for (;;) {
      pollfd watched{socket_, events, 0};
      const int ready = ::poll(&watched, 1, poll_milliseconds(steady_clock().now(), deadline_));
      if (ready > 0) return true;
      if (ready < 0 && errno != EINTR) return false;
      if (steady_clock().now() >= deadline_) return false;
    }
  }

  /// Receives the head.
  bool hear() {
    std::array<char, 4096> bytes{};
    std::string head;
    while (head.size() < kLongestHead && wait_for(POLLIN)) {
      const ssize_t count = ::recv(
          socket_, bytes.data(), std::min(bytes.size(), kLongestHead - head.size()), MSG_DONTWAIT);
      if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      if (count <= 0) return false;
      const std::size_t known = head.size();
      head.append(bytes.data(), static_cast<std::size_t>(count));
      const std::size_t end = head.find("\r\n\r\n", known - std::min<std::size_t>(known, 3));
      if (end == std::string::npos) continue;
      head_ = needed_of(std::string_view(head).substr(0, end + 4));
      heard_ = true;
      return !head_.empty();
    }
    return false;
  }

  const int socket_;
  const Duration limit_;
  TimePoint deadline_;
  TimePoint last_ = TimePoint::max();  // of the answer
  std::string head_;
  std::size_t read_ = 0;  // of it
  bool heard_ = false;
};

}  // namespace

/// Threads that serve a peer each; more of them are started as they are needed.
class BoundedHttpServer::PeerThreads final : public httplib::TaskQueue {
 public:
  explicit PeerThreads(BoundedHttpServer& server) : server_(server) {}

  void enqueue(std::function<void()> peer) override {
    std::unique_lock lock(lock_);
    waiting_.push_back(std::move(peer));
    if (waiting_.size() > idle_ && threads_.size() < kMostThreads) {
      if (auto thread = start_thread("a thread that serves a peer of the page", [this] { run(); }))
        threads_.push_back(std::move(*thread));
    }
    const bool is_full = note_fullness();
    const bool none = threads_.empty();
    changed_.notify_one();
    lock.unlock();
    if (none) return take_one();  // no thread can be had: one peer after the other
    if (is_full) server_.drop_oldest();
  }

  void shutdown() override {
    {
      const std::lock_guard lock(lock_);
      ending_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    while (!waiting_.empty()) take_one();  // closes its socket
  }

 private:
  /// Called with `lock_`.
  bool note_fullness() {
    const bool is_full = waiting_.size() > idle_ && threads_.size() == kMostThreads;
    server_.is_full_ = is_full;
    return is_full;
  }

  void run() {
    std::unique_lock lock(lock_);
    while (!ending_) {
      if (waiting_.empty()) {
        ++idle_;
        changed_.wait(lock);
        --idle_;
        continue;
      }
      lock.unlock();
      take_one();
      lock.lock();
    }
  }

  void take_one() {
    std::function<void()> peer;
    {
      const std::lock_guard lock(lock_);
      if (waiting_.empty()) return;
      peer = std::move(waiting_.front());
      waiting_.pop_front();
      note_fullness();
    }
    peer();
  }

  BoundedHttpServer& server_;
  std::mutex lock_;  // guards all below; taken before the server's, never the other way round
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  std::vector<std::thread> threads_;  // by the accepting thread only
  std::size_t idle_ = 0;
  bool ending_ = false;
};

BoundedHttpServer::BoundedHttpServer(Duration limit) : limit_(limit) {
  new_task_queue = [this] { return new PeerThreads(*this); };
  // The library's default lets a second server listen at the same port.
  set_socket_options([](socket_t socket) {
    const int yes = 1;
    ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  });
  set_tcp_nodelay(true);
}

Result<std::uint16_t> BoundedHttpServer::bind(std::uint16_t port) {
  const std::string host = "127.0.0.1";
  errno = 0;
  const int bound = port == 0 ? bind_to_any_port(host) : bind_to_port(host, port) ? port : -1;
  // The library's backlog of 5 makes a peer that finds it full wait for a second.
  if (bound > 0 && ::listen(svr_sock_, kBacklogOfPeers) == 0)
    return static_cast<std::uint16_t>(bound);
  return Status(Code::invalid_argument,
                "cannot listen at " + host + ":" + std::to_string(port) +
                    (errno == 0 ? std::string() : ": " + errno_text(errno)) +
                    "; choose another port, or 0 for a free one");
}

void BoundedHttpServer::end() {
  {
    const std::lock_guard lock(lock_);
    ending_ = true;
    // The library's stop() does nothing before the accepting thread runs.
    if (const int socket = svr_sock_.exchange(INVALID_SOCKET); socket >= 0) listener_ = socket;
    if (listener_ >= 0) ::shutdown(listener_, SHUT_RDWR);
  }
  drop_all();
}

BoundedHttpServer::~BoundedHttpServer() {
  const int bound = svr_sock_.exchange(INVALID_SOCKET);
  for (const int socket : {bound, listener_})
    if (socket >= 0) ::close(socket);
}

bool BoundedHttpServer::process_and_close_socket(socket_t socket) {
  ::fcntl(socket, F_SETFD, FD_CLOEXEC);  // not for the debugger that an answer starts
  bool serves = false;
  {
    const std::lock_guard lock(lock_);
    serves = !ending_;
    if (serves) unheard_.push_back(socket);
    // A peer that came before this one was listed may have found none to drop.
    if (serves && is_full_) drop_front();
  }
  if (serves) serve(socket);
  const std::lock_guard lock(lock_);
  unheard_.remove(socket);
  answered_.remove(socket);
  ::close(socket);
  return true;
}

void BoundedHttpServer::serve(int socket) {
  PeerStream stream(socket, limit_);
  bool closed = false;
  process_request(stream, true, closed, [&](httplib::Request&) {
    const std::lock_guard lock(lock_);
    unheard_.remove(socket);
    answered_.push_back(socket);
  });
  // Closing with unread bytes would reset the connection, and with it the answer.
  ::shutdown(socket, SHUT_WR);
  std::array<char, 4096> rest{};
  for (int reads = 0; reads < 8; ++reads)
    if (::recv(socket, rest.data(), rest.size(), MSG_DONTWAIT) <= 0) break;
}

void BoundedHttpServer::drop_oldest() {
  const std::lock_guard lock(lock_);
  drop_front();
}

void BoundedHttpServer::drop_front() {
  if (unheard_.empty()) return;
  ::shutdown(unheard_.front(), SHUT_RDWR);
  unheard_.pop_front();
}

void BoundedHttpServer::drop_all() {
  const std::lock_guard lock(lock_);
  for (const auto* peers : {&unheard_, &answered_})
    for (const int socket : *peers) ::shutdown(socket, SHUT_RDWR);
}

}  // namespace muster::cli
#endif
