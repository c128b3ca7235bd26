// SPDX-License-Identifier: BSD-3-Clause
// A TCP store with thousands of users at once. They are connections that one thread serves, so that
// what is tried is the server.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "core/store/store_protocol.h"
#include "core/store/testing/tcp_servers.h"
#include "testing/process_usage.h"
#include "testing/raw_peer.h"
#include "testing/seed.h"

namespace muster::store {
namespace {

/// One user: sends requests and takes replies when it is told to.
class User {
 public:
  explicit User(std::uint16_t port) : connection_(port) {
    Handshake::Hello hello;
    hello.job = store_job(port, {}, Handshake::Role::store);
    hello.build = kStoreBuild;
    authenticated_ = connection_.authenticate(kTcpSecret, hello);
  }
  bool authenticated() const { return authenticated_; }

  /// The request's id.
  std::uint64_t ask(const Request& request) {
    std::string frame = encode_head(request, ++last_id_);
    for (const auto value : request.values) frame.append(value);
    EXPECT_TRUE(connection_.send(frame));
    return last_id_;
  }
  /// The next reply, whichever request it answers; id 0 where none comes.
  WireReply take() {
    for (;;) {
      if (const auto frame = frames_.next()) {
        auto reply = decode_reply(*frame);
        EXPECT_TRUE(reply.ok()) << reply.status().message();
        return reply.ok() ? std::move(*reply) : WireReply{};
      }
      const std::string bytes = connection_.read_some();
      if (bytes.empty()) return {};
      frames_.feed(as_bytes(bytes));
    }
  }

 private:
  testing::RawPeer connection_;
  RequestFrames frames_;
  std::uint64_t last_id_ = 0;
  bool authenticated_ = false;
};

class Crowd : public ::testing::Test {
 protected:
  /// As many as the limit of open files allows: two descriptors each, since the server is in this
  /// process too.
  void gather(int wanted) {
    limit_ = std::make_unique<testing::DescriptorLimit>(static_cast<std::size_t>(2 * wanted + 100));
    const int count = std::min(wanted, static_cast<int>(limit_->limit() - 100) / 2);
    for (int i = 0; i < count; ++i) {
      users.push_back(std::make_unique<User>(server->port()));
      ASSERT_TRUE(users.back()->authenticated()) << "user " << i;
    }
  }
  /// Everybody's next reply must be a success under this id.
  std::vector<WireReply> take_all(std::uint64_t id) {
    std::vector<WireReply> replies;
    for (auto& user : users) {
      replies.push_back(user->take());
      EXPECT_EQ(replies.back().id, id) << "user " << replies.size() - 1;
      EXPECT_TRUE(replies.back().reply.status.ok()) << replies.back().reply.status.message();
      if (HasFailure()) break;
    }
    return replies;
  }
  std::string key(std::size_t user) const { return "user/" + std::to_string(user % users.size()); }

  std::shared_ptr<TcpStore> server = made(make_tcp_store(server_options()));
  std::vector<std::unique_ptr<User>> users;

 private:
  std::unique_ptr<testing::DescriptorLimit> limit_;
};

// spec: C7 thousands of clients at once: set, get, wait and barrier among all of them
TEST_F(Crowd, ThousandsOfUsersMeet) {
  gather(testing::long_tests() ? 5000 : 2000);
  ASSERT_FALSE(HasFailure());
  std::uint64_t id = 0;
  // Each reads what the next one writes; half of them ask before it is there.
  for (std::size_t i = 0; i < users.size(); i += 2)
    users[i]->ask({.op = StoreOp::set, .keys = {key(i)}, .values = {key(i)}});
  for (std::size_t i = 1; i < users.size(); i += 2)
    id = users[i]->ask({.op = StoreOp::set, .keys = {key(i)}, .values = {key(i)}});
  take_all(id);
  ASSERT_FALSE(HasFailure());
  for (std::size_t i = 0; i < users.size(); ++i) {
    const std::string next = key(i + 1);
    id = users[i]->ask({.op = StoreOp::get, .timeout = kLong, .keys = {next}});
  }
  const auto values = take_all(id);
  ASSERT_FALSE(HasFailure());
  for (std::size_t i = 0; i < users.size(); ++i)
    EXPECT_EQ(*values[i].reply.values.at(0), key(i + 1));

  // All wait for one key; that they do wait shows in the answer to a later question.
  for (auto& user : users) {
    user->ask({.op = StoreOp::wait, .timeout = kLong, .keys = {"start"}});
    id = user->ask({.op = StoreOp::check, .keys = {"start"}});
  }
  const auto checks = take_all(id);
  ASSERT_FALSE(HasFailure());
  for (const auto& each : checks) EXPECT_EQ(each.reply.number, 0);
  ASSERT_TRUE(server->set("start", "").ok());
  take_all(id - 1);
  ASSERT_FALSE(HasFailure());

  for (int round = 0; round < 2; ++round) {
    for (auto& user : users)
      id = user->ask({.op = StoreOp::barrier,
                      .timeout = kLong,
                      .members = static_cast<int>(users.size()),
                      .keys = {"all"}});
    take_all(id);
    ASSERT_FALSE(HasFailure());
  }
  std::cout << users.size() << " users met\n";
  EXPECT_GE(users.size(), 400u) << "the limit of open files (ulimit -Hn) is too low for a crowd";
  const auto late_client = made(make_tcp_store(client_options(*server)));
  EXPECT_EQ(*late_client->get(key(7)), key(7));
}

}  // namespace
}  // namespace muster::store
