#include "core/base/log/debug_level.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace muster {
namespace {

/// Puts levels and environment back.
class DebugLevels : public ::testing::Test {
 protected:
  void TearDown() override {
    for (const char* name : {"TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "MUSTER_LOG_LEVEL"})
      ::unsetenv(name);
    set_debug_level(DebugLevel::OFF);
    set_log_level(LogLevel::warning);
  }
};

// spec: H2 TORCH_DISTRIBUTED_DEBUG with TORCH_CPP_LOG_LEVEL give error, warning, info, debug, trace
TEST_F(DebugLevels, TableOfTheDocuments) {
  for (const auto debug : {DebugLevel::OFF, DebugLevel::INFO, DebugLevel::DETAIL}) {
    EXPECT_EQ(log_level_for("ERROR", debug), LogLevel::error);
    EXPECT_EQ(log_level_for("WARNING", debug), LogLevel::warning);
    EXPECT_EQ(log_level_for("FATAL", debug), LogLevel::error);
    EXPECT_EQ(log_level_for("2", debug), LogLevel::error);
    EXPECT_EQ(log_level_for("nonsense", debug), LogLevel::warning);
  }
  EXPECT_EQ(log_level_for("INFO", DebugLevel::OFF), LogLevel::info);
  EXPECT_EQ(log_level_for("INFO", DebugLevel::INFO), LogLevel::debug);
  EXPECT_EQ(log_level_for("INFO", DebugLevel::DETAIL), LogLevel::trace);
  EXPECT_EQ(log_level_for("info", DebugLevel::DETAIL), LogLevel::trace);
}

// spec: H2 OFF, INFO, DETAIL from the environment; anything else is named
TEST_F(DebugLevels, FromTheEnvironment) {
  EXPECT_EQ(*debug_level_from_environment(), DebugLevel::OFF);
  ::setenv("TORCH_DISTRIBUTED_DEBUG", "INFO", 1);
  EXPECT_EQ(*debug_level_from_environment(), DebugLevel::INFO);
  ::setenv("TORCH_DISTRIBUTED_DEBUG", "detail", 1);
  EXPECT_EQ(*debug_level_from_environment(), DebugLevel::DETAIL);
  ::setenv("TORCH_DISTRIBUTED_DEBUG", "OFF", 1);
  EXPECT_EQ(*debug_level_from_environment(), DebugLevel::OFF);
  ::setenv("TORCH_DISTRIBUTED_DEBUG", "LOUD", 1);
  const Status wrong = debug_level_from_environment().status();
  EXPECT_EQ(wrong.code(), Code::invalid_argument);
  for (const char* part : {"TORCH_DISTRIBUTED_DEBUG", "LOUD", "DETAIL"})
    EXPECT_NE(wrong.message().find(part), std::string::npos) << wrong.message();
}

// spec: H2 set_debug_level, get_debug_level: the log's level follows
TEST_F(DebugLevels, LogFollows) {
  ::setenv("TORCH_CPP_LOG_LEVEL", "INFO", 1);
  set_debug_level(DebugLevel::INFO);
  EXPECT_EQ(get_debug_level(), DebugLevel::INFO);
  EXPECT_EQ(log_level(), LogLevel::debug);
  set_debug_level(DebugLevel::DETAIL);
  EXPECT_EQ(log_level(), LogLevel::trace);
  ::setenv("MUSTER_LOG_LEVEL", "error", 1);
  set_debug_level(DebugLevel::INFO);
  EXPECT_EQ(log_level(), LogLevel::error);
}

}  // namespace
}  // namespace muster
