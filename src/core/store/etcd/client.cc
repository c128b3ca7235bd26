// SPDX-License-Identifier: BSD-3-Clause
#include "core/store/etcd/client.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <deque>
#include <thread>
#include <utility>

#include "core/base/bytes.h"
#include "core/base/environment.h"
#include "core/base/process/interruption.h"
#include "core/security/secret.h"

namespace muster::store::etcd {
namespace {

// So late no thread is that runs: this process stood still.
constexpr Duration kStoodStill = std::chrono::seconds(1);  // limit: of a running thread's delay

constexpr std::string_view kLeaseGone = "lease not found";

TimePoint earliest(TimePoint deadline, Duration from_now) {
  return std::min(deadline, deadline_after(steady_clock(), from_now));
}

Result<std::string> whole_endpoint(std::string text, bool tls) {
  if (text.find("://") == std::string::npos) text = (tls ? "https://" : "http://") + text;
  while (text.ends_with('/')) text.pop_back();
  const std::string host = text.substr(text.find("://") + 3);
  if ((!text.starts_with("http://") && !text.starts_with("https://")) || host.empty() ||
      host.find_first_of("/?#@ ") != std::string::npos) {
    return Status(Code::invalid_argument,
                  "\"" + text +
                      "\" is no endpoint of etcd; expected http://host:port, https://host:port or "
                      "host:port, several with commas between them");
  }
  constexpr std::string_view kPort = ":2379";
  const std::size_t bracket = host.rfind(']');
  const std::size_t colon = host.rfind(':');
  if (colon == std::string::npos || (bracket != std::string::npos && colon < bracket))
    text += kPort;
  return text;
}

/// A password must not be readable on the way. On this host only root sees what passes.
Status check_password_is_hidden(const ClientOptions& options) {
  if (options.password.empty()) return {};
  const auto insecure = env_flag("MUSTER_INSECURE");
  if (!insecure) return insecure.status();
  if (insecure->value_or(false)) return {};
  for (const std::string& each : options.endpoints) {
    const std::string_view host = std::string_view(each).substr(each.find("://") + 3);
    const bool here =
        host.starts_with("127.") || host.starts_with("localhost:") || host.starts_with("[::1]:");
    if (each.starts_with("http://") && !here)
      return Status(Code::refused, "etcd's password is not sent to " + each +
                                       ", where everybody on the way could read it; say https:// "
                                       "(MUSTER_ETCD_CACERT names the authority), or "
                                       "MUSTER_INSECURE=1 to send it all the same");
  }
  return {};
}

}  // namespace

Result<std::shared_ptr<EtcdClient>> EtcdClient::make(ClientOptions options) {
  const bool tls = !options.tls.authority.empty() || !options.tls.certificate.empty();
  if (options.endpoints.empty())
    return Status(Code::invalid_argument,
                  "etcd: no endpoint is given; expected host:port, several with commas between "
                  "them");
  for (std::string& each : options.endpoints) {
    auto whole = whole_endpoint(each, tls);
    if (!whole) return whole.status();
    each = std::move(*whole);
  }
  if (Status hidden = check_password_is_hidden(options); !hidden) return hidden;
  MakeConnection connections = curl_connections(options.tls);
  return std::make_shared<EtcdClient>(std::move(options), std::move(connections));
}

EtcdClient::EtcdClient(ClientOptions options, MakeConnection make_connection)
    : session_(std::move(options.endpoints), std::move(options.user), options.password),
      connections_(std::move(make_connection)) {}

Status EtcdClient::timed_out(const std::string& trouble) const {
  return Status(Code::timed_out, name() + " did not answer in time" +
                                     (trouble.empty() ? "" : "; the last attempt: " + trouble));
}

Result<std::string> EtcdClient::post(const char* path, std::string body, TimePoint deadline,
                                     Duration member_limit) {
  HttpExchange exchange(session_, path, std::move(body));
  ConnectionPool::Borrowed connection(connections_);
  while (true) {
    auto request = exchange.next(steady_clock().now());
    if (exchange.done()) break;
    if (Status interrupted = Interruption::of_thread(); !interrupted) return interrupted;
    if (steady_clock().now() >= deadline) return timed_out(exchange.trouble());
    if (!request) {
      // Nothing goes on: only the time passes.
      std::this_thread::sleep_until(earliest_look(std::min(deadline, exchange.resume_at())));
      continue;
    }
    const TimePoint limit = earliest(deadline, member_limit);
    if (Status interrupted = connection.exchange(*request, limit); !interrupted) return interrupted;
    HttpTransfer& transfer = connection->transfer();
    const TimePoint now = steady_clock().now();
    if (!transfer.ended)
      exchange.lost("no answer within " + describe(member_limit), false, now);
    else if (!transfer.error.empty())
      exchange.lost(transfer.error, transfer.rejected, now);
    else
      exchange.answered(transfer.http_status, std::move(transfer.received), now);
  }
  connection.keep();
  auto reply = exchange.take();
  if (!reply) return reply.status();
  return reply;
}

namespace {

/// A request to one member, which goes on while other members are asked.
class HedgedRequest {
 public:
  HedgedRequest(EtcdSession& session, ConnectionPool& pool, const char* path,
                const std::string& body)
      : exchange_(session, path, body), connection_(pool) {}

  /// Waits for an answer until then, and begins the next attempt where there is one.
  void advance(TimePoint until) {
    if (!under_way_) {
      const auto request = exchange_.next(steady_clock().now());
      if (!request) {
        if (!done()) std::this_thread::sleep_until(std::min(until, exchange_.resume_at()));
        return;
      }
      endpoint_ = request->endpoint;
      connection_->start(*request);
      under_way_ = true;
    }
    connection_->drive(until);
    HttpTransfer& transfer = connection_->transfer();
    if (!transfer.ended) return;
    under_way_ = false;
    if (!transfer.error.empty())
      exchange_.lost(transfer.error, transfer.rejected, steady_clock().now());
    else
      exchange_.answered(transfer.http_status, std::move(transfer.received), steady_clock().now());
  }
  /// Its member hangs: the next attempt goes to the one that the session names then.
  void give_up(const std::string& why) {
    if (under_way_) exchange_.lost(why, false, steady_clock().now());
    under_way_ = false;
  }

  bool done() const { return exchange_.done(); }
  Result<std::string> take() {
    connection_.keep();
    return exchange_.take();
  }
  const std::string& endpoint() const { return endpoint_; }
  const std::string& trouble() const { return exchange_.trouble(); }

 private:
  HttpExchange exchange_;
  ConnectionPool::Borrowed connection_;
  std::string endpoint_;  // that was asked last
  bool under_way_ = false;
};

}  // namespace

Result<std::string> EtcdClient::post_hedged(const char* path, const std::string& body,
                                            TimePoint deadline, Duration hedge_after) {
  const std::string why = "no answer within " + describe(hedge_after);
  std::deque<HedgedRequest> requests;
  std::size_t waited = 0;  // the one that is waited for; the others are only looked at
  TimePoint hedge_at{};
  while (true) {
    if (Status interrupted = Interruption::of_thread(); !interrupted) return interrupted;
    const TimePoint now = steady_clock().now();
    if (!requests.empty() && now >= deadline) {
      const std::string& trouble = requests[waited].trouble();
      return timed_out(trouble.empty() ? requests[waited].endpoint() + ": " + why : trouble);
    }
    if (now >= hedge_at) {
      const std::size_t before = waited;
      if (requests.size() < session_.members()) {
        waited = requests.size();
        requests.emplace_back(session_, connections_, path, body);
      } else {  // each has had the time of a whole round, and its member is asked anew
        waited = (waited + 1) % requests.size();
        requests[waited].give_up(why);
      }
      session_.failed(requests[before].endpoint());
      hedge_at = deadline_after(steady_clock(), hedge_after);
    }
    for (HedgedRequest& each : requests) {
      each.advance(&each == &requests[waited] ? earliest_look(std::min(deadline, hedge_at)) : now);
      if (each.done()) return each.take();
    }
  }
}

Result<TxnReply> EtcdClient::txn(const Txn& txn, TimePoint deadline, Duration member_limit) {
  const auto body = post("/v3/kv/txn", encode(txn), deadline, member_limit);
  if (!body) return body.status();
  return decode_txn(*body);
}

Result<EtcdLease> EtcdClient::grant(std::int64_t ttl_s, TimePoint deadline) {
  const auto body = post("/v3/lease/grant", encode_grant(ttl_s), deadline);
  if (!body) return body.status();
  return decode_grant(*body);
}

Result<EtcdLease> EtcdClient::keep_alive(std::int64_t lease, TimePoint deadline,
                                         Duration hedge_after) {
  const auto body = post_hedged("/v3/lease/keepalive", encode_lease(lease), deadline, hedge_after);
  if (!body) {
    if (body.status().message().find(kLeaseGone) != std::string::npos)
      return Status(Code::closed, body.status().message());
    return body.status();
  }
  auto kept = decode_keep_alive(*body);
  if (kept && kept->ttl_s <= 0) return Status(Code::closed, "the lease has ended");
  return kept;
}

Status EtcdClient::revoke(std::int64_t lease, TimePoint deadline) {
  const Status status = post("/v3/lease/revoke", encode_lease(lease), deadline).status();
  return status.message().find(kLeaseGone) != std::string::npos ? Status() : status;
}

Status EtcdClient::watch(const WatchOptions& options) {
  KeyWatch watch(session_, options.key, options.range_end);
  ConnectionPool::Borrowed connection(connections_);
  TimePoint heard{};  // when the stream that is open began or said something
  // When any stream said something or ended, or this process came back after standing still.
  TimePoint alive = steady_clock().now();
  TimePoint next_idle = earliest(options.deadline, options.idle);
  bool open = false, answered = false;  // answered: the stream that is open has said something
  std::vector<WatchMessage> messages;
  while (true) {
    const TimePoint now = steady_clock().now();
    if (Status interrupted = Interruption::of_thread(); !interrupted) return interrupted;
    if (options.on_idle && now >= next_idle) {
      if (options.on_idle()) return {};
      next_idle = earliest(options.deadline, options.idle);
    }
    if (now >= options.deadline) return timed_out(watch.trouble());
    if (!open && options.lost_limit >= Duration::zero() && now - alive >= options.lost_limit) {
      return Status(Code::network, name() + " has not answered for " +
                                       describe(options.lost_limit) +
                                       "; the last attempt: " + watch.trouble());
    }
    if (!open) {
      if (session_.needs_login()) {
        if (const auto login = post("", {}, options.deadline); !login) return login.status();
      }
      const auto request = watch.open(now);
      if (!watch.failure()) return watch.failure();
      if (!request) {
        const TimePoint until =
            earliest_look(std::min({options.deadline, watch.resume_at(), next_idle}));
        std::this_thread::sleep_until(until);
        if (steady_clock().now() - until > kStoodStill) alive = steady_clock().now();
        continue;
      }
      connection->start(*request);
      open = true;
      answered = false;
      heard = now;
    }
    // In short steps until it answers, so that a pause of this process shows.
    const TimePoint step = answered ? TimePoint::max() : earliest(options.deadline, kStoodStill);
    const TimePoint until =
        earliest_look(std::min({options.deadline, next_idle, heard + options.silence_limit, step}));
    connection->drive(until);
    HttpTransfer& transfer = connection->transfer();
    const TimePoint then = steady_clock().now();
    if ((answered && transfer.ended) || then - until > kStoodStill) alive = then;
    if (transfer.ended) transfer.received += '\n';  // an error's line has no end
    if (!transfer.received.empty()) {
      heard = then;
      answered = true;
      messages.clear();
      open = watch.feed(std::exchange(transfer.received, {}), messages, then);
      if (!messages.empty()) alive = then;
      for (const WatchMessage& message : messages) {
        if (message.created && options.on_open()) return {};
        if (!message.events.empty() && options.on_events(message.events)) return {};
      }
      if (!watch.failure()) return watch.failure();
    } else if (!transfer.ended && then >= heard + options.silence_limit) {
      open = false;  // a member that has answered is asked again: nothing may have happened
      if (!answered)
        watch.lost("no answer to a watch within " + describe(options.silence_limit), false, then);
    }
    if (open && transfer.ended) {
      watch.lost(transfer.error.empty() ? "it ended the watch" : transfer.error, transfer.rejected,
                 then);
      if (!watch.failure()) return watch.failure();
      open = false;
    }
  }
}

ClientOptions options_from_environment(const std::string& endpoints) {
  ClientOptions options;
  for (std::size_t begin = 0; begin < endpoints.size();) {
    const std::size_t end = std::min(endpoints.find(',', begin), endpoints.size());
    if (end > begin) options.endpoints.push_back(endpoints.substr(begin, end - begin));
    begin = end + 1;
  }
  options.user = env_text("MUSTER_ETCD_USER").value_or("");
  options.password = env_text("MUSTER_ETCD_PASSWORD").value_or("");
  options.tls.authority = env_text("MUSTER_ETCD_CACERT").value_or("");
  options.tls.certificate = env_text("MUSTER_ETCD_CERT").value_or("");
  options.tls.key = env_text("MUSTER_ETCD_KEY").value_or("");
  return options;
}

namespace {

// A mark needs to outlive only the attempts of one transaction; then etcd removes it.
constexpr std::int64_t kMarkLeaseSeconds = 7200;             // limit: litter of killed processes
constexpr Duration kRenewMark = std::chrono::minutes(60);    // limit: litter of killed processes
constexpr std::size_t kPieceBytes = std::size_t{512} << 10;  // limit: etcd's requests, 1.5 MiB
constexpr char kWhole = 'v', kInPieces = 'p';

std::string piece_key(const std::string& pieces, std::size_t number) {
  std::array<char, 9> digits{};
  std::snprintf(digits.data(), digits.size(), "%08x", static_cast<unsigned>(number));
  return pieces + digits.data();
}

}  // namespace

std::string random_name() {
  std::array<std::byte, 16> bytes;
  fill_random(bytes);
  return hexadecimal(bytes);
}

Result<Writer::WriteMark> Writer::take_mark(TimePoint deadline) {
  {
    const std::lock_guard lock(mutex_);
    while (!idle_.empty()) {
      WriteMark mark = std::move(idle_.back());
      idle_.pop_back();
      if (steady_clock().now() < mark.renew_at) return mark;
    }
  }
  const auto lease = client_->grant(kMarkLeaseSeconds, deadline);
  if (!lease) return lease.status();
  return WriteMark{root_ + "w" + random_name(), 0, lease->id, steady_clock().now() + kRenewMark};
}

Result<Written> Writer::commit(Txn txn, TimePoint deadline) {
  auto mark = take_mark(deadline);
  if (!mark) return mark.status();
  txn.when.push_back({.key = mark->key, .number = mark->version});
  txn.then.push_back(Put{.key = mark->key, .value = {}, .lease = mark->lease});
  txn.otherwise.push_back(KeyRange{.key = mark->key, .keys_only = true});
  auto reply = client_->txn(txn, deadline);
  if (!reply) return reply.status();  // the mark is not used again: its version is not known
  if (reply->replies.size() != (reply->succeeded ? txn.then : txn.otherwise).size())
    return Status(Code::store, "etcd answered a transaction with too few replies");
  Written written;
  written.revision = reply->revision;
  written.done = reply->succeeded;
  const OperationReply& own = reply->replies.back();
  const std::int64_t version = reply->succeeded     ? mark->version + 1
                               : own.values.empty() ? 0
                                                    : own.values[0].version;
  if (!reply->succeeded && version == mark->version + 1) {
    written.done = written.repeated = true;
    written.revision = own.values[0].mod_revision;
  } else if (version < mark->version) {
    return Status(Code::store,
                  "etcd has lost a key that it was to keep for two hours; this process was "
                  "stopped, or somebody deletes keys below \"" +
                      root_ + "\"");
  } else {
    written.replies = std::move(reply->replies);
    written.replies.pop_back();
  }
  mark->version = version;
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(*mark));
  return written;
}

Result<Writer::Long> Writer::prepare(const std::string& prefix, std::string_view value,
                                     TimePoint deadline) {
  if (value.size() <= kPieceBytes) return Long{kWhole + std::string(value), {}};
  const std::string name = random_name();
  Long out{kInPieces + name + std::to_string(value.size()), prefix + name + "/"};
  out.first = piece_key(out.pieces, 0);
  for (std::size_t number = 0; number * kPieceBytes < value.size(); ++number) {
    Txn txn;
    txn.then.push_back(Put{.key = piece_key(out.pieces, number),
                           .value = std::string(value.substr(number * kPieceBytes, kPieceBytes))});
    if (const auto put = client_->txn(txn, deadline); !put) return put.status();
  }
  return out;
}

Result<std::string> Writer::restore(const std::string& prefix, std::string_view stored,
                                    TimePoint deadline) {
  constexpr std::size_t kNameDigits = 32;
  if (stored.starts_with(kWhole)) return std::string(stored.substr(1));
  std::size_t size = 0;
  const std::string_view digits =
      stored.substr(std::min(stored.size(), std::size_t{1} + kNameDigits));
  const auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), size);
  if (!stored.starts_with(kInPieces) || error != std::errc() ||
      stop != digits.data() + digits.size()) {
    return Status(Code::store,
                  "a key of this store holds a value that no muster has written; another program "
                  "writes below the same prefix");
  }
  const std::string pieces = prefix + std::string(stored.substr(1, kNameDigits)) + "/";
  std::string value;
  for (std::size_t number = 0; number * kPieceBytes < size; ++number) {
    Txn txn;
    txn.then.push_back(KeyRange{.key = piece_key(pieces, number)});
    auto reply = client_->txn(txn, deadline);
    if (!reply) return reply.status();
    if (reply->replies.size() != 1 || reply->replies[0].values.empty())
      return Status(Code::closed, "the value has been replaced");
    value += reply->replies[0].values[0].value;
  }
  if (value.size() != size) return Status(Code::closed, "the value has been replaced");
  return value;
}

}  // namespace muster::store::etcd
