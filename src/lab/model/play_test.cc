// SPDX-License-Identifier: BSD-3-Clause
// Collectives played message by message, compared with times computed by hand and with the model.
#include "lab/model/play.h"

#include <gtest/gtest.h>

namespace muster::collective::plan {
namespace {

constexpr double kFarSeconds = 8192, kAddSeconds = 65536;  // for a byte: sums are exact
constexpr Machine kPlayed{.overhead = 1,
                          .latency = 100,
                          .host_latency = 10,
                          .bandwidth = 1 / kFarSeconds,
                          .host_bandwidth = 1.0 / 1024,
                          .reduction = 1 / kAddSeconds};

TEST(Play, TakesWhatTheModelSaysWhereAllRanksDoTheSame) {
  const auto expect_equal = [](Op op, Algorithm algorithm, double bytes, Crew crew) {
    EXPECT_DOUBLE_EQ(play(op, algorithm, bytes, kPlayed, crew),
                     predict(op, algorithm, bytes, kPlayed, crew))
        << info(op).name;
  };
  expect_equal(Op::barrier, Algorithm::dissemination, 0, {5, 1});
  expect_equal(Op::all_gather, Algorithm::ring, 4, {4, 1});
  expect_equal(Op::all_gather, Algorithm::bruck, 4, {4, 1});
  expect_equal(Op::all_reduce, Algorithm::slices, 8, {2, 1});
  expect_equal(Op::broadcast, Algorithm::tree, 1, {4, 1});
  expect_equal(Op::all_reduce, Algorithm::slices, 8, {1, 1});
}

TEST(Play, OverlapsWhatTheModelAddsUp) {
  // While the network carries two messages, those before are taken.
  EXPECT_DOUBLE_EQ(play(Op::all_gather, Algorithm::direct, 4, kPlayed, {4, 1}),
                   1 + 100 + 3 * kFarSeconds + 1);
}

TEST(Play, PaysEachLaterRoundAtTheBusiestPlace) {
  const double chunk = static_cast<double>(fixed::kHostChunk);
  Machine quick = kPlayed;
  quick.reduction = 1;
  const auto played = [&](double rounds) {
    return play(Op::all_reduce, Algorithm::slices, 2 * chunk * rounds, quick, {2, 1});
  };
  // Each rank sends two messages of a chunk in a round.
  EXPECT_DOUBLE_EQ(played(8) - played(4), 4 * 2 * chunk * kFarSeconds);
}

// Meetings of 1,000 replicas on 50 sites take about the time that the model predicts.
TEST(Play, OfAThousandReplicasOnFiftySites) {
  Machine sites;
  sites.latency = 0.05;
  sites.host_latency = 0.0002;
  sites.bandwidth = 125e6;  // 1 Gbit/s
  sites.host_bandwidth = 1.25e9;
  const Crew crew{1000, 20};
  for (const double bytes : {4e6, 1e8}) {  // of the changes, compressed
    const double predicted = predict(Op::all_reduce, Algorithm::hosts, bytes, sites, crew),
                 played = play(Op::all_reduce, Algorithm::hosts, bytes, sites, crew);
    // Every byte leaves and enters each site twice, but for a fiftieth that is its own.
    EXPECT_GE(played, 2 * 0.98 * bytes / sites.bandwidth + sites.latency);
    EXPECT_GT(played, 0.5 * predicted);
    EXPECT_LT(played, 2.2 * predicted) << "the sites' ranks all send to the same site first";
  }
}

}  // namespace
}  // namespace muster::collective::plan
