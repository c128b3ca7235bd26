// SPDX-License-Identifier: BSD-3-Clause
// The client's decisions without a server: bytes in, requests out, on a clock that stands still.

#include "core/store/etcd/session.h"

#include <gtest/gtest.h>

#include "testing/fuzz.h"

namespace muster::store::etcd {
namespace {

using std::chrono::seconds;

constexpr int kOk = 200, kUnavailable = 503, kBad = 400, kUnauthorized = 401;
const std::string kTxnReply =
    R"({"header":{"revision":"7"},"succeeded":true,"responses":[{"response_range":{"kvs":[)"
    R"({"key":"a2V5","create_revision":"3","mod_revision":"5","version":"2","value":"dmFsdWU="}],)"
    R"("count":"1"}},{"response_put":{}},{"response_delete_range":{"deleted":"4"}}]})";

EtcdSession session(std::string user = {}) {
  return {{"http://a:1", "http://b:1", "http://c:1"}, std::move(user), "password"};
}

// spec: L11 a member that does not answer: the next one is asked at once, with a pause after a
// round
TEST(EtcdSession, AsksTheNextMember) {
  EtcdSession cluster = session();
  HttpExchange exchange(cluster, "/v3/kv/txn", "body");
  const TimePoint now{seconds(1)};
  for (const char* member : {"http://a:1", "http://b:1", "http://c:1"}) {
    const auto request = exchange.next(now);
    ASSERT_TRUE(request.has_value());
    EXPECT_EQ(request->endpoint, member);
    EXPECT_EQ(request->body, "body");
    exchange.lost("connection refused", false, now);
  }
  EXPECT_FALSE(exchange.next(now).has_value()) << "all have been asked";
  EXPECT_GT(exchange.resume_at(), now);
  EXPECT_NE(exchange.trouble().find("connection refused"), std::string::npos);
  ASSERT_TRUE(exchange.next(exchange.resume_at()).has_value());
  exchange.answered(kUnavailable, R"({"error":"etcdserver: leader changed","code":14})",
                    exchange.resume_at());
  const auto request = exchange.next(exchange.resume_at());
  ASSERT_TRUE(request.has_value());
  EXPECT_EQ(request->endpoint, "http://b:1");
  exchange.answered(kOk, "reply", exchange.resume_at());
  ASSERT_TRUE(exchange.done());
  EXPECT_EQ(*exchange.take(), "reply");
  EXPECT_EQ(cluster.request("/", "").endpoint, "http://b:1") << "who answered is asked again";
}

// spec: L11 password: logs in first, and again where the token has grown stale
TEST(EtcdSession, LogsIn) {
  EtcdSession cluster = session("alice");
  HttpExchange exchange(cluster, "/v3/kv/txn", "body");
  const TimePoint now{seconds(1)};
  for (const std::string token : {"one", "two"}) {
    auto request = exchange.next(now);
    ASSERT_TRUE(request.has_value());
    EXPECT_EQ(request->path, "/v3/auth/authenticate");
    EXPECT_NE(request->body.find("alice"), std::string::npos);
    EXPECT_EQ(request->authorization, "");
    exchange.answered(kOk, R"({"token":")" + token + R"("})", now);
    request = exchange.next(now);
    ASSERT_TRUE(request.has_value());
    EXPECT_EQ(request->path, "/v3/kv/txn");
    EXPECT_EQ(request->authorization, token);
    if (token == "one")
      exchange.answered(kUnauthorized, R"({"error":"etcdserver: invalid auth token","code":16})",
                        now);
  }
  exchange.answered(kOk, "reply", now);
  EXPECT_EQ(*exchange.take(), "reply");
}

// spec: L11 TLS and password: what no other attempt can cure ends it, in words
TEST(EtcdSession, GivesUpWhatCannotBeCured) {
  struct Case {
    int status;
    const char* body;
    Code code;
    const char* words;
  };
  const TimePoint now{seconds(1)};
  for (const Case& each :
       {Case{kBad, R"({"error":"etcdserver: user name is empty","code":3})", Code::refused,
             "give a user"},
        Case{kBad, R"({"error":"etcdserver: permission denied","code":7})", Code::refused,
             "permission"},
        Case{kBad, R"({"error":"etcdserver: mvcc: database space exceeded","code":8})",
             Code::exhausted, "space exceeded"},
        Case{404, "404 page not found", Code::store, "v3 gateway"},
        Case{kBad, R"({"error":"etcdserver: duplicate key given in txn request","code":3})",
             Code::store, "duplicate key"}}) {
    EtcdSession cluster = session();
    HttpExchange exchange(cluster, "/v3/kv/txn", "body");
    ASSERT_TRUE(exchange.next(now).has_value());
    exchange.answered(each.status, each.body, now);
    ASSERT_TRUE(exchange.done()) << each.body;
    const Status status = exchange.take().status();
    EXPECT_EQ(status.code(), each.code) << status.message();
    EXPECT_NE(status.message().find(each.words), std::string::npos) << status.message();
  }
  EtcdSession cluster = session();
  HttpExchange exchange(cluster, "/v3/kv/txn", "body");
  for (int member = 0; member < 3; ++member) {
    ASSERT_TRUE(exchange.next(now).has_value());
    exchange.lost("SSL certificate problem", true, now);
  }
  ASSERT_TRUE(exchange.done());
  EXPECT_EQ(exchange.take().status().code(), Code::refused);
}

TEST(EtcdSession, ReadsAndWritesTransactions) {
  const auto reply = decode_txn(kTxnReply);
  ASSERT_TRUE(reply.ok()) << reply.status().message();
  EXPECT_TRUE(reply->succeeded);
  EXPECT_EQ(reply->revision, 7);
  ASSERT_EQ(reply->replies.size(), 3U);
  EXPECT_EQ(reply->replies[0].values.at(0).key, "key");
  EXPECT_EQ(reply->replies[0].values.at(0).value, "value");
  EXPECT_EQ(reply->replies[0].values.at(0).mod_revision, 5);
  EXPECT_EQ(reply->replies[2].deleted, 4);
  EXPECT_FALSE(decode_txn("[]").ok());
  EXPECT_FALSE(decode_txn(R"({"responses":[{"response_range":{"kvs":[{"key":"?"}]}}]})").ok());
  Txn txn;
  txn.when.push_back({.key = "k", .relation = Compare::Relation::greater, .number = 3});
  txn.then.push_back(Put{.key = "k", .value = std::string("\0\xff", 2), .lease = 9});
  EXPECT_EQ(encode(txn),
            R"({"compare":[{"key":"aw==","result":"GREATER","target":"VERSION","version":3}],)"
            R"("failure":[],"success":[{"request_put":{"key":"aw==","lease":9,"value":"AP8="}}]})");
  EXPECT_EQ(prefix_end("ab"), "ac");
  EXPECT_EQ(prefix_end("a\xff"), "b");
}

// spec: L11 a watch whose member ends goes on with the next
TEST(EtcdSession, WatchesGoOnElsewhere) {
  EtcdSession cluster = session();
  KeyWatch watch(cluster, "key", {});
  const TimePoint now{seconds(1)};
  std::vector<WatchMessage> messages;
  EXPECT_EQ(watch.open(now)->endpoint, "http://a:1");
  const std::string stream = R"({"result":{"header":{"revision":"4"},"created":true}})"
                             "\n"
                             R"({"result":{"events":[{"kv":{"key":"a2V5","mod_revision":"5"}},)"
                             R"({"type":"DELETE","kv":{"key":"a2V5","mod_revision":"6"}}]}})"
                             "\n";
  for (const char byte : stream) ASSERT_TRUE(watch.feed({&byte, 1}, messages, now));
  ASSERT_EQ(messages.size(), 2U);
  EXPECT_TRUE(messages[0].created);
  ASSERT_EQ(messages[1].events.size(), 2U);
  EXPECT_FALSE(messages[1].events[0].deleted);
  EXPECT_TRUE(messages[1].events[1].deleted);
  EXPECT_FALSE(
      watch.feed("{\"error\":{\"grpc_code\":14,\"message\":\"no leader\"}}\n", messages, now));
  EXPECT_TRUE(watch.failure().ok());
  EXPECT_EQ(watch.open(now)->endpoint, "http://b:1");
  EXPECT_FALSE(watch.feed(
      "{\"result\":{\"canceled\":true,\"cancel_reason\":\"etcdserver: permission denied\"}}\n",
      messages, now));
  EXPECT_EQ(watch.failure().code(), Code::refused);
}

// spec: L11 whatever a server sends is refused or read, and never more than has come is held
TEST(EtcdFuzz, RepliesAreReadOrRefused) {
  testing::Fuzz fuzz(41);
  const std::string watch =
      R"({"result":{"header":{"revision":"9"},"events":[{"type":"DELETE","kv":{"key":"a2V5"}}]}})"
      "\n";
  for (testing::FuzzRun run(3000); run.goes_on();) {
    const std::string txn = fuzz.one_in(8) ? fuzz.noise(300) : fuzz.damaged(kTxnReply);
    if (const auto reply = decode_txn(txn); reply.ok()) {
      std::size_t bytes = 0;
      for (const auto& each : reply->replies)
        for (const auto& value : each.values) bytes += value.key.size() + value.value.size();
      EXPECT_LE(bytes, txn.size());
    }
    static_cast<void>(decode_refusal(txn, kBad));
    static_cast<void>(decode_grant(txn));
    static_cast<void>(decode_keep_alive(txn));
    if (const auto token = decode_token(fuzz.damaged(R"({"token":"abc.12"})")); token.ok()) {
      EXPECT_EQ(token->find_first_of("\r\n"), std::string::npos);
    }
    WatchStream stream;
    std::vector<WatchMessage> messages;
    const std::string bytes = fuzz.damaged(watch + watch + watch);
    for (const auto piece : fuzz.pieces(bytes))
      if (!stream.feed(piece, messages)) break;
    EXPECT_LE(messages.size(), bytes.size());
  }
}

// spec: L11 an exchange ends with a reply or a reason, whatever is answered
TEST(EtcdFuzz, ExchangesEnd) {
  testing::Fuzz fuzz(42);
  for (testing::FuzzRun run(1000); run.goes_on();) {
    EtcdSession cluster = session(fuzz.one_in(2) ? "user" : "");
    HttpExchange exchange(cluster, "/v3/kv/txn", "body");
    TimePoint now{seconds(1)};
    int steps = 0;
    while (!exchange.done() && ++steps < 100) {
      if (!exchange.next(now)) {
        if (exchange.done()) break;
        ASSERT_GT(exchange.resume_at(), now);
        now = exchange.resume_at();
        continue;
      }
      constexpr int kStatuses[] = {200, 200, 400, 401, 404, 429, 500, 503};
      if (fuzz.one_in(4))
        exchange.lost("cut", fuzz.one_in(3), now);
      else
        exchange.answered(kStatuses[fuzz.below(std::size(kStatuses))],
                          fuzz.damaged(R"({"token":"abc","error":"etcdserver: no","code":14})"),
                          now);
    }
    EXPECT_LT(steps, 1000);
  }
}

}  // namespace
}  // namespace muster::store::etcd
