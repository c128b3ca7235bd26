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
  const std::vector<Lap> laps = {{1024, {{Algorithm::bruck, 1}, {Algorithm::slices, 2}}},
                                 {4096, {{Algorithm::bruck, 2}, {Algorithm::slices, 3}}},
                                 {16384, {{Algorithm::bruck, 9}, {Algorithm::slices, 4}}}};
  EXPECT_EQ(fit(kTwo, laps), (Rule{{Algorithm::bruck, 8192}, {Algorithm::slices}}));
  EXPECT_EQ(fit(kTwo, {laps[0]}), (Rule{{Algorithm::bruck}}));
  EXPECT_EQ(fit(kTwo, {laps[2]}), (Rule{{Algorithm::slices}}));
}

TEST(Fit, OneOddLapDoesNotMoveIt) {
  const std::vector<Lap> laps = {{1, {{Algorithm::bruck, 1}, {Algorithm::slices, 4}}},
                                 {10, {{Algorithm::bruck, 1.2}, {Algorithm::slices, 1.1}}},
                                 {100, {{Algorithm::bruck, 1}, {Algorithm::slices, 4}}},
                                 {10'000, {{Algorithm::bruck, 40}, {Algorithm::slices, 4}}}};
  EXPECT_EQ(fit(kTwo, laps), (Rule{{Algorithm::bruck, 1000}, {Algorithm::slices}}));
}

TEST(Fit, PassesOverWhatWinsNowhereAndWhatCannot) {
  const std::vector<Lap> laps = {
      {64, {{Algorithm::bruck, 5}, {Algorithm::direct, 1}, {Algorithm::ring, 2}}},
      {4096, {{Algorithm::direct, 9}, {Algorithm::ring, 3}}}};
  EXPECT_EQ(fit(kThree, laps), (Rule{{Algorithm::direct, 512}, {Algorithm::ring}}));
}

TEST(Lap, KeepsWhatWasLess) {
  Lap lap{8, {{Algorithm::bruck, 1.0}, {Algorithm::direct, 3.0}}};
  lap.take_less({8, {{Algorithm::bruck, 2.0}, {Algorithm::direct, 1.05}, {Algorithm::ring, 2.0}}});
  EXPECT_EQ(lap.us,
            (std::map<Algorithm, double>{
                {Algorithm::bruck, 1.0}, {Algorithm::direct, 1.05}, {Algorithm::ring, 2.0}}));
}

std::vector<Lap> laps_of(const std::vector<std::pair<double, double>>& bruck_and_direct) {
  std::vector<Lap> laps;
  laps.reserve(bruck_and_direct.size());
  for (const auto& [bruck, direct] : bruck_and_direct)
    laps.push_back({8, {{Algorithm::bruck, bruck}, {Algorithm::direct, direct}}});
  return laps;
}

TEST(Judge, FindsWhatIsMoreThanATenthFaster) {
  const std::vector<Lap> laps = {
      {8, {{Algorithm::bruck, 1.0}, {Algorithm::direct, 1.05}, {Algorithm::ring, 2.0}}}};
  EXPECT_FALSE(judge(laps, Algorithm::bruck).upset);
  EXPECT_FALSE(judge(laps, Algorithm::direct).upset);
  EXPECT_TRUE(judge(laps, Algorithm::direct, 1.04).upset);
  EXPECT_FALSE(judge(laps, Algorithm::slices).upset);
  EXPECT_FALSE(judge({}, Algorithm::bruck).upset);
  const auto found = judge(laps, Algorithm::ring).upset;
  ASSERT_TRUE(found);
  EXPECT_EQ(found->better, Algorithm::bruck);
  EXPECT_DOUBLE_EQ(found->times, 2);
}

TEST(Judge, GoesByMostLapsAndNotByTheLuckiest) {
  const auto laps = laps_of({{1.2, 1.0}, {1.3, 1.0}, {0.3, 1.0}});
  const auto found = judge(laps, Algorithm::bruck).upset;
  ASSERT_TRUE(found);
  EXPECT_DOUBLE_EQ(found->times, 1.2);
  EXPECT_FALSE(judge(laps, Algorithm::direct).upset);
  EXPECT_EQ(middle_of(laps).us,
            (std::map<Algorithm, double>{{Algorithm::bruck, 1.2}, {Algorithm::direct, 1.0}}));
}

TEST(Judge, ComparesWhatRanOneAfterTheOther) {
  // The middle times of bruck are less than direct's, but in most laps it was the slower one; and
  // the other way round.
  EXPECT_TRUE(judge(laps_of({{1.2, 1.0}, {2.4, 2.0}, {1.5, 4.0}}), Algorithm::bruck).upset);
  EXPECT_FALSE(judge(laps_of({{1.0, 1.2}, {2.0, 2.4}, {4.0, 1.5}}), Algorithm::bruck).upset);
}

TEST(Judge, IsClearOnceEnoughLapsAgree) {
  std::vector<std::pair<double, double>> times(5, {1.2, 1.0});
  EXPECT_TRUE(judge(laps_of(times), Algorithm::bruck).clear);
  EXPECT_TRUE(judge(laps_of(times), Algorithm::direct).clear);
  times.resize(8, {1.0, 1.0});
  EXPECT_FALSE(judge(laps_of(times), Algorithm::bruck).clear) << "five of eight";
  times.resize(16, {1.0, 1.0});
  EXPECT_FALSE(judge(laps_of(times), Algorithm::bruck).clear) << "five of sixteen";
  times.resize(20, {1.0, 1.0});
  EXPECT_TRUE(judge(laps_of(times), Algorithm::bruck).clear) << "five of twenty";
  EXPECT_FALSE(judge(laps_of(times), Algorithm::bruck).upset);
}

TEST(Judge, LooksUntilItIsClear) {
  const auto enough = [](std::size_t faster, std::size_t alike) {
    std::vector<std::pair<double, double>> times(faster, {1.2, 1.0});
    times.resize(faster + alike, {1.0, 1.0});
    return looked_enough(laps_of(times), 3, Algorithm::bruck);
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
  // the algorithms of a broadcast take the same time: hundreds of looks would be needed to tell.
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
  EXPECT_EQ(count_of(checked.out, " looks"), count_of(checked.out, "looked at again below"))
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

TEST(Bench, SimulatesPieces) {
  const Outcome outcome = run({"bench", "--simulate", "--op", "gather,scatter", "--ranks", "8,1000",
                               "--bytes", "1KiB,64MiB"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(count_of(outcome.out, "| picks tree"), 2) << outcome.out;
  EXPECT_EQ(count_of(outcome.out, "| picks direct"), 6) << outcome.out;
  EXPECT_EQ(count_of(outcome.out, "| tree - |"), 4) << "too large for it: " << outcome.out;
}

TEST(Bench, SimulatesGroupsOfEverySize) {
  testing::Fifo scratch;
  const std::string json = scratch.folder() + "/rows.json";
  const Outcome outcome =
      run({"bench", "--simulate", "--op", "all_reduce,broadcast", "--ranks", "8,100000",
           "--ranks-per-host", "8", "--bytes", "8,64MiB", "--json", json});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(count_of(outcome.out, "\n"), 8) << outcome.out;
  EXPECT_EQ(count_of(outcome.out, "12500 hosts"), 4) << outcome.out;
  EXPECT_EQ(count_of(outcome.out, "recursive_doubling (model)"), 4) << outcome.out;
  EXPECT_EQ(count_of(outcome.out, "| picks bruck"), 2) << outcome.out;
  EXPECT_EQ(count_of(contents(json), "\"selected\":true"), 8);
  EXPECT_EQ(count_of(contents(json), "\"algorithm\":\"chain\""), 4);
  std::filesystem::remove(json);
}

TEST(Bench, SaysWhatDoesNotGoTogether) {
  EXPECT_NE(run({"bench", "--simulate", "--tune"}).code, 0);
  EXPECT_NE(run({"bench", "--hosts", "3"}).code, 0);
  const Outcome uneven = run({"bench", "--simulate", "--ranks", "9,100", "--hosts", "3"});
  EXPECT_EQ(uneven.code, 1);
  EXPECT_EQ(count_of(uneven.err, "100 ranks do not stand evenly on 3 hosts"), 1) << uneven.err;
  const Outcome many = run({"bench", "--ranks", "1000"});
  EXPECT_EQ(many.code, 2);
  EXPECT_EQ(count_of(many.err, "--simulate predicts larger groups"), 1) << many.err;
  const Outcome none = run({"bench", "--check-selection", "--op", "barrier"});
  EXPECT_EQ(none.code, 1);
  EXPECT_EQ(count_of(none.err, "more than one algorithm"), 1) << none.err;
}

}  // namespace
}  // namespace muster::cli::bench
