// SPDX-License-Identifier: BSD-3-Clause
// Only the etcd store does this; tests of what all kinds do are in store_suite_test.cc.

#include "core/store/etcd/etcd_store.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <thread>

#include "core/rendezvous/rendezvous.h"
#include "core/store/factory.h"
#include "core/store/testing/long_wait.h"
#include "testing/budget.h"
#include "testing/etcd_cluster.h"
#include "testing/fuzz.h"
#include "testing/scratch_folder.h"

namespace muster::store {
namespace {

using muster::testing::EtcdCluster;
using std::chrono::seconds;
using Strings = std::vector<std::string>;

class EtcdStoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!EtcdCluster::installed()) GTEST_SKIP() << EtcdCluster::kMissing;
  }
};

EtcdOptions options_of(const EtcdCluster& cluster) {
  EtcdOptions options;
  options.endpoints = cluster.endpoints();
  options.timeout = kLong;
  return options;
}

std::shared_ptr<Store> opened(EtcdOptions options) {
  auto store = make_etcd_store(std::move(options));
  EXPECT_TRUE(store.ok()) << store.status().message();
  return *store;
}

/// Adds to a counter and pushes into a queue; what was counted and pushed must be there once each.
struct Traffic {
  static constexpr int kUsers = 4;
  const int each;  // of each user
  explicit Traffic(int many) : each(many) {}
  std::vector<std::future<void>> users;
  std::atomic<int> done = 0;

  void begin(const std::function<std::shared_ptr<Store>()>& user) {
    for (int u = 0; u < kUsers; ++u) {
      users.push_back(std::async(std::launch::async, [this, u, store = user()] {
        for (int i = 0; i < each; ++i) {
          const auto sum = store->add("count", 1);
          EXPECT_TRUE(sum.ok()) << sum.status().message();
          const Status pushed = store->queue_push("queue", std::to_string(u * each + i));
          EXPECT_TRUE(pushed.ok()) << pushed.message();
          const Status appended = store->append("text", "x");
          EXPECT_TRUE(appended.ok()) << appended.message();
          ++done;
        }
      }));
    }
  }
  void end(Store& store) {
    for (auto& user : users) user.get();
    EXPECT_EQ(*store.get("count"), std::to_string(kUsers * each));
    EXPECT_EQ(store.get("text")->size(), static_cast<std::size_t>(kUsers * each));
    EXPECT_EQ(*store.queue_len("queue"), kUsers * each);
    std::vector<int> seen;
    for (int i = 0; i < kUsers * each; ++i) {
      const auto popped = store.queue_pop("queue");
      ASSERT_TRUE(popped.ok()) << popped.status().message();
      seen.push_back(std::stoi(*popped));
    }
    std::sort(seen.begin(), seen.end());
    for (int i = 0; i < kUsers * each; ++i) EXPECT_EQ(seen[static_cast<std::size_t>(i)], i);
  }
};

// spec: L11 a cluster of three loses its leader in the middle of a job and nothing is lost
TEST_F(EtcdStoreTest, SurvivesTheLeadersDeath) {
  EtcdCluster cluster(EtcdCluster::Options{.members = 3, .certificate = {}, .key = {}});
  const auto store = opened(options_of(cluster));
  ASSERT_TRUE(store->set("before", "value").ok());
  auto waiting = std::async(std::launch::async,
                            [other = opened(options_of(cluster))] { return other->get("after"); });
  std::vector<std::future<Result<Strings>>> gathering;
  for (int index = 0; index < 2; ++index)
    gathering.push_back(std::async(std::launch::async, [&, index] {
      return opened(options_of(cluster))->all_gather("all", index, 3, std::to_string(index));
    }));
  Traffic traffic(60);
  traffic.begin([&] { return opened(options_of(cluster)); });
  while (traffic.done < Traffic::kUsers * traffic.each / 4) std::this_thread::yield();
  const int leader = cluster.leader();
  ASSERT_GE(leader, 0);
  cluster.kill(leader);
  traffic.end(*store);
  EXPECT_EQ(*store->get("before"), "value");
  ASSERT_TRUE(store->set("after", "value").ok());
  EXPECT_EQ(*waiting.get(), "value");
  EXPECT_EQ(*store->all_gather("all", 2, 3, "2"), (Strings{"0", "1", "2"}));
  for (auto& each : gathering) EXPECT_EQ(*each.get(), (Strings{"0", "1", "2"}));
  cluster.start(leader);
  cluster.kill((leader + 1) % 3);
  EXPECT_EQ(*store->get("after"), "value") << "the member that came back serves too";
}

/// A connection that carries a request out and then says that the reply was lost.
class LossyConnection final : public HttpConnection {
 public:
  LossyConnection(std::unique_ptr<HttpConnection> inner, std::uint64_t salt)
      : inner_(std::move(inner)), fuzz_(salt) {}
  void start(const HttpRequest& request) override {
    loses_ = request.path == "/v3/kv/txn" && fuzz_.one_in(4);
    lost_ = {};
    inner_->start(request);
  }
  void drive(TimePoint until) override {
    inner_->drive(until);
    if (!loses_ || !inner_->transfer().ended) return;
    lost_.ended = true;
    lost_.error = "the reply was lost";
  }
  HttpTransfer& transfer() override { return loses_ ? lost_ : inner_->transfer(); }
  bool usable() const override { return inner_->usable(); }

 private:
  std::unique_ptr<HttpConnection> inner_;
  muster::testing::Fuzz fuzz_;
  bool loses_ = false;
  HttpTransfer lost_;
};

// spec: L11 nothing is lost and nothing done twice where replies are lost
TEST_F(EtcdStoreTest, DoesEverythingOnceThoughRepliesAreLost) {
  EtcdCluster cluster;
  std::atomic<std::uint64_t> salt = 0;
  const auto user = [&] {
    return make_etcd_store_over(
        std::make_shared<etcd::EtcdClient>(
            etcd::ClientOptions{
                .endpoints = cluster.endpoints(), .user = {}, .password = {}, .tls = {}},
            [&] { return std::make_unique<LossyConnection>(curl_connections({})(), ++salt); }),
        "lossy", kLong);
  };
  const auto store = user();
  Traffic traffic(10);
  traffic.begin(user);
  std::vector<std::future<void>> members;
  for (int m = 0; m < 3; ++m)
    members.push_back(std::async(std::launch::async, [&, m] {
      const auto own = user();
      for (int round = 0; round < 5; ++round) {
        const Status met = own->barrier("barrier", 3);
        EXPECT_TRUE(met.ok()) << met.message();
        const auto all = own->all_gather("gather", m, 3, std::to_string(m));
        ASSERT_TRUE(all.ok()) << all.status().message();
        EXPECT_EQ(*all, (Strings{"0", "1", "2"}));
      }
    }));
  for (auto& each : members) each.get();
  traffic.end(*store);
  EXPECT_TRUE(*store->delete_key("count"));
  EXPECT_EQ(*store->compare_set("count", "", "a"), "a");
  EXPECT_EQ(*store->compare_set("count", "a", "b"), "b");
}

// spec: L11 EtcdStore: values of any length, in all_gather and queues too, replaced while they are
// read
TEST_F(EtcdStoreTest, KeepsLongValuesWhole) {
  EtcdCluster cluster;
  const auto store = opened(options_of(cluster));
  const auto value = [](char c) { return std::string(std::size_t{3} << 20, c); };
  std::atomic<bool> over = false;
  ASSERT_TRUE(store->set("key", value('a')).ok());
  auto writer = std::async(std::launch::async, [&, other = opened(options_of(cluster))] {
    for (int i = 0; i < testing::test_rounds(6, 6); ++i)
      EXPECT_TRUE(other->set("key", value(static_cast<char>('b' + i))).ok());
    over = true;
  });
  while (!over) {
    const auto read = store->get("key");
    ASSERT_TRUE(read.ok()) << read.status().message();
    EXPECT_EQ(read->size(), std::size_t{3} << 20);
    EXPECT_EQ(std::count(read->begin(), read->end(), read->front()), std::ptrdiff_t{3} << 20);
  }
  writer.get();
  ASSERT_TRUE(store->queue_push("queue", value('q')).ok());
  EXPECT_EQ(*store->queue_pop("queue"), value('q'));
  for (int round = 0; round < 3; ++round) {
    auto other = std::async(std::launch::async,
                            [&] { return store->all_gather("gather", 1, 2, value('1')); });
    EXPECT_EQ(*store->all_gather("gather", 0, 2, value('0')), (Strings{value('0'), value('1')}));
    EXPECT_EQ(other.get()->size(), 2U);
  }
  EXPECT_TRUE(*store->delete_key("key"));
}

// spec: L11.tls TLS and password
TEST_F(EtcdStoreTest, SpeaksTlsAndLogsIn) {
  const muster::testing::ScratchFolder folder;
  const std::string certificate = folder.file("cert.pem"), key = folder.file("key.pem");
  const std::string command =
      "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=etcd "
      "-addext subjectAltName=IP:127.0.0.1 -keyout " +
      key + " -out " + certificate + " 2>/dev/null";
  ASSERT_EQ(std::system(command.c_str()), 0) << "openssl made no certificate";
  EtcdCluster cluster(EtcdCluster::Options{.members = 1, .certificate = certificate, .key = key});
  cluster.post(0, "/v3/auth/user/add", R"({"name":"root","password":"correct horse"})");
  cluster.post(0, "/v3/auth/role/add", R"({"name":"root"})");
  cluster.post(0, "/v3/auth/user/grant", R"({"user":"root","role":"root"})");
  cluster.post(0, "/v3/auth/enable", "{}");

  EtcdOptions options = options_of(cluster);
  options.timeout = seconds(20);
  const auto refused = [&](const char* word) {
    const auto store = make_etcd_store(options);
    EXPECT_EQ(store.status().code(), Code::refused) << store.status().message();
    EXPECT_NE(store.status().message().find(word), std::string::npos) << store.status().message();
  };
  refused("certificate");
  options.authority_file = certificate;
  refused("give a user");
  options.user = "root";
  options.password = "wrong";
  refused("password");
  options.password = "correct horse";
  const auto store = opened(options);
  ASSERT_TRUE(store->set("key", "value").ok());
  auto later = std::async(std::launch::async, [&] { return store->get("later"); });
  ASSERT_TRUE(opened(options)->set("later", "value").ok());
  EXPECT_EQ(*later.get(), "value");
}

// spec: L11 what cannot be reached or read is said
TEST_F(EtcdStoreTest, SaysWhatIsWrong) {
  EtcdOptions options;
  EXPECT_EQ(make_etcd_store(options).status().code(), Code::invalid_argument);
  options.endpoints = {"ftp://host"};
  EXPECT_EQ(make_etcd_store(options).status().code(), Code::invalid_argument);
  options.endpoints = {"127.0.0.1:" + std::to_string(muster::testing::reserve_port())};
  options.timeout = std::chrono::milliseconds(100);
  const Status nobody = make_etcd_store(options).status();
  EXPECT_EQ(nobody.code(), Code::timed_out);
  EXPECT_NE(nobody.message().find(options.endpoints[0]), std::string::npos) << nobody.message();
}

// spec: L11 a member of a meeting that dies is named to the others
TEST_F(EtcdStoreTest, NamesAMemberThatDies) {
  EtcdCluster cluster;
  const auto store = opened(options_of(cluster));
  const pid_t child = ::fork();
  if (child == 0) {
    const auto other = make_etcd_store(options_of(cluster));
    if (other) static_cast<void>((*other)->set("ready", "").ok());
    if (other) static_cast<void>((*other)->all_gather("all", 1, 3, "dies").ok());
    ::_exit(0);
  }
  ASSERT_TRUE(store->get("ready").ok());
  auto waiting = std::async(std::launch::async,
                            [&] { return store->all_gather("all", 0, 3, "waits").status(); });
  // By then the waiting member has looked who is there.
  EXPECT_EQ(waiting.wait_for(seconds(4)), std::future_status::timeout);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  const Status status = waiting.get();
  EXPECT_EQ(status.code(), Code::peer_failed) << status.message();
  EXPECT_EQ(status.ranks(), std::vector<int>{1}) << status.message();
}

// spec: L11 ranks join a job over it, with signed contacts
TEST_F(EtcdStoreTest, RanksJoinAJobOverIt) {
  EtcdCluster cluster;
  for (int job = 0; job < 2; ++job) {  // a second run finds nothing of the first in its way
    std::vector<std::future<Result<Rendezvous>>> ranks;
    for (int rank = 0; rank < 3; ++rank)
      ranks.push_back(std::async(std::launch::async, [&, rank] {
        return rendezvous_over(opened(options_of(cluster)),
                               {.rank = rank, .world_size = 3, .timeout = kLong});
      }));
    for (int rank = 0; rank < 3; ++rank) {
      const auto joined = ranks[static_cast<std::size_t>(rank)].get();
      ASSERT_TRUE(joined.ok()) << joined.status().message();
      EXPECT_EQ(joined->rank, rank);
      EXPECT_TRUE(joined->any_host);
    }
  }
}

}  // namespace
}  // namespace muster::store
