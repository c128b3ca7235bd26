// SPDX-License-Identifier: BSD-3-Clause
// `muster run --metrics` as a real process, with ranks that write traces.
#include "faces/cli/metrics/metrics.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <map>
#include <sstream>
#include <string>

#include "faces/cli/metrics/families.h"
#include "faces/cli/testing/http_peer.h"
#include "faces/cli/testing/launched.h"
#include "testing/scratch_folder.h"

namespace muster::cli::testing {
namespace {

using muster::testing::ScratchFolder;

const std::string kMetricsSecret = "muster run tests: 0123456789abcdef, long enough?";

const char* const kNoPrometheus = "built without prometheus-cpp (tools/setup installs it)";

/// {series with its labels: value}.
std::map<std::string, double> series_of(const std::string& page) {
  std::map<std::string, double> series;
  std::istringstream lines(page);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t space = line.rfind(' ');
    if (!line.starts_with("#") && space != std::string::npos)
      series[line.substr(0, space)] = std::strtod(line.c_str() + space, nullptr);
  }
  return series;
}

std::string url_in(const std::string& text) {
  const std::size_t begin = text.find("http://");
  return begin == std::string::npos ? std::string()
                                    : text.substr(begin, text.find('\n', begin) - begin);
}

// spec: V7 a node's calls, bytes, seconds, queue, memory and restarts, from its launcher
TEST(RunMetrics, ShowsTheCallsOfAllRanks) {
  if (MUSTER_PROMETHEUS == 0) GTEST_SKIP() << kNoPrometheus;
  const ScratchFolder folder;
  Launched launched(run_words(2, {"--rdzv-id", "job7", "--metrics", "0", kWorker, "calls", "3000"}),
                    {{"MUSTER_RUN_DIR", folder.file("run")}});
  ASSERT_TRUE(launched.wait_for_error("/metrics\n"));
  ASSERT_TRUE(launched.wait_for_output("ready", 2));
  const std::string url = url_in(launched.take_error());
  EXPECT_TRUE(url.starts_with("http://127.0.0.1:")) << url;
  const std::string page = fetch_page(url);
  auto series = series_of(page);
  for (const std::string rank : {"0", "1"}) {
    const std::string of = "{rank=\"" + rank + "\",group=\"default\",operation=\"all_reduce\"";
    EXPECT_NEAR(series["muster_calls_total" + of + "}"], 3000, 1e-6) << page;
    EXPECT_NEAR(series["muster_call_io_bytes_total" + of + "}"], 24000, 1e-6);
    EXPECT_GT(series["muster_call_time_seconds_total" + of + ",state=\"moving\"}"] +
                  series["muster_call_time_seconds_total" + of + ",state=\"waiting\"}"] +
                  series["muster_call_time_seconds_total" + of + ",state=\"unattributed\"}"],
              0);
    EXPECT_EQ(series["muster_calls_in_flight{rank=\"" + rank + "\",group=\"default\"}"], 1);
    EXPECT_GT(series["muster_call_age_seconds{rank=\"" + rank + "\"}"], 0);
    EXPECT_EQ(series["muster_rank_up{rank=\"" + rank + "\"}"], 1);
    EXPECT_GT(series["process_memory_usage_bytes{rank=\"" + rank + "\"}"], 1 << 16);
    EXPECT_EQ(series.count("muster_rank_behind_seconds{rank=\"" + rank + "\"}"), 1u);
  }
  EXPECT_EQ(series["muster_job_ranks"], 2);
  EXPECT_EQ(series["muster_job_restarts_total"], 0);
  EXPECT_EQ(series.count("muster_store_connections_refused_total"), 1u);
  EXPECT_TRUE(contains(page, "service_instance_id=\"job7\"")) << page;
  launched.signal(SIGTERM);
  launched.finish();
}

// spec: V7 a rank that waits for the next epoch of its job is up
TEST(RunMetrics, ARankBetweenEpochsIsUp) {
  if (MUSTER_PROMETHEUS == 0) GTEST_SKIP() << kNoPrometheus;
  trace::JobTrace job;
  for (const trace::Life life :
       {trace::Life::running, trace::Life::left, trace::Life::stopped, trace::Life::gone}) {
    trace::RankTrace one;
    one.rank = static_cast<int>(job.ranks.size());
    one.life = life;
    job.ranks.push_back(one);
  }
  const CallTotals totals;
  NodeSample sample;
  sample.job = &job;
  sample.totals = &totals;
  auto series = series_of(metrics_text(sample));
  EXPECT_EQ(series["muster_rank_up{rank=\"0\"}"], 1);
  EXPECT_EQ(series["muster_rank_up{rank=\"1\"}"], 1);
  for (const std::string rank : {"2", "3"}) {
    EXPECT_EQ(series.count("muster_rank_up{rank=\"" + rank + "\"}"), 1u);
    EXPECT_EQ(series["muster_rank_up{rank=\"" + rank + "\"}"], 0);
  }
}

// spec: V7 restarts and failures are counted, and the calls of a rank go on counting
TEST(RunMetrics, CountsOverARestart) {
  if (MUSTER_PROMETHEUS == 0) GTEST_SKIP() << kNoPrometheus;
  const ScratchFolder folder;
  const std::string script =
      "test $TORCHELASTIC_RESTART_COUNT = 0 && exit 3; exec " + kWorker + " calls 10";
  Launched launched(shell(1, script, {"--max-restarts", "1", "--metrics", "0"}),
                    {{"MUSTER_RUN_DIR", folder.file("run")}});
  ASSERT_TRUE(launched.wait_for_error("/metrics\n"));
  ASSERT_TRUE(launched.wait_for_output("ready"));
  auto series = series_of(fetch_page(url_in(launched.take_error())));
  EXPECT_EQ(series["muster_job_restarts_total"], 1);
  EXPECT_EQ(series["muster_worker_failures_total"], 1);
  EXPECT_EQ(series["muster_calls_total{rank=\"0\",group=\"default\",operation=\"all_reduce\"}"],
            10);
  launched.signal(SIGTERM);
  launched.finish();
}

// spec: V7 beyond loopback the token of the observers' key opens the page; W7 without a secret
// nothing listens there
TEST(RunMetrics, BeyondLoopbackNeedsTheToken) {
  if (MUSTER_PROMETHEUS == 0) GTEST_SKIP() << kNoPrometheus;
  const auto open = run(shell(1, "true", {"--metrics", "0.0.0.0:0"}));
  EXPECT_EQ(open.code, 1);
  EXPECT_TRUE(contains(open.err, "MUSTER_SECRET")) << open.err;

  const Launched::Variables secret = {{"MUSTER_SECRET", kMetricsSecret}};
  const std::string token = run({"secret", "--metrics"}, secret).out;
  EXPECT_TRUE(token.starts_with("muster-metrics-")) << token;
  EXPECT_FALSE(contains(token, kMetricsSecret));

  Launched launched(shell(1, "echo ready; exec sleep infinity", {"--metrics", "0.0.0.0:0"}),
                    secret);
  ASSERT_TRUE(launched.wait_for_error("/metrics\n"));
  ASSERT_TRUE(launched.wait_for_output("ready"));
  std::string url = url_in(launched.take_error());
  url.replace(7, 7, "127.0.0.1");
  HttpPeer peer(url);
  peer.send("GET /metrics HTTP/1.1\r\n\r\n");
  EXPECT_TRUE(peer.read_to_end().starts_with("HTTP/1.1 401"));
  const std::string page =
      fetch_page(url, "Authorization: Bearer " + token.substr(0, token.size() - 1) + "\r\n");
  EXPECT_TRUE(contains(page, "muster_job_ranks 1")) << page;
  launched.signal(SIGTERM);
  launched.finish();
}

// spec: V7 the observers' key makes the same token as the secret
TEST(RunMetrics, TheTokenIsOfTheObserversKey) {
  const Launched::Variables secret = {{"MUSTER_SECRET", kMetricsSecret}};
  std::string key = run({"secret", "--observer"}, secret).out;
  key.pop_back();
  EXPECT_EQ(run({"secret", "--metrics"}, {{"MUSTER_SECRET", key}}).out,
            run({"secret", "--metrics"}, secret).out);
  const auto none = run({"secret", "--metrics"});
  EXPECT_EQ(none.code, 1);
  EXPECT_TRUE(contains(none.err, "MUSTER_SECRET")) << none.err;
  EXPECT_EQ(run({"secret", "--metrics", "--observer"}, secret).code, 2);
}

// spec: V7 loopback unless an address is given
TEST(RunMetrics, AddressesAreNumeric) {
  for (const auto& [text, expected] :
       std::map<std::string, std::string>{{"9464", "127.0.0.1:9464"},
                                          {"localhost:9464", "127.0.0.1:9464"},
                                          {"0.0.0.0:1", "0.0.0.0:1"},
                                          {"[::1]:9464", "[::1]:9464"}}) {
    const auto address = parse_metrics_address(text);
    ASSERT_TRUE(address.ok()) << address.status().message();
    EXPECT_EQ(address->text(), expected);
  }
  for (const std::string text : {"", "70000", "node0:9464", "127.0.0.1", ":", "1.2.3:x"}) {
    const auto refused = parse_metrics_address(text);
    ASSERT_FALSE(refused.ok()) << text;
    EXPECT_TRUE(contains(refused.status().message(), "--metrics")) << refused.status().message();
  }
  EXPECT_EQ(run(shell(1, "true", {"--metrics", "node0:9464"})).code, 2);
}

}  // namespace
}  // namespace muster::cli::testing
