// SPDX-License-Identifier: BSD-3-Clause
// The client over connections that only say what a test wants.

#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <thread>

#include "core/store/etcd/client.h"

namespace muster::store::etcd {
namespace {

using std::chrono::milliseconds;

/// `streams`: the bytes of each stream of a watch, in the order in which they are opened; each is
/// silent after that. `asked`: the members that were asked. `pauses`: for each stream, how long the
/// process stands still while it waits for it, after which the stream has ended.
struct WatchScript {
  std::deque<std::string> streams;
  std::vector<std::string> asked;
  std::deque<Duration> pauses{};
};

class ScriptedConnection final : public HttpConnection {
 public:
  explicit ScriptedConnection(WatchScript& script) : script_(script) {}
  void start(const HttpRequest& request) override {
    script_.asked.push_back(request.endpoint);
    transfer_ = {};
    transfer_.http_status = 200;
    ASSERT_FALSE(script_.streams.empty()) << "no more streams are expected";
    transfer_.received = script_.streams.front();
    script_.streams.pop_front();
  }
  void drive(TimePoint until) override {
    if (!transfer_.received.empty()) return;
    std::this_thread::sleep_until(until);
    if (script_.pauses.empty()) return;
    std::this_thread::sleep_for(script_.pauses.front());  // the fault itself
    script_.pauses.pop_front();
    transfer_.ended = true;
    transfer_.error = "the member has ended";
  }
  HttpTransfer& transfer() override { return transfer_; }
  bool usable() const override { return true; }

 private:
  WatchScript& script_;
  HttpTransfer transfer_;
};

// spec: L11 a watch whose other end is gone without a word is opened anew; a member that has never
// answered it is left for the next
TEST(EtcdClient, ASilentWatchIsOpenedAnew) {
  const std::string created = "{\"result\":{\"header\":{\"revision\":\"4\"},\"created\":true}}\n";
  const std::string event = R"({"result":{"events":[{"kv":{"key":"a2V5","mod_revision":"5"}}]}})"
                            "\n";
  WatchScript script{.streams = {created, "", created + event}, .asked = {}};
  EtcdClient client({.endpoints = {"http://a:1", "http://b:1"}},
                    [&] { return std::make_unique<ScriptedConnection>(script); });
  int opened = 0;
  std::size_t events = 0;
  const Status watched = client.watch({
      .key = "key",
      .deadline = deadline_after(steady_clock(), std::chrono::minutes(2)),
      .on_open = [&] { return ++opened > 2; },
      .on_events =
          [&](const std::vector<Event>& all) {
            events = all.size();
            return true;
          },
      .silence_limit = milliseconds(20),
  });
  EXPECT_TRUE(watched.ok()) << watched.message();
  EXPECT_EQ(opened, 2);
  EXPECT_EQ(events, 1U);
  EXPECT_EQ(script.asked, (std::vector<std::string>{"http://a:1", "http://a:1", "http://b:1"}));
}

// spec: L11 a process that stood still for longer than its patience with etcd asks once more before
// it takes its own absence for etcd's end; so does one whose stream ends after a long silence
TEST(EtcdClient, OnesOwnAbsenceIsNotTheEndOfEtcd) {
  const std::string created = "{\"result\":{\"header\":{\"revision\":\"4\"},\"created\":true}}\n";
  const Duration limit = milliseconds(400), pause = milliseconds(1500);
  const std::vector<std::pair<std::deque<std::string>, std::deque<Duration>>> scripts{
      {{"", created}, {pause}},       // before the first stream has answered
      {{created, created}, {pause}},  // while a stream is open
      {{created, created},
       {milliseconds(0)}},  // the first has been silent for longer than the limit
  };
  for (const auto& [streams, pauses] : scripts) {
    WatchScript script{.streams = streams, .asked = {}, .pauses = pauses};
    EtcdClient client({.endpoints = {"http://a:1"}},
                      [&] { return std::make_unique<ScriptedConnection>(script); });
    const Status watched = client.watch({
        .key = "key",
        .deadline = deadline_after(steady_clock(), std::chrono::minutes(2)),
        .on_open = [&] { return script.streams.empty(); },
        .on_events = [&](const std::vector<Event>&) { return false; },
        .on_idle = [] { return false; },
        .idle = milliseconds(500),
        .lost_limit = limit,
    });
    EXPECT_TRUE(watched.ok()) << watched.message();
    EXPECT_EQ(script.asked.size(), 2U);
  }
}

/// Members that answer the renewal of a lease, or hang. `asked`: in order.
struct RenewalScript {
  std::function<bool(const std::string& endpoint)> answers;
  std::vector<std::string> asked{};
};

class RenewalConnection final : public HttpConnection {
 public:
  explicit RenewalConnection(RenewalScript& script) : script_(script) {}
  void start(const HttpRequest& request) override {
    script_.asked.push_back(request.endpoint);
    endpoint_ = request.endpoint;
    transfer_ = {};
  }
  void drive(TimePoint until) override {
    transfer_.ended = script_.answers(endpoint_);
    if (!transfer_.ended) return std::this_thread::sleep_until(until);
    transfer_.http_status = 200;
    transfer_.received = R"({"result":{"ID":"7","TTL":"5"}})";
  }
  HttpTransfer& transfer() override { return transfer_; }
  bool usable() const override { return true; }

 private:
  RenewalScript& script_;
  std::string endpoint_;
  HttpTransfer transfer_;
};

// spec: L14.service a lease is renewed beside members that hang: each that does not answer in time
// costs one wait, its answer counts when it comes, and it is not asked first again
TEST(EtcdClient, MembersThatHangDoNotKeepALeaseFromItsRenewal) {
  const std::vector<std::string> all{"http://a:1", "http://b:1", "http://c:1"};
  const auto limit = [] { return deadline_after(steady_clock(), std::chrono::minutes(2)); };
  RenewalScript script;
  const auto client = [&] {
    script.asked.clear();
    return EtcdClient({.endpoints = all, .user = {}, .password = {}, .tls = {}},
                      [&] { return std::make_unique<RenewalConnection>(script); });
  };
  script.answers = [](const std::string& endpoint) { return endpoint == "http://c:1"; };
  EtcdClient two_hang = client();
  EXPECT_TRUE(two_hang.keep_alive(7, limit(), milliseconds(10)).ok());
  EXPECT_EQ(script.asked, all);
  EXPECT_TRUE(two_hang.keep_alive(7, limit(), milliseconds(10)).ok());
  EXPECT_EQ(script.asked.size(), 4U) << "who answered is asked again";
  script.answers = [&](const std::string& endpoint) {
    return endpoint == "http://a:1" && script.asked.size() > 1;
  };
  EtcdClient slow = client();
  EXPECT_TRUE(slow.keep_alive(7, limit(), milliseconds(10)).ok());
  EXPECT_EQ(script.asked, (std::vector<std::string>{"http://a:1", "http://b:1"}));
  script.answers = [&](const std::string&) { return script.asked.size() > 3; };
  EtcdClient again = client();
  EXPECT_TRUE(again.keep_alive(7, limit(), milliseconds(10)).ok());
  EXPECT_EQ(script.asked.at(3), "http://a:1") << "a round begins anew";
  script.answers = [](const std::string&) { return false; };
  const auto kept =
      client().keep_alive(7, deadline_after(steady_clock(), milliseconds(50)), milliseconds(10));
  EXPECT_EQ(kept.status().code(), Code::timed_out);
  EXPECT_NE(kept.status().message().find("no answer within 10 ms"), std::string::npos)
      << kept.status().message();
}

// spec: L11 password: it is not sent where others could read it, unless that is asked for aloud
TEST(EtcdClient, ThePasswordIsNotSentInTheClear) {
  const auto made = [](const std::string& endpoint, const std::string& password) {
    return EtcdClient::make({.endpoints = {"127.0.0.1:1", endpoint},
                             .user = "root",
                             .password = password,
                             .tls = {}})
        .status();
  };
  const Status refused = made("http://10.0.0.1:2379", "correct horse");
  EXPECT_EQ(refused.code(), Code::refused);
  for (const char* part : {"http://10.0.0.1:2379", "https://", "MUSTER_INSECURE=1"})
    EXPECT_NE(refused.message().find(part), std::string::npos) << refused.message();
  EXPECT_TRUE(made("https://10.0.0.1:2379", "correct horse").ok());
  EXPECT_TRUE(made("http://10.0.0.1:2379", "").ok());
  EXPECT_TRUE(made("http://localhost", "correct horse").ok());
  ::setenv("MUSTER_INSECURE", "1", 1);
  EXPECT_TRUE(made("http://10.0.0.1:2379", "correct horse").ok());
  ::unsetenv("MUSTER_INSECURE");
}

}  // namespace
}  // namespace muster::store::etcd
