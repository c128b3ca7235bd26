// SPDX-License-Identifier: BSD-3-Clause
// Fuzzers of the small languages of the launcher's options.

#include <gtest/gtest.h>

#include <string>

#include "jobs/launch/hosts/host_list.h"
#include "jobs/launch/node/join_door.h"
#include "jobs/launch/options.h"
#include "testing/fuzz.h"

namespace muster::launch {
namespace {

using testing::Fuzz;

// Malformed options are refused in words, whatever they are
TEST(OptionsFuzz, TextsAreReadOrRefused) {
  Fuzz fuzz(1);
  constexpr int kWorkers = 4;
  for (testing::FuzzRun run(3000); run.goes_on();) {
    const auto text = [&](const std::string& sample) {
      return fuzz.one_in(3) ? fuzz.babble(20, "0123456789:,-[]. abcpugto") : fuzz.damaged(sample);
    };
    const auto nodes = parse_nodes(text("4:4"));
    EXPECT_TRUE(nodes.ok() ? nodes->least > 0 && nodes->least <= nodes->most
                           : !nodes.status().message().empty());
    const auto workers = parse_workers(text("8"));
    EXPECT_TRUE(workers.ok() ? *workers > 0 : !workers.status().message().empty());
    const auto streams = parse_streams("--tee", text("0:1,1:2,3:3"), kWorkers);
    EXPECT_TRUE(streams.ok() ? streams->size() == kWorkers : !streams.status().message().empty());
    const auto ranks = parse_rank_set("--local-ranks-filter", text("0,2,3"), kWorkers);
    if (ranks.ok()) {
      for (const int rank : *ranks) EXPECT_TRUE(rank >= 0 && rank < kWorkers) << rank;
    }
    const auto endpoint =
        parse_endpoint("--rdzv-endpoint", text(fuzz.one_in(2) ? "node1:29400" : "[::1]:29400"));
    EXPECT_TRUE(endpoint.ok() ? !endpoint->host.empty() : !endpoint.status().message().empty());
  }
}

// spec: V5.refusal lists of machines are read, or refused in words
TEST(HostsFuzz, ListsAreReadOrRefused) {
  Fuzz fuzz(2);
  for (testing::FuzzRun run(3000); run.goes_on();) {
    const auto text = [&](const std::string& sample) {
      return fuzz.one_in(3) ? fuzz.babble(20, "ab@:,-[]. 0149#=slot\n") : fuzz.damaged(sample);
    };
    for (const auto& hosts : {parse_hosts(text("a,me@b:4,[::1]:2,fe80::1")),
                              parse_host_lines(text("a slots=4 # one\nb:2\n[::1]\n"), "f")}) {
      EXPECT_TRUE(hosts.ok() ? !hosts->empty() : !hosts.status().message().empty());
      for (std::size_t i = 0; hosts.ok() && i < hosts->size(); ++i) {
        EXPECT_FALSE((*hosts)[i].name().empty());
        EXPECT_FALSE((*hosts)[i].destination.starts_with("-"));
        EXPECT_GT((*hosts)[i].workers.value_or(1), 0);
      }
    }
  }
}

// spec: V5.refusal tokens and what is behind them are read, or refused in words
TEST(JoinFuzz, RecordsAreReadOrRefused) {
  Fuzz fuzz(3);
  const JoinToken token{{"10.0.0.1", 4711}, "0123456789abcdef0123456789abcdef"};
  const std::string record = encode(JoinFacts{{}, {"10.0.0.1", 29400}, "job7", {2, 4}});
  for (testing::FuzzRun run(3000); run.goes_on();) {
    const auto parsed = parse_join_token(fuzz.damaged(token.text()));
    EXPECT_TRUE(parsed.ok() ? parsed->key == token.key : !parsed.status().message().empty());
    const auto facts = parse_join_facts(fuzz.damaged(record));
    EXPECT_TRUE(facts.ok() ? facts->nodes.least >= 1 : !facts.status().message().empty());
  }
}

}  // namespace
}  // namespace muster::launch
