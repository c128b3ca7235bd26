// SPDX-License-Identifier: BSD-3-Clause
// `muster run` and `muster launch` as real processes.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "faces/cli/testing/launched.h"
#include "jobs/launch/node/host.h"
#include "testing/reserved_port.h"

namespace muster::cli::testing {
namespace {

using Lines = std::vector<std::string>;

// spec: J3.executables plain executables, output prefixed with the rank; J8 --standalone needs no
// --rdzv-*
TEST(Run, PrefixesTheOutputOfEveryRank) {
  const Outcome outcome = run(shell(3, "echo hello; echo trouble >&2"));
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(sorted_lines(outcome.out), (Lines{"[0] hello", "[1] hello", "[2] hello"}));
  EXPECT_EQ(sorted_lines(outcome.err), (Lines{"[0] trouble", "[1] trouble", "[2] trouble"}));
}

// spec: J5 workers see these variables, each with its value
TEST(Run, TellsWorkersWhatTheyAre) {
  const std::string script =
      "echo $WORLD_SIZE $RANK $LOCAL_RANK $GROUP_RANK $ROLE_RANK $LOCAL_WORLD_SIZE "
      "$ROLE_WORLD_SIZE $ROLE_NAME $MASTER_ADDR "
      "$TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS $TORCHELASTIC_RUN_ID $PYTHON_EXEC "
      "${MUSTER_AGENT_STORE%:*} "
      "$(test \"$MASTER_PORT\" -gt 0 && echo port) $(tail -n 1 /dev/fd/${MUSTER_SECRET_FD#*:} | wc "
      "-c) ${MUSTER_SECRET-none}";
  const Outcome outcome = run(shell(2, script,
                                    {"--rdzv-id", "job7", "--max-restarts", "3", "--role",
                                     "trainer", "--local-addr", "localhost"}),
                              {{"PYTHON_EXEC", "/opt/python"}});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(
      sorted_lines(outcome.out),
      (Lines{"[0] 2 0 0 0 0 2 2 trainer localhost 0 3 job7 /opt/python localhost port 87 none",
             "[1] 2 1 1 0 1 2 2 trainer localhost 0 3 job7 /opt/python localhost port 87 none"}));
}

// spec: J8 MASTER_ADDR is the full host name of rank 0; TORCHELASTIC_RUN_ID and ROLE_NAME have
// defaults (J5)
TEST(Run, CallsTheMasterByItsFullName) {
  const Outcome outcome = run(shell(1,
                                    "echo $MASTER_ADDR; test -n \"$TORCHELASTIC_RUN_ID\" && echo "
                                    "$ROLE_NAME; test -n \"$PYTHON_EXEC\" && echo yes"));
  EXPECT_EQ(outcome.out, "[0] " + launch::full_host_name() + "\n[0] default\n[0] yes\n");
}

// spec: J5 every restart has a MASTER_PORT that nobody listens at, and all ranks the same
TEST(Run, LeavesMasterPortToTheProgram) {
  const std::string port = std::to_string(muster::testing::reserve_port());
  const Outcome outcome =
      run(shell(2,
                "echo $TORCHELASTIC_RESTART_COUNT $MASTER_PORT $MUSTER_AGENT_STORE; "
                "test $TORCHELASTIC_RESTART_COUNT = 1 || exit 1",
                {"--max-restarts", "1", "--master-port", port, "--local-addr", "localhost"}));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  std::set<std::string> ports;
  for (const std::string& line : sorted_lines(outcome.out)) {
    std::istringstream words(line);
    std::string rank, restart, own, store;
    words >> rank >> restart >> own >> store;
    EXPECT_EQ(store, "localhost:" + port);
    ports.insert(restart + " " + own);
    EXPECT_NE(own, port);
  }
  EXPECT_EQ(ports.size(), 2U) << outcome.out;
}

// spec: J5 the launcher's store, which all ranks reach with the secret that they inherit
TEST(Run, ServesTheStore) {
  const Outcome outcome = run(run_words(4, {kWorker, "meet"}));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(sorted_lines(outcome.out),
            (Lines{"[0] met 0123", "[1] met 0123", "[2] met 0123", "[3] met 0123"}));
}

// spec: J3 a failure on one rank ends the others; it is reported last with rank, exit code, host
// and the tail of its stderr; the exit code tells
TEST(Run, ReportsTheFirstFailureLast) {
  // Rank 1 fails once rank 0 runs: it waits until the fifo is open for writing.
  Fifo fifo;
  const std::string script = "if test $RANK = 1; then : < " + fifo.path() +
                             "; echo the reason >&2; exit 3; fi; exec sleep infinity > " +
                             fifo.path();
  const Outcome outcome = run(shell(2, script));
  EXPECT_EQ(outcome.code, 3);
  EXPECT_EQ(outcome.out, "");
  EXPECT_TRUE(outcome.err.starts_with("[1] the reason\n")) << outcome.err;
  const std::string report = outcome.err.substr(outcome.err.find('\n') + 1);
  EXPECT_TRUE(report.starts_with("muster run: FAILED: rank 1 (local rank 1, process ")) << report;
  EXPECT_TRUE(
      contains(report, "host " + launch::full_host_name() + ") ended with exit code 3 at 20"))
      << report;
  EXPECT_TRUE(contains(report, "  | the reason\n")) << report;
  EXPECT_TRUE(contains(report, "rank 0: ended by the launcher with SIGTERM")) << report;
  EXPECT_TRUE(report.ends_with("muster run: exit code 3\n")) << report;
}

// spec: J3 a worker that a signal ended is reported by the signal's name, and the exit code is 128
// + signal
TEST(Run, NamesTheSignalThatEndedAWorker) {
  const Outcome outcome = run(shell(2, "test $RANK = 0 && kill -KILL $$; exec sleep infinity"));
  EXPECT_EQ(outcome.code, 128 + SIGKILL);
  EXPECT_TRUE(contains(outcome.err, "FAILED: rank 0 (local rank 0, process ")) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "was ended by SIGKILL (signal 9")) << outcome.err;
}

// spec: J4 a program that cannot be executed is not started again, and the report says why
TEST(Run, AProgramThatCannotBeExecutedIsNotStartedAgain) {
  const TemporaryFolder folder("muster-test-");
  const std::string program = folder.path() + "/program";
  std::ofstream(program) << "#!" + folder.path() + "/no-interpreter\n";
  std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  const Outcome outcome = run(run_words(2, {"--max-restarts", "5", program}));
  EXPECT_EQ(outcome.code, 127) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "could not be started: program \"" + program)) << outcome.err;
  EXPECT_EQ(outcome.err.find("restarting"), std::string::npos) << outcome.err;
}

// spec: J3 a worker that ignores SIGTERM is killed after --shutdown-timeout
TEST(Run, KillsWorkersThatIgnoreTerm) {
  Fifo fifo;
  const std::string script = "if test $RANK = 1; then cat " + fifo.path() +
                             "; exit 3; fi; trap '' TERM; : > " + fifo.path() +
                             "; exec sleep infinity";
  const Outcome outcome = run(shell(2, script, {"--shutdown-timeout", "0.2"}));
  EXPECT_EQ(outcome.code, 3);
  EXPECT_TRUE(contains(outcome.err, "rank 0: ended by the launcher with SIGKILL")) << outcome.err;
}

// spec: J3 the children of workers end with them
TEST(Run, EndsTheChildrenOfWorkers) {
  Fifo fifo;
  // The child ignores SIGTERM and has lost its parent when the job ends.
  const std::string script =
      "(trap '' TERM; exec sleep infinity) > " + fifo.path() + " & : < " + fifo.path() + "; exit 5";
  Launched launched(shell(1, "exec 3<>" + fifo.path() + "; " + script));
  ASSERT_TRUE(fifo.open());
  EXPECT_EQ(launched.finish().code, 5);
  EXPECT_TRUE(fifo.wait_for_end());
}

// spec: J3 workers do not outlive a launcher that is killed
TEST(Run, WorkersDieWithTheLauncher) {
  Fifo fifo;
  Launched launched(shell(2, "echo ready; exec sleep infinity > " + fifo.path()));
  ASSERT_TRUE(fifo.open());
  ASSERT_TRUE(launched.wait_for_output("ready", 2));
  launched.signal(SIGKILL);
  EXPECT_TRUE(fifo.wait_for_end());
  EXPECT_EQ(launched.finish().code, 128 + SIGKILL);
}

// spec: J3 SIGINT, SIGTERM and SIGHUP are passed on to the workers; the exit code is 128 + signal
TEST(Run, PassesSignalsOn) {
  for (const auto& [signal, name] :
       {std::pair{SIGINT, "SIGINT"}, {SIGTERM, "SIGTERM"}, {SIGHUP, "SIGHUP"}}) {
    Launched launched(run_words(2, {kWorker, "wait", "0"}));
    ASSERT_TRUE(launched.wait_for_output("ready", 2));
    launched.signal(signal);
    const Outcome outcome = launched.finish();
    EXPECT_EQ(outcome.code, 128 + signal);
    EXPECT_EQ(count_of(outcome.out, std::string("got ") + name), 2) << outcome.out;
    EXPECT_TRUE(contains(outcome.err, std::string("stopped by ") + name)) << outcome.err;
    EXPECT_FALSE(contains(outcome.err, "FAILED")) << outcome.err;
  }
}

// spec: J3 SIGUSR1 is passed on and stops nothing by itself
TEST(Run, PassesUserSignalsOn) {
  Launched launched(run_words(1, {kWorker, "wait", "0"}));
  ASSERT_TRUE(launched.wait_for_output("ready"));
  launched.signal(SIGUSR1);
  const Outcome outcome = launched.finish();
  EXPECT_EQ(outcome.code, 0);
  EXPECT_TRUE(contains(outcome.out, "got SIGUSR1"));
}

// spec: J3 who asks a second time kills what ignored the first
TEST(Run, ASecondSignalKills) {
  Launched launched(run_words(1, {kWorker, "ignore"}));
  ASSERT_TRUE(launched.wait_for_output("ready"));
  launched.signal(SIGTERM);
  launched.signal(SIGINT);
  EXPECT_NE(launched.finish().code, 0);
}

// spec: J3 a flood on stdout: nothing is lost, no line is torn, through the prefixed console
TEST(Run, StandsAFlood) {
  constexpr int kLines = 100000;  // 10 MB a rank
  const Outcome outcome = run(run_words(2, {kWorker, "flood", std::to_string(kLines)}));
  EXPECT_EQ(outcome.code, 0);
  std::vector<int> next(2, 0);
  std::istringstream lines(outcome.out);
  for (std::string line; std::getline(lines, line);) {
    ASSERT_EQ(line.size(), 103u) << line;
    const int rank = line[1] - '0';
    ASSERT_TRUE(rank == 0 || rank == 1) << line;
    ASSERT_EQ(std::stoi(line.substr(4, 9)), next[static_cast<std::size_t>(rank)]++);
  }
  EXPECT_EQ(next, (std::vector{kLines, kLines}));
}

// spec: J3 a flood of 100 MB into --redirects: nothing is lost
TEST(Run, StandsAFloodIntoAFile) {
  Fifo folder;
  const Outcome outcome = run(run_words(1, {"--rdzv-id", "flood", "--log-dir", folder.folder(),
                                            "--redirects", "3", kWorker, "flood", "1000000"}));
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.out, "");
  EXPECT_EQ(std::filesystem::file_size(folder.folder() + "/flood/attempt_0/0/stdout.log"),
            100000000u);
}

// spec: J3 a console that nobody reads stops neither the watching nor the ending of workers; the
// report still comes last
TEST(Run, ASlowReaderDelaysNothingButOutput) {
  Fifo fifo;
  const std::string script = "if test $RANK = 1; then : < " + fifo.path() +
                             "; exit 4; fi; exec 3> " + fifo.path() + "; " + kWorker +
                             " flood 100000000";
  Fifo alive;
  Launched launched(shell(2, "test $RANK = 0 && exec 4> " + alive.path() + "; " + script));
  // Nothing reads the launcher's output here, and yet rank 0 is ended when rank 1 fails.
  ASSERT_TRUE(alive.open());
  EXPECT_TRUE(alive.wait_for_end());
  const Outcome outcome = launched.finish();
  EXPECT_EQ(outcome.code, 4);
  EXPECT_TRUE(contains(outcome.err, "FAILED: rank 1"));
}

// spec: J3 the last line of a worker is shown without its newline
TEST(Run, ShowsPartialLastLines) {
  EXPECT_EQ(run(shell(1, "printf 'one\\ntwo'")).out, "[0] one\n[0] two\n");
  EXPECT_EQ(run(shell(1, "printf last; kill -KILL $$")).out, "[0] last\n");
}

// spec: J3 a child that keeps the streams open does not keep the launcher
TEST(Run, DoesNotWaitForStraysThatHoldTheStreams) {
  Fifo fifo;
  Launched launched(shell(1, "sleep infinity 3> " + fifo.path() + " & echo $!"));
  ASSERT_TRUE(fifo.open());
  const Outcome outcome = launched.finish();
  EXPECT_EQ(outcome.code, 0);
  const int stray = std::atoi(outcome.out.substr(outcome.out.find(' ')).c_str());
  ASSERT_GT(stray, 1) << outcome.out;
  EXPECT_EQ(::kill(stray, SIGKILL), 0);  // it lives on, as under a shell
  EXPECT_TRUE(fifo.wait_for_end());
}

// spec: J3.logs --log-dir, --redirects and --tee, for all or by local rank; what is redirected is
// not shown, what is teed is
TEST(Run, RedirectsAndTees) {
  Fifo folder;
  const Outcome outcome = run(shell(3, "echo out; echo err >&2",
                                    {"--rdzv-id", "logs", "--log-dir", folder.folder(),
                                     "--redirects", "0:3,1:2", "--tee", "2:1"}));
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(sorted_lines(outcome.out), (Lines{"[1] out", "[2] out"}));
  EXPECT_EQ(sorted_lines(outcome.err), (Lines{"[2] err"}));
  const std::string logs = folder.folder() + "/logs/attempt_0/";
  EXPECT_EQ(contents(logs + "0/stdout.log"), "out\n");
  EXPECT_EQ(contents(logs + "0/stderr.log"), "err\n");
  EXPECT_EQ(contents(logs + "1/stderr.log"), "err\n");
  EXPECT_EQ(contents(logs + "2/stdout.log"), "out\n");
  EXPECT_FALSE(std::filesystem::exists(logs + "1/stdout.log"));
  EXPECT_FALSE(std::filesystem::exists(logs + "2/stderr.log"));
}

// spec: J3 the report quotes a redirected standard error too, and says where the logs are
TEST(Run, QuotesRedirectedErrors) {
  Fifo folder;
  const Outcome outcome =
      run(shell(1, "echo the reason >&2; exit 9",
                {"--rdzv-id", "logs", "--log-dir", folder.folder(), "-r", "3"}));
  EXPECT_EQ(outcome.code, 9);
  EXPECT_TRUE(contains(outcome.err, "  | the reason\n")) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "logs are in " + folder.folder() + "/logs")) << outcome.err;
}

// spec: J5 without the launcher's store rank 0 opens its own at MASTER_PORT
TEST(Run, LeavesTheStoreToRankZero) {
  const Outcome outcome =
      run(run_words(2, {"--no-agent-store", "sh", "-c",
                        "echo ${MUSTER_AGENT_STORE-none}; exec " + kWorker + " meet"}));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(sorted_lines(outcome.out), (Lines{"[0] met 01", "[0] none", "[1] met 01", "[1] none"}));
}

// spec: J3.filter --local-ranks-filter shows some local ranks only; failures of others are still
// quoted
TEST(Run, FiltersLocalRanks) {
  const Outcome outcome = run(shell(3, "echo out", {"--local-ranks-filter", "0,2"}));
  EXPECT_EQ(sorted_lines(outcome.out), (Lines{"[0] out", "[2] out"}));
  const Outcome failed =
      run(shell(2, "test $RANK = 1 || exec sleep infinity; echo the reason >&2; exit 2",
                {"--local-ranks-filter", "0"}));
  EXPECT_FALSE(contains(failed.err, "[1] the reason"));
  EXPECT_TRUE(contains(failed.err, "  | the reason")) << failed.err;
}

// spec: J4 all workers restart after a failure, up to --max-restarts, and see
// TORCHELASTIC_RESTART_COUNT (J5)
TEST(Run, RestartsAllWorkers) {
  Fifo folder;
  const std::string script =
      "echo attempt $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; " + kWorker +
      " meet || exit 1; test $TORCHELASTIC_RESTART_COUNT = 2 || { test $RANK = 0 && exit 7; exec "
      "sleep infinity; }";
  const Outcome outcome = run(shell(
      2, script,
      {"--max-restarts", "2", "--rdzv-id", "again", "--log-dir", folder.folder(), "--tee", "1"}));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  for (const char* line : {"attempt 0 of 2\n", "attempt 1 of 2\n", "attempt 2 of 2\n"})
    EXPECT_EQ(count_of(outcome.out, line), 2) << outcome.out;
  EXPECT_TRUE(contains(outcome.err, "restart 2 of 2")) << outcome.err;
  EXPECT_TRUE(contains(contents(folder.folder() + "/again/attempt_2/1/stdout.log"), "attempt 2"));
}

// spec: J4 when the restarts are used up, the last failure is the job's
TEST(Run, GivesUpAfterTheLastRestart) {
  const Outcome outcome =
      run(shell(1, "exit $((TORCHELASTIC_RESTART_COUNT + 10))", {"--max-restarts", "1"}));
  EXPECT_EQ(outcome.code, 11);
}

// spec: J3 a program's arguments are passed through untouched
TEST(Run, LeavesTheProgramsArgumentsAlone) {
  const std::string script = "for word in \"$@\"; do echo \"<$word>\"; done";
  const Outcome outcome = run(run_words(1, {"sh", "-c", script, "sh", "--nproc-per-node", "9", "-h",
                                            "two words", "", "--x_y=1", "--", "--standalone"}));
  EXPECT_EQ(outcome.out,
            "[0] <--nproc-per-node>\n[0] <9>\n[0] <-h>\n[0] <two words>\n[0] <>\n[0] "
            "<--x_y=1>\n[0] <-->\n[0] <--standalone>\n");
  EXPECT_EQ(run(run_words(1, {"--", "echo", "-n", "--", "x"})).out, "[0] -- x\n");
}

// spec: J6 underscores for dashes, and --nnode; J8 MASTER_ADDR without --standalone
TEST(Run, TakesUnderscores) {
  const Outcome outcome = run({"run", "--nproc_per_node=2", "--nnode=1", "--rdzv_id", "under",
                               "--node_rank=0", "--max_restarts=0", "--master_port", "0", "sh",
                               "-c", "echo $TORCHELASTIC_RUN_ID $MASTER_ADDR"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const std::string name = launch::full_host_name();
  EXPECT_EQ(sorted_lines(outcome.out), (Lines{"[0] under " + name, "[1] under " + name}));
}

// spec: J3.no_python a file that ends in .py is run by Python, unless --no-python
TEST(Run, RunsPythonFiles) {
  Fifo folder;
  const std::string path = folder.folder() + "/train.py";
  std::ofstream(path) << "#!/bin/sh\necho \"run directly\" $1\n";
  ::chmod(path.c_str(), 0755);
  const std::string python = folder.folder() + "/python";
  std::ofstream(python) << "#!/bin/sh\necho \"$@\"\n";
  ::chmod(python.c_str(), 0755);
  EXPECT_EQ(run(run_words(1, {path, "a"}), {{"PYTHON_EXEC", python}}).out,
            "[0] -u " + path + " a\n");
  EXPECT_EQ(run(run_words(1, {"-m", "package.train", "a"}), {{"PYTHON_EXEC", python}}).out,
            "[0] -u -m package.train a\n");
  EXPECT_EQ(run(run_words(1, {"--no-python", path, "a"}), {{"PYTHON_EXEC", python}}).out,
            "[0] run directly a\n");
}

// spec: J3.traces the report of a failure says where the last calls of the ranks are, and the job's
// name finds them too
TEST(Run, ReportsWhereTheTracesAre) {
  for (const char* kind : {"trace", "trace-of-child"}) {
    const TemporaryFolder folder("muster-test-");
    const Launched::Variables variables = {{"MUSTER_RUN_DIR", folder.path()}};
    const Outcome outcome = run(run_words(1, {"--rdzv-id", "job7", kWorker, kind}), variables);
    EXPECT_EQ(outcome.code, 3);
    const std::string directory = folder.path() + "/job-job-of-a-worker";
    EXPECT_TRUE(
        contains(outcome.err, "what the ranks called last: muster trace --dir " + directory + "\n"))
        << outcome.err;
    for (const std::vector<std::string>& words :
         {std::vector<std::string>{"--dir", directory}, {"--job", "job7"}, {}}) {
      for (const char* command : {"trace", "top"}) {
        std::vector<std::string> all = {command};
        all.insert(all.end(), words.begin(), words.end());
        const Outcome shown = run(all, variables);
        EXPECT_EQ(shown.code, 0) << shown.err;
        EXPECT_TRUE(contains(shown.out, "job 'job7', job-of-a-worker, begun ")) << shown.out;
      }
    }
    const Outcome none = run(run_words(1, {"--rdzv-id", "job8", "false"}), variables);
    EXPECT_FALSE(contains(none.err, "muster trace")) << none.err;
  }
}

// spec: J3.python MUSTER_PYTHON and the activated environment say which Python runs a file that
// ends in .py, and a missing torch is explained
TEST(Run, FindsThePython) {
  Fifo folder;
  const std::string path = folder.folder() + "/train.py", active = folder.folder() + "/active";
  std::filesystem::create_directories(active + "/bin");
  std::ofstream(active + "/pyvenv.cfg") << "home = /usr/bin\n";
  std::ofstream(path) << "import torch\n";
  const std::string python = active + "/bin/python3";
  std::ofstream(python)
      << "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n";
  ::chmod(python.c_str(), 0755);
  for (const Launched::Variables& variables :
       {Launched::Variables{{"VIRTUAL_ENV", active}}, {{"MUSTER_PYTHON", python}}}) {
    const Outcome outcome = run(run_words(1, {path}), variables);
    EXPECT_EQ(outcome.code, 1);
    EXPECT_TRUE(contains(
        outcome.err, "muster run: " + python + " ran the program, the first of PYTHON_EXEC (none)"))
        << outcome.err;
    EXPECT_TRUE(contains(outcome.err, "say in MUSTER_PYTHON which Python has torch"))
        << outcome.err;
  }
  const Outcome wrong = run(run_words(1, {path}), {{"MUSTER_PYTHON", "/nowhere/python"}});
  EXPECT_EQ(wrong.code, 127);
  EXPECT_TRUE(contains(wrong.err, "/nowhere/python")) << wrong.err;
}

// spec: J3 a program that cannot be run, and options that make no sense, are told apart and
// explained
TEST(Run, ExplainsMistakes) {
  const auto check = [](const std::vector<std::string>& words, int code, const std::string& what) {
    const Outcome outcome = run(words);
    EXPECT_EQ(outcome.code, code) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, what)) << outcome.err;
  };
  check(run_words(2, {"no-such-program-here"}), 127, "not found on PATH");
  check(run_words(2, {"/no/such/program"}), 127, "/no/such/program");
  check(run_words(2, {"no_such_program.py"}), 127, "cannot find the program no_such_program.py");
  check(run_words(2, {"/etc/passwd"}), 126, "/etc/passwd");
  check({"run", "--standalone"}, 2, "no program");
  check({"run", "--nprocs", "2", "true"}, 2, "--nprocs");
  check({"run", "--nnodes", "1:2", "true"}, 2, "1:2");
  check({"run", "--rdzv-backend", "etcd-v2", "true"}, 2, "say etcd");
  check({"run", "--rdzv-backend", "etcd", "--nnodes", "2", "true"}, 2, "--rdzv-endpoint");
  check({"walk"}, 2, "walk");
}

// spec: J3 two jobs at once on a host whose localhost has two addresses
TEST(Run, SharesALocalhostOfBothFamilies) {
  if (::geteuid() != 0) GTEST_SKIP() << "other names for addresses need root";
  const TemporaryFolder folder("muster-test-");
  const auto before = localhost_of_both_families(folder.path() + "/hosts");
  Launched other({"run", kWorker, "wait", "0"}, {}, before);
  ASSERT_TRUE(other.wait_for_output("ready"));
  const Outcome outcome =
      Launched({"run", "--nproc-per-node", "2", kWorker, "meet"}, {}, before).finish();
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(sorted_lines(outcome.out), (Lines{"[0] met 01", "[1] met 01"}));
}

// spec: J1 torch.distributed.launch's options, those of a node too
// spec: J7 --local-rank=N comes first, with --local-rank-spelling underscore --local_rank=N, with
// --use-env none; a single node needs no address; J6 --use-env=True and --use_env
TEST(Launch, PassesTheLocalRank) {
  const std::string script =
      "echo $MASTER_ADDR $RANK $WORLD_SIZE $LOCAL_RANK \"$@\"; test $MASTER_PORT -gt 0";
  const auto words = [&](std::vector<std::string> options) {
    std::vector<std::string> all = {"launch", "--nproc-per-node", "2"};
    all.insert(all.end(), options.begin(), options.end());
    // As `sh FILE --local-rank=N x`, where FILE is the program.
    return all;
  };
  Fifo folder;
  const std::string program = folder.folder() + "/program";
  std::ofstream(program) << "#!/bin/sh\n" << script << "\n";
  ::chmod(program.c_str(), 0755);
  EXPECT_EQ(sorted_lines(run(words({program, "x", "--y"})).out),
            (Lines{"[0] 127.0.0.1 0 2 0 --local-rank=0 x --y",
                   "[1] 127.0.0.1 1 2 1 --local-rank=1 x --y"}));
  EXPECT_EQ(sorted_lines(run(words({"--use-env", program, "x"})).out),
            (Lines{"[0] 127.0.0.1 0 2 0 x", "[1] 127.0.0.1 1 2 1 x"}));
  for (const char* spelling : {"--use-env=True", "--use_env"}) {
    EXPECT_EQ(sorted_lines(run(words({spelling, program})).out),
              (Lines{"[0] 127.0.0.1 0 2 0", "[1] 127.0.0.1 1 2 1"}));
  }
  EXPECT_EQ(sorted_lines(run(words({"--local-rank-spelling", "underscore", program})).out),
            (Lines{"[0] 127.0.0.1 0 2 0 --local_rank=0", "[1] 127.0.0.1 1 2 1 --local_rank=1"}));
  EXPECT_EQ(sorted_lines(run(words({"--nnodes=1", "--node-rank=0", "--master-addr=localhost",
                                    "--master-port=0", program}))
                             .out),
            (Lines{"[0] localhost 0 2 0 --local-rank=0", "[1] localhost 1 2 1 --local-rank=1"}));
}

// spec: J1 the command explains itself
TEST(Command, ExplainsItself) {
  for (const char* command : {"run", "launch"}) {
    const Outcome outcome = run({command, "--help"});
    EXPECT_EQ(outcome.code, 0);
    EXPECT_TRUE(contains(outcome.out, "--nproc-per-node")) << outcome.out;
  }
  EXPECT_TRUE(run({"--version"}).out.starts_with("muster "));
  EXPECT_TRUE(contains(run({"doctor"}).out, "cores"));
}

// spec: L13.error_file the error file of a worker is read and shown
TEST(Run, ShowsTheErrorFile) {
  const Outcome outcome =
      run(shell(1, R"(echo '{"message": {"message": "ValueError: by itself", "extraInfo": )"
                   R"({"py_callstack": "Traceback of it"}}}' > $TORCHELASTIC_ERROR_FILE; exit 4)"));
  EXPECT_EQ(outcome.code, 4);
  EXPECT_TRUE(
      contains(outcome.err, "its error file says: ValueError: by itself\n  | Traceback of it"))
      << outcome.err;
}

// spec: L2.prefix --log-line-prefix-template, also from the environment
TEST(Run, PrefixesLinesAsAsked) {
  const std::vector<std::string> words = {"--role", "trainer", "--log-line-prefix-template",
                                          "<${role_name}/${local_rank}/${rank}> "};
  EXPECT_EQ(run(shell(1, "echo hello", words)).out, "<trainer/0/0> hello\n");
  EXPECT_EQ(
      run(shell(1, "echo hello"), {{"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "${rank}: "}}).out,
      "0: hello\n");
}

// spec: L2.signals --signals-to-handle: a signal that is listed ends the job, after it was passed
// on
TEST(Run, HandlesTheSignalsThatItIsTold) {
  Launched launcher(run_words(1, {"--signals-to-handle", "SIGTERM,SIGUSR1", kWorker, "wait", "0"}));
  ASSERT_TRUE(launcher.wait_for_output("ready"));
  launcher.signal(SIGUSR1);
  const Outcome outcome = launcher.finish();
  EXPECT_EQ(outcome.code, 128 + SIGUSR1) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "got SIGUSR1")) << outcome.out;
}

// spec: L2.events --event-log-handler: console and null, others are refused by name; torchrun's
// other options that are not there are refused with the reason
TEST(Run, RefusesWhatItDoesNotHave) {
  const Outcome console = run(shell(1, "true", {"--event-log-handler", "console"}));
  EXPECT_TRUE(contains(console.err, R"("event":"workers_started")")) << console.err;
  EXPECT_EQ(run(shell(1, "true", {"--event-log-handler", "null"})).err, "");
  const std::vector<std::pair<std::string, std::string>> refused = {
      {"--event-log-handler", "scuba"},
      {"--logs-specs", "mine"},
      {"--numa-binding", "socket"},
      {"--virtual-local-rank", ""},
      {"--duplicate_stdout_filters", "x"}};
  for (const auto& [option, value] : refused) {
    std::vector<std::string> words = {option};
    if (!value.empty()) words.push_back(value);
    const Outcome outcome = run(shell(1, "true", words));
    EXPECT_EQ(outcome.code, 2) << option;
    std::string name = option;
    std::replace(name.begin(), name.end(), '_', '-');
    EXPECT_TRUE(contains(outcome.err, name)) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, ": ")) << outcome.err;
  }
}

}  // namespace
}  // namespace muster::cli::testing
