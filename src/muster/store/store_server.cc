#include "muster/store/store_server.h"

#include <algorithm>
#include <optional>

#include "muster/base/log.h"

namespace muster::store {

/// The key that counts the workers; it makes `num_keys` one more than with the other kinds.
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

  Client(Connection connection, std::string name, const Options& options)
      : number(connection),
        peer(std::move(name)),
        handshake(std::in_place, Handshake::Side::acceptor,
                  Handshake::Hello{.role = Handshake::Role::store,
                                   .rank = -1,
                                   .world_size = -1,
                                   .job = options.job,
                                   .build = kStoreBuild,
                                   .note = 0},
                  options.secret) {}

  Connection number;
  std::string peer;
  std::optional<Handshake> handshake;  // none once it is done
  std::list<std::pair<TimePoint, Connection>>::iterator stranger;
  FrameReader input;
  std::deque<Piece> output;
  std::size_t output_at = 0;  // bytes of the first piece that are written
  std::size_t output_bytes = 0;
  std::set<Ticket> parked;
  bool closing = false;
};

StoreServer::StoreServer(Options options) : options_(std::move(options)) {
  StoreTable::Answers ignored;
  table_.submit(0, {.op = Op::add, .number = 0, .keys = {kWorkersKey}}, TimePoint(), ignored);
}
StoreServer::~StoreServer() = default;

void StoreServer::on_open(Connection connection, std::string peer, bool same_host, TimePoint now) {
  if (options_.secret.kind() == Secret::Kind::host && !same_host) {
    log(LogLevel::warning,
        "the store refused " + peer +
            ": it is not on this host, and without MUSTER_SECRET only this host's ranks may join");
    const auto [entry, fresh] =
        clients_.try_emplace(connection, connection, std::move(peer), options_);
    entry->second.handshake.reset();
    entry->second.closing = true;
    changed_.insert(connection);
    return;
  }
  if (strangers_.size() >= options_.max_strangers) close(clients_.at(strangers_.front().second));
  const auto [entry, fresh] =
      clients_.try_emplace(connection, connection, std::move(peer), options_);
  entry->second.stranger =
      strangers_.emplace(strangers_.end(), now + options_.greeting_limit, connection);
}

void StoreServer::on_bytes(Connection connection, ConstBytes bytes, TimePoint now) {
  const auto entry = clients_.find(connection);
  if (entry == clients_.end() || entry->second.closing) return;
  Client& client = entry->second;
  if (client.handshake) greet(client, bytes);
  if (client.handshake || client.closing) return;
  client.input.feed(bytes);
  serve(client, now);
  resume(now);
}

void StoreServer::greet(Client& client, ConstBytes& bytes) {
  Handshake& handshake = *client.handshake;
  bytes = bytes.subspan(handshake.feed(bytes));
  if (std::string out = handshake.take_output(); !out.empty()) {
    client.output_bytes += out.size();
    client.output.push_back({std::move(out), nullptr});
    changed_.insert(client.number);
  }
  if (handshake.failed()) {
    log(LogLevel::info, "the store refused " + client.peer + ": " + handshake.failure().message());
    return close(client);
  }
  if (!handshake.done()) return;
  forget_stranger(client);
  client.handshake.reset();
}

void StoreServer::serve(Client& client, TimePoint now) {
  while (!client.closing && !choked(client)) {
    const auto frame = client.input.next();
    if (!frame) break;
    const auto wire = decode_request(*frame);
    if (!wire) {
      log(LogLevel::warning, "the store closes its connection to " + client.peer + ": it sent " +
                                 wire.status().message());
      return close(client);
    }
    const Ticket ticket = next_ticket_++;
    askers_[ticket] = {client.number, wire->id};
    client.parked.insert(ticket);
    StoreTable::Answers answers;
    table_.submit(ticket, wire->request, now, answers);
    answer(answers);
  }
  client.input.trim();
  if (client.input.broken()) {
    log(LogLevel::warning, "the store closes its connection to " + client.peer +
                               ": it announced a request of an impossible length");
    return close(client);
  }
  changed_.insert(client.number);
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
    constexpr std::size_t kWorthSharing = 4096;
    if (value->size() < kWorthSharing) {  // a copy is cheaper than a piece
      if (client.output.back().value) client.output.push_back({});
      client.output.back().head.append(*value);
      client.output_bytes += value->size();
      continue;
    }
    client.output_bytes += value->size();
    client.output.push_back({{}, std::move(value)});
  }
  changed_.insert(client.number);
}

void StoreServer::close(Client& client) {
  if (client.closing) return;
  client.closing = true;
  if (client.handshake) forget_stranger(client);
  client.handshake.reset();
  changed_.insert(client.number);
}

void StoreServer::forget_stranger(Client& client) { strangers_.erase(client.stranger); }

void StoreServer::on_closed(Connection connection, TimePoint now) {
  const auto entry = clients_.find(connection);
  if (entry == clients_.end()) return;
  if (entry->second.handshake) forget_stranger(entry->second);
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
  client.output_bytes -= count;
  client.output_at += count;
  while (!client.output.empty() && client.output_at >= client.output.front().bytes().size()) {
    client.output_at -= client.output.front().bytes().size();
    client.output.pop_front();
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
  while (!strangers_.empty() && strangers_.front().first <= now) {
    Client& client = clients_.at(strangers_.front().second);
    log(LogLevel::info, "the store closes its connection to " + client.peer +
                            ": it did not prove the job's secret within " +
                            describe(options_.greeting_limit));
    close(client);
  }
  StoreTable::Answers answers;
  table_.expire(now, answers);
  answer(answers);
  if (logs(LogLevel::info))
    for (const std::string& sentence : table_.overdue(now)) log(LogLevel::info, sentence);
  resume(now);
}

std::vector<StoreServer::Connection> StoreServer::take_changed() {
  std::vector<Connection> changed(changed_.begin(), changed_.end());
  changed_.clear();
  return changed;
}

std::vector<ConstBytes> StoreServer::output(Connection connection, std::size_t most) const {
  std::vector<ConstBytes> pieces;
  const auto entry = clients_.find(connection);
  if (entry == clients_.end()) return pieces;
  std::size_t at = entry->second.output_at;
  for (const auto& piece : entry->second.output) {
    if (pieces.size() == most) break;
    if (const auto bytes = as_bytes(piece.bytes()).subspan(at); !bytes.empty())
      pieces.push_back(bytes);
    at = 0;
  }
  return pieces;
}

bool StoreServer::choked(const Client& client) const {
  return client.output_bytes > options_.max_output || client.parked.size() >= options_.max_parked;
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
  return strangers_.empty() ? deadline : std::min(deadline, strangers_.front().first);
}

std::size_t StoreServer::held(Connection connection) const {
  const auto entry = clients_.find(connection);
  return entry == clients_.end() ? 0 : entry->second.input.held();
}

}  // namespace muster::store
