// SPDX-License-Identifier: BSD-3-Clause
#include "core/store/client/tcp_connection.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <random>
#include <thread>

#include "core/base/descriptor.h"
#include "core/base/log/log.h"
#include "core/base/process/interruption.h"
#include "core/net/socket_address.h"
#include "core/net/unix_socket.h"
#include "core/security/handshake.h"
#include "core/store/client/tcp_socket.h"
#include "core/tunables/tunables.h"
#include "core/wait/spin_wait.h"

namespace muster::store {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// The socket's receive timeout. It is constant, because setting it for every request would cost a
/// system call each.
constexpr Duration kTick = seconds(1);
constexpr Duration kShortestWait = milliseconds(1);  // limit: zero would mean none
constexpr Duration kConnectLimit = seconds(5);
constexpr Duration kLocalLimit = milliseconds(50);  // limit: any process may own the name
constexpr Duration kGreetingLimit = seconds(3);
/// If the resolver takes longer than this, the error blames it; otherwise it reports the last
/// attempt's failure.
constexpr Duration kSlowSearch = seconds(1);
constexpr Duration kLongestPause = milliseconds(250);  // limit: load of a server that starts
/// After this many connections that were accepted without a greeting, the listener is taken for
/// something other than a store.
constexpr int kMostSilences = 3;  // limit: attempts before a verdict

TimePoint now() { return steady_clock().now(); }

/// Without a given secret only ranks of one host may meet. Checked before a byte is sent.
Status check_same_host(int socket, const Secret& secret) {
  if (secret.kind() != Secret::Kind::host) return {};
  const auto own = SocketAddress::local_of(socket), peer = SocketAddress::peer_of(socket);
  if (!own || !peer || peer->is_loopback() || own->host() == peer->host()) return {};
  return Status(Code::refused, peer->text() +
                                   " is another host, and without a secret only ranks of one host "
                                   "may join; set MUSTER_SECRET to the same text on all "
                                   "ranks (MUSTER_INSECURE=1 on all ranks goes without one)");
}

/// A connected, still non-blocking socket.
Result<Descriptor> connect_to(const SocketAddress& address, TimePoint deadline) {
  auto socket = start_connect(address);
  if (!socket) return socket;
  pollfd waiting{socket->get(), POLLOUT, 0};
  while (waiting.revents == 0) {
    const TimePoint time = now();
    const int ready = ::poll(&waiting, 1, poll_milliseconds(time, deadline));
    if (ready < 0 && errno != EINTR)
      return Status(Code::network, "poll failed: " + errno_text(errno));
    if (ready == 0 && time >= deadline)
      return Status(Code::timed_out, "cannot connect to " + address.text() + ": no answer");
  }
  int error = 0;
  socklen_t length = sizeof error;
  if (::getsockopt(socket->get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
  if (error != 0)
    return Status(Code::network, "cannot connect to " + address.text() + ": " + errno_text(error));
  return socket;
}

/// Connects to the store's Unix socket, if the address is this host's and the store has one.
/// Another process may own that name, so after 50 ms TCP is tried.
Descriptor connect_within_host(const SocketAddress& address) {
  if (!is_of_this_host(address)) return {};
  for (const std::string& name : {local_name_of(address), local_name_of(address.port())}) {
    auto socket = connect_locally(name, now() + kLocalLimit);
    if (socket && is_same_user(socket->get())) return std::move(*socket);
  }
  return {};
}

/// Cannot fail on an open socket.
void make_blocking(int socket) {
  const int flags = ::fcntl(socket, F_GETFL);
  ::fcntl(socket, F_SETFL, flags & ~O_NONBLOCK);
}

/// Logs a warning when attempts to reach a store have failed for `patience` (`outage_log.h`).
class ReachabilityWarning {
 public:
  ReachabilityWarning(const TcpEndpoint& endpoint, Duration patience, TimePoint deadline,
                      OutageLog& outage)
      : endpoint_(endpoint), patience_(patience), deadline_(deadline), outage_(outage) {}

  TimePoint due_at() const { return outage_.due_at(begin_, patience_); }

  void check(TimePoint time, const std::string& why) {
    Duration lasted{0};
    if (!outage_.say(begin_, time, patience_, lasted)) return;
    const std::string rest =
        deadline_ == TimePoint::max() ? "; there is no time limit"
        : time >= deadline_           ? ""
                            : "; it is tried for at least " + describe(deadline_ - time) + " more";
    log(LogLevel::warning, "still cannot reach " + endpoint_.name() + " after " + describe(lasted) +
                               ": " + why + rest +
                               ". Check that MASTER_ADDR and MASTER_PORT (or the address given) "
                               "are the same on all ranks and name the "
                               "host of rank 0 or of the launcher, that it is running, and that no "
                               "firewall stands between");
  }

 private:
  const TcpEndpoint& endpoint_;
  const TimePoint begin_ = now();
  const Duration patience_;
  const TimePoint deadline_;
  OutageLog& outage_;
};

/// Resolves the host's addresses. `before`: why the last attempt failed; ok in the first attempt.
Result<std::vector<SocketAddress>> find(const TcpEndpoint& endpoint, TimePoint deadline,
                                        ReachabilityWarning& warning, const Resolver& resolver,
                                        const Status& before) {
  const TimePoint begin = now();
  NameSearch search(endpoint.host, endpoint.port, resolver);
  const auto cause = [&] {
    const Duration asked = now() - begin;
    if (!before && asked < kSlowSearch) return before;
    return Status(Code::timed_out, "the resolver does not answer for " +
                                       describe_host(endpoint.host) + " (asked " + describe(asked) +
                                       " ago)");
  };
  // After the time of the warning, still wait long enough for a prompt answer.
  const TimePoint looks_up = warning.due_at() > begin ? warning.due_at() : begin + kSlowSearch;
  if (const auto* early = search.wait(std::min(deadline, looks_up))) return *early;
  warning.check(now(), cause().message());
  const auto* answer = search.wait(deadline);
  return answer == nullptr ? cause() : *answer;
}

/// The failures of one attempt at several addresses, as one sentence.
Status both(const Status& first, const Status& second) {
  if (first.ok() || first.message() == second.message()) return second;
  const Code code = first.code() == Code::timed_out ? second.code() : first.code();
  return Status(code, first.message() + "; " + second.message());
}

/// Sends this client's epoch. The server refuses one older than the job's at once.
Result<std::unique_ptr<TcpConnection>> entered(const TcpEndpoint& endpoint,
                                               std::unique_ptr<TcpConnection> connection,
                                               TimePoint deadline) {
  if (endpoint.epoch == 0) return connection;
  const Reply reply = connection->exchange(
      {.op = StoreOp::enter, .number = endpoint.epoch, .keys = {endpoint.epoch_record}}, deadline);
  if (!reply.status) return reply.status.with_context(endpoint.name());
  return connection;
}

/// A request's bytes. `head` is its encoded head.
std::vector<ConstBytes> with_values(const std::string& head, const Request& request) {
  std::vector<ConstBytes> pieces{as_bytes(head)};
  for (const std::string_view value : request.values) {
    if (!value.empty()) pieces.push_back(as_bytes(value));
  }
  return pieces;
}

}  // namespace

std::string TcpEndpoint::name() const {
  const bool bare_six = host.find(':') != std::string::npos && host.front() != '[';
  return "the store at " + (bare_six ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

TcpConnection::TcpConnection(Descriptor socket, std::string name)
    : socket_(std::move(socket)), name_(std::move(name)), buffer_(fixed::kIoBuffer) {}

Result<std::unique_ptr<TcpConnection>> TcpConnection::open(const TcpEndpoint& endpoint,
                                                           TimePoint deadline, bool was_there,
                                                           Duration patience,
                                                           const Resolver& resolver,
                                                           OutageLog* known_outage) {
  const TimePoint begin = now();
  std::minstd_rand random(static_cast<unsigned>(begin.time_since_epoch().count()));
  OutageLog own_outage;
  OutageLog& outage = known_outage == nullptr ? own_outage : *known_outage;
  ReachabilityWarning warning(endpoint, patience, deadline, outage);
  Duration pause = milliseconds(5);  // limit: load of a server that starts
  Status last;
  ClearAnswers clear;
  int silences = 0;
  for (;;) {
    const auto addresses = find(endpoint, deadline, warning, resolver, last);
    Status met = addresses.status();  // in this attempt
    for (std::size_t i = 0; addresses && i < addresses->size(); ++i) {
      Descriptor local;
      if (endpoint.within_host) local = connect_within_host((*addresses)[i]);
      const EndpointWay way = local ? EndpointWay::unix_socket : EndpointWay::tcp;
      auto socket = local ? Result<Descriptor>(std::move(local))
                          : connect_to((*addresses)[i], std::min(deadline, now() + kConnectLimit));
      if (!socket) {
        met = both(met, socket.status());
        continue;
      }
      make_blocking(socket->get());
      if (way == EndpointWay::tcp) tune_tcp(socket->get());
      std::unique_ptr<TcpConnection> connection(
          new TcpConnection(std::move(*socket), endpoint.name()));
      connection->over_network_ = way == EndpointWay::tcp;
      Status greeted =
          connection->shake_hands(endpoint, way, std::min(deadline, now() + kGreetingLimit));
      if (greeted) {
        outage.reached();
        return entered(endpoint, std::move(connection), deadline);
      }
      if (connection->tls_ && connection->tls_->failed_in_the_clear()) {
        // Somebody who looks at a job can ask again by hand; the job counts each try.
        const bool looks = endpoint.role == Handshake::Role::observer;
        if (!looks && !clear.tell(now(), deadline, kLongestPause)) {
          met = both(met, greeted);
          continue;
        }
        greeted = ClearAnswers::told(greeted);
      }
      clear.forget();
      if (greeted.code() == Code::refused) return greeted.with_context(endpoint.name());
      met = both(met, greeted);
      if (greeted.code() == Code::timed_out && ++silences == kMostSilences) {
        return Status(Code::refused,
                      "something takes connections at " + endpoint.host + ":" +
                          std::to_string(endpoint.port) +
                          " and does not greet like a muster store: it hangs, or it is another "
                          "program, such as the store of torchrun's own agent "
                          "(then give MASTER_PORT another port and unset "
                          "TORCHELASTIC_USE_AGENT_STORE, or start the job with muster run)");
      }
    }
    // A refusal is more informative than the timeout of the last attempt.
    if (last.ok() || met.code() != Code::timed_out) last = met;
    const bool nobody_listens = last.message().find("ECONNREFUSED") != std::string::npos;
    if (was_there && nobody_listens) {
      return Status(Code::network, endpoint.name() + " is gone (" + last.message() +
                                       "); the process that hosts it has probably ended");
    }
    // Jitter: many ranks wait for one server and must not all retry at the same moment.
    const Duration jittered = pause / 2 + pause * static_cast<int>(random() % 64) / 128;
    if (Status interrupted = Interruption::of_thread(); !interrupted)
      return interrupted.with_context(endpoint.name());
    const TimePoint time = now();
    warning.check(time, last.message());
    if (time + jittered >= deadline) {
      return Status(
          last.code() == Code::invalid_argument ? last.code() : Code::timed_out,
          "could not reach " + endpoint.name() + " within " + describe(now() - begin) + ": " +
              last.message() +
              (nobody_listens
                   ? "; nobody listens there: its host (rank 0 or the launcher) has not started, "
                     "or "
                     "has ended, and then its output and the errors of the ranks that had reached "
                     "it say why; or host and port are wrong"
                   : "; is its host (rank 0 or the launcher) running, and are host and port "
                     "right?"));
    }
    std::this_thread::sleep_for(jittered);
    pause = std::min(pause * 2, kLongestPause);
  }
}

Status TcpConnection::shake_hands(const TcpEndpoint& endpoint, EndpointWay way,
                                  TimePoint deadline) {
  const Handshake::Hello hello{.role = endpoint.role,
                               .job = store_job(endpoint.port, endpoint.job, endpoint.role),
                               .build = kStoreBuild};
  if (way == EndpointWay::unix_socket) {
    Handshake handshake(Handshake::Side::connector, hello, endpoint.secret);
    return shake_hands(handshake, deadline);
  }
  if (Status same = check_same_host(socket_.get(), endpoint.secret); !same) return same;
  TlsSession session(Handshake::Side::connector, hello, endpoint.secret);
  Status greeted = shake_hands(session, deadline);
  tls_.emplace(std::move(session));
  return greeted;
}

template <class Session>
Status TcpConnection::shake_hands(Session& session, TimePoint deadline) {
  for (;;) {
    if (const std::string out = session.take_output(); !out.empty()) {
      ConstBytes bytes = as_bytes(out);
      if (Status sent = send_bytes({&bytes, 1}, deadline); !sent) return sent;
    }
    if (session.done()) return {};
    if (session.failed()) return session.failure();
    const auto bytes = receive_bytes(deadline);
    if (!bytes) return bytes.status();
    session.feed(*bytes);  // the server sends nothing more until it gets a request
  }
}

bool TcpConnection::arm(int option, Duration& armed, TimePoint deadline) {
  const Duration left = deadline == TimePoint::max() ? kTick : deadline - now();
  if (left <= Duration::zero()) return false;
  const Duration wanted =
      std::clamp<Duration>(left, kShortestWait, std::min(kTick, Interruption::look_every()));
  if (wanted == armed) return true;
  const auto micro = std::chrono::ceil<std::chrono::microseconds>(wanted).count();
  const timeval value{micro / 1000000, micro % 1000000};
  // Without the limit a call could wait for ever.
  if (::setsockopt(socket_.get(), SOL_SOCKET, option, &value, sizeof value) != 0) return false;
  armed = wanted;
  return true;
}

Status TcpConnection::send_all(std::vector<ConstBytes> pieces, TimePoint deadline) {
  if (!tls_) return send_bytes(pieces, deadline);
  for (std::span<ConstBytes> left(pieces); !left.empty();) {
    const auto taken = tls_->write(left);
    if (!taken) return taken.status();
    std::size_t gone = *taken;
    while (!left.empty() && gone >= left.front().size()) {
      gone -= left.front().size();
      left = left.subspan(1);
    }
    if (!left.empty()) left.front() = left.front().subspan(gone);
    ConstBytes encrypted = tls_->output();
    if (Status sent = send_bytes({&encrypted, 1}, deadline); !sent) return sent;
    tls_->sent(tls_->output().size());
  }
  return {};
}

Status TcpConnection::send_bytes(std::span<ConstBytes> pieces, TimePoint deadline) {
  constexpr std::size_t kPieces = 256;
  std::size_t first = 0;
  while (first < pieces.size()) {
    const bool may_block = arm(SO_SNDTIMEO, send_limit_, deadline);
    std::array<iovec, kPieces> list;
    const std::size_t count = std::min(kPieces, pieces.size() - first);
    for (std::size_t i = 0; i < count; ++i)
      list[i] = {const_cast<std::byte*>(pieces[first + i].data()), pieces[first + i].size()};
    msghdr message{};
    message.msg_iov = list.data();
    message.msg_iovlen = count;
    ssize_t n = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | (may_block ? 0 : MSG_DONTWAIT));
    if (n < 0) {
      if (!may_block && (errno == EAGAIN || errno == EWOULDBLOCK))
        return Status(Code::timed_out, name_ + " did not take the request in time");
      if (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK) continue;
      if (errno == EPIPE) return closed();
      return Status(Code::network, "the connection to " + name_ + " is lost (" + errno_text(errno) +
                                       "); the process that hosts it has probably ended");
    }
    for (; first < pieces.size() && static_cast<std::size_t>(n) >= pieces[first].size(); ++first)
      n -= static_cast<ssize_t>(pieces[first].size());
    if (first < pieces.size()) pieces[first] = pieces[first].subspan(static_cast<std::size_t>(n));
  }
  return {};
}

/// Polls for the reply briefly before sleeping; returns like recv, EAGAIN if nothing arrived. After
/// a miss (other processes need the cores, the server is remote, or a key is not set yet) the next
/// polls are skipped.
ssize_t TcpConnection::look() {
  if (unlooked_ > 0) {
    --unlooked_;
    errno = EAGAIN;
    return -1;
  }
  SpinWait spin(SpinBudget::for_answer());
  do {
    const ssize_t n = ::recv(socket_.get(), buffer_.data(), buffer_.size(), MSG_DONTWAIT);
    if (n >= 0 || (errno != EAGAIN && errno != EINTR)) {
      misses_ = 0;
      return n;
    }
  } while (spin.pause(now));
  misses_ = std::clamp<std::int64_t>(2 * misses_, 2, tunables().unpolled_answers);
  unlooked_ = misses_;
  errno = EAGAIN;
  return -1;
}

Result<ConstBytes> TcpConnection::receive(TimePoint deadline) {
  if (!tls_) return receive_bytes(deadline);
  plain_.resize(buffer_.size());
  for (;;) {
    const MutableBytes piece(plain_);
    const auto got = tls_->read({&piece, 1});
    if (!got) return got.status().with_context(name_);
    if (*got > 0) return ConstBytes(plain_).first(*got);
    auto bytes = receive_bytes(deadline);
    if (!bytes) return bytes;
    tls_->feed(*bytes);
  }
}

Result<ConstBytes> TcpConnection::receive_bytes(TimePoint deadline) {
  for (;;) {
    const bool may_block = arm(SO_RCVTIMEO, receive_limit_, deadline);
    errno = EAGAIN;
    ssize_t n = may_block ? look() : -1;
    if (n < 0 && errno == EAGAIN)
      n = ::recv(socket_.get(), buffer_.data(), buffer_.size(), may_block ? 0 : MSG_DONTWAIT);
    if (n > 0) return ConstBytes(buffer_).first(static_cast<std::size_t>(n));
    if (n == 0) return closed();
    if (!may_block && (errno == EAGAIN || errno == EWOULDBLOCK))
      return Status(Code::timed_out, name_ + " did not answer in time");
    if (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK) {
      if (Status interrupted = Interruption::of_thread(); !interrupted) return interrupted;
      continue;
    }
    return Status(Code::network, "the connection to " + name_ + " is lost (" + errno_text(errno) +
                                     "); the process that hosts it has probably ended");
  }
}

Status TcpConnection::closed() const {
  return Status(
      Code::network,
      name_ + " closed the connection; the process that hosts it has probably ended" +
          (over_network_ ? ", or somebody cut the connection: it has no authenticated end" : ""));
}

void TcpConnection::shut_down() { ::shutdown(socket_.get(), SHUT_RDWR); }

Reply TcpConnection::fail(Status status) {
  broken_ = true;
  return {std::move(status), 0, {}};
}

Status TcpConnection::post(const Request& request, TimePoint deadline) {
  const std::string head = encode_head(request, next_id_++);
  return send_all(with_values(head, request), deadline);
}

Reply TcpConnection::exchange(const Request& request, TimePoint deadline) {
  const std::uint64_t id = next_id_++;
  const std::string head = encode_head(request, id);
  if (head.empty()) {
    return {Status(Code::invalid_argument, std::string(name_of(request.op)) +
                                               ": the request is longer than the limit of " +
                                               std::to_string(kMaxFrameBytes) + " bytes"),
            0,
            {}};
  }
  if (Status sent = send_all(with_values(head, request), deadline); !sent)
    return fail(std::move(sent));
  for (;;) {
    if (const auto frame = frames_.next()) {
      auto wire = decode_reply(*frame);
      if (!wire || wire->id != id)
        return fail(Status(Code::network, name_ + " sent a malformed reply"));
      frames_.trim();
      if (buffer_.size() > fixed::kIoBuffer) buffer_ = std::vector<std::byte>(fixed::kIoBuffer);
      return std::move(wire->reply);
    }
    if (frames_.broken())
      return fail(Status(Code::network, name_ + " announced a reply of an impossible length"));
    if (frames_.outstanding() > fixed::kIoShare && buffer_.size() < fixed::kIoShare)
      buffer_.resize(fixed::kIoShare);
    const auto bytes = receive(deadline);
    if (!bytes) return fail(bytes.status());
    frames_.feed(*bytes);
  }
}

}  // namespace muster::store
