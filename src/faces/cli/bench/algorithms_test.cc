// SPDX-License-Identifier: BSD-3-Clause
// The tuning and the check of the selection: their arithmetic here, their command in a process.
#include "faces/cli/bench/algorithms.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "faces/cli/testing/launched.h"

namespace muster::cli::bench {
namespace {

using collective::Algorithm;
using collective::Medium;
using collective::Op;
using collective::Selection;
using testing::contents;
using testing::count_of;
using testing::Outcome;
using testing::run;
using Rule = std::vector<collective::Tuning::SizeLimit>;

constexpr Algorithm kTwo[] = {Algorithm::bruck, Algorithm::slices};
constexpr Algorithm kThree[] = {Algorithm::bruck, Algorithm::direct, Algorithm::ring};

TEST(Fit, PutsTheBorderWhereTheFasterOneChanges) {
  const std::vector<AlgorithmTimes> measurements = {
      {1024, {{Algorithm::bruck, 1}, {Algorithm::slices, 2}}},
      {4096, {{Algorithm::bruck, 2}, {Algorithm::slices, 3}}},
      {16384, {{Algorithm::bruck, 9}, {Algorithm::slices, 4}}}};
  EXPECT_EQ(fit(kTwo, measurements), (Rule{{Algorithm::bruck, 8192}, {Algorithm::slices}}));
  EXPECT_EQ(fit(kTwo, {measurements[0]}), (Rule{{Algorithm::bruck}}));
  EXPECT_EQ(fit(kTwo, {measurements[2]}), (Rule{{Algorithm::slices}}));
}

TEST(Fit, OneOddLapDoesNotMoveIt) {
  const std::vector<AlgorithmTimes> measurements = {
      {1, {{Algorithm::bruck, 1}, {Algorithm::slices, 4}}},
      {10, {{Algorithm::bruck, 1.2}, {Algorithm::slices, 1.1}}},
      {100, {{Algorithm::bruck, 1}, {Algorithm::slices, 4}}},
      {10'000, {{Algorithm::bruck, 40}, {Algorithm::slices, 4}}}};
  EXPECT_EQ(fit(kTwo, measurements), (Rule{{Algorithm::bruck, 1000}, {Algorithm::slices}}));
}

TEST(Fit, PassesOverWhatWinsNowhereAndWhatCannot) {
  const std::vector<AlgorithmTimes> measurements = {
      {64, {{Algorithm::bruck, 5}, {Algorithm::direct, 1}, {Algorithm::ring, 2}}},
      {4096, {{Algorithm::direct, 9}, {Algorithm::ring, 3}}}};
  EXPECT_EQ(fit(kThree, measurements), (Rule{{Algorithm::direct, 512}, {Algorithm::ring}}));
}

TEST(AlgorithmTimes, KeepsWhatWasLess) {
  AlgorithmTimes times{8, {{Algorithm::bruck, 1.0}, {Algorithm::direct, 3.0}}};
  times.take_less(
      {8, {{Algorithm::bruck, 2.0}, {Algorithm::direct, 1.05}, {Algorithm::ring, 2.0}}});
  EXPECT_EQ(times.us,
            (std::map<Algorithm, double>{
                {Algorithm::bruck, 1.0}, {Algorithm::direct, 1.05}, {Algorithm::ring, 2.0}}));
}

std::vector<AlgorithmTimes> times_of(
    const std::vector<std::pair<double, double>>& bruck_and_direct) {
  std::vector<AlgorithmTimes> measurements;
  measurements.reserve(bruck_and_direct.size());
  for (const auto& [bruck, direct] : bruck_and_direct)
    measurements.push_back({8, {{Algorithm::bruck, bruck}, {Algorithm::direct, direct}}});
  return measurements;
}

TEST(Judge, FindsWhatIsMoreThanATenthFaster) {
  const std::vector<AlgorithmTimes> measurements = {
      {8, {{Algorithm::bruck, 1.0}, {Algorithm::direct, 1.05}, {Algorithm::ring, 2.0}}}};
  EXPECT_FALSE(judge(measurements, Algorithm::bruck).faster);
  EXPECT_FALSE(judge(measurements, Algorithm::direct).faster);
  EXPECT_TRUE(judge(measurements, Algorithm::direct, 1.04).faster);
  EXPECT_FALSE(judge(measurements, Algorithm::slices).faster);
  EXPECT_FALSE(judge({}, Algorithm::bruck).faster);
  const auto found = judge(measurements, Algorithm::ring).faster;
  ASSERT_TRUE(found);
  EXPECT_EQ(found->better, Algorithm::bruck);
  EXPECT_DOUBLE_EQ(found->times, 2);
}

TEST(Judge, GoesByMostLapsAndNotByTheLuckiest) {
  const auto measurements = times_of({{1.2, 1.0}, {1.3, 1.0}, {0.3, 1.0}});
  const auto found = judge(measurements, Algorithm::bruck).faster;
  ASSERT_TRUE(found);
  EXPECT_DOUBLE_EQ(found->times, 1.2);
  EXPECT_FALSE(judge(measurements, Algorithm::direct).faster);
  EXPECT_EQ(middle_of(measurements).us,
            (std::map<Algorithm, double>{{Algorithm::bruck, 1.2}, {Algorithm::direct, 1.0}}));
}

TEST(Judge, ComparesWhatRanOneAfterTheOther) {
  // The middle times of bruck are less than direct's, but in most measurements it was slower; and
  // the other way round.
  EXPECT_TRUE(judge(times_of({{1.2, 1.0}, {2.4, 2.0}, {1.5, 4.0}}), Algorithm::bruck).faster);
  EXPECT_FALSE(judge(times_of({{1.0, 1.2}, {2.0, 2.4}, {4.0, 1.5}}), Algorithm::bruck).faster);
}

TEST(Judge, IsClearOnceEnoughLapsAgree) {
  std::vector<std::pair<double, double>> times(5, {1.2, 1.0});
  EXPECT_TRUE(judge(times_of(times), Algorithm::bruck).clear);
  EXPECT_TRUE(judge(times_of(times), Algorithm::direct).clear);
  times.resize(8, {1.0, 1.0});
  EXPECT_FALSE(judge(times_of(times), Algorithm::bruck).clear) << "five of eight";
  times.resize(16, {1.0, 1.0});
  EXPECT_FALSE(judge(times_of(times), Algorithm::bruck).clear) << "five of sixteen";
  times.resize(20, {1.0, 1.0});
  EXPECT_TRUE(judge(times_of(times), Algorithm::bruck).clear) << "five of twenty";
  EXPECT_FALSE(judge(times_of(times), Algorithm::bruck).faster);
}

TEST(Judge, LooksUntilItIsClear) {
  const auto enough = [](std::size_t faster, std::size_t alike) {
    std::vector<std::pair<double, double>> times(faster, {1.2, 1.0});
    times.resize(faster + alike, {1.0, 1.0});
    return measured_enough(times_of(times), 3, Algorithm::bruck);
  };
  EXPECT_FALSE(enough(0, 0));
  EXPECT_FALSE(enough(11, 0)) << "four for each round";
  EXPECT_TRUE(enough(12, 0));
  EXPECT_TRUE(enough(0, 12));
  EXPECT_FALSE(enough(6, 6));
  EXPECT_FALSE(enough(149, 150));
  EXPECT_TRUE(enough(150, 150)) << "a hundred for each round";
}

TEST(Bench, TunesAndReadsWhatItWrote) {
  testing::Fifo scratch;  // for its folder
  const std::string file = scratch.folder() + "/settings/tuning";
  const std::vector<std::string> quick = {"--op",      "all_reduce,broadcast",
                                          "--sizes",   "8,1KiB",
                                          "--ranks",   "2",
                                          "--seconds", "0.01",
                                          "--rounds",  "1"};
  const auto with = [&](std::vector<std::string> words) {
    words.insert(words.begin(), "bench");
    words.insert(words.end(), quick.begin(), quick.end());
    return words;
  };
  const Outcome tuned = run(with({"--tune", file}));
  ASSERT_EQ(tuned.code, 0) << tuned.err;
  const auto rules = collective::parse_tuning(contents(file), file);
  ASSERT_TRUE(rules.ok()) << rules.status().message();
  EXPECT_TRUE(rules->rules.contains({Medium::network, Op::all_reduce, 2}));
  EXPECT_TRUE(rules->rules.contains({Medium::network, Op::broadcast, 2}));
  EXPECT_TRUE(rules->rules.contains({Medium::shared_memory, Op::all_reduce, 2}));
  EXPECT_EQ(rules->rules.size(), 3u);

  // How quick they were must not decide a test; that every cell is there must. Between two ranks
  // the algorithms of a broadcast take the same time: hundreds of measurements would be needed to
  // tell.
  auto check = with({"--check-selection", "--transport", "tcp"});
  *std::find(check.begin(), check.end(), "all_reduce,broadcast") = "all_reduce";
  const Outcome checked = run(check, {{"MUSTER_TUNING", file}});
  EXPECT_EQ(count_of(checked.out, "| selected: "), 2) << checked.out << checked.err;
  EXPECT_EQ(checked.code, count_of(checked.out, "WRONG") > 0 ? 1 : 0) << checked.err;

  std::ofstream(file) << "version = 1\nnetwork.all_reduce.2 = fast\n";
  const Outcome wrong = run(with({"--engine", "--transport", "tcp"}), {{"MUSTER_TUNING", file}});
  EXPECT_EQ(wrong.code, 1);
  EXPECT_EQ(count_of(wrong.err, "line 2: \"fast\" is not an algorithm"), 1) << wrong.err;
  std::filesystem::remove_all(scratch.folder() + "/settings");
}

TEST(Bench, LooksAgainAtWhatMayBeWrong) {
  testing::Fifo scratch;  // for its folder
  const std::string file = scratch.folder() + "/tuning";
  std::ofstream(file) << "version = 1\nnetwork.reduce.2 = slices\n";  // a message more, and nothing
                                                                      // that it would save
  const Outcome checked =
      run({"bench", "--check-selection", "--op", "reduce", "--sizes", "8,64", "--ranks", "2",
           "--seconds", "0.01", "--rounds", "1", "--transport", "tcp"},
          {{"MUSTER_TUNING", file}});
  // As good as always it is wrong; how quick the algorithms were must not decide a test.
  EXPECT_EQ(count_of(checked.out, "| selected: slices"), 2) << checked.out << checked.err;
  EXPECT_EQ(count_of(checked.out, " measurements"), count_of(checked.out, "measured again below"))
      << checked.out;
  EXPECT_EQ(checked.code, count_of(checked.out, "WRONG") > 0 ? 1 : 0) << checked.out << checked.err;
  std::filesystem::remove(file);
}

TEST(Bench, TunesPiecesWhereATreeIsMoreThanItsRoot) {
  testing::Fifo scratch;  // for its folder
  const std::string file = scratch.folder() + "/tuning";
  const Outcome tuned = run({"bench", "--tune", file, "--op", "gather", "--sizes", "64", "--ranks",
                             "2,4", "--transport", "tcp", "--seconds", "0.01", "--rounds", "1"});
  ASSERT_EQ(tuned.code, 0) << tuned.err;
  const auto rules = collective::parse_tuning(contents(file), file);
  ASSERT_TRUE(rules.ok()) << rules.status().message();
  EXPECT_TRUE(rules->rules.contains({Medium::network, Op::gather, 4}));
  EXPECT_EQ(rules->rules.size(), 1u) << "of two ranks both are the same";
  EXPECT_EQ(count_of(tuned.out, "| tree "), 1) << tuned.out;
  EXPECT_EQ(count_of(tuned.out, "| direct "), 1) << tuned.out;
  std::filesystem::remove(file);
}

TEST(Bench, SaysWhatDoesNotGoTogether) {
  EXPECT_NE(run({"bench", "--check-selection", "--tune"}).code, 0);
  const Outcome many = run({"bench", "--ranks", "1000"});
  EXPECT_EQ(many.code, 2);
  EXPECT_EQ(count_of(many.err, "at most 128 ranks"), 1) << many.err;
  const Outcome none = run({"bench", "--check-selection", "--op", "barrier"});
  EXPECT_EQ(none.code, 1);
  EXPECT_EQ(count_of(none.err, "more than one algorithm"), 1) << none.err;
}

}  // namespace
}  // namespace muster::cli::bench
