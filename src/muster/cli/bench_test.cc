#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "muster/cli/launched.h"

namespace muster::cli::testing {
namespace {

TEST(Bench, MeasuresEveryOperationAndWritesARowOfEach) {
  Fifo scratch;  // for its folder
  const std::string json = scratch.folder() + "/rows.json";
  const std::string ops = "broadcast,all_reduce,reduce,all_gather,gather,scatter,reduce_scatter,all_to_all,barrier";
  const Outcome outcome =
      run({"bench", "--op", ops, "--sizes", "8,1KiB", "--ranks", "2,3", "--seconds", "0.01", "--memory", "arena", "--json", json});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const std::string rows = contents(json);
  EXPECT_EQ(count_of(rows, "\n"), 2 * (8 * 2 + 1));
  EXPECT_EQ(count_of(rows, "\"op\":\"reduce_scatter\",\"ranks\":3,\"bytes\":1024"), 1);
  EXPECT_EQ(count_of(rows, "\"op\":\"barrier\""), 2);
  std::filesystem::remove(json);
}

TEST(Bench, RunsOverTcpToo) {
  const Outcome outcome = run({"bench", "--sizes", "8", "--seconds", "0.01", "--transport", "tcp"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(count_of(outcome.out, "all_reduce"), 1);
}

TEST(Bench, NamesWhatItDoesNotKnow) {
  const Outcome outcome = run({"bench", "--op", "all_reduction"});
  EXPECT_NE(outcome.code, 0);
  EXPECT_NE((outcome.out + outcome.err).find("all_reduction"), std::string::npos);
}

}  // namespace
}  // namespace muster::cli::testing
