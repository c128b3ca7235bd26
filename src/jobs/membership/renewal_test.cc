// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/membership/renewal.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "jobs/membership/stored_values.h"
#include "jobs/membership/testing/membership_suite.h"

namespace muster::membership::testing {
namespace {

using std::chrono::milliseconds;

constexpr Duration kTtl = milliseconds(800);

// spec: L14.node a process that stood still for longer than its lease asks the service once more
// before it takes its own absence for the service's silence
TEST(Renewal, OnesOwnAbsenceIsNotTheServicesSilence) {
  if (kForksStartNoThreads) GTEST_SKIP() << "ThreadSanitizer ends a fork that starts threads";
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  Renewal* renewal = nullptr;
  // It looks at the state whenever that may have changed, as soon as it goes on after a pause too,
  // and tells when it is bad and when the service was asked.
  Bystander child([&] {
    renewal = new Renewal("a service", "node/a", kTtl, steady_clock().now());
    const Status begun = renewal->begin([&](TimePoint) {
      return ::write(ends[1], "r", 1) == 1 ? Status() : Status(Code::network, "");
    });
    std::thread([&] {
      while (renewal->state().ok()) std::this_thread::sleep_until(renewal->expires());
      [[maybe_unused]] const ssize_t written = ::write(ends[1], "x", 1);
    }).detach();
    return begun.ok();
  });
  ASSERT_TRUE(child.ready());
  const auto next = [&] {
    char word = 0;
    EXPECT_EQ(::read(ends[0], &word, 1), 1);
    return word;
  };
  EXPECT_EQ(next(), 'r');
  for (int pause = 0; pause < 3; ++pause) {
    child.stop();
    std::this_thread::sleep_for(3 * kTtl);  // the fault itself
    child.go_on();
    EXPECT_EQ(next(), 'r');
    EXPECT_EQ(next(), 'r');
  }
  child.kill();
  ::close(ends[0]);
  ::close(ends[1]);
}

// spec: L14.service a service that is silent for the whole lease while this process runs may have
// let the name go, which `expires` tells in time; its next answer says that it has not
TEST(Renewal, ASilentServiceMayHaveLostTheName) {
  const TimePoint granted = steady_clock().now();
  Renewal renewal("a service", "node/a", kTtl, granted);
  EXPECT_GE(renewal.expires(), granted + kTtl);
  EXPECT_EQ(renewal.silent_until(), TimePoint{});
  std::atomic<int> asked = 0;
  std::atomic<bool> answers = false;
  ASSERT_TRUE(renewal
                  .begin([&](TimePoint) {
                    ++asked;
                    return answers ? Status() : Status(Code::timed_out, "no answer");
                  })
                  .ok());
  const TimePoint limit = steady_clock().now() + kPatience;
  while (renewal.state().ok() && steady_clock().now() < limit)
    std::this_thread::sleep_until(renewal.expires());
  EXPECT_EQ(renewal.state().code(), Code::timed_out);
  EXPECT_NE(renewal.state().message().find("no answer"), std::string::npos)
      << renewal.state().message();
  EXPECT_GE(asked.load(), 1);
  EXPECT_FALSE(renewal.lost()) << "the service has not said so";
  // Others may have lost their places, until it answers and for a time after that.
  while (renewal.silent_until() != TimePoint::max() && steady_clock().now() < limit)
    std::this_thread::yield();
  EXPECT_EQ(renewal.silent_until(), TimePoint::max());
  const TimePoint silent_at = steady_clock().now();
  answers = true;
  while (!renewal.state() && steady_clock().now() < limit) std::this_thread::yield();
  EXPECT_TRUE(renewal.state().ok()) << renewal.state().message();
  while (renewal.silent_until() == TimePoint::max() && steady_clock().now() < limit)
    std::this_thread::yield();
  EXPECT_GE(renewal.silent_until(), silent_at);
  EXPECT_LE(renewal.silent_until(), steady_clock().now());
}

// spec: L12 what a holder says of itself is shown only where people can read it
TEST(Renewal, AnothersBytesAreNotPrinted) {
  EXPECT_NE(held_by_another("node/a", "a launcher").message().find("a launcher"),
            std::string::npos);
  const std::string bytes = held_by_another("node/a", std::string("\x01\0\xff raw", 7)).message();
  EXPECT_EQ(bytes.find("raw"), std::string::npos);
  EXPECT_NE(bytes.find("another process"), std::string::npos);
}

}  // namespace
}  // namespace muster::membership::testing
