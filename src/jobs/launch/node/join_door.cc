// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/node/join_door.h"

#include <string.h>

#include <utility>

#include "core/base/bytes.h"
#include "core/net/socket_address.h"

namespace muster::launch {
namespace {

constexpr std::size_t kKeyBytes = 16;  // limit: 128 random bits
constexpr std::size_t kKeyDigits = 2 * kKeyBytes;
constexpr std::size_t kTokenCheckDigits = 8;
constexpr int kDoorBacklog = 1024;
constexpr const char* kFactsKey = "facts";
constexpr std::string_view kDoorTitle = "muster join 1";  // the version of the record
// Not the job's name: who asks does not know it yet.
constexpr const char* kDoorJob = "muster join";

std::string token_check(const std::string& text) {
  return hexadecimal(short_hash(text)).substr(0, kTokenCheckDigits);
}

store::TcpStoreOptions door_options(const JoinToken& token) {
  store::TcpStoreOptions tcp;
  tcp.host = token.door.host;
  tcp.port = token.door.port.value_or(0);
  tcp.wait_for_workers = false;
  tcp.secret = Secret::given("muster-join-" + token.key);
  tcp.job = kDoorJob;
  tcp.role = Handshake::Role::launcher;
  return tcp;
}

}  // namespace

std::string JoinToken::text() const {
  const std::string text = endpoint_text(door) + "/" + key;
  return text + token_check(text);
}

Result<JoinToken> parse_join_token(const std::string& text) {
  const Status odd(Code::invalid_argument,
                   "--join: this is no token; it is HOST:PORT/ and 40 digits from 0 to f, as the "
                   "first node has printed it");
  const std::size_t slash = text.rfind('/');
  if (slash == std::string::npos || text.size() - slash - 1 != kKeyDigits + kTokenCheckDigits ||
      text.find_first_not_of("0123456789abcdef", slash + 1) != std::string::npos)
    return odd;
  const std::size_t checked = slash + 1 + kKeyDigits;
  if (text.substr(checked) != token_check(text.substr(0, checked)))
    return Status(Code::invalid_argument,
                  "--join: the token's check digits are wrong: a character is missing or was "
                  "changed; copy it again");
  auto door = parse_endpoint("--join", text.substr(0, slash));
  if (!door || !door->port) return odd;
  return JoinToken{std::move(*door), text.substr(slash + 1, kKeyDigits)};
}

std::string encode(const JoinFacts& facts) {
  ByteWriter writer;
  writer.put_text(kDoorTitle);
  writer.put_text(facts.secret ? facts.secret->key().text() : std::string_view());
  writer.put_text(facts.store.host).put(facts.store.port.value_or(0));
  writer.put_text(facts.run_id);
  writer.put(static_cast<std::int32_t>(facts.nodes.least));
  writer.put(static_cast<std::int32_t>(facts.nodes.most));
  return writer.take();
}

Result<JoinFacts> parse_join_facts(const std::string& record) {
  ByteReader reader(record);
  const bool known = reader.get_text() == kDoorTitle;
  JoinFacts facts;
  const std::string_view key = reader.get_text();
  if (!key.empty()) facts.secret = Secret::given(key);
  facts.store.host = reader.get_text();
  facts.store.port = reader.get<std::uint16_t>();
  facts.run_id = reader.get_text();
  facts.nodes.least = reader.get<std::int32_t>();
  facts.nodes.most = reader.get<std::int32_t>();
  if (known && reader.at_end() && !facts.store.host.empty() && facts.nodes.least >= 1 &&
      facts.nodes.most >= facts.nodes.least)
    return facts;
  return Status(Code::invalid_argument,
                "--join: what the first node says is not understood; muster must be of one version "
                "on all nodes");
}

Result<std::shared_ptr<JoinDoor>> JoinDoor::open(const std::string& host, const JoinFacts& facts,
                                                 TimePoint deadline) {
  auto addresses = resolve(host, 0, deadline);
  if (!addresses) return addresses.status();
  auto socket = listen_on(addresses->front(), kDoorBacklog);
  if (!socket) return socket.status();
  const auto bound = SocketAddress::local_of(socket->get());
  if (!bound) return bound.status();
  JoinToken token{{host, bound->port()}, random_name(kKeyBytes)};
  store::TcpStoreOptions tcp = door_options(token);
  tcp.is_server = true;
  tcp.listen_descriptor = socket->release();
  auto store = store::make_tcp_store(tcp);
  if (!store) return store.status();
  std::string record = encode(facts);
  const Status set = (*store)->set(kFactsKey, record);
  ::explicit_bzero(record.data(), record.size());
  if (!set) return set;
  return std::shared_ptr<JoinDoor>(new JoinDoor(std::move(token), std::move(*store)));
}

Result<JoinFacts> ask_at_door(const JoinToken& token, Duration timeout) {
  store::TcpStoreOptions tcp = door_options(token);
  tcp.timeout = timeout;
  auto store = store::make_tcp_store(tcp);
  if (!store)
    return store.status().with_context(
        "--join: asking the first node at " + endpoint_text(token.door) +
        " (a token is for one job, and opens nothing once all of its nodes have come)");
  auto record = (*store)->get(kFactsKey);
  if (!record) return record.status().with_context("--join: asking the first node");
  auto facts = parse_join_facts(*record);
  ::explicit_bzero(record->data(), record->size());
  return facts;
}

}  // namespace muster::launch
