// SPDX-License-Identifier: BSD-3-Clause
#include <optional>
#include "core/base/process/interruption.h"
#include "jobs/membership/factory.h"
#include "jobs/membership/kubernetes_client.h"
#include "jobs/membership/testing/membership_kinds.h"
#include "jobs/membership/testing/membership_suite.h"
#include "testing/fuzz.h"
#include "testing/kubernetes_api.h"
#include "testing/limits.h"

namespace muster::membership::testing {
namespace {

using muster::testing::KubernetesApi;
using std::chrono::seconds;

std::unique_ptr<Membership> member_of(const KubernetesApi& api, const std::string& job,
                                      Duration timeout = muster::testing::kMustHappen,
                                      const std::string& secret = "a secret for the tests",
                                      std::optional<Duration> watch_limit = std::nullopt) {
  auto membership = make_kubernetes_membership(api.options(), job, Secret::given(secret), timeout,
                                               watch_limit.value_or(timeout));
  if (membership) return std::move(*membership);
  ADD_FAILURE() << membership.status().message();
  return nullptr;
}

// spec: L1.kubernetes a Kubernetes Lease; R3.lease Lease membership against a fake of the API
INSTANTIATE_TYPED_TEST_SUITE_P(Kubernetes, MembershipSuite, KubernetesKind);

using KubernetesMembershipTest = ServerTest<KubernetesApi>;

// spec: L1 Kubernetes: what a watcher has missed it lists anew (410 Gone)
TEST_F(KubernetesMembershipTest, AWatcherThatHasMissedChangesListsAnew) {
  KubernetesApi api;
  const auto membership = member_of(api, "job");
  auto hold = membership->hold("node/a", "before", seconds(10));
  ASSERT_TRUE(hold.ok()) << hold.status().message();
  auto watch = membership->watch("");
  ASSERT_TRUE(watch.ok());
  Watcher watcher(std::move(*watch));
  ASSERT_TRUE(watcher.sees("node/a", "before"));
  const std::int64_t since = watcher.names["node/a"].since;
  api.compact();
  ASSERT_TRUE((*hold)->set("after").ok());
  ASSERT_TRUE(watcher.sees("node/a", "after"));
  EXPECT_EQ(watcher.names["node/a"].since, since);
}

// spec: L1 Kubernetes: a watch whose other end is gone without a word is begun anew with a list
TEST_F(KubernetesMembershipTest, ASilentWatchIsBegunAnew) {
  KubernetesApi api;
  auto client = KubernetesClient::make(api.options(), "job");
  ASSERT_TRUE(client.ok()) << client.status().message();
  const auto interruption = std::make_shared<Interruption>();
  const Interruption::InterruptionBinding binding(interruption);
  int lists = 0;
  const Status followed = (*client)->follow({
      .on_list =
          [&](std::int64_t, const std::vector<KubernetesLease>&) {
            if (++lists == 3) interruption->raise("that is enough");
          },
      .on_event = [](const LeaseEvent&) {},
      .on_idle = [] {},
      .silence_limit = std::chrono::milliseconds(20),
  });
  EXPECT_EQ(followed.code(), Code::aborted) << followed.message();
  EXPECT_EQ(lists, 3);
}

// spec: L1 Kubernetes: a process that stood still for longer than its patience asks once more
// before it takes its own absence for the end of the server
TEST_F(KubernetesMembershipTest, OnesOwnAbsenceIsNotTheServersEnd) {
  KubernetesApi api;
  auto client = KubernetesClient::make(api.options(), "job");
  ASSERT_TRUE(client.ok()) << client.status().message();
  const auto interruption = std::make_shared<Interruption>();
  const Interruption::InterruptionBinding binding(interruption);
  int lists = 0, looks = 0;
  const Status followed = (*client)->follow({
      .on_list =
          [&](std::int64_t, const std::vector<KubernetesLease>&) {
            if (++lists == 2) interruption->raise("that is enough");
          },
      .on_event = [](const LeaseEvent&) {},
      .on_idle =
          [&] {
            if (++looks != 4) return;  // by then the watch is open
            api.kill();
            std::this_thread::sleep_for(seconds(6));  // the fault itself
            api.start();
          },
      .lost_limit = seconds(5),
  });
  EXPECT_EQ(followed.code(), Code::aborted) << followed.message();
  EXPECT_EQ(lists, 2);
}

// spec: L1 Kubernetes: holds, watches and the epoch survive a server that starts again
TEST_F(KubernetesMembershipTest, SurvivesARestartOfTheServer) {
  KubernetesApi api;
  const auto membership = member_of(api, "job");
  const auto hold = membership->hold("node/a", "before", seconds(60));
  ASSERT_TRUE(hold.ok()) << hold.status().message();
  auto watch = membership->watch("");
  ASSERT_TRUE(watch.ok());
  Watcher watcher(std::move(*watch));
  ASSERT_TRUE(watcher.sees("node/a", "before"));
  const auto first = membership->commit(epoch(1), 0);
  ASSERT_TRUE(first.ok()) << first.status().message();
  api.kill();
  Result<std::int64_t> second = Status(Code::internal, "");
  std::thread committing([&] { second = membership->commit(epoch(2), *first); });
  api.start();
  committing.join();
  ASSERT_TRUE(second.ok()) << second.status().message();
  ASSERT_TRUE((*hold)->set("after").ok());
  EXPECT_TRUE(watcher.sees("node/a", "after"));
  EXPECT_TRUE(watcher.until([&] { return watcher.epoch.number == 2; }));
  EXPECT_TRUE((*hold)->state().ok());
}

// spec: L1 Kubernetes: a token that the kubelet replaces is taken, and a wrong one is an error that
// says what to do
TEST_F(KubernetesMembershipTest, TokensRotate) {
  KubernetesApi api;
  const auto membership = member_of(api, "job");
  const auto hold = membership->hold("node/a", "1", seconds(60));
  ASSERT_TRUE(hold.ok()) << hold.status().message();
  const auto hasty = member_of(api, "job", seconds(5));
  const auto hasty_hold = hasty->hold("node/b", "1", seconds(60));
  ASSERT_TRUE(hasty_hold.ok()) << hasty_hold.status().message();
  api.accept_tokens("second\nweak");
  Status young;
  std::thread setting([&] { young = (*hold)->set("2"); });
  const Status old = (*hasty_hold)->set("2");
  EXPECT_EQ(old.code(), Code::refused);
  EXPECT_NE(old.message().find(api.token_file()), std::string::npos) << old.message();
  api.show_token("second");
  setting.join();
  EXPECT_TRUE(young.ok()) << young.message();
  api.show_token("weak");
  const auto forbidden =
      make_kubernetes_membership(api.options(), "job", Secret::random(),
                                 muster::testing::kMustHappen, muster::testing::kMustHappen);
  ASSERT_EQ(forbidden.status().code(), Code::refused);
  const std::string& text = forbidden.status().message();
  EXPECT_NE(text.find("verbs: [get, list, watch, create, update, delete]"), std::string::npos)
      << text;
  EXPECT_NE(text.find("namespace jobs"), std::string::npos) << text;
  api.show_token("second");
}

// spec: L1 Kubernetes: a watch outlives refusals of its token, and garbage
TEST_F(KubernetesMembershipTest, AWatchOutlivesTrouble) {
  KubernetesApi api;
  const auto membership = member_of(api, "job");
  const auto hold = membership->hold("node/a", "1", seconds(60));
  ASSERT_TRUE(hold.ok()) << hold.status().message();
  auto watch = membership->watch("");
  ASSERT_TRUE(watch.ok());
  Watcher watcher(std::move(*watch));
  ASSERT_TRUE(watcher.sees("node/a", "1"));
  api.garble();
  ASSERT_TRUE((*hold)->set("2").ok());
  ASSERT_TRUE(watcher.sees("node/a", "2"));
  struct Refusal {
    const char *accepted, *shown;
  };
  for (const Refusal& refusal : {Refusal{"second", "first"}, {"first\nweak", "weak"}}) {
    const KubernetesApi::Refused before = api.refused({-1, -1});
    api.accept_tokens(refusal.accepted);
    api.show_token(refusal.shown);
    api.compact();  // ends the watch
    Status set;
    std::thread setting([&] { set = (*hold)->set(refusal.shown); });
    EXPECT_GT(api.refused(before).reads, before.reads);
    api.show_token("first");
    api.accept_tokens("first");
    setting.join();
    ASSERT_TRUE(set.ok()) << set.message();
    ASSERT_TRUE(watcher.sees("node/a", refusal.shown));
  }
}

// spec: L1 Kubernetes: an outage that is longer than a call's limit and shorter than the leases
// ends no watch
TEST_F(KubernetesMembershipTest, AWatchOutlivesAnOutageBelowTheLeases) {
  KubernetesApi api;
  const auto membership =
      member_of(api, "job", seconds(2), "a secret for the tests", muster::testing::kMustHappen);
  auto watch = membership->watch("");
  ASSERT_TRUE(watch.ok());
  ASSERT_TRUE((*watch)->next(muster::testing::kMustHappen).ok());
  api.kill();
  const auto nothing = (*watch)->next(seconds(4));
  EXPECT_TRUE(nothing.ok()) << nothing.status().message();
  api.start();
  const auto other = member_of(api, "job");
  const auto hold = other->hold("node/a", "1", seconds(60));
  ASSERT_TRUE(hold.ok()) << hold.status().message();
  Watcher watcher(std::move(*watch));
  EXPECT_TRUE(watcher.sees("node/a", "1"));
}

// spec: L1 Kubernetes: a token that is refused for longer than the patience ends a watch, in words
TEST_F(KubernetesMembershipTest, ALastingRefusalEndsAWatch) {
  KubernetesApi api;
  const auto membership = member_of(api, "job", seconds(5));
  auto watch = membership->watch("");
  ASSERT_TRUE(watch.ok());
  ASSERT_TRUE((*watch)->next(kPatience).ok());
  api.accept_tokens("second");
  api.compact();
  Result<Update> update = Update();
  while (update.ok()) update = (*watch)->next(kPatience);
  EXPECT_EQ(update.status().code(), Code::refused) << update.status().message();
  EXPECT_NE(update.status().message().find(api.server()), std::string::npos);
  EXPECT_NE(update.status().message().find(api.token_file()), std::string::npos);
}

// spec: L5 Kubernetes: an outage that is longer than the ttl removes no live holder
TEST_F(KubernetesMembershipTest, AnOutageWithLiveHolders) {
  if (kForksStartNoThreads) GTEST_SKIP() << "ThreadSanitizer ends a fork that starts threads";
  KubernetesApi api;
  std::unique_ptr<Membership> theirs;
  Result<std::unique_ptr<Hold>> held = Status(Code::internal, "");
  Bystander child([&] {
    theirs = member_of(api, "job");
    held = theirs->hold("node/c", "1", seconds(5));
    return held.ok();
  });
  ASSERT_TRUE(child.ready());
  const auto membership = member_of(api, "job");
  const auto a = membership->hold("node/a", "1", seconds(5));
  const auto b = membership->hold("node/b", "1", seconds(5));
  ASSERT_TRUE(a.ok() && b.ok());
  auto watch = membership->watch("");
  ASSERT_TRUE(watch.ok());
  Watcher watcher(std::move(*watch));
  ASSERT_TRUE(watcher.sees("node/a", "1") && watcher.sees("node/b", "1"));
  ASSERT_TRUE(watcher.sees("node/c", "1"));
  api.kill();
  const TimePoint limit = deadline_after(steady_clock(), kPatience);
  while (((*a)->state().ok() || (*b)->state().ok()) && steady_clock().now() < limit)
    std::this_thread::yield();
  EXPECT_FALSE((*a)->state().ok());  // the ttl has passed
  child.kill();
  api.start();
  EXPECT_TRUE(watcher.until([&] { return !watcher.names.contains("node/c"); }));
  EXPECT_TRUE((*a)->set("2").ok()) << (*a)->state().message();
  EXPECT_TRUE((*b)->set("2").ok()) << (*b)->state().message();
  EXPECT_TRUE(watcher.sees("node/a", "2") && watcher.sees("node/b", "2"));
}

// spec: L5 a holder whose Lease was removed does not come back as the same hold
TEST_F(KubernetesMembershipTest, AHoldWhoseLeaseIsGoneIsLost) {
  KubernetesApi api;
  const auto membership = member_of(api, "job");
  auto hold = membership->hold("node/a", "1", seconds(60));
  ASSERT_TRUE(hold.ok()) << hold.status().message();
  const std::string path = "/apis/coordination.k8s.io/v1/namespaces/jobs/leases/";
  ASSERT_EQ(api.ask("DELETE", path + object_name("job", "h/node/a")).http_status, 200);
  const auto other = membership->hold("node/a", "2", seconds(60));
  ASSERT_TRUE(other.ok()) << other.status().message();
  EXPECT_EQ((*hold)->set("back").code(), Code::refused);
  EXPECT_EQ((*hold)->state().code(), Code::refused);
  hold->reset();
  EXPECT_TRUE((*other)->set("still there").ok()) << "the lost hold took the other's Lease along";
}

// spec: L1 Kubernetes: a name whose holder is dead is given to who asks for it, without a watcher
TEST_F(KubernetesMembershipTest, WhoWantsTheNameOfADeadHolderGetsIt) {
  if (kForksStartNoThreads) GTEST_SKIP() << "ThreadSanitizer ends a fork that starts threads";
  KubernetesApi api;
  std::unique_ptr<Membership> theirs;
  Result<std::unique_ptr<Hold>> held = Status(Code::internal, "");
  Bystander child([&] {
    theirs = member_of(api, "job");
    held = theirs->hold("node/a", "1", seconds(2));
    return held.ok();
  });
  ASSERT_TRUE(child.ready());
  child.kill();
  const auto mine = member_of(api, "job")->hold("node/a", "2", seconds(2));
  EXPECT_TRUE(mine.ok()) << mine.status().message();
}

// spec: W2 who can write Leases and has not the job's secret is no node of the job and decides
// nothing
TEST_F(KubernetesMembershipTest, OthersHaveNoSay) {
  KubernetesApi api;
  const auto membership = member_of(api, "job"),
             outsider = member_of(api, "job", muster::testing::kMustHappen, "some other secret");
  expect_no_say(*outsider, *membership, 1);
}

// spec: L1 Kubernetes: the server proves itself to the authority of the options
TEST_F(KubernetesMembershipTest, SpeaksTls) {
  const muster::testing::ScratchFolder folder;
  const std::string certificate = folder.file("cert.pem"), key = folder.file("key.pem");
  const std::string command =
      "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=api "
      "-addext subjectAltName=IP:127.0.0.1 -keyout " +
      key + " -out " + certificate + " 2>/dev/null";
  ASSERT_EQ(std::system(command.c_str()), 0) << "openssl made no certificate";
  const KubernetesApi api(certificate, key);
  const auto membership = member_of(api, "job");
  const auto hold = membership->hold("node/a", "1", seconds(10));
  EXPECT_TRUE(hold.ok()) << hold.status().message();
  KubernetesOptions others = api.options();
  others.authority_file.clear();
  const auto refused = make_kubernetes_membership(
      others, "job", Secret::random(), muster::testing::kMustHappen, muster::testing::kMustHappen);
  EXPECT_EQ(refused.status().code(), Code::refused) << refused.status().message();
  ::setenv("MUSTER_KUBERNETES_CACERT", certificate.c_str(), 1);
  ::setenv("MUSTER_KUBERNETES_TOKEN_FILE", api.token_file().c_str(), 1);
  const auto named = kubernetes_options(api.server());
  ::unsetenv("MUSTER_KUBERNETES_CACERT");
  ::unsetenv("MUSTER_KUBERNETES_TOKEN_FILE");
  ASSERT_TRUE(named.ok()) << named.status().message();
  const auto outside = make_kubernetes_membership(
      *named, "job", Secret::random(), muster::testing::kMustHappen, muster::testing::kMustHappen);
  EXPECT_TRUE(outside.ok()) << outside.status().message();
}

// spec: L1 Kubernetes: a watch fails, in words, when the server is gone
TEST_F(KubernetesMembershipTest, AServerThatIsGoneEndsAWatch) {
  KubernetesApi api;
  const auto membership = member_of(api, "job", seconds(5));
  auto watch = membership->watch("");
  ASSERT_TRUE(watch.ok());
  ASSERT_TRUE((*watch)->next(kPatience).ok());
  api.kill();
  Result<Update> update = Update();
  while (update.ok()) update = (*watch)->next(Duration(-1));
  EXPECT_EQ(update.status().code(), Code::network) << update.status().message();
  EXPECT_NE(update.status().message().find(api.server()), std::string::npos);
}

// spec: L1 Kubernetes: values that no Lease takes are refused
TEST_F(KubernetesMembershipTest, AValueMayBeTooLong) {
  const auto membership = KubernetesKind().open();
  const auto hold = membership->hold("node/a", std::string(200'000, 'x'), seconds(2));
  EXPECT_EQ(hold.status().code(), Code::exhausted) << hold.status().message();
}

TEST(KubernetesMembership, RefusesServersThatAreNone) {
  for (const char* server : {"https://", "ftp://host", "https://host/path", "http://10.0.0.1:80",
                             "http://localhost.example.com", "http://127.0.0.1.example.com:80"}) {
    KubernetesOptions options{
        .server = server, .token_file = {}, .authority_file = {}, .name_space = "jobs"};
    EXPECT_EQ(KubernetesClient::make(options, "job").status().code(), Code::invalid_argument)
        << server;
  }
}

TEST(KubernetesNames, AreValidAndTellApart) {
  EXPECT_EQ(label_value("job7"), "job7");
  for (const std::string& text : {std::string("a b"), std::string(200, 'x'), std::string("-")}) {
    const std::string label = label_value(text);
    EXPECT_LE(label.size(), 63U);
    EXPECT_EQ(label_value(label), label);
    const std::string object = object_name(text, "Node/" + text);
    EXPECT_LE(object.size(), 253U);
    EXPECT_EQ(object.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-"), std::string::npos)
        << object;
    EXPECT_NE(object, object_name(text, "node/" + text));
  }
  EXPECT_NE(label_value("a b"), label_value("a  b"));
}

// spec: L1 Kubernetes: whatever a server sends is refused or read
TEST(KubernetesFuzz, EventsAreReadOrRefused) {
  const std::string line =
      R"({"type":"MODIFIED","object":{"metadata":{"name":"n","uid":"u","resourceVersion":"7",)"
      R"("annotations":{"muster.dev/value":"YWJj"}},"spec":{"leaseDurationSeconds":5}}})";
  std::int64_t revision = 0;
  const auto whole = decode_lease_event(line, revision);
  ASSERT_TRUE(whole.ok() && *whole) << whole.status().message();
  EXPECT_EQ((*whole)->lease.value, "abc");
  EXPECT_EQ(revision, 7);
  muster::testing::Fuzz fuzz(43);
  for (muster::testing::FuzzRun run(3000); run.goes_on();) {
    const std::string text = fuzz.one_in(8) ? fuzz.noise(300) : fuzz.damaged(line);
    const auto event = decode_lease_event(text, revision);
    if (event.ok() && *event) {
      EXPECT_LE((*event)->lease.value.size(), text.size());
    }
  }
}

}  // namespace
}  // namespace muster::membership::testing
