// SPDX-License-Identifier: BSD-3-Clause
// How ranks find each other by an address or the environment: threads as ranks, and processes where
// the environment or death is the point.
#include "core/store/testing/rendezvous_job.h"

#include "core/base/descriptor.h"
#include "core/net/socket_address.h"
#include "core/rendezvous/rendezvous.h"

namespace muster::store {
namespace {

using namespace rendezvous_test;

// spec: B5 tcp:// with IPv4, IPv6 and a name
// spec: B1 blocks until every rank has joined
TEST(Rendezvous, TcpWithRanks) {
  const Environment environment({});
  for (const char* host : {"127.0.0.1", "[::1]", "localhost"}) {
    for (const int world : {1, 2, 5})
      expect_met(on_threads(
          ranks_of("tcp://" + std::string(host) + ":" + std::to_string(testing::reserve_port()),
                   world, true)));
  }
}

// spec: B6.tcp tcp:// without ranks: first come, first numbered
TEST(Rendezvous, TcpAssignsRanks) {
  const Environment environment({});
  for (const char* host : {"127.0.0.1", "[::1]", "localhost"}) {
    expect_met(on_threads(ranks_of(
        "tcp://" + std::string(host) + ":" + std::to_string(testing::reserve_port()), 5, false)));
  }
}

// spec: B3 rank and world_size in the URL query
TEST(Rendezvous, NumbersInTheQuery) {
  const Environment environment({});
  const std::string base = "tcp://127.0.0.1:" + std::to_string(testing::reserve_port());
  std::vector<RendezvousOptions> ranks;
  for (int rank = 0; rank < 3; ++rank)
    ranks.push_back({base + "?rank=" + std::to_string(rank) + "&world_size=3", -1, -1, "", kLong});
  expect_met(on_threads(ranks));
  const Status twice = rendezvous({base + "?rank=1&world_size=3", 2, -1, "", kShort}).status();
  EXPECT_EQ(twice.code(), Code::invalid_argument);
  EXPECT_TRUE(mentions(twice, "rank is 2")) << twice.message();
}

// spec: B3 a malformed query is named
// spec: B5 a malformed address is named
TEST(Rendezvous, MalformedUrlsAreNamed) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"tcp://host:1?rank=x", "rank as \"x\""},
      {"tcp://host:1?rnk=1", "\"rnk\""},
      {"tcp://host:1?rank=1&rank=1", "twice"},
      {"tcp://host", "no port"},
      {"tcp://host:0", "\"0\""},
      {"tcp://host:65536", "\"65536\""},
      {"tcp://host:port", "\"port\""},
      {"tcp://:1", "no host"},
      {"tcp://::1:29500", "without brackets"},
      {"tcp://[::1]", "no port"},
      {"tcp://[::1:29500", "close"},
      {"file://relative", "absolute path"},
      {"file://", "absolute path"},
      {"env://host:1", "more than env://"},
      {"http://host:1", "not known"},
      {"", "not known"},
      {"tcp://host:1?world_size=0", "world_size"},
      {"tcp://host:1?world_size=", "\"\""},
  };
  for (const auto& [url, expected] : cases) {
    const auto parsed = parse_init_url(url);
    ASSERT_FALSE(parsed.ok()) << url;
    EXPECT_EQ(parsed.status().code(), Code::invalid_argument);
    EXPECT_TRUE(mentions(parsed.status(), expected)) << parsed.status().message();
    EXPECT_TRUE(mentions(parsed.status(), url)) << parsed.status().message();
  }
}

// spec: B5 all-digit host names are names
TEST(Rendezvous, DigitsAreAName) {
  EXPECT_FALSE(SocketAddress::numeric("12345", 1).ok());
  EXPECT_EQ(parse_init_url("tcp://12345:29500")->host, "12345");
}

// spec: B13 a rank outside 0..world_size-1 is an error; world_size has no default
TEST(Rendezvous, RangesAreChecked) {
  const Environment environment({});
  const Status rank = rendezvous({"tcp://127.0.0.1:1", 4, 4, "", kShort}).status();
  EXPECT_EQ(rank.code(), Code::invalid_argument);
  EXPECT_TRUE(mentions(rank, "rank 4 is not within 0 to 3")) << rank.message();
  EXPECT_EQ(rendezvous({"tcp://127.0.0.1:1", -2, 4, "", kShort}).status().code(),
            Code::invalid_argument);
  const Status world = rendezvous({"tcp://127.0.0.1:1", 0, -1, "", kShort}).status();
  EXPECT_EQ(world.code(), Code::invalid_argument);
  EXPECT_TRUE(mentions(world, "world_size is missing")) << world.message();
  EXPECT_EQ(rendezvous({"tcp://127.0.0.1:1", 0, 0, "", kShort}).status().code(),
            Code::invalid_argument);
}

// spec: B13 defaults: env://, rank and world_size -1, no group name
// spec: B4.timeout timeout: 30 minutes unless something else is asked for
// spec: B14 timeout 30 minutes
TEST(Rendezvous, Defaults) {
  const RendezvousOptions options;
  EXPECT_EQ(options.init_method, "env://");
  EXPECT_EQ(options.rank, -1);
  EXPECT_EQ(options.world_size, -1);
  EXPECT_EQ(options.group_name, "");
  EXPECT_EQ(options.timeout, std::chrono::minutes(30));
}

// spec: B1 at the timeout the ranks that did not join are named, to all who came
TEST(Rendezvous, NamesTheRanksThatDidNotJoin) {
  const Environment environment({});
  auto ranks =
      ranks_of("tcp://127.0.0.1:" + std::to_string(testing::reserve_port()), 5, true, kInVain);
  ranks.erase(ranks.begin() + 3);
  ranks.erase(ranks.begin() + 1);
  for (const auto& result : on_threads(ranks)) {
    ASSERT_FALSE(result.ok());
    EXPECT_EQ(result.status().code(), Code::timed_out) << result.status().message();
    EXPECT_EQ(result.status().ranks(), (std::vector<int>{1, 3})) << result.status().message();
    EXPECT_TRUE(mentions(result.status(), "ranks 1 and 3")) << result.status().message();
  }
}

// spec: B1 where rank 0 did not come, there is nobody to meet: it is named
TEST(Rendezvous, NamesRankZero) {
  const Environment environment({});
  const Status status =
      rendezvous({"tcp://127.0.0.1:" + std::to_string(testing::reserve_port()), 1, 2, "", kShort})
          .status();
  EXPECT_EQ(status.code(), Code::timed_out);
  EXPECT_EQ(status.ranks(), std::vector<int>{0});
  EXPECT_TRUE(mentions(status, "127.0.0.1")) << status.message();
}

// spec: B1 two processes with one rank are told so
TEST(Rendezvous, OneRankTwice) {
  const Environment environment({});
  const std::string method = "tcp://127.0.0.1:" + std::to_string(testing::reserve_port());
  // The claim that comes second is told first; it gives up, and so the others hear why. No deadline
  // passes.
  const auto results =
      on_threads({{method, 0, 3, "", kLong}, {method, 1, 3, "", kLong}, {method, 1, 3, "", kLong}});
  const auto mismatches = std::count_if(results.begin(), results.end(), [](const auto& each) {
    return each.status().code() == Code::mismatch;
  });
  EXPECT_EQ(mismatches, 1);
  for (const auto& result : results) {
    const Status& status = result.status();
    EXPECT_TRUE(mentions(status, "two processes claim one rank")) << status.message();
    if (status.code() == Code::mismatch) continue;
    EXPECT_EQ(status.code(), Code::peer_failed) << status.message();
    EXPECT_EQ(status.ranks(), std::vector<int>{1}) << status.message();
    EXPECT_TRUE(mentions(status, "rank 1 gave up joining")) << status.message();
  }
}

// spec: B8 group_name keeps jobs that share one address apart
// spec: B14 group_name is honoured
TEST(Rendezvous, GroupNamesShareAnAddress) {
  const Environment environment({});
  const std::string method = "tcp://127.0.0.1:" + std::to_string(testing::reserve_port());
  auto all = ranks_of(method, 3, true, kLong, "red");
  const auto blue = ranks_of(method, 3, true, kLong, "blue");
  all.insert(all.end(), blue.begin(), blue.end());
  const Results results = on_threads(all);
  expect_met({results.begin(), results.begin() + 3});
  expect_met({results.begin() + 3, results.end()});
  EXPECT_NE(results[0]->job, results[3]->job);
  ASSERT_TRUE(results[0]->store->set("colour", "red").ok());
  EXPECT_FALSE(*results[3]->store->check(std::vector<std::string>{"colour"}));
}

// spec: B10 init after destroy works, any number of times: the same address again and again
TEST(Rendezvous, AgainAtTheSameAddress) {
  const Environment environment({});
  const std::string method = "tcp://127.0.0.1:" + std::to_string(testing::reserve_port());
  std::vector<std::future<bool>> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.push_back(std::async(std::launch::async, [&, rank] {
      for (int round = 0; round < 10; ++round) {
        const auto joined = rendezvous({method, rank, 3, "", kLong});
        EXPECT_TRUE(joined.ok()) << joined.status().message();
        // Nobody waits for the others before it leaves: who is fast must find the next round, not
        // the last one's remains.
        if (!joined.ok()) return false;
      }
      return true;
    }));
  }
  for (auto& each : ranks) EXPECT_TRUE(each.get());
}

// spec: B9.variables env:// reads MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK
TEST(Rendezvous, Environment) {
  const std::string port = std::to_string(testing::reserve_port());
  const Environment environment(
      {{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}, {"WORLD_SIZE", "3"}});
  std::vector<std::unique_ptr<Child>> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.push_back(std::make_unique<Child>([rank] {
      ::setenv("RANK", std::to_string(rank).c_str(), 1);
      const auto joined = rendezvous({});
      return joined.ok() && joined->rank == rank && joined->world_size == 3 &&
             joined->store->barrier("end", 3).ok();
    }));
  }
  for (auto& rank : ranks) EXPECT_TRUE(rank->succeeded());
}

// spec: B9.arguments rank and world_size may be arguments; MASTER_ADDR is optional on rank 0
TEST(Rendezvous, EnvironmentWithArguments) {
  const std::string port = std::to_string(testing::reserve_port());
  const Environment environment({{"MASTER_PORT", port}});
  Child zero([] {
    const auto joined = rendezvous({"env://", 0, 2, "", kLong});
    return joined.ok() && joined->store->barrier("end", 2).ok();
  });
  Child one([] {
    ::setenv("MASTER_ADDR", "127.0.0.1", 1);
    const auto joined = rendezvous({"env://", 1, 2, "", kLong});
    return joined.ok() && joined->store->barrier("end", 2).ok();
  });
  EXPECT_TRUE(zero.succeeded());
  EXPECT_TRUE(one.succeeded());
}

// spec: W2 ranks of two jobs with one secret do not take each other's texts for those of their own,
// even if another process has put them into one store; W1 nor do they meet in one's store
TEST(Rendezvous, NamesOfJobsAreBoundIn) {
  const std::string port = std::to_string(testing::reserve_port());
  const Environment environment({{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}});
  const testing::ScratchFolder folder;
  const auto over_file = [&](int rank, const char* name) {
    ::setenv("TORCHELASTIC_RUN_ID", name, 1);
    const auto store = make_file_store(folder.file("store"), 2, kLong);
    return mentions(rendezvous_over(*store, {"", rank, 2, "", kLong}).status(),
                    "carries no proof of this job's secret");
  };
  Child mine([&] { return over_file(0, "mine"); });
  Child other([&] { return over_file(1, "other"); });
  EXPECT_TRUE(mine.succeeded());
  EXPECT_TRUE(other.succeeded());
  const auto over_tcp = [](int rank, const char* name) {
    ::setenv("TORCHELASTIC_RUN_ID", name, 1);
    return rendezvous({"env://", rank, 2, "", kLong});
  };
  Child host([&] { return over_tcp(0, "mine").ok(); });
  Child stray([&] { return over_tcp(1, "other").status().code() == Code::refused; });
  EXPECT_TRUE(stray.succeeded());
  Child rank([&] { return over_tcp(1, "mine").ok(); });
  EXPECT_TRUE(rank.succeeded());
  EXPECT_TRUE(host.succeeded());
}

// spec: W7 rank 0 without MASTER_ADDR listens on loopback and on the interface that leads to peers,
// not on all; where one is named, there
TEST(Rendezvous, RankZeroWithoutAnAddressListensWhereItIsAsked) {
  const std::string port = std::to_string(testing::reserve_port());
  const Environment environment({{"MASTER_PORT", port}});
  Child alone([] {
    const auto joined = rendezvous({"env://", 0, 1, "", kLong});
    return joined.ok() && !listens_everywhere() && listening_addresses().contains("127.0.0.1");
  });
  EXPECT_TRUE(alone.succeeded());
  Child named([] {
    ::setenv("MUSTER_SOCKET_IFNAME", "lo", 1);
    const auto joined = rendezvous({"env://", 0, 1, "", kLong});
    for (const std::string& host : listening_addresses()) {
      if (!host.starts_with("127.") && host != "::1") return false;
    }
    return joined.ok();
  });
  EXPECT_TRUE(named.succeeded());
  Child unknown([] {
    ::setenv("MUSTER_SOCKET_IFNAME", "no-such-interface", 1);
    return mentions(rendezvous({"env://", 0, 1, "", kLong}).status(), "no-such-interface");
  });
  EXPECT_TRUE(unknown.succeeded());
}

// spec: B9.named a missing or malformed variable is named
TEST(Rendezvous, EnvironmentErrorsNameTheVariable) {
  const std::map<std::string, std::string> good = {
      {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}, {"WORLD_SIZE", "2"}, {"RANK", "1"}};
  for (const auto& [name, value] : good) {
    for (const std::string& bad : {std::string(), std::string("x1")}) {
      if (name == "MASTER_ADDR" && !bad.empty()) continue;
      auto values = good;
      values[name] = bad;
      const Environment environment(values);
      const Status status = rendezvous({"env://", -1, -1, "", kShort}).status();
      EXPECT_EQ(status.code(), Code::invalid_argument) << name;
      EXPECT_TRUE(mentions(status, name)) << status.message();
      EXPECT_TRUE(bad.empty() || mentions(status, "\"x1\"")) << status.message();
    }
  }
}

using Variables = std::map<std::string, std::string>;

/// Launchers other than ours: what they tell a rank; the address of rank 0 aside, all that env://
/// needs.
struct Scheduled {
  const char* name;
  Variables shared;
  const char* rank;
};
const Scheduled kScheduled[] = {
    {"Slurm",
     {{"SLURM_NTASKS", "2"}, {"SLURM_NNODES", "1"}, {"SLURM_JOB_ID", "77"}, {"SLURM_STEP_ID", "0"}},
     "SLURM_PROCID"},
    {"Open MPI",
     {{"OMPI_COMM_WORLD_SIZE", "2"},
      {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
      {"PMIX_NAMESPACE", "1322713089"}},
     "OMPI_COMM_WORLD_RANK"},
    {"MPICH (PMI)", {{"PMI_SIZE", "2"}, {"MPI_LOCALNRANKS", "2"}}, "PMI_RANK"},
};

/// Two processes, each with the variables of its rank, meet and exchange a word.
void expect_two_meet(const Scheduled& scheduled, const Variables& more) {
  const auto body = [&](int rank) {
    return [&, rank] {
      ::setenv(scheduled.rank, std::to_string(rank).c_str(), 1);
      for (int again = 0; again < 3; ++again) {
        const auto met = rendezvous({"env://", -1, -1, "", kLong});
        if (!met || met->rank != rank || met->world_size != 2 || met->any_host) return false;
        const auto all = met->store->all_gather("words", rank, 2, std::to_string(rank));
        if (!all || *all != std::vector<std::string>{"0", "1"}) return false;
      }
      return true;
    };
  };
  auto variables = scheduled.shared;
  variables.insert(more.begin(), more.end());
  const Environment environment(variables);
  Child zero(body(0)), one(body(1));
  EXPECT_TRUE(zero.succeeded()) << scheduled.name;
  EXPECT_TRUE(one.succeeded()) << scheduled.name;
}

// spec: B9.schedulers rank and world size from srun and mpirun; the address as ever, and none
// needed where all are on this host
TEST(Rendezvous, EnvironmentOfOtherLaunchers) {
  const std::string port = std::to_string(testing::reserve_port());
  const testing::ScratchFolder folder;
  for (const Scheduled& scheduled : kScheduled) {
    expect_two_meet(scheduled, {{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}});
    expect_two_meet(scheduled, {{"MASTER_PORT", port}});
    // The ranks of MPICH are told apart by its process that has started them; there is none here.
    if (std::string(scheduled.name) != "MPICH (PMI)")
      expect_two_meet(scheduled, {{"XDG_RUNTIME_DIR", folder.path()}});
  }
}

// spec: B9 explicit variables and arguments win over those of another launcher; an address that is
// missing is asked for by name
TEST(Rendezvous, EnvironmentOfOtherLaunchersComesLast) {
  for (const Scheduled& scheduled : kScheduled) {
    auto variables = scheduled.shared;
    variables[scheduled.rank] = "1";
    variables.insert({{"WORLD_SIZE", "1"},
                      {"RANK", "0"},
                      {"MASTER_PORT", std::to_string(testing::reserve_port())}});
    {
      const Environment environment(variables);
      const auto alone = rendezvous({"env://", -1, -1, "", kLong});
      ASSERT_TRUE(alone.ok()) << alone.status().message();
      EXPECT_EQ(alone->world_size, 1);
    }
    variables.erase("MASTER_PORT");
    {
      const Environment environment(
          variables);  // numbered by others: the launcher's ranks are not the job's
      EXPECT_EQ(rendezvous({"env://", -1, -1, "", kShort}).status().code(), Code::invalid_argument);
    }
    for (const char* name :
         {"WORLD_SIZE", "RANK", "SLURM_STEP_ID", "SLURM_JOB_ID", "PMIX_NAMESPACE"})
      variables.erase(name);
    const Environment environment(variables);
    const Status status = rendezvous({"env://", -1, -1, "", kShort}).status();
    EXPECT_EQ(status.code(), Code::invalid_argument);
    const std::string started =
        std::string(scheduled.name) + " has started this process as rank 1 of 2";
    for (const std::string& part :
         {std::string("MASTER_PORT"), std::string("MASTER_ADDR"), started})
      EXPECT_TRUE(mentions(status, part)) << status.message();
  }
}

// spec: B9 under a launcher that hosts the store rank 0 is a client too, and every restart meets
// anew
TEST(Rendezvous, EnvironmentWithTheLaunchersStore) {
  TcpStoreOptions options;
  options.host = "127.0.0.1";
  options.port = 0;
  options.is_server = true;
  const auto launcher = [&] {
    const Environment environment({});
    return make_tcp_store(options);
  }();
  ASSERT_TRUE(launcher.ok());
  const std::string place = "127.0.0.1:" + std::to_string((*launcher)->port());
  for (const std::string restart : {"0", "1"}) {
    const Environment environment(
        {{"MUSTER_AGENT_STORE", place}, {"TORCHELASTIC_RESTART_COUNT", restart}});
    for (int again = 0; again < 3; ++again) expect_met(on_threads(ranks_of("env://", 3, true)));
  }
  // Somebody of an earlier restart who still waits is not taken for one of this restart.
  const Environment old({{"MUSTER_AGENT_STORE", place}, {"TORCHELASTIC_RESTART_COUNT", "1"}});
  auto left_over = std::async(std::launch::async, [] {
    return rendezvous({"env://", 0, 2, "", 2 * kInVain});
  });
  Child next([] {
    ::setenv("TORCHELASTIC_RESTART_COUNT", "2", 1);
    return rendezvous({"env://", 1, 2, "", kInVain}).status().ranks() == std::vector<int>{0};
  });
  EXPECT_TRUE(next.succeeded());
  EXPECT_EQ(left_over.get().status().ranks(), std::vector<int>{1});
}

// spec: L5 ranks of an older epoch of the job are refused by name, those that wait and those that
// come; the ranks of each epoch are a job of their own, so no link between two is accepted
TEST(Rendezvous, AnOlderEpochIsRefused) {
  TcpStoreOptions options;
  options.host = "127.0.0.1";
  options.port = 0;
  options.is_server = true;
  const auto launcher = [&] {
    const std::map<std::string, std::string> run{{"TORCHELASTIC_RUN_ID", "job"}};
    const Environment environment(run);
    return make_tcp_store(options);
  }();
  ASSERT_TRUE(launcher.ok());
  const std::string record = epoch_record("job");
  auto commit = [&, revision = std::int64_t{0}](const std::string& epoch) mutable {
    auto connection = (*launcher)->connect(steady_clock().now() + kLong);
    ASSERT_TRUE(connection.ok());
    const Reply reply = (*connection)
                            ->exchange({.op = StoreOp::commit,
                                        .number = revision,
                                        .keys = {record},
                                        .values = {epoch, "record"}},
                                       steady_clock().now() + kLong);
    ASSERT_TRUE(reply.status.ok()) << reply.status.message();
    revision = reply.number;
  };
  const auto environment_of = [&](const std::string& epoch) {
    return std::map<std::string, std::string>{
        {"MUSTER_AGENT_STORE", "127.0.0.1:" + std::to_string((*launcher)->port())},
        {"TORCHELASTIC_RUN_ID", "job"},
        {"MUSTER_EPOCH", epoch}};
  };
  const auto refused = [](const Status& status) {
    EXPECT_EQ(status.code(), Code::refused) << status.message();
    EXPECT_TRUE(mentions(status, "epoch 1") && mentions(status, "epoch 2")) << status.message();
  };
  commit("1");
  std::string first_job;
  {
    const Environment environment(environment_of("1"));
    const auto met = on_threads(ranks_of("env://", 2, true));
    expect_met(met);
    first_job = met.front()->job;
    auto left_over = std::async(std::launch::async, [] {
      return rendezvous({"env://", 0, 2, "", kLong});
    });
    // The commit may also come before it asks: then it is refused at the door.
    left_over.wait_for(milliseconds(50));
    commit("2");
    refused(left_over.get().status());
    refused(rendezvous({"env://", 1, 2, "", kLong}).status());
    refused(met.front()->store->set("key", "value"));
  }
  const Environment environment(environment_of("2"));
  const auto met = on_threads(ranks_of("env://", 2, true));
  expect_met(met);
  EXPECT_NE(met.front()->job, first_job);
}

// A rank that is killed while the others wait for the last one is named at once, not at the
// deadline; B1 killed inside init
TEST(Rendezvous, NamesARankKilledInside) {
  const Environment environment({});
  const std::string method = "tcp://127.0.0.1:" + std::to_string(testing::reserve_port());
  auto zero = std::async(std::launch::async, [&] { return rendezvous({method, 0, 4, "", kLong}); });
  // Whether the victim was inside already when it was killed shows in what rank 0 learns; if it was
  // not, the next one gets more time.
  for (Duration time = milliseconds(50);
       zero.wait_for(milliseconds(200)) != std::future_status::ready; time *= 2) {
    Child victim([&] { return rendezvous({method, 2, 4, "", kLong}).ok(); });
    zero.wait_for(time);
    victim.kill();
  }
  const Status status = zero.get().status();
  EXPECT_EQ(status.code(), Code::peer_failed) << status.message();
  EXPECT_EQ(status.ranks(), std::vector<int>{2}) << status.message();
}

// ThreadSanitizer starts no threads in a child of a process with several.
#if !defined(__SANITIZE_THREAD__)
// spec: B1 rank 0, which hosts the store, killed while others are inside with it: they do not wait
// for another one
TEST(Rendezvous, NamesRankZeroKilledInside) {
  const Environment environment({});
  const std::string method = "tcp://127.0.0.1:" + std::to_string(testing::reserve_port());
  auto one = std::async(std::launch::async, [&] { return rendezvous({method, 1, 3, "", kLong}); });
  // As above: where rank 1 had not come in yet when rank 0 was killed, the next rank 0 gets more
  // time.
  for (Duration time = milliseconds(50);
       one.wait_for(milliseconds(200)) != std::future_status::ready; time *= 2) {
    Child zero([&] { return rendezvous({method, 0, 3, "", kLong}).ok(); });
    one.wait_for(time);
    zero.kill();
  }
  const Status status = one.get().status();
  EXPECT_EQ(status.code(), Code::peer_failed) << status.message();
  EXPECT_EQ(status.ranks(), std::vector<int>{0}) << status.message();
  EXPECT_TRUE(mentions(status, "rank 0")) << status.message();
}
#endif

// spec: B1 killed after it has joined: the next meeting of all ranks names it at once
TEST(Rendezvous, NamesARankKilledAfterwards) {
  const Environment environment({});
  const std::string method = "tcp://127.0.0.1:" + std::to_string(testing::reserve_port());
  int joined[2];
  ASSERT_EQ(::pipe(joined), 0);
  Child victim([&] {
    const auto mine = rendezvous({method, 1, 3, "", kLong});
    return ::write(joined[1], "x", 1) == 1 && mine.ok() && mine->store->get("never", kLong).ok();
  });
  const Results others = on_threads({{method, 0, 3, "", kLong}, {method, 2, 3, "", kLong}});
  for (const auto& result : others) ASSERT_TRUE(result.ok()) << result.status().message();
  auto waiting = std::async(std::launch::async, [&] {
    return others[0]->store->all_gather("meeting", 0, 3, "zero", kLong);
  });
  char byte;
  ASSERT_EQ(::read(joined[0], &byte, 1), 1);
  victim.kill();
  EXPECT_EQ(waiting.get().status().ranks(), std::vector<int>{1});
  const Status later = others[1]->store->all_gather("meeting", 2, 3, "two", kLong).status();
  EXPECT_EQ(later.code(), Code::peer_failed) << later.message();
  EXPECT_EQ(later.ranks(), std::vector<int>{1}) << later.message();
}

// spec: B1 rank 0, which hosts the store, killed while the others join: named
TEST(Rendezvous, NamesRankZeroKilledAfterwards) {
  const Environment environment({});
  const std::string method = "tcp://127.0.0.1:" + std::to_string(testing::reserve_port());
  Child zero([&] {
    const auto mine = rendezvous({method, 0, 2, "", kLong});
    return mine.ok() && mine->store->get("never", kLong).ok();
  });
  const auto mine = rendezvous({method, 1, 2, "", kLong});
  ASSERT_TRUE(mine.ok()) << mine.status().message();
  zero.kill();
  const Status status = mine->store->all_gather("meeting", 1, 2, "one", kLong).status();
  EXPECT_EQ(status.ranks(), std::vector<int>{0}) << status.message();
  EXPECT_TRUE(mentions(status, "rank 0")) << status.message();
}

}  // namespace
}  // namespace muster::store
