// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "faces/cli/testing/launched.h"

namespace muster::cli::testing {
namespace {

/// In the torch-free builds, whose bench says so.
bool is_engine_alone(const Outcome& outcome) {
  return contains(outcome.err, "times the engine alone, below the tensors");
}

TEST(Bench, MeasuresEveryOperationAndWritesARowOfEach) {
  Fifo scratch;  // for its folder
  const std::string json = scratch.folder() + "/rows.json";
  const std::string ops =
      "broadcast,all_reduce,reduce,all_gather,gather,scatter,reduce_scatter,all_to_all,barrier";
  const Outcome outcome = run({"bench", "--op", ops, "--sizes", "8,1KiB", "--ranks", "2,3",
                               "--seconds", "0.01", "--memory", "arena", "--json", json});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const std::string rows = contents(json);
  EXPECT_EQ(count_of(rows, "\n"), 2 * (8 * 2 + 1));
  EXPECT_EQ(count_of(rows, "\"op\":\"reduce_scatter\",\"ranks\":3,\"bytes\":1024"), 1);
  EXPECT_EQ(count_of(rows, "\"op\":\"barrier\""), 2);
  std::filesystem::remove(json);
}

TEST(Bench, RefusesAnElementTypeThatDoesNotExistAndNamesThoseThatDo) {
  const Outcome outcome = run({"bench", "--dtype", "float33", "--seconds", "0.01"});
  EXPECT_NE(outcome.code, 0);
  EXPECT_TRUE(outcome.out.empty()) << outcome.out;
  for (const char* word : {"--dtype", "float33", "float32", "bfloat16", "complex128"})
    EXPECT_NE(outcome.err.find(word), std::string::npos) << word << ": " << outcome.err;
}

TEST(Bench, RunsEveryElementType) {
  for (const char* dtype : {"bool", "bfloat16", "int16", "complex128"}) {
    const Outcome outcome = run({"bench", "--dtype", dtype, "--sizes", "64", "--seconds", "0.01"});
    EXPECT_EQ(outcome.code, 0) << dtype << ": " << outcome.err;
    EXPECT_TRUE(outcome.err.empty() || is_engine_alone(outcome)) << dtype << ": " << outcome.err;
  }
}

TEST(Bench, RunsOverTcpToo) {
  const Outcome outcome = run({"bench", "--sizes", "8", "--seconds", "0.01", "--transport", "tcp"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(count_of(outcome.out, "all_reduce"), 1);
}

TEST(Bench, MeasuresMessages) {
  const Outcome outcome = run({"bench", "--op", "ping_pong", "--sizes", "8", "--seconds", "0.01"});
  EXPECT_EQ(count_of(outcome.out, "ping_pong"), 1) << outcome.out;
  if (is_engine_alone(outcome)) {
    EXPECT_EQ(outcome.code, 1) << "nothing is measured";
    EXPECT_TRUE(contains(outcome.err, "the engine has no ping_pong")) << outcome.err;
  } else {
    EXPECT_EQ(outcome.code, 0) << outcome.err;
  }
}

// Options that compare with other libraries, or predict, belong to muster-lab, which is not
// installed.
TEST(Bench, HasNoOptionOfTheLaboratory) {
  for (const char* option : {"--vs=gloo", "--plot=picture.svg", "--simulate", "hosts", "ddp"}) {
    const Outcome outcome = run({"bench", option});
    EXPECT_EQ(outcome.code, 2) << option;
    EXPECT_TRUE(outcome.out.empty()) << outcome.out;
  }
}

TEST(Bench, KnowsTheOtherNamesOfTransportsAndMemories) {
  Fifo scratch;  // for its folder
  const std::string json = scratch.folder() + "/rows.json";
  const Outcome outcome = run({"bench", "--sizes", "8", "--seconds", "0.01", "--transport", "auto",
                               "--memory", "shared", "--json", json});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(count_of(contents(json), "\"memory\":\"arena\",\"transport\":\"shm\""), 1)
      << contents(json);
  std::filesystem::remove(json);
}

TEST(Bench, OneMemoryIsEnoughToFindOutWhichAlgorithmIsFaster) {
  const Outcome outcome = run({"bench", "--check-selection", "--memory", "private,arena"});
  EXPECT_NE(outcome.code, 0);
  EXPECT_EQ(count_of(outcome.err, "take one --memory"), 1) << outcome.err;
}

TEST(Bench, NamesWhatItDoesNotKnow) {
  const Outcome outcome = run({"bench", "--op", "all_reduction"});
  EXPECT_NE(outcome.code, 0);
  EXPECT_NE((outcome.out + outcome.err).find("all_reduction"), std::string::npos);
}

}  // namespace
}  // namespace muster::cli::testing
