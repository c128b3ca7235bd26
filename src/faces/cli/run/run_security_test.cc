// SPDX-License-Identifier: BSD-3-Clause
// The secret of a job, and what others on the host can read, lay or connect to: `muster run`,
// `muster secret` and `muster doctor` as real processes.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "core/store/factory.h"
#include "core/trace/recorder.h"
#include "core/trace/responder.h"
#include "faces/cli/testing/launched.h"
#include "jobs/launch/node/host.h"
#include "testing/dump.h"
#include "testing/reserved_port.h"

namespace muster::cli::testing {
namespace {

using Lines = std::vector<std::string>;

/// Prints the secret that a worker has inherited.
const std::string kTellSecret = "echo secret=$(tail -n 1 /dev/fd/${MUSTER_SECRET_FD#*:}).";

// spec: J3 the job's secret is made anew for every job, and in no argument list; W4 and in no
// environment: workers inherit a sealed file
TEST(Run, KeepsTheSecretOutOfArgumentsAndEnvironments) {
  Launched launched(shell(2, kTellSecret + "; exec sleep infinity"));
  ASSERT_TRUE(launched.wait_for_output(".\n", 2));
  std::string everything;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    everything += contents(entry.path().string() + "/cmdline");
    everything += contents(entry.path().string() + "/environ");
  }
  launched.signal(SIGTERM);
  const Outcome outcome = launched.finish();
  const std::size_t at = outcome.out.find("secret=") + 7;
  const std::string secret = outcome.out.substr(at, outcome.out.find('.', at) - at);
  EXPECT_TRUE(secret.starts_with("muster-secret-")) << secret;
  EXPECT_EQ(count_of(outcome.out, secret), 2);
  EXPECT_TRUE(contains(everything, "MUSTER_SECRET_FD=")) << "the scan saw no worker";
  EXPECT_FALSE(contains(everything, secret));
  EXPECT_FALSE(contains(outcome.err, secret));
  EXPECT_FALSE(contains(run(shell(1, kTellSecret)).out, secret));
}

// spec: W4 a program that a worker starts without the descriptor finds the secret all the same
TEST(Run, ProgramsOfWorkersFindTheSecret) {
  const std::string script =
      "exec bash -c 'fd=${MUSTER_SECRET_FD#*:}; exec {fd}<&-; exec " + kWorker + " meet'";
  const Outcome outcome = run(shell(2, script));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(sorted_lines(outcome.out), (Lines{"[0] met 01", "[1] met 01"}));
}

// spec: W7 with one node nothing listens but on loopback, whatever the host is called
TEST(Run, ListensOnLoopbackWithOneNode) {
  const Outcome outcome = run(shell(1, "echo $MUSTER_AGENT_STORE $MASTER_ADDR"));
  EXPECT_TRUE(outcome.out.starts_with("[0] localhost:")) << outcome.out;
  EXPECT_TRUE(outcome.out.ends_with(" " + launch::full_host_name() + "\n")) << outcome.out;
}

// spec: W3 logs go through no link and to no other user's file: what others laid is refused by name
TEST(Run, RefusesLogsThroughLinks) {
  Fifo folder;
  const std::string precious = folder.folder() + "/precious";
  std::ofstream(precious) << "text";
  const auto refused = [&](const std::string& id, const std::string& why) {
    const Outcome outcome = run(
        shell(1, "echo out", {"--rdzv-id", id, "--log-dir", folder.folder(), "--redirects", "3"}));
    EXPECT_EQ(outcome.code, 1) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, why)) << outcome.err;
  };
  std::filesystem::create_directories(folder.folder() + "/a/attempt_0/0");
  std::filesystem::create_symlink(precious, folder.folder() + "/a/attempt_0/0/stdout.log");
  refused("a", "symbolic link");
  EXPECT_EQ(contents(precious), "text");
  std::filesystem::create_directory(folder.folder() + "/b");
  ::chmod((folder.folder() + "/b").c_str(), 0777);
  refused("b", "can be written by others");
}

// spec: W3 nor do events: what others laid is refused, and a pipe is not waited for
TEST(Run, RefusesEventsThatOthersCouldHaveLaid) {
  Fifo folder;
  const std::string loose = folder.folder() + "/loose", named = folder.folder() + "/named";
  std::ofstream(loose) << "text";
  ::chmod(loose.c_str(), 0666);
  std::ofstream(named) << "text";
  std::filesystem::create_hard_link(named, folder.folder() + "/second");
  const auto refused = [](const std::string& path, const std::string& why) {
    const Outcome outcome = run(shell(1, "echo out", {"--events", path}));
    EXPECT_EQ(outcome.code, 1) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, "--events") && contains(outcome.err, why)) << outcome.err;
  };
  refused(loose, "can be written by others");
  refused(folder.folder() + "/second", "2 names");
  refused(folder.path(), "the file of events " + folder.path());
  EXPECT_EQ(contents(loose) + contents(named), "texttext");
}

// spec: W1 who has the secret learns how many have tried without it
TEST(Doctor, TellsHowManyWereTurnedAway) {
  const std::string port = std::to_string(muster::testing::reserve_port());
  const std::string place = "localhost:" + port;
  const Launched::Variables secret = {{"MUSTER_SECRET", "the secret of this test"}};
  Launched launched(shell(1, "echo started; exec sleep infinity",
                          {"--master-port", port, "--local-addr", "localhost"}),
                    secret);
  ASSERT_TRUE(launched.wait_for_output("started"));
  EXPECT_TRUE(contains(run({"doctor", "--job", place}, secret).out, "turned nobody away"));
  // Links that were asked for, and of which no rank tells, are in the way.
  EXPECT_TRUE(contains(run({"doctor", "--job", place, "--links"}, secret).out,
                       "(MUSTER_TRACE_ENTRIES=0)   <-- look here"));
  const Outcome guess =
      run({"doctor", "--job", place}, {{"MUSTER_SECRET", "nobody has this secret"}});
  EXPECT_EQ(guess.code, 1);
  EXPECT_TRUE(
      contains(run({"doctor", "--job", place}, secret).out, "turned away, by its store: 1;"));
  launched.signal(SIGTERM);
  launched.finish();
}

// spec: W1 and which rank they tried
TEST(Doctor, TellsWhichRankTurnedThemAway) {
  const std::string text = Secret::random_text();
  store::TcpStoreOptions served;
  served.host = "127.0.0.1";
  served.port = 0;
  served.is_server = true;
  served.secret = Secret::given(text);
  const auto server = *store::make_tcp_store(served);
  const auto job = store::make_prefix_store("a job", server);
  const TemporaryFolder folder("muster-doctor");
  std::vector<std::shared_ptr<trace::Recorder>> recorders;
  std::vector<std::unique_ptr<trace::TraceResponder>> responders;
  for (int rank = 0; rank < 3; ++rank) {
    recorders.push_back(*trace::Recorder::create({.job = "a job",
                                                  .rank = rank,
                                                  .world_size = 3,
                                                  .entries = 64,
                                                  .directory = folder.path()}));
    responders.push_back(trace::TraceResponder::start(recorders.back(), job, [rank](bool) {
      return trace::RankReport{.refusals = rank == 1 ? 7u : 0u};
    }));
    ASSERT_NE(responders.back(), nullptr);
  }
  const std::string place = "127.0.0.1:" + std::to_string(server->port());
  const Outcome told = run({"doctor", "--job", place}, {{"MUSTER_SECRET", text}});
  EXPECT_TRUE(contains(told.out, "turned away, by rank 1: 7; their logs")) << told.out;
}

// spec: W1 what is not encrypted is said, and what is no such setting
TEST(Doctor, ShowsHowConnectionsAreEncrypted) {
  EXPECT_TRUE(contains(run({"doctor"}).out, "TCP between processes is encrypted (TLS 1.3)"));
  const Outcome plain = run({"doctor"}, {{"MUSTER_TLS", "control-plain"}});
  EXPECT_TRUE(contains(plain.out, "MUSTER_TLS=control-plain")) << plain.out;
  EXPECT_EQ(plain.code, 1);
  EXPECT_TRUE(contains(run({"doctor"}, {{"MUSTER_TLS", "off"}}).out, "MUSTER_TLS is \"off\""));
}

// spec: W4.command `muster secret` makes a random one; a file of it is nobody else's, and never an
// old one
TEST(MusterSecret, MakesOne) {
  const Outcome first = run({"secret"}), second = run({"secret"});
  EXPECT_EQ(first.code, 0);
  EXPECT_EQ(first.out.size(), 88u);
  EXPECT_NE(first.out, second.out);
  Fifo folder;
  const std::string path = folder.folder() + "/secret";
  EXPECT_EQ(run({"secret", "-o", path}).code, 0);
  EXPECT_EQ(contents(path).size(), 88u);
  EXPECT_EQ(std::filesystem::status(path).permissions(),
            std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  const Outcome again = run({"secret", "-o", path});
  EXPECT_EQ(again.code, 1);
  EXPECT_TRUE(contains(again.err, path)) << again.err;
  EXPECT_EQ(run(shell(1, "true"), {{"MUSTER_SECRET_FILE", path}}).code, 0);
}

// spec: W1 `muster secret --observer` makes the key that looks at a job; it starts and joins none
TEST(MusterSecret, MakesAnObserversKey) {
  const Launched::Variables secret = {{"MUSTER_SECRET", "the secret of this test"}};
  const Outcome key = run({"secret", "--observer"}, secret);
  EXPECT_EQ(key.code, 0) << key.err;
  EXPECT_TRUE(key.out.starts_with("muster-observer-")) << key.out;
  EXPECT_EQ(run({"secret", "--observer"}, secret).out, key.out);
  const Launched::Variables observer = {{"MUSTER_SECRET", key.out.substr(0, key.out.size() - 1)}};
  EXPECT_EQ(run({"secret", "--observer"}, observer).out, key.out);
  const Outcome none = run({"secret", "--observer"});
  EXPECT_EQ(none.code, 1);
  EXPECT_TRUE(contains(none.err, "no secret in the environment")) << none.err;
  const Outcome job = run(shell(1, "true"), observer);
  EXPECT_EQ(job.code, 1);
  EXPECT_TRUE(contains(job.err, "an observer's key")) << job.err;
  EXPECT_TRUE(contains(run({"doctor"}, observer).out, "an observers' key"));

  const std::string port = std::to_string(muster::testing::reserve_port());
  Launched launched(shell(1, "echo started; exec sleep infinity",
                          {"--master-port", port, "--local-addr", "localhost"}),
                    secret);
  ASSERT_TRUE(launched.wait_for_output("started"));
  const Outcome looked = run({"doctor", "--job", "localhost:" + port}, observer);
  EXPECT_TRUE(contains(looked.out, "turned nobody away")) << looked.out;
  launched.signal(SIGTERM);
  launched.finish();
}

// spec: W4 neither the launcher's environment nor a core dump of it holds the secret that it was
// given, while the job runs
TEST(Run, ForgetsTheVariableOfTheSecret) {
  const std::string text = "correct horse battery";
  Launched launched(shell(1, "echo started; exec sleep infinity"), {{"MUSTER_SECRET", text}});
  ASSERT_TRUE(launched.wait_for_output("started"));
  const std::string environment = contents("/proc/" + std::to_string(launched.pid()) + "/environ");
  EXPECT_TRUE(contains(environment, "PATH="));
  EXPECT_FALSE(contains(environment, text));
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they copy the environment
  std::size_t looked_at = 0;
  EXPECT_FALSE(
      muster::testing::dump_shows(launched.pid(), muster::testing::HiddenText(text), looked_at));
  EXPECT_GT(looked_at, 100'000u);
#endif
  launched.signal(SIGTERM);
  launched.finish();
}

// spec: J3 a secret that the user has given is the job's
TEST(Run, TakesAGivenSecret) {
  const Launched::Variables given = {{"MUSTER_SECRET", "correct horse battery"}};
  const std::string first = run(shell(1, kTellSecret), given).out;
  EXPECT_EQ(first.size(), std::string("[0] secret=.\n").size() + 64);
  EXPECT_EQ(run(shell(1, kTellSecret), given).out, first);
  EXPECT_EQ(run(shell(1, "echo ${MUSTER_SECRET-none}"), given).out, "[0] none\n");
  const Outcome outcome = run(shell(1, "true"), {{"MUSTER_SECRET", "short"}});
  EXPECT_EQ(outcome.code, 1);
  EXPECT_TRUE(contains(outcome.err, "MUSTER_SECRET")) << outcome.err;
}

}  // namespace
}  // namespace muster::cli::testing
