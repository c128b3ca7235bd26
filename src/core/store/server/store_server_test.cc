// SPDX-License-Identifier: BSD-3-Clause
// The server without its sockets, and the wire protocol: at every cut, with damaged frames, on a
// clock that stands where the test puts it.

#include "core/store/server/store_server.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "core/store/testing/server_bench.h"

namespace muster::store {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using namespace bench;

// spec: C7 one request and one reply, also where get blocks, while other requests of the connection
// go on
TEST(StoreServer, RepliesWhenReady) {
  Bench bench;
  const auto a = bench.authenticated(), b = bench.authenticated();
  bench.feed(a, get("key", 1) + set("other", "x", 2));
  auto replies = bench.replies(a);
  ASSERT_EQ(replies.size(), 1u);
  EXPECT_EQ(replies[0].id, 2u);
  bench.feed(b, set("key", "value", 1));
  replies = bench.replies(a);
  ASSERT_EQ(replies.size(), 1u);
  EXPECT_EQ(replies[0].id, 1u);
  EXPECT_EQ(*replies[0].reply.values.at(0), "value");
}

// spec: C7 timeout: the server answers at the client's deadline
TEST(StoreServer, AnswersAtTheDeadline) {
  Bench bench;
  const auto a = bench.authenticated();
  bench.feed(a, get("key", 1, seconds(3)));
  EXPECT_EQ(bench.server.next_timer(), bench.now + seconds(3));
  bench.advance(seconds(3));
  const auto replies = bench.replies(a);
  ASSERT_EQ(replies.size(), 1u);
  EXPECT_EQ(replies[0].reply.status.code(), Code::timed_out);
  EXPECT_NE(replies[0].reply.status.message().find("\"key\""), std::string::npos);
}

// spec: C2 unauthenticated peers have five seconds, the oldest of too many goes first
TEST(StoreServer, OutsidersHaveLimits) {
  Bench bench({.secret = kServerSecret, .job = "job", .max_unauthenticated = 3});
  std::vector<Connection> outsiders;
  for (int i = 0; i < 4; ++i) outsiders.push_back(bench.open(Bench::ListenerWay::tcp));
  EXPECT_TRUE(bench.closed(outsiders[0]));
  EXPECT_FALSE(bench.closed(outsiders[1]));
  EXPECT_EQ(bench.server.unauthenticated(), 3u);
  bench.advance(seconds(5) - Duration(1));
  EXPECT_FALSE(bench.closed(outsiders[3]));
  // A rank of this host takes no place of theirs, and loses none to them.
  const auto silent = bench.open(), friendly = bench.authenticated();
  EXPECT_FALSE(bench.closed(outsiders[1]));
  EXPECT_TRUE((bench.open(Bench::ListenerWay::tcp), bench.closed(outsiders[1])));
  EXPECT_FALSE(bench.closed(silent));
  bench.advance(Duration(1));
  EXPECT_TRUE(bench.closed(outsiders[3]));
  bench.advance(seconds(5));
  EXPECT_TRUE(bench.closed(silent));
  EXPECT_EQ(bench.server.unauthenticated(), 0u);
  bench.advance(seconds(500));
  EXPECT_FALSE(bench.closed(friendly)) << "who has proved the secret may be silent for ever";
}

// spec: C2 without a given secret a connection from another host is refused before a byte of it is
// read
TEST(StoreServer, HostSecretWantsThisHost) {
  ::unsetenv("MUSTER_SECRET");
  ::unsetenv("MUSTER_SECRET_FILE");
  ::unsetenv("MUSTER_INSECURE");
  const auto secret = Secret::from_environment();
  ASSERT_TRUE(secret.ok()) << secret.status().message();
  ASSERT_EQ(secret->kind(), Secret::Kind::host);
  Bench bench({.secret = *secret, .job = "job"});
  EXPECT_TRUE(bench.closed(bench.open(Bench::ListenerWay::tcp)));
  EXPECT_FALSE(bench.closed(bench.open(Bench::ListenerWay::tcp_same_host)));
}

// spec: C2 bounded output: who does not read is not read from, and goes on where it stopped
TEST(StoreServer, WhoDoesNotReadIsNotReadFrom) {
  Bench bench({.secret = kServerSecret, .job = "job", .max_output = 100000});
  const auto slow = bench.authenticated(), other = bench.authenticated();
  bench.feed(other, set("large", std::string(60000, 'x'), 1));
  bench.set_deaf(slow, true);
  std::string requests;
  for (std::uint64_t id = 1; id <= 10; ++id) requests += get("large", id);
  bench.feed(slow, requests);
  EXPECT_FALSE(bench.server.wants_read(slow));
  EXPECT_TRUE(bench.server.wants_read(other));
  bench.take(other);
  bench.feed(other, get("large", 2));
  EXPECT_EQ(bench.replies(other).size(), 1u);
  bench.set_deaf(slow, false);
  EXPECT_TRUE(bench.server.wants_read(slow));
  EXPECT_EQ(bench.replies(slow).size(), 10u) << "requests that lay in the buffer are answered";
}

// spec: C2 a limited number of requests of one connection may wait; the rest is taken up as they
// are answered
TEST(StoreServer, ParkedRequestsAreBounded) {
  Bench bench({.secret = kServerSecret, .job = "job", .max_parked = 4});
  const auto greedy = bench.authenticated(), other = bench.authenticated();
  std::string requests;
  for (std::uint64_t id = 1; id <= 10; ++id) requests += get("key " + std::to_string(id), id);
  bench.feed(greedy, requests);
  EXPECT_FALSE(bench.server.wants_read(greedy));
  for (std::uint64_t id = 1; id <= 10; ++id)
    bench.feed(other, set("key " + std::to_string(id), "x", id));
  EXPECT_EQ(bench.replies(greedy).size(), 10u);
  EXPECT_TRUE(bench.server.wants_read(greedy));
}

// spec: C14 a connection that ends takes its waiting requests with it
TEST(StoreServer, ClosedConnectionsLeaveNothing) {
  Bench bench;
  const auto a = bench.authenticated(), b = bench.authenticated();
  bench.feed(
      a,
      get("key", 1) +
          whole({.op = StoreOp::queue_pop, .timeout = seconds(10), .number = 1, .keys = {"queue"}},
                2));
  bench.close(a);
  EXPECT_EQ(bench.server.next_timer(), TimePoint::max());
  bench.feed(b, whole({.op = StoreOp::queue_push, .keys = {"queue"}, .values = {"x"}}, 1) +
                    whole({.op = StoreOp::queue_len, .keys = {"queue"}}, 2));
  EXPECT_EQ(bench.replies(b).at(1).reply.number, 1)
      << "a value must not go to somebody who is gone";
}

// spec: C7 requests cut at every byte mean the same
TEST(StoreServer, CutAtEveryByte) {
  const std::string stream = set("key", "value", 1) + get("key", 2) +
                             whole({.op = StoreOp::add, .number = 5, .keys = {"count"}}, 3);
  for (std::size_t cut = 0; cut <= stream.size(); ++cut) {
    Bench bench;
    const auto a = bench.authenticated();
    bench.feed(a, stream.substr(0, cut));
    bench.feed(a, stream.substr(cut));
    const auto replies = bench.replies(a);
    ASSERT_EQ(replies.size(), 3u) << cut;
    EXPECT_EQ(*replies[1].reply.values.at(0), "value");
    EXPECT_EQ(replies[2].reply.number, 5);
  }
}

// spec: C2 damaged requests end their own connection and nothing else, and hold no memory
TEST(StoreServer, DamagedRequests) {
  std::mt19937_64 random(17);
  Bench bench;
  const auto friendly = bench.authenticated();
  const std::string good = whole({.op = StoreOp::multi_set,
                                  .timeout = seconds(1),
                                  .keys = {"a", "b", "c"},
                                  .values = {"1", "22", "333"}},
                                 9);
  for (int round = 0; round < 3000; ++round) {
    const auto bad = bench.authenticated();
    std::string bytes = good + good;
    for (std::uint64_t i = 0; i <= random() % 4; ++i)
      bytes[random() % bytes.size()] = static_cast<char>(random());
    bench.feed(bad, bytes);
    ASSERT_LE(bench.server.held(bad), std::size_t{1} << 16);
    if (!bench.closed(bad)) bench.close(bad);
    bench.feed(friendly, set("alive", std::to_string(round), 1));
    ASSERT_EQ(bench.replies(friendly).size(), 1u);
  }
  EXPECT_EQ(bench.server.connections(), 1u);
}

// spec: C7 version and length limits of the protocol
TEST(StoreProtocol, LimitsAndVersions) {
  const std::string frame = set("key", "value", 1).substr(4);
  EXPECT_TRUE(decode_request(frame).ok());
  for (const std::size_t at : {0u, 1u, 2u}) {  // version, operation, zero
    std::string bad = frame;
    bad[at] = 99;
    EXPECT_FALSE(decode_request(bad).ok()) << at;
  }
  EXPECT_FALSE(decode_request(frame + "x").ok()) << "more than was announced";
  for (std::size_t cut = 0; cut < frame.size(); ++cut)
    EXPECT_FALSE(decode_request(frame.substr(0, cut)).ok()) << cut;
  Request too_large{.op = StoreOp::multi_set};
  too_large.keys.assign(2000, "key");
  const std::string megabyte(1 << 20, 'x');
  too_large.values.assign(2000, megabyte);
  EXPECT_EQ(encode_head(too_large, 1), "") << "two gigabytes do not fit into a frame";
}

// spec: C7 replies carry code, message, ranks, number and values, and are checked like requests
TEST(StoreProtocol, RepliesBothWays) {
  Reply reply;
  reply.status = Status(Code::timed_out, "a message", {1, 5});
  reply.number = -3;
  reply.values = {std::make_shared<const std::string>("one"),
                  std::make_shared<const std::string>(""),
                  std::make_shared<const std::string>("three")};
  std::string frame = encode_head(reply, 77);
  for (const auto& value : reply.values) frame += *value;
  frame = frame.substr(4);
  const auto back = decode_reply(frame);
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(back->id, 77u);
  EXPECT_EQ(back->reply.status.code(), Code::timed_out);
  EXPECT_EQ(back->reply.status.message(), "a message");
  EXPECT_EQ(back->reply.status.ranks(), (std::vector<int>{1, 5}));
  EXPECT_EQ(back->reply.number, -3);
  ASSERT_EQ(back->reply.values.size(), 3u);
  EXPECT_EQ(*back->reply.values[2], "three");
  for (std::size_t cut = 0; cut < frame.size(); ++cut)
    EXPECT_FALSE(decode_reply(frame.substr(0, cut)).ok()) << cut;
  std::mt19937_64 random(23);
  for (int round = 0; round < 10000; ++round) {
    std::string bad = frame;
    for (int i = 0; i < 3; ++i) bad[random() % bad.size()] = static_cast<char>(random());
    static_cast<void>(decode_reply(
        bad));  // must not crash, nor allocate on the frame's word: the sanitizers watch
  }
}

// spec: W1 those that do not prove the secret are counted, and any client that has it can ask
TEST(StoreServer, CountsThoseItTurnsAway) {
  Bench bench;
  const auto refused = [&] {
    const Connection rank = bench.authenticated();
    bench.feed(rank, whole({.op = StoreOp::count_refusals}, 1));
    return bench.replies(rank).at(0).reply.number;
  };
  EXPECT_EQ(refused(), 0);
  const Connection silent = bench.open();
  bench.feed(silent, std::string(128, 'x'));
  EXPECT_EQ(refused(), 1);
  bench.open();
  bench.advance(seconds(6));
  EXPECT_EQ(refused(), 2) << "who says nothing";
}

// spec: W1 peers without proof that a crowd pushes out are counted as well
TEST(StoreServer, CountsThoseWhomACrowdPushesOut) {
  Bench bench({.secret = kServerSecret, .job = "job", .max_unauthenticated = 3});
  for (int i = 0; i < 5; ++i) bench.open(Bench::ListenerWay::tcp);
  const Connection rank = bench.authenticated();
  bench.feed(rank, whole({.op = StoreOp::count_refusals}, 1));
  EXPECT_EQ(bench.replies(rank).at(0).reply.number, 2);
}

// spec: C2 a lying length is refused before it allocates
TEST(StoreProtocol, LyingLengths) {
  for (const std::uint32_t length :
       {0u, 11u, static_cast<std::uint32_t>(kMaxFrameBytes) + 1, 0xffffffffu}) {
    RequestFrames frames;
    ByteWriter lie;
    lie.put(length);
    frames.feed(as_bytes(lie.view()));
    EXPECT_FALSE(frames.next().has_value());
    EXPECT_TRUE(frames.broken()) << length;
  }
  RequestFrames frames;
  ByteWriter claim;
  claim.put(static_cast<std::uint32_t>(kMaxFrameBytes));
  frames.feed(as_bytes(claim.view()));
  EXPECT_FALSE(frames.next().has_value());
  EXPECT_FALSE(frames.broken());
  EXPECT_EQ(frames.outstanding(), kMaxFrameBytes);
  EXPECT_LT(frames.held(), 4096u);
}

}  // namespace
}  // namespace muster::store
