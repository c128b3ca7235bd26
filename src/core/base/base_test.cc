// SPDX-License-Identifier: BSD-3-Clause
// Status, clock, dtype, bytes, env, log: the small values that everything is made of.

#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <set>

#include "core/base/bytes.h"
#include "core/base/descriptor.h"
#include "core/base/dtype.h"
#include "core/base/environment.h"
#include "core/base/log/log.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster {
namespace {

TEST(Status, SuccessSaysNothing) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.code(), Code::ok);
  EXPECT_EQ(status.message(), "");
  EXPECT_TRUE(status.ranks().empty());
  EXPECT_TRUE(status.with_context("anything").ok());
  EXPECT_TRUE(Status(Code::ok, "a message that success does not have").ok());
}

TEST(Status, FailureKeepsCodeMessageAndRanksThroughContext) {
  const Status status(Code::peer_failed, "rank 3 died", {3});
  const Status told = status.with_context("all_reduce").with_context("step 7");
  EXPECT_EQ(told.code(), Code::peer_failed);
  EXPECT_EQ(told.message(), "step 7: all_reduce: rank 3 died");
  EXPECT_EQ(told.ranks(), std::vector<int>{3});
  EXPECT_EQ(status.message(), "rank 3 died");
}

TEST(Status, EveryCodeHasAName) {
  std::set<std::string> names;
  for (int code = 0; code <= static_cast<int>(Code::internal); ++code)
    names.insert(code_name(static_cast<Code>(code)));
  EXPECT_EQ(names.size(), static_cast<std::size_t>(Code::internal) + 1);
  EXPECT_FALSE(names.contains("unknown"));
}

TEST(Result, HoldsAValueOrAFailure) {
  Result<std::string> good = std::string("value");
  ASSERT_TRUE(good.ok());
  EXPECT_TRUE(good.status().ok());
  EXPECT_EQ(*good, "value");
  EXPECT_EQ(good->size(), 5u);
  const std::string taken = *std::move(good);
  EXPECT_EQ(taken, "value");
  const Result<std::string> bad = Status(Code::network, "no");
  EXPECT_FALSE(bad.ok());
  EXPECT_EQ(bad.status().code(), Code::network);
  const Result<int> neither = Status();
  EXPECT_EQ(neither.status().code(), Code::internal) << "a success without a value is a defect";
}

class SetClock final : public Clock {
 public:
  TimePoint now() const override { return time; }
  TimePoint time{std::chrono::seconds(5)};
};

TEST(Clock, DeadlinesDoNotOverflow) {
  const SetClock clock;
  EXPECT_EQ(deadline_after(clock, std::chrono::seconds(2)), TimePoint(std::chrono::seconds(7)));
  EXPECT_EQ(deadline_after(clock, Duration::zero()), clock.time);
  EXPECT_EQ(deadline_after(clock, Duration(-1)), TimePoint::max());
  EXPECT_EQ(deadline_after(clock, Duration::max()), TimePoint::max());
}

TEST(Clock, TimeLeftShrinksToNothing) {
  const SetClock clock;
  EXPECT_EQ(time_left(clock, clock.now() + std::chrono::seconds(5)), std::chrono::seconds(5));
  EXPECT_EQ(time_left(clock, clock.now() - std::chrono::seconds(5)), Duration::zero());
  EXPECT_LT(time_left(clock, TimePoint::max()), Duration::zero());  // no limit
}

TEST(Clock, SteadyClockGoesForward) {
  const TimePoint before = steady_clock().now();
  EXPECT_GE(steady_clock().now(), before);
}

TEST(Clock, DescribesTimesForPeople) {
  using namespace std::chrono_literals;
  EXPECT_EQ(describe(350us), "350 us");
  EXPECT_EQ(describe(1500us), "1.5 ms");
  EXPECT_EQ(describe(2500ms), "2.5 s");
  EXPECT_EQ(describe(90s), "90 s");
  EXPECT_EQ(describe(30min), "30 min");
}

// spec: F15 twelve reducible element types, by torch's names
TEST(DType, NamesSizesAndClasses) {
  const std::vector<std::pair<std::string_view, std::size_t>> expected = {
      {"bool", 1},    {"uint8", 1},   {"int8", 1},      {"int16", 2},
      {"int32", 4},   {"int64", 8},   {"float16", 2},   {"bfloat16", 2},
      {"float32", 4}, {"float64", 8}, {"complex64", 8}, {"complex128", 16}};
  ASSERT_EQ(expected.size(), static_cast<std::size_t>(kReducibleDTypes));
  for (int i = 0; i < kReducibleDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    const auto& [name, size] = expected[static_cast<std::size_t>(i)];
    EXPECT_EQ(name_of(dtype), name);
    EXPECT_EQ(size_of(dtype), size);
    EXPECT_TRUE(is_reducible(dtype));
    EXPECT_EQ(is_complex(dtype), name.starts_with("complex"));
    EXPECT_EQ(is_integral(dtype), name == "bool" || name.find("int") != std::string_view::npos);
  }
  std::size_t size = 1;
  for (const auto dtype : {DType::raw8, DType::raw16, DType::raw32, DType::raw64}) {
    EXPECT_FALSE(is_reducible(dtype));
    EXPECT_EQ(size_of(dtype), size);
    size *= 2;
  }
}

TEST(Bytes, ReadsWhatWasWritten) {
  ByteWriter out;
  out.put(std::uint8_t{7})
      .put(std::int64_t{-5})
      .put_text("text")
      .put_text("")
      .put(2.5)
      .put_bytes("tail");
  ByteReader in(out.view());
  EXPECT_EQ(in.get<std::uint8_t>(), 7);
  EXPECT_EQ(in.get<std::int64_t>(), -5);
  EXPECT_EQ(in.get_text(), "text");
  EXPECT_EQ(in.get_text(), "");
  EXPECT_EQ(in.get<double>(), 2.5);
  EXPECT_FALSE(in.at_end());
  EXPECT_EQ(in.left(), 4u);
  EXPECT_EQ(in.get<std::uint32_t>(), 0x6c696174u);
  EXPECT_TRUE(in.at_end());
}

TEST(Bytes, EveryCutIsNoticedAndStaysNoticed) {
  ByteWriter out;
  out.put(std::uint16_t{1}).put_text("some text").put(std::uint64_t{2});
  for (std::size_t cut = 0; cut < out.view().size(); ++cut) {
    ByteReader in(std::string_view(out.view()).substr(0, cut));
    in.get<std::uint16_t>();
    in.get_text();
    in.get<std::uint64_t>();
    EXPECT_FALSE(in.ok()) << cut;
    EXPECT_EQ(in.get<std::uint8_t>(), 0) << "a broken reader gives nothing more";
    EXPECT_FALSE(in.ok());
  }
}

TEST(Bytes, LyingLengthsGiveNothing) {
  ByteWriter out;
  out.put(std::uint32_t{0xffffffffu}).put_bytes("short");
  ByteReader in(out.view());
  EXPECT_EQ(in.get_text(), "");
  EXPECT_FALSE(in.ok());
}

TEST(Env, TextIntegerAndFlag) {
  ::setenv("MUSTER_TEST_VARIABLE", "", 1);
  EXPECT_FALSE(env_text("MUSTER_TEST_VARIABLE").has_value());
  EXPECT_FALSE(env_integer("MUSTER_TEST_VARIABLE", 0, 9)->has_value());
  EXPECT_FALSE(env_flag("MUSTER_TEST_VARIABLE")->has_value());
  ::setenv("MUSTER_TEST_VARIABLE", "7", 1);
  EXPECT_EQ(**env_integer("MUSTER_TEST_VARIABLE", 0, 9), 7);
  for (const char* bad : {"10", "-1", "7x", " 7", "7 ", "x", "99999999999999999999"}) {
    ::setenv("MUSTER_TEST_VARIABLE", bad, 1);
    const Status status = env_integer("MUSTER_TEST_VARIABLE", 0, 9).status();
    EXPECT_EQ(status.code(), Code::invalid_argument) << bad;
    EXPECT_NE(status.message().find("MUSTER_TEST_VARIABLE"), std::string::npos);
    EXPECT_NE(status.message().find(bad), std::string::npos);
    EXPECT_NE(status.message().find("0 to 9"), std::string::npos);
  }
  for (const char* yes : {"1", "true", "YES", "On"}) {
    ::setenv("MUSTER_TEST_VARIABLE", yes, 1);
    EXPECT_TRUE(**env_flag("MUSTER_TEST_VARIABLE")) << yes;
  }
  for (const char* no : {"0", "False", "no", "OFF"}) {
    ::setenv("MUSTER_TEST_VARIABLE", no, 1);
    EXPECT_FALSE(**env_flag("MUSTER_TEST_VARIABLE")) << no;
  }
  ::setenv("MUSTER_TEST_VARIABLE", "perhaps", 1);
  EXPECT_NE(env_flag("MUSTER_TEST_VARIABLE").status().message().find("perhaps"), std::string::npos);
  ::unsetenv("MUSTER_TEST_VARIABLE");
}

TEST(Log, LevelDecidesAndRankShows) {
  const LogLevel before = log_level();
  set_log_level(LogLevel::info);
  EXPECT_TRUE(logs(LogLevel::error));
  EXPECT_TRUE(logs(LogLevel::info));
  EXPECT_FALSE(logs(LogLevel::debug));
  set_log_rank(42);
  testing::internal::CaptureStderr();
  log(LogLevel::info, "a line with {} braces");
  log(LogLevel::debug, "not this one");
  const std::string text = testing::internal::GetCapturedStderr();
  set_log_rank(-1);
  set_log_level(before);
  EXPECT_NE(text.find("a line with {} braces"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 42"), std::string::npos) << text;
  EXPECT_NE(text.find("info"), std::string::npos) << text;
  EXPECT_EQ(text.find("not this one"), std::string::npos) << text;
}

}  // namespace
}  // namespace muster
