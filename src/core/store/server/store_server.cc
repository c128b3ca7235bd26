// SPDX-License-Identifier: BSD-3-Clause
#include "core/store/server/store_server.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "core/base/log/log.h"
#include "core/security/refusals.h"
#include "core/tunables/tunables_fixed.h"

namespace muster::store {

/// The key that counts the workers. It makes `num_keys` one higher than in other kinds of store.
constexpr std::string_view kWorkersKey = "muster/workers";

struct StoreServer::Client {
  /// A reply's head, or a value shared with the table and other readers.
  struct Piece {
    std::string head;
    Value value;
    std::string_view bytes() const {
      return value ? std::string_view(*value) : std::string_view(head);
    }
  };

  Client(Connection connection, std::string name) : number(connection), peer(std::move(name)) {}

  /// A piece of unencrypted output.
  void written(std::size_t count) {
    output_bytes -= count;
    output_at += count;
    while (!output.empty() && output_at >= output.front().bytes().size()) {
      output_at -= output.front().bytes().size();
      output.pop_front();
    }
  }
  std::vector<ConstBytes> pieces(std::size_t most) const {
    std::vector<ConstBytes> first;
    std::size_t at = output_at;
    for (const Piece& piece : output) {
      if (first.size() == most) break;
      if (const auto bytes = as_bytes(piece.bytes()).subspan(at); !bytes.empty())
        first.push_back(bytes);
      at = 0;
    }
    return first;
  }

  Connection number;
  std::string peer;
  bool greeting = true;                // the client has not proved the secret yet
  bool observes = false;               // authenticated with the observer's key
  std::optional<Handshake> handshake;  // over a Unix socket
  std::optional<TlsSession> tls;       // over TCP
  std::list<std::pair<TimePoint, Connection>>::iterator unauthenticated_entry;
  RequestFrames input;
  std::deque<Piece> output;
  std::size_t output_at = 0;  // bytes of the first piece that are written
  std::size_t output_bytes = 0;
  std::set<Ticket> parked;
  std::string record;      // the record of its job's epochs; see StoreOp::enter
  std::int64_t epoch = 0;  // 0: none
  bool closing = false;
};

StoreServer::StoreServer(StoreServerOptions options) : options_(std::move(options)) {
  StoreTable::Answers ignored;
  table_.submit(0, {.op = StoreOp::add, .number = 0, .keys = {kWorkersKey}}, TimePoint(), ignored);
}
StoreServer::~StoreServer() = default;

void StoreServer::on_open(Connection connection, const std::string& peer, ListenerWay way,
                          TimePoint now) {
  if (options_.secret.kind() == Secret::Kind::host && way == ListenerWay::tcp) {
    refuse("the store refused " + peer +
               ": it is not on this host, and without MUSTER_SECRET only this host's ranks may "
               "join",
           now);
    const auto [entry, fresh] = clients_.try_emplace(connection, connection, peer);
    entry->second.greeting = false;
    entry->second.closing = true;
    changed_.insert(connection);
    return;
  }
  // Many network connections must not displace ranks of this host, whose user has been checked
  // already.
  if (way != ListenerWay::unix_socket && unauthenticated() >= options_.max_unauthenticated) {
    const auto oldest = std::ranges::find_if(unauthenticated_, [this](const auto& each) {
      return clients_.at(each.second).tls.has_value();
    });
    Client& client = clients_.at(oldest->second);
    refuse("the store closes its connection to " + client.peer +
               ", which has not proved the job's secret, to make room for others",
           now);
    close(client);
  }
  const auto [entry, fresh] = clients_.try_emplace(connection, connection, peer);
  Handshake::Hello hello{.role = Handshake::Role::store, .job = options_.job, .build = kStoreBuild};
  hello.also = {{Handshake::Role::launcher, options_.job},
                {Handshake::Role::observer, options_.observed_job}};
  if (way == ListenerWay::unix_socket) {
    entry->second.handshake.emplace(Handshake::Side::acceptor, hello, options_.secret);
  } else {
    entry->second.tls.emplace(Handshake::Side::acceptor, hello, options_.secret);
  }
  entry->second.unauthenticated_entry =
      unauthenticated_.emplace(unauthenticated_.end(), now + options_.greeting_limit, connection);
}

void StoreServer::on_bytes(Connection connection, ConstBytes bytes, TimePoint now) {
  const auto entry = clients_.find(connection);
  if (entry == clients_.end() || entry->second.closing) return;
  Client& client = entry->second;
  if (client.greeting) refuse_surplus_observer(client);
  if (client.tls) client.tls->feed(std::exchange(bytes, {}));
  if (client.greeting) greet(client, bytes, now);
  if (client.greeting || client.closing) return;
  if (client.tls && !decrypt(client, now)) return;
  client.input.feed(bytes);
  serve(client, now);
  resume(now);
}

void StoreServer::refuse(const std::string& sentence, TimePoint now) {
  if (const auto line = refusals_.note(sentence, now)) log(LogLevel::warning, *line);
}

void StoreServer::drop(Client& client, const std::string& why, TimePoint now) {
  const std::string sentence = "the store closes its connection to " + client.peer + ": " + why;
  if (const auto line = dropped_.note(sentence, now)) log(LogLevel::warning, *line);
  close(client);
}

/// Before each piece of a greeting is read: the last one completes it, and others may have become
/// observers since the first.
void StoreServer::refuse_surplus_observer(Client& client) {
  const Handshake::Peer& peer = client.tls ? client.tls->peer() : client.handshake->peer();
  if (peer.role == Handshake::Role::observer && observers_ >= kMostObservers)
    client.tls ? client.tls->set_unwelcome() : client.handshake->set_unwelcome();
}

void StoreServer::greet(Client& client, ConstBytes& bytes, TimePoint now) {
  if (client.handshake) {
    bytes = bytes.subspan(client.handshake->feed(bytes));
    if (std::string out = client.handshake->take_output(); !out.empty()) {
      client.output_bytes += out.size();
      client.output.push_back({std::move(out), nullptr});
    }
  }
  changed_.insert(client.number);
  const Handshake::Peer& peer = client.tls ? client.tls->peer() : client.handshake->peer();
  const bool failed = client.tls ? client.tls->failed() : client.handshake->failed();
  if (failed) {
    const Status& why = client.tls ? client.tls->failure() : client.handshake->failure();
    refuse("the store refused " + client.peer + ": " + why.message(), now);
    return close(client);
  }
  if (client.tls ? !client.tls->done() : !client.handshake->done()) return;
  forget_unauthenticated(client);
  client.greeting = false;
  client.observes = peer.role == Handshake::Role::observer;
  if (client.observes) ++observers_;
  client.handshake.reset();
}

/// Decrypts the received bytes. False if they were tampered with, which ends the connection.
bool StoreServer::decrypt(Client& client, TimePoint now) {
  std::array<std::byte, 16 * 1024> plain;  // limit: a record of TLS
  const MutableBytes piece(plain);
  for (;;) {
    const auto got = client.tls->read({&piece, 1});
    if (!got) {
      drop(client, got.status().message(), now);
      return false;
    }
    if (*got == 0) return true;
    client.input.feed(ConstBytes(plain).first(*got));
  }
}

/// Encrypts as much of the output as may be buffered.
void StoreServer::encrypt(Client& client) {
  while (!client.output.empty()) {
    constexpr std::size_t kPieces = 64;
    const auto taken = client.tls->write(client.pieces(kPieces));
    if (!taken) {
      log(LogLevel::warning,
          "the store closes its connection to " + client.peer + ": " + taken.status().message());
      return close(client);
    }
    if (*taken == 0) break;
    client.written(*taken);
  }
}

void StoreServer::serve(Client& client, TimePoint now) {
  while (!client.closing && !choked(client)) {
    const auto frame = client.input.next();
    if (!frame) break;
    const auto wire = decode_request(*frame);
    if (!wire) {
      return drop(client, "it sent " + wire.status().message(), now);
    }
    const Ticket ticket = next_ticket_++;
    askers_[ticket] = {client.number, wire->id};
    client.parked.insert(ticket);
    StoreTable::Answers answers;
    const Status may = client.observes ? rights_.may(wire->request, table_) : Status();
    if (may && wire->request.op == StoreOp::enter && !wire->request.keys.empty()) {
      client.record = wire->request.keys[0];
      client.epoch = wire->request.number;
    }
    if (!may) {
      answers.push_back({ticket, {may, 0, {}}});
    } else if (is_of_the_past(client)) {
      answers.push_back({ticket, {table_.leases().refusal_of(client.record, client.epoch), 0, {}}});
    } else if (wire->request.op == StoreOp::count_refusals) {
      answers.push_back({ticket, {{}, static_cast<std::int64_t>(refusals_.count()), {}}});
    } else {
      table_.submit(ticket, wire->request, now, answers);
      if (client.observes && wire->request.op == StoreOp::list_keys)
        ObserverRights::hide(answers, table_);
    }
    answer(answers);
    if (may && wire->request.op == StoreOp::commit) refuse_the_past(now);
  }
  client.input.trim();
  if (client.input.broken() ||
      (client.observes && client.input.outstanding() > 2 * kLongestQuestion))
    return drop(client, "it announced a request of an impossible length", now);
  changed_.insert(client.number);
}

bool StoreServer::is_of_the_past(const Client& client) const {
  return client.epoch > 0 && table_.leases().epoch_of(client.record) > client.epoch;
}

/// Refuses the pending requests of clients of older epochs.
void StoreServer::refuse_the_past(TimePoint now) {
  for (auto& [number, client] : clients_) {
    if (client.parked.empty() || !is_of_the_past(client)) continue;
    const Status refusal = table_.leases().refusal_of(client.record, client.epoch);
    StoreTable::Answers answers;
    for (const Ticket ticket : client.parked) {
      answers.push_back({ticket, {refusal, 0, {}}});
      table_.drop(ticket, now, answers);
    }
    answer(answers);
  }
}

void StoreServer::answer(StoreTable::Answers& answers) {
  for (auto& each : answers) {
    const auto asker = askers_.find(each.ticket);
    if (asker == askers_.end()) continue;
    const auto entry = clients_.find(asker->second.connection);
    if (entry != clients_.end()) {
      if (choked(entry->second)) resumable_.insert(entry->first);
      entry->second.parked.erase(each.ticket);
      if (!entry->second.closing) send(entry->second, asker->second.id, std::move(each.reply));
    }
    askers_.erase(asker);
  }
}

void StoreServer::send(Client& client, std::uint64_t id, Reply reply) {
  std::string head = encode_head(reply, id);
  if (head.empty()) {
    reply = {Status(Code::exhausted, "the reply would be longer than the limit of " +
                                         std::to_string(kMaxFrameBytes) +
                                         " bytes; ask for fewer keys at once"),
             0,
             {}};
    head = encode_head(reply, id);
  }
  client.output_bytes += head.size();
  client.output.push_back({std::move(head), nullptr});
  for (Value& value : reply.values) {
    if (value->size() <= fixed::kSmallMessage) {  // a copy is cheaper than a piece
      if (client.output.back().value) client.output.push_back({});
      client.output.back().head.append(*value);
      client.output_bytes += value->size();
      continue;
    }
    client.output_bytes += value->size();
    client.output.push_back({{}, std::move(value)});
  }
  if (client.tls) encrypt(client);
  changed_.insert(client.number);
}

void StoreServer::close(Client& client) {
  if (client.closing) return;
  client.closing = true;
  if (std::exchange(client.greeting, false)) forget_unauthenticated(client);
  changed_.insert(client.number);
}

void StoreServer::forget_unauthenticated(Client& client) {
  unauthenticated_.erase(client.unauthenticated_entry);
}

void StoreServer::on_closed(Connection connection, TimePoint now) {
  const auto entry = clients_.find(connection);
  if (entry == clients_.end()) return;
  if (entry->second.greeting) forget_unauthenticated(entry->second);
  if (entry->second.observes) --observers_;
  const std::set<Ticket> parked = std::move(entry->second.parked);
  clients_.erase(entry);
  changed_.erase(connection);
  for (const Ticket ticket : parked) {
    askers_.erase(ticket);
    StoreTable::Answers answers;
    table_.drop(ticket, now, answers);
    answer(answers);
  }
  resume(now);
}

void StoreServer::on_written(Connection connection, std::size_t count, TimePoint now) {
  const auto entry = clients_.find(connection);
  if (entry == clients_.end()) return;
  Client& client = entry->second;
  const bool was_choked = choked(client);
  if (client.tls) {
    client.tls->sent(count);
    encrypt(client);
  } else {
    client.written(count);
  }
  if (was_choked) resumable_.insert(connection);
  resume(now);
}

void StoreServer::resume(TimePoint now) {
  while (!resumable_.empty()) {
    const auto entry = clients_.find(*resumable_.begin());
    resumable_.erase(resumable_.begin());
    if (entry != clients_.end() && !entry->second.closing && !choked(entry->second))
      serve(entry->second, now);
  }
}

void StoreServer::on_time(TimePoint now) {
  while (!unauthenticated_.empty() && unauthenticated_.front().first <= now) {
    Client& client = clients_.at(unauthenticated_.front().second);
    refuse("the store closes its connection to " + client.peer +
               ": it did not prove the job's secret within " + describe(options_.greeting_limit),
           now);
    close(client);
  }
  StoreTable::Answers answers;
  table_.expire(now, answers);
  answer(answers);
  if (logs(LogLevel::info))
    for (const std::string& sentence : table_.overdue(now)) log(LogLevel::info, sentence);
  resume(now);
}

std::size_t StoreServer::unauthenticated() const {
  return static_cast<std::size_t>(std::ranges::count_if(unauthenticated_, [this](const auto& each) {
    return clients_.at(each.second).tls.has_value();
  }));
}

std::vector<StoreServer::Connection> StoreServer::take_changed() {
  std::vector<Connection> changed(changed_.begin(), changed_.end());
  changed_.clear();
  return changed;
}

std::vector<ConstBytes> StoreServer::output(Connection connection, std::size_t most) const {
  const auto entry = clients_.find(connection);
  if (entry == clients_.end()) return {};
  if (!entry->second.tls) return entry->second.pieces(most);
  const ConstBytes encrypted = entry->second.tls->output();
  return encrypted.empty() ? std::vector<ConstBytes>() : std::vector{encrypted};
}

bool StoreServer::choked(const Client& client) const {
  const std::size_t encrypted = client.tls ? client.tls->output().size() : 0;
  return client.output_bytes + encrypted > options_.max_output ||
         client.parked.size() >= (client.observes ? kMostObserversRequests : options_.max_parked);
}

bool StoreServer::wants_read(Connection connection) const {
  const auto entry = clients_.find(connection);
  return entry != clients_.end() && !entry->second.closing && !choked(entry->second);
}

bool StoreServer::wants_close(Connection connection) const {
  const auto entry = clients_.find(connection);
  return entry != clients_.end() && entry->second.closing;
}

TimePoint StoreServer::next_timer() const {
  const TimePoint deadline = logs(LogLevel::info)
                                 ? std::min(table_.next_deadline(), table_.next_overdue())
                                 : table_.next_deadline();
  return unauthenticated_.empty() ? deadline : std::min(deadline, unauthenticated_.front().first);
}

std::size_t StoreServer::held(Connection connection) const {
  const auto entry = clients_.find(connection);
  if (entry == clients_.end()) return 0;
  const Client& client = entry->second;
  return client.input.held() + (client.tls ? client.tls->unread() : 0);
}

}  // namespace muster::store
