// What the observers' key can do with a store, over TCP and within a host, and what it cannot.

#include "muster/store/observer_rights.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "muster/store/testing/tcp_servers.h"

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
    EXPECT_TRUE(server->set("job/trace/job", "a job").ok());
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
  const auto may_read = [](std::string_view key) {
    return observer_may({.op = StoreOp::get, .keys = {key}}).ok();
  };
  for (const char* key : {"trace/job", "trace/0", "a/b/trace/12", "j/trace/answer/id/0"})
    EXPECT_TRUE(may_read(key)) << key;
  for (const char* key : {"", "/", "job", "0", "trace", "trace/", "trace/x", "atrace/0", "trace/-1",
                          "trace/0/x", "trace/ask/0", "answer/id/0", "trace/answer/0",
                          "trace/answer/id/x", "trace/0123456789", "fabric/contacts"})
    EXPECT_FALSE(may_read(key)) << key;
}

}  // namespace
}  // namespace muster::store
