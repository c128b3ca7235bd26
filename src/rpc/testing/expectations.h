/// Helpers of this folder's tests for exceptions and eventual conditions.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "muster/rpc_calls.h"
#include "testing/limits.h"

namespace muster::rpc::testing {

/// The message of `call`'s exception; a test failure if it throws none.
template <class Call>
std::string thrown_by(Call call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  ADD_FAILURE() << "threw nothing";
  return {};
}
#define EXPECT_SAYS(call, part)                                              \
  do {                                                                       \
    const std::string said = muster::rpc::testing::thrown_by([&] { call; }); \
    EXPECT_NE(said.find(part), std::string::npos) << "in: " << said;         \
  } while (false)

/// Waits for `condition`, driving messages; the limit is reached only if there is a defect.
inline bool soon(const std::function<bool()>& condition) {
  const auto agent = current_agent("soon");
  return agent->wait(condition, agent->clock().now() + muster::testing::kMustHappen);
}

}  // namespace muster::rpc::testing
