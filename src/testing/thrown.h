// SPDX-License-Identifier: BSD-3-Clause
/// The text of the exception that a call throws.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <string>

namespace muster::testing {

/// The message of the `Error` that `call` throws; a test failure where it throws none or another.
template <class Error, class Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "threw another exception: " << error.what();
    return {};
  }
  ADD_FAILURE() << "threw nothing";
  return {};
}

#define EXPECT_HAS(text, part) \
  EXPECT_NE(std::string(text).find(part), std::string::npos) << "in: " << (text)

}  // namespace muster::testing
