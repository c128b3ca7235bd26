// SPDX-License-Identifier: BSD-3-Clause
// The rights of the observers' key with a store, over TCP and within a host.

#include "core/store/observer_rights.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/security/tls_session.h"
#include "core/store/job_keys.h"
#include "core/store/testing/server_bench.h"
#include "core/store/testing/tcp_servers.h"

namespace muster::store {
namespace {

using Role = Handshake::Role;

const std::string kWord = "job/trace/3", kQuestions = "job/trace/ask/3",
                  kAnswer = "job/trace/answer/0123/3";

class Observers : public ::testing::TestWithParam<bool> {
 protected:
  Observers() {
    EXPECT_TRUE(server->set("key", "value").ok());
    EXPECT_TRUE(server->set("number", "1").ok());
    EXPECT_TRUE(server->queue_push("queue", "first").ok());
    EXPECT_TRUE(server->set(kWord, "last words").ok());
    EXPECT_TRUE(server->set("job/trace/job", encode(JobAnnouncement{"a job", 8, 1})).ok());
    EXPECT_TRUE(server->set(kAnswer, "an answer").ok());
    observer = made(make_tcp_store(options(Role::observer, kTcpSecret.observer())));
  }
  TcpStoreOptions options(Role role, const Secret& secret) const {
    TcpStoreOptions made = client_options(*server);
    made.role = role;
    made.secret = secret;
    made.within_host = GetParam();
    return made;
  }
  std::shared_ptr<TcpStore> server = made(make_tcp_store(server_options()));
  std::shared_ptr<TcpStore> observer;
};
INSTANTIATE_TEST_SUITE_P(Ways, Observers, ::testing::Bool(),
                         [](const auto& way) { return way.param ? "WithinAHost" : "OverTcp"; });

// spec: W1 with the observers' key nothing is written, and nothing is read but traces
TEST_P(Observers, WriteNothing) {
  const std::array keys{std::string("key")};
  const std::array values{std::string("forged")};
  const std::vector<std::pair<std::string, std::function<Status(Store&)>>> tries{
      {"set", [](Store& store) { return store.set("key", "forged"); }},
      {"set of a trace", [](Store& store) { return store.set(kWord, "forged"); }},
      {"set of an answer", [](Store& store) { return store.set(kAnswer, "forged"); }},
      {"set of a question", [](Store& store) { return store.set(kQuestions, "forged"); }},
      {"add", [](Store& store) { return store.add("number", 1).status(); }},
      {"compare_set",
       [](Store& store) { return store.compare_set("key", "value", "forged").status(); }},
      {"append", [](Store& store) { return store.append("key", "forged"); }},
      {"multi_set", [&](Store& store) { return store.multi_set(keys, values); }},
      {"delete_key", [](Store& store) { return store.delete_key("key").status(); }},
      {"delete of a trace", [](Store& store) { return store.delete_key(kWord).status(); }},
      {"queue_push", [](Store& store) { return store.queue_push("queue", "forged"); }},
      {"queue_pop", [](Store& store) { return store.queue_pop("queue", false).status(); }},
      {"pop of a question",
       [](Store& store) { return store.queue_pop(kQuestions, false).status(); }},
      {"barrier", [](Store& store) { return store.barrier("barrier", 1); }},
      {"all_gather",
       [](Store& store) { return store.all_gather("gather", 0, 1, "forged").status(); }},
      {"get", [](Store& store) { return store.get("key").status(); }},
      {"wait", [&](Store& store) { return store.wait(keys); }},
      {"check", [&](Store& store) { return store.check(keys).status(); }},
      {"multi_get", [&](Store& store) { return store.multi_get(keys).status(); }},
      {"queue_len", [](Store& store) { return store.queue_len("queue").status(); }},
      {"num_keys", [](Store& store) { return store.num_keys().status(); }},
  };
  const auto before = *server->list_keys();
  for (const auto& [name, attempt] : tries) {
    const Status refused = attempt(*observer);
    EXPECT_EQ(refused.code(), Code::refused) << name;
    EXPECT_TRUE(mentions(refused, "an observer may read")) << name << ": " << refused.message();
  }
  EXPECT_EQ(*server->list_keys(), before);
  EXPECT_EQ(*server->get("key"), "value");
  EXPECT_EQ(*server->get("number"), "1");
  EXPECT_EQ(*server->get(kWord), "last words");
  EXPECT_EQ(*server->get(kAnswer), "an answer");
  EXPECT_EQ(*server->queue_pop("queue", false), "first");
}

// spec: W1 what an observer needs: who runs, what ranks tell, and to ask them, a few times
TEST_P(Observers, ReadTracesAndAsk) {
  auto keys = *observer->list_keys();
  std::ranges::sort(keys);
  EXPECT_EQ(keys, (std::vector<std::string>{"job/trace/3", "job/trace/job"}));
  EXPECT_EQ(*observer->get(kWord), "last words");
  EXPECT_EQ(*observer->get(kAnswer), "an answer");
  EXPECT_TRUE(*observer->delete_key(kAnswer));
  EXPECT_EQ(*observer->count_refusals(), 0);
  for (std::int64_t asked = 0; asked < kMostQuestions; ++asked) {
    EXPECT_EQ(*observer->queue_len(kQuestions), asked);
    EXPECT_TRUE(observer->queue_push(kQuestions, "what").ok());
  }
  EXPECT_EQ(observer->queue_push(kQuestions, "what").code(), Code::exhausted);
  EXPECT_EQ(observer->queue_push("job/trace/ask/4", std::string(kLongestQuestion + 1, 'x')).code(),
            Code::refused);
}

// spec: W1 keys that look like a trace's and are of no running job are not for observers
TEST_P(Observers, SeeRunningJobsOnly) {
  for (const char* key :
       {"mine/trace/3", "mine/trace/answer/0123/3", "job/trace/8", "job/trace/03"})
    ASSERT_TRUE(server->set(key, "a user's").ok());
  for (const char* key : {"mine/trace/ask/3", "job/trace/ask/8", "job/trace/ask/03", "trace/ask/0",
                          "/trace/ask/0", "job//trace/ask/0"})
    EXPECT_EQ(observer->queue_push(key, "what").code(), Code::refused) << key;
  for (const char* key :
       {"mine/trace/3", "mine/trace/answer/0123/3", "job/trace/8", "job/trace/03"})
    EXPECT_EQ(observer->get(key).status().code(), Code::refused) << key;
  EXPECT_EQ(observer->delete_key("mine/trace/answer/0123/3").status().code(), Code::refused);
  EXPECT_EQ(observer->list_keys()->size(), 2u);
  ASSERT_TRUE(*server->delete_key("job/trace/job"));  // it ends
  EXPECT_EQ(observer->get(kWord).status().code(), Code::refused);
  EXPECT_TRUE(observer->list_keys()->empty());
}

// spec: W1 however many ranks a job has, observers' questions take a fixed amount of memory
TEST_P(Observers, AllTogetherAskWithinOneBound) {
  constexpr int kRanks = 10'000;
  ASSERT_TRUE(server->set("job/trace/job", encode(JobAnnouncement{"a job", kRanks, 1})).ok());
  const auto key = [](int rank) { return "job/trace/ask/" + std::to_string(rank); };
  const std::string question(kLongestQuestion, 'x');
  const auto other = made(make_tcp_store(options(Role::observer, kTcpSecret.observer())));
  int asked = 0;
  for (; asked < kRanks; ++asked)
    if (!(asked % 2 == 0 ? observer : other)->queue_push(key(asked), question).ok()) break;
  EXPECT_LE(static_cast<std::size_t>(asked) * question.size(), kMostQuestionBytes);
  EXPECT_GE(static_cast<std::size_t>(asked) * question.size(), kMostQuestionBytes / 2);
  EXPECT_EQ(observer->queue_push(key(asked), question).code(), Code::exhausted);
  EXPECT_EQ(*server->queue_pop(key(0), false), question);
  EXPECT_TRUE(other->queue_push(key(asked), question).ok()) << "a rank has taken one";
  EXPECT_EQ(observer->queue_push(key(0), question).code(), Code::exhausted);
}

/// Connections of observers that are open after twice as many as may be have greeted in step.
template <class Greeting>
std::size_t joined_at_once(bench::Bench::ListenerWay way) {
  bench::Bench bench({.secret = kTcpSecret, .job = "job", .observed_job = "job"});
  const Handshake::Hello hello{.role = Role::observer, .job = "job", .build = kStoreBuild};
  std::vector<bench::Connection> connections;
  std::vector<Greeting> greetings;
  for (std::size_t i = 0; i < 2 * kMostObservers; ++i) {
    connections.push_back(bench.open(way));
    greetings.emplace_back(Greeting::Side::connector, hello, kTcpSecret.observer());
  }
  constexpr int kRounds = 10;  // more than any greeting takes
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < greetings.size(); ++i) {
      if (bench.closed(connections[i])) continue;
      if (const std::string said = greetings[i].take_output(); !said.empty())
        bench.feed(connections[i], said);
      const std::string answer = bench.take(connections[i]);
      if (!greetings[i].done() && !greetings[i].failed()) greetings[i].feed(as_bytes(answer));
    }
  }
  std::size_t joined = 0;
  for (std::size_t i = 0; i < greetings.size(); ++i)
    joined += greetings[i].done() && !bench.closed(connections[i]) ? 1 : 0;
  return joined;
}

// spec: W1 observers hold a fixed number of connections, also if all of them greet at once
TEST(ObserverRights, ConnectionsAreFewThoughAllGreetAtOnce) {
  using Way = bench::Bench::ListenerWay;
  EXPECT_EQ(joined_at_once<Handshake>(Way::unix_socket), kMostObservers);
  EXPECT_EQ(joined_at_once<TlsSession>(Way::tcp), kMostObservers);
}

// spec: W1 observers hold a fixed number of connections, and few requests wait for each
TEST(ObserverRights, ConnectionsAndWaitingRequestsAreFew) {
  bench::Bench bench({.secret = kTcpSecret, .job = "job", .observed_job = "job"});
  const Handshake::Hello hello{.role = Role::observer, .job = "job", .build = kStoreBuild};
  std::vector<bench::Connection> observers;
  for (std::size_t i = 0; i < kMostObservers; ++i)
    observers.push_back(bench.authenticated(hello, kTcpSecret.observer()));
  const auto joins = [&] {
    const auto connection = bench.open();
    Handshake handshake(Handshake::Side::connector, hello, kTcpSecret.observer());
    while (!handshake.done() && !handshake.failed()) {
      bench.feed(connection, handshake.take_output());
      const std::string said = bench.take(connection);
      handshake.feed(as_bytes(said));
    }
    return handshake.done();
  };
  EXPECT_FALSE(joins());
  bench.close(observers.back());
  EXPECT_TRUE(joins());

  const auto rank = bench.authenticated({.job = "job", .build = kStoreBuild}, kTcpSecret);
  bench.feed(rank, bench::set("trace/job", encode(JobAnnouncement{"a job", 8, 1}), 1));
  for (std::uint64_t id = 1; id <= kMostObserversRequests; ++id) {
    EXPECT_TRUE(bench.server.wants_read(observers[0]));
    bench.feed(observers[0], bench::get("trace/0", id));
  }
  EXPECT_FALSE(bench.server.wants_read(observers[0]));
  bench.feed(rank, bench::set("trace/0", "last words", 2));
  EXPECT_EQ(bench.replies(observers[0]).size(), kMostObserversRequests);
}

// spec: W1 an observer cannot make the store hold much of what it sends
TEST_P(Observers, SayLittle) {
  const Status refused = observer->queue_push(kQuestions, std::string(std::size_t{8} << 20, 'x'));
  EXPECT_FALSE(refused.ok());
  EXPECT_EQ(*server->queue_len(kQuestions), 0);
  EXPECT_EQ(*observer->get(kWord), "last words") << "by a new connection";
}

// spec: W1 the observers' key joins in no other role
TEST_P(Observers, JoinNothing) {
  for (const Role role : {Role::store, Role::launcher}) {
    const Status refused = make_tcp_store(options(role, kTcpSecret.observer())).status();
    EXPECT_EQ(refused.code(), Code::refused);
  }
  EXPECT_TRUE(make_tcp_store(options(Role::observer, kTcpSecret)).ok())
      << "who has the secret may observe";
}

TEST(ObserverRights, KeysAreReadFromTheirEnd) {
  StoreTable table;
  const std::string job = encode(JobAnnouncement{"a job", 13, 1});
  for (const char* key : {"trace/job", "a/b/trace/job", "j/trace/job", "/trace/job"}) {
    StoreTable::Answers ignored;
    table.submit(0, {.op = StoreOp::set, .keys = {key}, .values = {job}}, TimePoint(), ignored);
  }
  const auto may_read = [&table](std::string_view key) {
    return ObserverRights().may({.op = StoreOp::get, .keys = {key}}, table).ok();
  };
  for (const char* key :
       {"trace/job", "trace/0", "a/b/trace/12", "j/trace/answer/id/0", "/trace/5", "/trace/job"})
    EXPECT_TRUE(may_read(key)) << key;
  for (const char* key : {"",
                          "/",
                          "job",
                          "0",
                          "trace",
                          "trace/",
                          "trace/x",
                          "atrace/0",
                          "trace/-1",
                          "trace/0/x",
                          "trace/ask/0",
                          "answer/id/0",
                          "trace/answer/0",
                          "trace/answer/id/x",
                          "trace/0123456789",
                          "fabric/contacts",
                          "trace/13",
                          "trace/01",
                          "b/trace/12",
                          "//trace/5",
                          "trace/ask/job",
                          "trace/answer/id/job",
                          "trace/answer/id/13"})
    EXPECT_FALSE(may_read(key)) << key;
}

}  // namespace
}  // namespace muster::store
