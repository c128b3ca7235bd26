// SPDX-License-Identifier: BSD-3-Clause
// Backend ucc below tensors: muster_ucc_test_rank, in processes of its own, over UCC's stand-in
// and, in long runs, over libucc of Debian sid, started by sid's dynamic loader.
#include <gtest/gtest.h>

#include <cmath>
#include <iostream>
#include <limits>
#include <string>
#include <vector>

#include "backends/carried/call.h"
#include "backends/carried/ordered_floats.h"
#include "backends/ucc/library.h"
#include "backends/ucc/team.h"
#include "testing/budget.h"
#include "testing/reserved_port.h"
#include "testing/seed.h"
#include "testing/shell.h"

namespace muster::ucc {
namespace {

using testing::run_shell;

enum class Ucc : std::uint8_t { standin, sid };

class OnUcc : public ::testing::TestWithParam<Ucc> {
 protected:
  void SetUp() override {
    if (GetParam() == Ucc::standin) {
      start_ = "MUSTER_UCC_LIBRARY=" MUSTER_UCC_STANDIN " timeout -k 5 100 ";
      return;
    }
    if (!testing::long_tests()) GTEST_SKIP() << "libucc of Debian sid is for long runs";
    if (testing::kSanitized) GTEST_SKIP() << "libucc is not instrumented";
    const auto got = run_shell(MUSTER_SOURCE "/tests/ucc/get_libucc");
    if (got.code != 0) GTEST_SKIP() << got.output;
    const std::string libraries = MUSTER_SOURCE "/.cache/ucc/root/usr/lib/x86_64-linux-gnu";
    start_ =
        "timeout -k 5 100 " + libraries + "/ld-linux-x86-64.so.2 --library-path " + libraries + " ";
  }
  /// `killed`: a rank that does not come to its end.
  void run(int ranks, const std::string& arguments, int killed = -1) const {
    std::string line =
        "MASTER_ADDR=127.0.0.1 MASTER_PORT=" + std::to_string(testing::reserve_port()) +
        " WORLD_SIZE=" + std::to_string(ranks);
    line = "(export " + line + "; ";
    for (int rank = 0; rank < ranks; ++rank)
      line += "RANK=" + std::to_string(rank) + " " + start_ + MUSTER_UCC_TEST_RANK " " + arguments +
              " & ";
    const auto ended = run_shell(line + "wait)");
    for (int rank = 0; rank < ranks; ++rank)
      if (rank != killed) {
        EXPECT_NE(ended.output.find("right " + std::to_string(rank)), std::string::npos)
            << "rank " << rank << ":\n"
            << ended.output << "replay with MUSTER_TEST_SEED=" << testing::test_seed();
      }
    std::cout << ended.output;
  }

 private:
  std::string start_;  // before the program
};

// spec: A5 every operation that libucc has
// spec: F2 F3 F4 F5 F7 F8 F9 F11 F12 F13 on ucc: every operation, uneven and empty slices, in place
// spec: F14 every reduce op on ucc; F15 every dtype; F16 zero elements, one rank; F19 PREMUL_SUM,
// AVG
TEST_P(OnUcc, EveryCellMatchesTheDirectComputation) {
  const double budget = testing::test_budget(1.5, 30).count();
  for (const int ranks : {1, 2, 3, 5}) run(ranks, "suite " + std::to_string(budget));
}

// spec: A5 messages, which libucc lacks: over muster's own links; E1 E2 E4 on ucc
TEST_P(OnUcc, MessagesCome) { run(3, "messages"); }

// spec: A5 started calls, groups of some ranks, several threads; D3 on ucc
TEST_P(OnUcc, CallsEndInOrder) { run(3, "calls"); }

// spec: F18 on ucc, at any debug level; A5 a deadline fails the group by name, and another group
// goes on
TEST_P(OnUcc, FailuresAreNamed) { run(3, "failures"); }

// spec: F18 on ucc, sums of several MiB that do not match: every rank is told, and nothing is
// written beside the tensors
TEST_P(OnUcc, LargeSumsThatDoNotMatchAreNamed) { run(3, "mismatches"); }

// spec: A5 kill -9 of a rank: the others name it before the deadline, and live
TEST_P(OnUcc, AKilledRankIsNamed) { run(3, "killed", 1); }

INSTANTIATE_TEST_SUITE_P(All, OnUcc, ::testing::Values(Ucc::standin, Ucc::sid),
                         [](const auto& ucc) {
                           return ucc.param == Ucc::standin ? "standin" : "sid";
                         });

// spec: A5 A6 what cannot be used is refused: a missing library, another library, another version
TEST(UccLibrary, SaysWhatIsMissing) {
  const auto why = [](const char* path) { return UccLibrary::open(path).status().message(); };
  EXPECT_NE(why("/no/libucc.so.1").find("install UCC 1.9"), std::string::npos);
  EXPECT_NE(why("/no/libucc.so.1").find("MUSTER_UCC_LIBRARY"), std::string::npos);
  EXPECT_NE(why("libm.so.6").find("libm.so.6 has no function ucc_"), std::string::npos);
  const auto version = why(MUSTER_UCC_STANDIN_1_10);
  EXPECT_NE(version.find("UCC 1.10.0"), std::string::npos) << version;
  EXPECT_NE(version.find("does not know"), std::string::npos) << version;
}

// spec: A5 dtypes and reduce ops by UCC's numbers (ucc/api/ucc.h)
TEST(UccTypes, AreUccsNumbers) {
  EXPECT_EQ(static_cast<int>(type_of(carried::Element::uint8)), 5 << 3);
  EXPECT_EQ(static_cast<int>(type_of(carried::Element::int64)), 3 << 3);
  EXPECT_EQ(static_cast<int>(type_of(carried::Element::float64)), 12 << 3);
  EXPECT_EQ(static_cast<int>(op_of(carried::CarriedReduction::min)), 3);
  EXPECT_EQ(static_cast<int>(op_of(carried::CarriedReduction::max)), 2);
  EXPECT_EQ(static_cast<int>(op_of(carried::CarriedReduction::bxor)), 9);
}

// spec: A5 F14 MIN and MAX pass NaN on although libucc's do not: as integers of the same order
TEST(UccTypes, FloatsAreOrderedAsIntegers) {
  using collective::Reduce;
  EXPECT_TRUE(carried::carrier_of(DType::float32, Reduce::max, false).orders);
  EXPECT_TRUE(carried::carrier_of(DType::bfloat16, Reduce::min, false).orders);
  EXPECT_FALSE(carried::carrier_of(DType::float32, Reduce::sum, false).orders);
  EXPECT_FALSE(carried::carrier_of(DType::int32, Reduce::max, false).orders);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::vector<double> sorted{-kInfinity, -2.5, -1e-310, 0, 1e-310, 1, kInfinity};
  for (const bool largest : {false, true}) {
    std::vector<double> values = sorted;
    values.push_back(-std::numeric_limits<double>::quiet_NaN());
    auto* const bytes = reinterpret_cast<std::byte*>(values.data());
    carried::order_floats<double>(bytes, values.size(), largest);
    std::vector<std::int64_t> integers(values.size());
    std::memcpy(integers.data(), bytes, integers.size() * sizeof(std::int64_t));
    const std::int64_t nan = integers.back();
    integers.pop_back();
    EXPECT_TRUE(std::ranges::is_sorted(integers));
    EXPECT_TRUE(largest ? nan > integers.back() : nan < integers.front());
    carried::restore_floats<double>(bytes, values.size());
    EXPECT_TRUE(std::isnan(values.back()));
    values.pop_back();
    EXPECT_EQ(values, sorted);
  }
}

}  // namespace
}  // namespace muster::ucc
