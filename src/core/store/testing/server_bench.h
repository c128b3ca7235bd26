// SPDX-License-Identifier: BSD-3-Clause
/// Test support: the store's server without sockets, on a clock controlled by the test.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/store/server/store_server.h"
#include "core/store/store_protocol.h"

namespace muster::store::bench {

inline const Secret kServerSecret = Secret::given("the secret of the server's tests");

using std::chrono::seconds;
using Connection = StoreServer::Connection;

/// A server and the output of each connection.
class Bench {
 public:
  explicit Bench(StoreServer::StoreServerOptions options = {.secret = kServerSecret, .job = "job"})
      : server(std::move(options)) {}

  using ListenerWay = StoreServer::ListenerWay;
  Connection open(ListenerWay way = ListenerWay::unix_socket) {
    ++last_;
    server.on_open(last_, "peer " + std::to_string(last_), way, now);
    pump();
    return last_;
  }
  void feed(Connection connection, std::string_view bytes) {
    server.on_bytes(connection, as_bytes(bytes), now);
    pump();
  }
  void advance(Duration time) {
    now += time;
    server.on_time(now);
    pump();
  }
  void close(Connection connection) {
    server.on_closed(connection, now);
    closed_[connection] = true;
    pump();
  }
  /// Writes all pending output, except to connections that do not read.
  void pump() {
    for (auto changed = server.take_changed(); !changed.empty(); changed = server.take_changed()) {
      for (const Connection connection : changed) {
        for (auto pieces = server.output(connection, 3); !pieces.empty() && !deaf_[connection];
             pieces = server.output(connection, 3)) {
          std::size_t count = 0;
          for (const auto piece : pieces) {
            sent_[connection].append(as_text(piece));
            count += piece.size();
          }
          server.on_written(connection, count, now);
        }
        if (server.wants_close(connection)) {
          server.on_closed(connection, now);
          closed_[connection] = true;
        }
      }
    }
  }
  void set_deaf(Connection connection, bool deaf) {
    deaf_[connection] = deaf;
    if (!deaf) {
      server.on_written(connection, 0, now);
      // Writes pending output now, as for a socket that becomes writable.
      for (auto pieces = server.output(connection, 3); !pieces.empty();
           pieces = server.output(connection, 3)) {
        sent_[connection].append(as_text(pieces[0]));
        server.on_written(connection, pieces[0].size(), now);
      }
      pump();
    }
  }
  Connection authenticated(const Handshake::Hello& hello = {.job = "job", .build = kStoreBuild},
                           const Secret& secret = kServerSecret) {
    const Connection connection = open();
    Handshake handshake(Handshake::Side::connector, hello, secret);
    while (!handshake.done() && !handshake.failed()) {
      feed(connection, handshake.take_output());
      const std::string bytes = take(connection);
      handshake.feed(as_bytes(bytes));
    }
    EXPECT_TRUE(handshake.done()) << handshake.failure().message();
    return connection;
  }
  std::string take(Connection connection) { return std::exchange(sent_[connection], {}); }
  std::vector<WireReply> replies(Connection connection) {
    RequestFrames frames;
    frames.feed(as_bytes(take(connection)));
    std::vector<WireReply> all;
    while (const auto frame = frames.next()) {
      auto reply = decode_reply(*frame);
      EXPECT_TRUE(reply.ok());
      all.push_back(std::move(*reply));
    }
    return all;
  }
  bool closed(Connection connection) { return closed_[connection]; }

  StoreServer server;
  TimePoint now{seconds(1000)};

 private:
  Connection last_ = 0;
  std::map<Connection, std::string> sent_;
  std::map<Connection, bool> closed_, deaf_;
};

inline std::string whole(const Request& request, std::uint64_t id) {
  std::string frame = encode_head(request, id);
  for (const auto value : request.values) frame.append(value);
  return frame;
}
inline std::string set(std::string_view key, std::string_view value, std::uint64_t id) {
  return whole({.op = StoreOp::set, .keys = {key}, .values = {value}}, id);
}
inline std::string get(std::string_view key, std::uint64_t id, Duration timeout = seconds(10)) {
  return whole({.op = StoreOp::get, .timeout = timeout, .keys = {key}}, id);
}

}  // namespace muster::store::bench
