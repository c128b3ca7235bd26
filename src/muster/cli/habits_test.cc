// What users do with `muster run` besides running it: closed streams, other programs' ports,
// watchers of events, folders of logs.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "muster/cli/testing/launched.h"
#include "muster/testing/shell.h"

namespace muster::cli::testing {
namespace {

// spec: J3 streams that the caller has closed do not keep the launcher from ending, and are written
// to by nobody
TEST(Habits, ClosedStreamsLeadNowhere) {
  const std::string command = std::string(MUSTER_COMMAND) +
                              " run --standalone --nproc-per-node 2 sh -c 'echo out; echo err >&2'";
  for (const char* closed : {">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"}) {
    const auto ended = muster::testing::run_shell("(timeout 120 " + command + " " + closed + ")");
    EXPECT_EQ(ended.code, 0) << closed << ": " << ended.output;
  }
  const auto shown = muster::testing::run_shell("(" + command + " >&-)");
  EXPECT_EQ(sorted_lines(shown.output), (std::vector<std::string>{"[0] err", "[1] err"}));
}

// spec: L13 the events say how many restarts there were, and the exit code of a killed worker as a
// shell does
TEST(Habits, EventsCountRestartsAndNameKills) {
  const TemporaryFolder folder("muster-test-");
  const std::string file = folder.path() + "/events";
  const Outcome outcome =
      run({"run", "--standalone", "--nproc-per-node", "1", "--max-restarts", "1", "--events", file,
           "sh", "-c", "test $TORCHELASTIC_RESTART_COUNT = 1 || kill -KILL $$"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const std::string events = contents(file);
  EXPECT_EQ(count_of(events, "\"restarts\":0"), 1) << events;
  EXPECT_EQ(count_of(events, "\"restarts\":1"), 1) << events;
  EXPECT_EQ(count_of(events, "\"exit_code\":137,\"signal\":\"SIGKILL\""), 1) << events;
}

// spec: J3 the port that programs of torch take by themselves is left to them
TEST(Habits, ProgramsPortsAreLeftToThem) {
  const Outcome outcome = run(
      {"run", "--nproc-per-node", "1", "sh", "-c", "echo ${MUSTER_AGENT_STORE##*:} $MASTER_PORT"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_FALSE(contains(outcome.out, "29500")) << outcome.out;
}

// spec: W3 logs are for this user and its group
TEST(Habits, LogsAreNotForAll) {
  const TemporaryFolder folder("muster-test-");
  const Outcome outcome =
      run({"run", "--standalone", "--nproc-per-node", "1", "--rdzv-id", "logs", "--log-dir",
           folder.path(), "--redirects", "3", "sh", "-c", "echo out"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const auto mode = [&](const std::string& name) {
    struct stat info {};
    EXPECT_EQ(::stat((folder.path() + name).c_str(), &info), 0) << name;
    return info.st_mode & 0777;
  };
  EXPECT_EQ(mode("/logs"), 0750U);
  EXPECT_EQ(mode("/logs/attempt_0/0/stdout.log"), 0640U);
}

}  // namespace
}  // namespace muster::cli::testing
