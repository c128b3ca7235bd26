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

/// A rival whose figures are known: rank processes that answer every cell with 1000 us, and end
/// without a word at sizes above `limit`.
Launched::Variables rival(const std::string& folder, int limit) {
  std::ofstream(folder + "/gloo_worker.py") << "";
  const std::string python = folder + "/python";
  std::ofstream(python) << "#!/bin/sh\n"
                           "[ \"$1\" = -c ] && exit 0\n"
                           "exec 3> $5/back\n"
                           "while read kind op bytes rest; do\n"
                           "  [ $kind = quit ] && exit 0\n"
                           "  [ $bytes -gt "
                        << limit
                        << " ] && echo the rival is out of memory && exit 3\n"
                           "  echo row 1000 1000 1000 1000 5 >&3\n"
                           "done < $5/to-0\n";
  std::filesystem::permissions(python, std::filesystem::perms::owner_all);
  return {{"MUSTER_PYTHON", python}, {"MUSTER_BENCH_DIR", folder}};
}

TEST(Bench, MeasuresRivalsInTheSameRunAndComparesWithThem) {
  Fifo scratch;
  const std::string folder = scratch.folder(), json = folder + "/rows.json",
                    picture = folder + "/picture.svg";
  const Outcome outcome = run({"bench", "--vs", "gloo", "--sizes", "8,64", "--seconds", "0.01",
                               "--rounds", "2", "--json", json, "--plot", picture},
                              rival(folder, 8));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const std::string rows = contents(json);
  EXPECT_EQ(count_of(rows, "\"library\":\"muster\""), 2);
  EXPECT_EQ(count_of(rows, "\"library\":\"gloo\",\"op\":\"all_reduce\",\"ranks\":2,\"bytes\":8,"),
            1)
      << rows;
  EXPECT_EQ(count_of(rows, "\"memory\":\"private\",\"transport\":\"tcp\""), 1)
      << "Gloo's way within a host: " << rows;
  EXPECT_EQ(count_of(rows, "\"loop_us\":1000.0000"), 1) << rows;
  EXPECT_EQ(count_of(rows, "\"ratio_to_best\":null"), 1)
      << "of the cell at which the rival ended: " << rows;
  EXPECT_EQ(count_of(outcome.err, "the rival is out of memory"), 1) << outcome.err;
  EXPECT_EQ(count_of(contents(picture), "<polyline"), 2);
  for (const char* name : {"/rows.json", "/picture.svg", "/python", "/gloo_worker.py"})
    std::filesystem::remove(folder + name);
}

TEST(Bench, MeasuresMessagesByTheWordOrByTheOperation) {
  for (const char* word : {"p2p", "--op=ping_pong"}) {
    const Outcome outcome = run({"bench", word, "--sizes", "8", "--seconds", "0.01"});
    EXPECT_EQ(count_of(outcome.out, "ping_pong"), 1) << outcome.out;
    if (is_engine_alone(outcome)) {
      EXPECT_EQ(outcome.code, 1) << "nothing is measured";
      EXPECT_TRUE(contains(outcome.err, "the engine has no ping_pong")) << outcome.err;
    } else {
      EXPECT_EQ(outcome.code, 0) << outcome.err;
    }
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

TEST(Bench, MeasuresSeveralMemoriesBesideOneMeasurementOfARival) {
  Fifo scratch;
  const std::string folder = scratch.folder(), json = folder + "/rows.json";
  const Outcome outcome = run({"bench", "--vs", "gloo", "--sizes", "64KiB", "--seconds", "0.01",
                               "--rounds", "1", "--memory", "private,shared", "--json", json},
                              rival(folder, 1 << 20));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const std::string rows = contents(json);
  EXPECT_EQ(count_of(rows, "\"library\":\"muster\""), 2) << rows;
  EXPECT_EQ(count_of(rows, "\"memory\":\"arena\",\"transport\":\"shm\""), 1) << rows;
  EXPECT_EQ(count_of(rows, "\"library\":\"gloo\""), 1) << rows;
  EXPECT_EQ(count_of(rows, "\"ratio_to_best\":null"), 0) << rows;
  for (const char* name : {"/rows.json", "/python", "/gloo_worker.py"})
    std::filesystem::remove(folder + name);
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
