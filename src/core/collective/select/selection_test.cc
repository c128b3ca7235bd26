// SPDX-License-Identifier: BSD-3-Clause
// Algorithm selection: the defaults, the tuning file and its errors, and that a group's members
// agree.
#include "core/collective/select/selection.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "core/collective/call.h"
#include "core/collective/select/tuning.h"
#include "core/collective/testing/communicator_job.h"
#include "core/shm/segment_layout.h"
#include "core/tunables/tuning_file.h"
#include "lab/model/cost.h"
#include "testing/limits.h"
#include "testing/scratch_folder.h"

namespace muster::collective {
namespace {

using namespace communicator_test;

constexpr std::uint64_t kKiB = 1024;
TimePoint in_a_minute() { return in(muster::testing::kMustHappen); }

TEST(Selection, DefaultsDependOnTheGatheredBytes) {
  for (const int ranks : {1, 2, 3, 8, 1000}) {
    const Selection links(Medium::network, ranks);
    const std::uint64_t gathered = ranks == 1000 ? 4000 * kKiB : 64 * kKiB;
    const std::uint64_t share = gathered / static_cast<std::uint64_t>(ranks);
    const std::uint64_t each = ranks == 2 ? 1024 * kKiB : share;
    EXPECT_EQ(links.choose(Op::all_reduce, 0), Algorithm::bruck);
    EXPECT_EQ(links.choose(Op::all_reduce, each), Algorithm::bruck);
    EXPECT_EQ(links.choose(Op::all_reduce, each + 1), Algorithm::slices);
    EXPECT_EQ(links.choose(Op::reduce, share), Algorithm::direct);
    EXPECT_EQ(links.choose(Op::reduce, share + 1),
              ranks == 2 ? Algorithm::direct : Algorithm::slices);
    EXPECT_EQ(links.choose(Op::all_gather, gathered),
              ranks == 2 ? Algorithm::direct : Algorithm::bruck)
        << "two have one message each";
    EXPECT_EQ(links.choose(Op::all_gather, gathered + 1),
              ranks <= 8 ? Algorithm::direct : Algorithm::ring);
    EXPECT_EQ(links.choose(Op::all_gather, 1024 * 1024 * kKiB),
              ranks <= 8 ? Algorithm::direct : Algorithm::ring);
    EXPECT_EQ(links.choose(Op::broadcast, gathered), Algorithm::tree);
    EXPECT_EQ(links.choose(Op::broadcast, 1024 * 1024 * kKiB),
              ranks < 3 ? Algorithm::tree : Algorithm::hosts);
    const Selection region(Medium::shared_memory, ranks);
    const std::uint64_t read =
        std::min<std::uint64_t>(64 * kKiB / static_cast<std::uint64_t>(ranks), fixed::kSlotBytes);
    for (const Op op : {Op::all_reduce, Op::reduce}) {
      EXPECT_EQ(region.choose(op, read), Algorithm::one_shot);
      EXPECT_EQ(region.choose(op, read + 1), Algorithm::shares);
    }
    EXPECT_EQ(region.choose(Op::broadcast, 1), Algorithm::pull);
  }
}

// spec: H2 the table of algorithms by size, as text: it says what is chosen
TEST(Selection, IsPrintedAsText) {
  Selection region(Medium::shared_memory, 4);
  const auto told = text_of(region);
  const std::string small(name_of(region.choose(Op::all_reduce, 0))),
      large(name_of(region.choose(Op::all_reduce, 1u << 30)));
  EXPECT_NE(told.find("\n  all_reduce: " + small + " below "), std::string::npos) << told;
  EXPECT_NE(told.find(", then " + large), std::string::npos) << told;
  region.force(Op::all_reduce, Algorithm::shares);
  EXPECT_NE(text_of(region).find("\n  all_reduce: one_shot below 1 bytes, then shares\n"),
            std::string::npos)
      << "empty calls stay";
  const Selection hosts(Medium::network, 8, {.first_ranks = even_hosts(8, 4), .per_core = 1});
  EXPECT_NE(text_of(hosts).find("hosts"), std::string::npos) << text_of(hosts);
  EXPECT_EQ(text_of(Selection(Medium::network, 2)).find("hosts"), std::string::npos)
      << "one rank a host has no sums of its own, and none forwards";
}

TEST(Selection, OversubscribedRanksSendFewMessages) {
  for (const int ranks : {4, 8, 64}) {
    const Selection links(Medium::network, ranks,
                          {.first_ranks = even_hosts(ranks, ranks), .per_core = ranks / 2});
    const std::uint64_t each = ranks == 64 ? 4 * kKiB : 32 * kKiB;
    EXPECT_EQ(links.choose(Op::all_reduce, each), Algorithm::bruck);
    EXPECT_EQ(links.choose(Op::all_reduce, each + 1), Algorithm::slices);
    const std::uint64_t scattered = ranks == 4 ? 32 * kKiB : 16 * kKiB;
    EXPECT_EQ(links.choose(Op::scatter, scattered), Algorithm::tree);
    EXPECT_EQ(links.choose(Op::scatter, scattered + 1), Algorithm::direct);
    EXPECT_EQ(links.choose(Op::gather, 64), Algorithm::direct);
  }
}

TEST(Selection, NothingIsChosenBeyondItsLimit) {
  Selection region(Medium::shared_memory, 2);
  region.force(Op::all_reduce, Algorithm::one_shot);
  EXPECT_EQ(region.choose(Op::all_reduce, fixed::kSlotBytes), Algorithm::one_shot);
  EXPECT_EQ(region.choose(Op::all_reduce, fixed::kSlotBytes + 1), Algorithm::shares);
  region.force(Op::all_reduce, Algorithm::shares);
  EXPECT_EQ(region.choose(Op::all_reduce, 1), Algorithm::shares);
  EXPECT_EQ(region.choose(Op::all_reduce, 0), Algorithm::one_shot)
      << "of nothing there are no shares";
  Selection links(Medium::network, 4);
  links.force(Op::all_reduce, Algorithm::bruck);
  EXPECT_EQ(links.choose(Op::all_reduce, 1024 * kKiB), Algorithm::bruck);
  EXPECT_EQ(links.choose(Op::all_reduce, 1024 * kKiB + 1), Algorithm::slices);
  links.force(Op::all_gather, Algorithm::direct);
  for (const std::uint64_t bytes : {std::uint64_t{0}, 64 * kKiB, std::uint64_t{1} << 40})
    EXPECT_EQ(links.choose(Op::all_gather, bytes), Algorithm::direct);
  links.force(Op::broadcast, Algorithm::one_shot);  // not available for this operation
  EXPECT_EQ(links.bounds(),
            [] {
              Selection same(Medium::network, 4);
              same.force(Op::all_reduce, Algorithm::bruck);
              same.force(Op::all_gather, Algorithm::direct);
              return same;
            }()
                .bounds());
}

TEST(Selection, SmallPiecesOfManyRanksGoAlongATree) {
  for (const Op op : {Op::gather, Op::scatter}) {
    for (const int ranks : {2, 8, 16, 51}) {
      const Selection links(Medium::network, ranks);
      EXPECT_EQ(links.choose(op, 0), Algorithm::direct) << ranks << ", a host each";
    }
    for (const int ranks : {52, 64, 1000}) {
      const Selection links(Medium::network, ranks);
      const std::uint64_t most = static_cast<std::uint64_t>(4 * ranks) * kKiB;
      EXPECT_EQ(links.choose(op, 0), Algorithm::tree) << ranks;
      EXPECT_EQ(links.choose(op, most), Algorithm::tree) << ranks;
      EXPECT_EQ(links.choose(op, most + 1), Algorithm::direct) << ranks;
    }
    EXPECT_EQ(Selection(Medium::network, 8, {.first_ranks = even_hosts(8, 8)}).choose(op, 64),
              Algorithm::direct);
    EXPECT_EQ(Selection(Medium::network, 16, {.first_ranks = even_hosts(16, 16)}).choose(op, 64),
              Algorithm::tree)
        << "ways within a host are short";
    EXPECT_EQ(Selection(Medium::network, 16, {.first_ranks = even_hosts(16, 8)}).choose(op, 64),
              Algorithm::tree);
    Selection forced(Medium::network, 4);
    forced.force(op, Algorithm::tree);
    EXPECT_EQ(forced.choose(op, 0), Algorithm::tree);
    EXPECT_EQ(forced.choose(op, 4096 * kKiB), Algorithm::tree);
    EXPECT_EQ(forced.choose(op, 4096 * kKiB + 1), Algorithm::direct)
        << "those that pass pieces on hold them";
    forced.force(op, Algorithm::direct);
    EXPECT_EQ(forced.choose(op, 0), Algorithm::direct);
  }
}

TEST(Selection, SmallPiecesGoAsTheModelSays) {
  constexpr plan::Machine kUsual;
  for (int ranks = 2; ranks <= 300; ++ranks) {
    for (const int per_host : {1, 2, 4, 8, 12, 16, ranks}) {
      if (per_host > ranks) continue;
      const Algorithm chosen =
          Selection(Medium::network, ranks, {.first_ranks = even_hosts(ranks, per_host)})
              .choose(Op::gather, 64);
      const auto seconds = [&](Algorithm algorithm) {
        return plan::predict(Op::gather, algorithm, 64, kUsual, {ranks, per_host});
      };
      // A small last host changes the tree in ways that selection does not look at.
      const double tolerance = ranks % per_host == 0 ? 1.1 : 1.4;
      EXPECT_LE(seconds(chosen),
                tolerance * std::min(seconds(Algorithm::tree), seconds(Algorithm::direct)))
          << ranks << " ranks, " << per_host << " on a host";
    }
  }
}

// A member's knowledge of the others' pieces must not matter.
TEST(Selection, EveryMemberSeesTheSameSize) {
  std::vector<std::byte> memory(1024);
  const auto part = [&](std::size_t index) { return std::span(memory).subspan(index * 24, 24); };
  constexpr int kRanks = 9;
  Args root{.op = Op::gather, .dtype = DType::int64, .root = 3, .inputs = {part(9)}}, other = root;
  for (std::size_t r = 0; r < kRanks; ++r) root.outputs.push_back(part(r));
  EXPECT_EQ(selected_bytes(root, kRanks), 9u * 24);
  EXPECT_EQ(selected_bytes(other, kRanks), 9u * 24);
  EXPECT_EQ(fingerprint_of(root, 1).count, 3u) << "and it is held against the others'";
  EXPECT_EQ(fingerprint_of(other, 1).count, 3u);
  root = other = Args{.op = Op::scatter, .dtype = DType::int64, .root = 3, .outputs = {part(9)}};
  for (std::size_t r = 0; r < kRanks; ++r) root.inputs.push_back(part(r));
  EXPECT_EQ(selected_bytes(root, kRanks), 9u * 24);
  EXPECT_EQ(selected_bytes(other, kRanks), 9u * 24);
  EXPECT_EQ(fingerprint_of(root, 1).count, 3u);
  EXPECT_EQ(fingerprint_of(other, 1).count, 3u);
}

TEST(Selection, DetectsRanksNumberedHostByHost) {
  using Ranks = std::vector<int>;
  const auto first = [](const Ranks& hosts) { return first_ranks_of_hosts(hosts); };
  EXPECT_EQ(first({0, 0, 1, 1}), (Ranks{0, 2}));
  EXPECT_EQ(first({7, 7, 7, 2, 2, 2, 5, 5, 5}), (Ranks{0, 3, 6}));
  EXPECT_EQ(first({}), Ranks());
  EXPECT_EQ(first({0, 0, 0}), Ranks{0}) << "one host";
  EXPECT_EQ(first({0, 1, 2}), (Ranks{0, 1, 2})) << "one on each";
  EXPECT_EQ(first({0, 1, 0, 1}), Ranks()) << "in turn";
  EXPECT_EQ(first({0, 0, 1, 1, 1, 1}), (Ranks{0, 2})) << "more on one";
  EXPECT_EQ(first({0, 0, 1, 1, 2}), (Ranks{0, 2, 4}));
  EXPECT_EQ(first({0, 0, 1, 1, 0, 0}), Ranks()) << "a host comes twice";
  EXPECT_EQ(even_hosts(10, 4), (Ranks{0, 4, 8}));
}

TEST(Selection, HostsMayHaveDifferentNumbersOfRanks) {
  for (const auto& [ranks, hosts] : std::vector<std::pair<int, std::vector<int>>>{
           {5, {0, 3}}, {5, {0, 1}}, {5, {0, 4}}, {10, {0, 4, 8}}}) {
    const Selection links(Medium::network, ranks, {.first_ranks = hosts});
    for (const Op op :
         {Op::all_reduce, Op::reduce, Op::reduce_scatter, Op::all_gather, Op::broadcast})
      EXPECT_EQ(links.choose(op, 1024 * kKiB), Algorithm::hosts) << info(op).name;
  }
  const auto bound = [](std::vector<int> hosts) {
    const Selection links(Medium::network, 8, {.first_ranks = std::move(hosts)});
    return links.bounds()[static_cast<std::size_t>(Op::reduce_scatter)];
  };
  EXPECT_EQ(bound({0, 4, 6}), bound({0, 4})) << "the wire of the largest host is the busiest";
}

TEST(Selection, OversubscribedRanksCopyAndWaitLeast) {
  const Selection links(Medium::network, 8, {.first_ranks = even_hosts(8, 8), .per_core = 4});
  EXPECT_EQ(links.choose(Op::reduce, 1024 * 1024 * kKiB), Algorithm::direct);
  EXPECT_EQ(links.choose(Op::all_gather, 32 * kKiB), Algorithm::bruck);
  EXPECT_EQ(links.choose(Op::all_gather, 32 * kKiB + 1), Algorithm::direct);
  EXPECT_EQ(links.choose(Op::broadcast, 1024 * 1024 * kKiB), Algorithm::tree);
  for (const Op op : {Op::all_reduce, Op::reduce_scatter})
    EXPECT_EQ(links.choose(op, 1024 * kKiB), Algorithm::slices) << "there is no other host";
  const Selection core_each(Medium::network, 8, {.first_ranks = even_hosts(8, 8), .per_core = 1}),
      host_each(Medium::network, 8);
  for (int op = 0; op < kCollectives; ++op) {
    if (static_cast<Op>(op) != Op::broadcast) {
      EXPECT_EQ(core_each.bounds()[static_cast<std::size_t>(op)],
                host_each.bounds()[static_cast<std::size_t>(op)]);
    }
  }
  EXPECT_EQ(core_each.choose(Op::broadcast, 4096 * kKiB), Algorithm::tree);
  EXPECT_EQ(core_each.choose(Op::broadcast, 4096 * kKiB + 1), Algorithm::chain);
  const Selection two_to_a_core(Medium::network, 4,
                                {.first_ranks = even_hosts(4, 4), .per_core = 2});
  EXPECT_EQ(two_to_a_core.choose(Op::reduce, 1024 * 1024 * kKiB), Algorithm::direct);
  EXPECT_EQ(two_to_a_core.choose(Op::broadcast, 2048 * kKiB), Algorithm::tree);
  EXPECT_EQ(two_to_a_core.choose(Op::broadcast, 2048 * kKiB + 1), Algorithm::chain);
  const Selection three_to_a_core(Medium::network, 6,
                                  {.first_ranks = even_hosts(6, 6), .per_core = 3});
  EXPECT_EQ(three_to_a_core.choose(Op::broadcast, 1024 * 1024 * kKiB), Algorithm::tree);
}

TEST(Selection, TheRootReducesAloneWithFewCores) {
  const auto most = [](int ranks, int per_core) {
    const Selection links(Medium::network, ranks,
                          {.first_ranks = even_hosts(ranks, ranks), .per_core = per_core});
    std::uint64_t kib = 1;
    while (kib < 1024 * 1024 && links.choose(Op::reduce, kib * kKiB) == Algorithm::direct) kib *= 2;
    return kib / 2;
  };
  constexpr std::uint64_t kAnything = 1024 * 1024 / 2;
  EXPECT_EQ(most(2, 1), kAnything) << "slices send no fewer bytes";
  EXPECT_EQ(most(2, 2), kAnything);
  EXPECT_EQ(most(4, 4), kAnything) << "on one core";
  EXPECT_EQ(most(3, 2), kAnything) << "on two";
  EXPECT_EQ(most(4, 2), kAnything);
  EXPECT_EQ(most(8, 4), kAnything);
  EXPECT_EQ(most(8, 2), 128u) << "on four";
  EXPECT_EQ(most(16, 8), 256u) << "as measured";
  EXPECT_EQ(most(64, 32), 256u);
  EXPECT_EQ(most(64, 2), 64u) << "4 MiB of all";
  EXPECT_EQ(most(4, 1), 16u) << "a core each";
}

TEST(Selection, OversubscribedRanksUseOneShotForLargerSizes) {
  for (const int per_core : {1, 2, 4}) {
    const Selection region(Medium::shared_memory, 8,
                           {.first_ranks = even_hosts(8, 8), .per_core = per_core});
    const std::uint64_t most = (per_core > 1 ? 16 : 8) * kKiB;
    for (const Op op : {Op::all_reduce, Op::reduce}) {
      EXPECT_EQ(region.choose(op, most), Algorithm::one_shot);
      EXPECT_EQ(region.choose(op, most + 1), Algorithm::shares);
    }
  }
}

TEST(Selection, RanksOfAHostShareItsNetwork) {
  for (const int per_host : {1, 2, 4}) {
    const Selection links(Medium::network, 8, {.first_ranks = even_hosts(8, per_host)});
    const Algorithm large = per_host > 1 ? Algorithm::hosts : Algorithm::slices;
    const std::uint64_t from = per_host == 2 ? 128 * kKiB : 160 * kKiB / 3;
    EXPECT_EQ(links.choose(Op::all_reduce, 8 * kKiB), Algorithm::bruck);
    EXPECT_EQ(links.choose(Op::all_reduce, 8 * kKiB + 1), Algorithm::slices);
    EXPECT_EQ(links.choose(Op::all_reduce, from - 1), Algorithm::slices);
    EXPECT_EQ(links.choose(Op::all_reduce, from), large);
    EXPECT_EQ(links.choose(Op::reduce, 1024 * kKiB), large);
    EXPECT_EQ(links.choose(Op::reduce_scatter, from - 1), Algorithm::slices);
    EXPECT_EQ(links.choose(Op::reduce_scatter, from), large);
    EXPECT_EQ(links.choose(Op::all_gather, 256 * kKiB), Algorithm::direct);
    EXPECT_EQ(links.choose(Op::all_gather, 256 * kKiB + 1),
              per_host > 1 ? Algorithm::hosts : Algorithm::direct);
    EXPECT_EQ(links.choose(Op::broadcast, 64 * kKiB), Algorithm::tree);
    EXPECT_EQ(links.choose(Op::broadcast, 64 * kKiB + 1), Algorithm::hosts);
    Selection flat = links;
    flat.force(Op::all_reduce, Algorithm::slices);
    EXPECT_EQ(flat.choose(Op::all_reduce, 1024 * kKiB), Algorithm::slices);
    flat.force(Op::all_reduce, Algorithm::hosts);
    EXPECT_EQ(flat.choose(Op::all_reduce, 1), large);
  }
}

TEST(Selection, AFileMeasuredOnOneHostDoesNotApplyToSeveral) {
  const auto tuning = parse_tuning(
      "version = 1\nnetwork.all_reduce.8 = bruck <= 256 KiB, slices\nnetwork.reduce.8 = slices <= "
      "1 "
      "MiB, hosts\n"
      "network.all_gather.8 = bruck <= 4 KiB, direct\nnetwork.broadcast.8 = "
      "tree\nnetwork.reduce_scatter.6 = slices <= 1 MiB, "
      "hosts\nnetwork.reduce_scatter.8 = slices\nnetwork.gather.8 = tree\nnetwork.scatter.8 = tree "
      "<= 2 "
      "KiB, direct\n",
      "a file");
  ASSERT_TRUE(tuning.ok()) << tuning.status().message();
  const Selection tuned = select(*tuning, Medium::network, 8, {.first_ranks = even_hosts(8, 4)});
  EXPECT_EQ(tuned.choose(Op::all_reduce, 256 * kKiB), Algorithm::bruck);
  EXPECT_EQ(tuned.choose(Op::all_reduce, 256 * kKiB + 1), Algorithm::hosts)
      << "a line that does not name it says nothing of it";
  EXPECT_EQ(tuned.choose(Op::reduce, 1024 * kKiB), Algorithm::slices);
  EXPECT_EQ(tuned.choose(Op::reduce, 1024 * kKiB + 1), Algorithm::hosts);
  EXPECT_EQ(select(*tuning, Medium::network, 8).choose(Op::reduce, 1), Algorithm::slices);
  const auto by_root = parse_tuning("version = 1\nnetwork.reduce.4 = direct\n", "a file");
  ASSERT_TRUE(by_root.ok()) << by_root.status().message();
  for (const int per_host : {1, 2}) {
    EXPECT_EQ(
        select(*by_root, Medium::network, 4, {.first_ranks = even_hosts(4, per_host)}).bounds(),
        Selection(Medium::network, 4, {.first_ranks = even_hosts(4, per_host)}).bounds())
        << "one host does not tell what the wires between several can do";
  }
  EXPECT_EQ(select(*by_root, Medium::network, 4, {.first_ranks = even_hosts(4, 4)})
                .choose(Op::reduce, 1024 * 1024 * kKiB),
            Algorithm::direct);
  EXPECT_EQ(tuned.choose(Op::all_gather, 4 * kKiB + 1), Algorithm::direct);
  EXPECT_EQ(tuned.choose(Op::all_gather, 256 * kKiB + 1), Algorithm::hosts);
  EXPECT_EQ(select(*tuning, Medium::network, 8).choose(Op::all_gather, 1024 * kKiB),
            Algorithm::direct);
  EXPECT_EQ(tuned.choose(Op::broadcast, 64 * kKiB), Algorithm::tree);
  EXPECT_EQ(tuned.choose(Op::broadcast, 64 * 1024 * kKiB), Algorithm::hosts);
  EXPECT_EQ(tuned.choose(Op::reduce_scatter, 64 * kKiB), Algorithm::hosts)
      << "the last line that fits counts";
  EXPECT_EQ(tuned.choose(Op::gather, 4096 * kKiB), Algorithm::tree)
      << "nothing of it is for several hosts";
  EXPECT_EQ(tuned.choose(Op::gather, 4096 * kKiB + 1), Algorithm::direct);
  EXPECT_EQ(tuned.choose(Op::scatter, 2 * kKiB), Algorithm::tree);
  EXPECT_EQ(tuned.choose(Op::scatter, 2 * kKiB + 1), Algorithm::direct);
}

TEST(Tuning, LinesOfTheNearestNumberOfRanksApply) {
  const auto tuning = parse_tuning(
      "# a comment\n"
      "version = 1\n"
      "\n"
      "link_spin = 20 us\n"
      "network.all_reduce.2 = bruck <= 1 MiB, slices   # much\n"
      "network.all_reduce.4 = bruck <= 4KiB, slices\n"
      "network.all_gather.4 = direct <= 65536, ring\r\n"
      "shared_memory.all_reduce.4 = shares\n",
      "a file");
  ASSERT_TRUE(tuning.ok()) << tuning.status().message();
  const auto links = [&](int ranks) { return select(*tuning, Medium::network, ranks); };
  EXPECT_EQ(links(2).choose(Op::all_reduce, 1024 * kKiB), Algorithm::bruck);
  EXPECT_EQ(links(3).choose(Op::all_reduce, 1024 * kKiB), Algorithm::bruck);
  EXPECT_EQ(links(4).choose(Op::all_reduce, 4 * kKiB), Algorithm::bruck);
  EXPECT_EQ(links(7).choose(Op::all_reduce, 4 * kKiB + 1), Algorithm::slices);
  EXPECT_EQ(links(8).bounds(), Selection(Medium::network, 8).bounds())
      << "4 ranks say nothing of 8";
  EXPECT_EQ(links(4).choose(Op::all_gather, 1), Algorithm::direct);
  EXPECT_EQ(links(4).choose(Op::all_gather, 64 * kKiB + 1), Algorithm::ring);
  EXPECT_EQ(select(*tuning, Medium::shared_memory, 5).choose(Op::all_reduce, 8), Algorithm::shares);
  EXPECT_EQ(links(4).choose(Op::broadcast, 8), Algorithm::tree);

  const auto again = parse_tuning(print_tuning(*tuning), "what was printed");
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(again->rules, tuning->rules);
  EXPECT_EQ(again->numbers, tuning->numbers);
}

TEST(Tuning, NumbersOfTheTableDecideWhereNoLineDoes) {
  Tunables table = default_tunables();
  ASSERT_TRUE(override_tunable(table, "pair_exchange", "4 KiB"));
  const Selection overridden(Medium::network, 2, {}, table);
  EXPECT_EQ(overridden.choose(Op::all_reduce, 4 * kKiB), Algorithm::bruck);
  EXPECT_EQ(overridden.choose(Op::all_reduce, 4 * kKiB + 1), Algorithm::slices);
  EXPECT_EQ(Selection(Medium::network, 2).choose(Op::all_reduce, 4 * kKiB + 1), Algorithm::bruck);
  // `--check-selection` counts an operation that has a choice for each of them.
  for (const Tunable& row : tunable_rows()) {
    std::string_view rest = row.decides;
    while (!rest.empty()) {
      const auto each = rest.substr(0, rest.find(' '));
      rest.remove_prefix(std::min(rest.size(), each.size() + 1));
      const auto dot = each.find('.');
      const auto op = op_named(each.substr(dot + 1));
      const auto medium = each.starts_with("network.") ? Medium::network : Medium::shared_memory;
      ASSERT_TRUE(op.has_value()) << row.name;
      EXPECT_EQ(name_of(medium), each.substr(0, dot)) << row.name;
      EXPECT_GE(algorithms_of(medium, *op).size(), 2u) << row.name;
    }
  }
}

TEST(Tuning, WrongLinesAreNamed) {
  const auto error = [](const std::string& lines) {
    const auto read = parse_tuning("version = 1\n" + lines, "the file");
    return read.ok() ? std::string("none") : read.status().message();
  };
  for (const auto& [line, what] : std::initializer_list<std::pair<std::string, std::string>>{
           {"link_spin = soon", "\"soon\" is no value of link_spin; write a time"},
           {"eager = 1 MiB", "cannot be changed"},
           {"link_spin = 1 us\nlink_spin = 1 us", "appears twice"},
           {"link_spun = 1 us", "or a name that muster tunables lists"},
           {"network.all_reduce.2", "is not KEY = VALUE"},
           {"network.all_reduce.2 =", "is not KEY = VALUE"},
           {"network.all_reduce = slices", "MEDIUM.OPERATION.RANKS"},
           {"wires.all_reduce.2 = slices", "\"wires\" should be network or shared_memory"},
           {"network.all_reduction.2 = slices",
            "\"all_reduction\" is not a collective; there are broadcast, all_reduce"},
           {"network.all_reduce.two = slices", "\"two\" should be a number of ranks"},
           {"network.all_reduce.2 = slice", "\"slice\" is not an algorithm"},
           {"network.all_reduce.2 = tree",
            "\"tree\" is not allowed here; all_reduce over network has, in this order, bruck, "
            "slices, "
            "hosts"},
           {"network.all_reduce.2 = slices <= 4, bruck", "is not allowed here"},
           {"network.gather.16 = direct <= 4, tree",
            "\"tree\" is not allowed here; gather over network has, in this order, tree, direct"},
           {"network.all_reduce.2 = bruck, slices", "\"bruck\" needs a limit"},
           {"network.all_reduce.2 = bruck <= some, slices", "\"some\" is not a size"},
           {"network.all_reduce.2 = bruck <= 99999999999999999999, slices", "is not a size"},
           {"network.all_reduce.2 = bruck <= 4", "the last algorithm has no limit"},
           {"network.all_gather.2 = bruck <= 9, direct <= 8, ring", "sizes must grow"},
           {"version = 2", "version 2 of the file is not known"},
           {"network.all_reduce.2 = slices\nnetwork.all_reduce.2 = slices", "appears twice"},
       }) {
    const std::string said = error(line);
    EXPECT_TRUE(contains(said, what)) << line << ": " << said;
    EXPECT_TRUE(contains(said, "the file, line " + std::to_string(contains(line, "\n") ? 3 : 2)))
        << said;
    EXPECT_TRUE(contains(said, "mend the line, or remove the file")) << said;
  }
  const auto unversioned = parse_tuning("network.all_reduce.2 = slices\n", "the file");
  EXPECT_TRUE(contains(unversioned.status().message(), "line 1")) << unversioned.status().message();
}

TEST(Tuning, AnAlgorithmCanBeForced) {
  const auto forced =
      parse_forced("all_reduce:bruck, broadcast:chain, gather:tree, scatter:direct");
  ASSERT_TRUE(forced.ok()) << forced.status().message();
  Tuning tuning;
  tuning.forced = *forced;
  EXPECT_EQ(select(tuning, Medium::network, 2).choose(Op::all_reduce, 1024 * kKiB),
            Algorithm::bruck);
  EXPECT_EQ(select(tuning, Medium::network, 2).choose(Op::broadcast, 1), Algorithm::chain);
  EXPECT_EQ(select(tuning, Medium::network, 2).choose(Op::gather, 1024 * kKiB), Algorithm::tree);
  EXPECT_EQ(select(tuning, Medium::network, 1000).choose(Op::scatter, 1), Algorithm::direct);
  EXPECT_EQ(select(tuning, Medium::shared_memory, 2).bounds(),
            Selection(Medium::shared_memory, 2).bounds());
  EXPECT_TRUE(
      contains(parse_forced("all_reduce:tree").status().message(),
               "all_reduce has bruck, slices, hosts over the network and one_shot, shares"));
  EXPECT_TRUE(contains(parse_forced("reduction:tree").status().message(),
                       "\"reduction\" is not a collective"));
  EXPECT_TRUE(contains(parse_forced("all_reduce").status().message(), "MUSTER_ALGORITHM"));
}

// Every rank has a different tuning. If members chose differently, they would wait for each other's
// messages forever.
TEST(Tuning, TheFirstMembersTuningAppliesToAll) {
  for (Wire wire : testing::kWiresAndHosts) {
    run_ranks(4, wire, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
      CommunicatorOptions options;
      options.timeout = muster::testing::kMustHappen;
      auto tuning = std::make_shared<Tuning>();
      const bool one = rank % 2 == 0;
      tuning->forced = {{Op::all_reduce, one ? Algorithm::bruck : Algorithm::hosts},
                        {Op::all_reduce, one ? Algorithm::one_shot : Algorithm::shares},
                        {Op::broadcast, one ? Algorithm::chain : Algorithm::tree}};
      options.tuning = tuning;
      options.name = "world";
      const auto world = Communicator::create(fabric, {0, 1, 2, 3}, options);
      ASSERT_TRUE(world.ok()) << world.status().message();
      options.name = "backwards";
      const auto backwards = Communicator::create(fabric, {3, 2, 1, 0}, options);
      ASSERT_TRUE(backwards.ok()) << backwards.status().message();
      options.name = "parts";
      const auto part = Communicator::split(*world, {{1, 0, 2}, {3}}, options);
      ASSERT_TRUE(part.ok()) << part.status().message();
      for (const Group& group : {*world, *backwards, *part}) {
        for (const std::size_t count : {std::size_t{1}, std::size_t{1500}, std::size_t{40'000}}) {
          Values out(count);
          const Values in(count, 1);
          const Status reduced = group->run(all_reduce(in, out), in_a_minute());
          ASSERT_TRUE(reduced.ok()) << reduced.message();
          EXPECT_EQ(out, Values(count, group->size()));
          Values told(count, group->rank());
          const Status cast = group->run(broadcast(told, group->size() - 1), in_a_minute());
          ASSERT_TRUE(cast.ok()) << cast.message();
          EXPECT_EQ(told, Values(count, group->size() - 1));
        }
        EXPECT_TRUE(group->close(in_a_minute()).ok());
      }
    });
  }
}

TEST(Tuning, AnInvalidFileFailsCreationOnAllRanks) {
  const testing::ScratchFolder scratch;
  const std::string path = scratch.file("tuning");
  std::ofstream(path) << "version = 1\nnetwork.all_reduce.2 = slow\n";
  for (const bool exists : {true, false}) {
    const Variable named("MUSTER_TUNING", exists ? path : path + ".not");
    for (Wire wire : {Wire::loopback, Wire::region}) {
      run_ranks(2, wire, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
        CommunicatorOptions options;
        options.name = "g";
        options.timeout = muster::testing::kMustHappen;
        const auto made = Communicator::create(fabric, {0, 1}, options);
        ASSERT_FALSE(made.ok());
        const std::string said = made.status().message();
        EXPECT_TRUE(
            contains(said, exists ? "tuning file " + path + ", line 2: \"slow\" is not an algorithm"
                                  : "cannot be read"))
            << said;
        EXPECT_EQ(contains(said, "rank 0 cancelled it: "), rank == 1) << said;
        options.tuning = std::make_shared<Tuning>();
        EXPECT_TRUE(Communicator::create(fabric, {0, 1}, options).ok()) << "the job goes on";
      });
    }
  }
}

TEST(Tuning, ComesFromWhereTheEnvironmentSays) {
  const testing::ScratchFolder scratch;
  const std::string path = scratch.file("mine");
  std::ofstream(path) << "version = 1\nnetwork.all_reduce.2 = slices\n";
  ::unsetenv("MUSTER_TUNING");
  {
    const Variable named("MUSTER_TUNING", path);
    EXPECT_EQ(tuning_path(), path);
    const auto tuning = tuning_of_environment();
    ASSERT_TRUE(tuning.ok()) << tuning.status().message();
    EXPECT_EQ(tuning->rules.size(), 1u);
  }
  {
    const Variable off("MUSTER_TUNING", "off");
    const Variable forced("MUSTER_ALGORITHM", "all_gather:direct");
    EXPECT_EQ(tuning_path(), "");
    const auto tuning = tuning_of_environment();
    ASSERT_TRUE(tuning.ok()) << tuning.status().message();
    EXPECT_TRUE(tuning->rules.empty());
    ASSERT_EQ(tuning->forced.size(), 1u);
    EXPECT_EQ(tuning->forced[0], std::pair(Op::all_gather, Algorithm::direct));
  }
  const Variable settings("XDG_CONFIG_HOME", scratch.file("settings"));
  EXPECT_EQ(tuning_path(), scratch.file("settings") + "/muster/tuning");
  EXPECT_TRUE(tuning_of_environment().ok()) << "a file that is not there says nothing";
}

}  // namespace
}  // namespace muster::collective
