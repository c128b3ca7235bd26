// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "faces/cli/testing/launched.h"

namespace muster::lab {
namespace {

using cli::testing::contents;
using cli::testing::count_of;
using cli::testing::Fifo;
using cli::testing::Launched;
using cli::testing::Outcome;
using cli::testing::run;

/// A library whose figures are known: rank processes that answer every cell with 1000 us, and end
/// without a word at sizes above `limit`.
Launched::Variables known_library(const std::string& folder, int limit) {
  std::ofstream(folder + "/gloo_worker.py") << "";
  const std::string python = folder + "/python";
  std::ofstream(python) << "#!/bin/sh\n"
                           "[ \"$1\" = -c ] && exit 0\n"
                           "exec 3> $5/back\n"
                           "while read kind op bytes rest; do\n"
                           "  [ $kind = quit ] && exit 0\n"
                           "  [ $bytes -gt "
                        << limit
                        << " ] && echo the library is out of memory && exit 3\n"
                           "  echo row 1000 1000 1000 1000 5 >&3\n"
                           "done < $5/to-0\n";
  std::filesystem::permissions(python, std::filesystem::perms::owner_all);
  return {{"MUSTER_PYTHON", python}, {"MUSTER_BENCH_DIR", folder}};
}

TEST(Lab, MeasuresLibrariesInTheSameRunAndComparesThem) {
  Fifo scratch;
  const std::string folder = scratch.folder(), json = folder + "/rows.json",
                    picture = folder + "/picture.svg";
  const Outcome outcome = run({"--vs", "gloo", "--sizes", "8,64", "--seconds", "0.01", "--rounds",
                               "2", "--json", json, "--plot", picture},
                              known_library(folder, 8));
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
      << "of the cell at which the library ended: " << rows;
  EXPECT_EQ(count_of(outcome.err, "the library is out of memory"), 1) << outcome.err;
  EXPECT_EQ(count_of(contents(picture), "<polyline"), 2);
  for (const char* name : {"/rows.json", "/picture.svg", "/python", "/gloo_worker.py"})
    std::filesystem::remove(folder + name);
}

TEST(Lab, MeasuresSeveralMemoriesBesideOneMeasurementOfAnotherLibrary) {
  Fifo scratch;
  const std::string folder = scratch.folder(), json = folder + "/rows.json";
  const Outcome outcome = run({"--vs", "gloo", "--sizes", "64KiB", "--seconds", "0.01", "--rounds",
                               "1", "--memory", "private,shared", "--json", json},
                              known_library(folder, 1 << 20));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  const std::string rows = contents(json);
  EXPECT_EQ(count_of(rows, "\"library\":\"muster\""), 2) << rows;
  EXPECT_EQ(count_of(rows, "\"memory\":\"arena\",\"transport\":\"shm\""), 1) << rows;
  EXPECT_EQ(count_of(rows, "\"library\":\"gloo\""), 1) << rows;
  EXPECT_EQ(count_of(rows, "\"ratio_to_best\":null"), 0) << rows;
  for (const char* name : {"/rows.json", "/python", "/gloo_worker.py"})
    std::filesystem::remove(folder + name);
}

TEST(Lab, SimulatesPieces) {
  const Outcome outcome =
      run({"--simulate", "--op", "gather,scatter", "--ranks", "8,1000", "--bytes", "1KiB,64MiB"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(count_of(outcome.out, "| picks tree"), 2) << outcome.out;
  EXPECT_EQ(count_of(outcome.out, "| picks direct"), 6) << outcome.out;
  EXPECT_EQ(count_of(outcome.out, "| tree - |"), 4) << "too large for it: " << outcome.out;
}

TEST(Lab, SimulatesGroupsOfEverySize) {
  Fifo scratch;
  const std::string json = scratch.folder() + "/rows.json";
  const Outcome outcome = run({"--simulate", "--op", "all_reduce,broadcast", "--ranks", "8,100000",
                               "--ranks-per-host", "8", "--bytes", "8,64MiB", "--json", json});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(count_of(outcome.out, "\n"), 8) << outcome.out;
  EXPECT_EQ(count_of(outcome.out, "12500 hosts"), 4) << outcome.out;
  EXPECT_EQ(count_of(outcome.out, "ring (model)"), 4) << outcome.out;
  EXPECT_EQ(count_of(outcome.out, "| picks bruck"), 2) << outcome.out;
  EXPECT_EQ(count_of(contents(json), "\"selected\":true"), 8);
  EXPECT_EQ(count_of(contents(json), "\"algorithm\":\"chain\""), 4);
  std::filesystem::remove(json);
}

// The time of a meeting of 1,000 replicas on 50 sites, played beside the model's.
TEST(Lab, PlaysBesideTheModel) {
  const auto command = [](const char* ranks, const char* hosts) {
    return std::vector<std::string>{"--simulate",      "--play", "--op",         "all_reduce",
                                    "--ranks",         ranks,    "--hosts",      hosts,
                                    "--bytes",         "64MiB",  "--latency-us", "50000",
                                    "--bandwidth-gbs", "0.125"};
  };
  const Outcome outcome = run(command("1000", "50"));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(count_of(outcome.out, ", played "), 1) << outcome.out;
  EXPECT_EQ(count_of(outcome.out, " of the model"), 1) << outcome.out;
  const std::string few = run(command("40", "2")).out;
  EXPECT_EQ(count_of(few, " of the model"), 1) << few;
  EXPECT_EQ(run(command("40", "2")).out, few) << "the same in every run";
  const std::string alone = run(command("1", "1")).out;
  EXPECT_EQ(count_of(alone, ", played "), 1) << alone;
  EXPECT_EQ(count_of(alone, "nan"), 0) << alone;
}

TEST(Lab, RefusesWhatItCannotPredictOrStart) {
  const Outcome large = run({"--simulate", "--play", "--ranks", "100000"});
  EXPECT_EQ(large.code, 1);
  EXPECT_EQ(count_of(large.err, "--play is for at most 4096 ranks"), 1) << large.err;
  EXPECT_EQ(run({"--hosts", "3"}).code, 2);
  const Outcome uneven = run({"--simulate", "--ranks", "9,100", "--hosts", "3"});
  EXPECT_EQ(uneven.code, 1);
  EXPECT_EQ(count_of(uneven.err, "100 ranks do not stand evenly on 3 hosts"), 1) << uneven.err;
  const Outcome many = run({"--ranks", "1000"});
  EXPECT_EQ(many.code, 2);
  EXPECT_EQ(count_of(many.err, "--simulate predicts larger groups"), 1) << many.err;
}

}  // namespace
}  // namespace muster::lab
