// SPDX-License-Identifier: BSD-3-Clause
// Tests of CallObserver.
#include <stdexcept>
#include <string>
#include <vector>

#include "core/group/call/call.h"
#include "core/group/group_core.h"
#include "core/group/testing/ranks.h"

namespace muster {
namespace {

using testing::on_ranks;

struct CallLog : CallObserver {
  std::uint64_t on_call(const Call& call) override {
    const std::uint64_t number = before.size();
    before.push_back(std::string(call.name()));
    tensors += call.outputs().size();
    if (refuses) throw std::runtime_error("not this one");
    if (std::exchange(calls, false)) barrier({.group = group});
    return number;
  }
  void on_submitted(const Call& call, std::uint64_t number, const WorkRef& work) override {
    after.push_back(std::string(call.name()));
    numbers.push_back(number);
    works += work != nullptr ? 1 : 0;
  }
  void on_abort() noexcept override { ++aborts; }

  std::vector<std::string> before, after;
  std::vector<std::uint64_t> numbers;
  Group group;  // that it makes a call on once, if `calls`
  bool calls = false;
  std::size_t tensors = 0;
  int works = 0, aborts = 0;
  bool refuses = false;
};

// spec: U2 an observer sees a group's calls, in order, and its abort
TEST(CallObserver, SeesCallsInOrder) {
  on_ranks(2, [](int) {
    const Group group = new_group();
    const auto log = std::make_shared<CallLog>();
    core_of(group).observe(log);
    EXPECT_EQ(core_of(group).observer(), log.get());
    EXPECT_THROW(core_of(group).observe(log), DistError);

    const auto x = torch::ones({3});
    all_reduce(x, {.group = group});
    broadcast(x, {.group = group, .async_op = true, .group_src = 0})->wait();
    barrier();  // of another group
    EXPECT_EQ(log->before, (std::vector<std::string>{"all_reduce", "broadcast"}));
    EXPECT_EQ(log->after, log->before);
    EXPECT_EQ(log->tensors, 2U);
    EXPECT_EQ(log->works, 1);

    log->refuses = true;
    EXPECT_THROW(all_reduce(x, {.group = group}), std::runtime_error);
    EXPECT_EQ(log->after.size(), 2U);  // no member made the call
    log->refuses = false;
    barrier({.group = group});
    EXPECT_EQ(log->after.back(), "barrier");

    core_of(group).show_calls(false);
    EXPECT_EQ(core_of(group).observer(), log.get());
    barrier({.group = group});
    EXPECT_EQ(log->after.size(), 3U);
    core_of(group).show_calls(true);
    barrier({.group = group});
    EXPECT_EQ(log->after.size(), 4U);

    barrier();
    core_of(group).abort("for the test");
    EXPECT_EQ(log->aborts, 1);
  });
}

// spec: U2 an observer that never returns from the abort of its group holds up no other one: all
// groups have ended their calls before the first is told
TEST(CallObserver, IsToldOfAnAbortAfterAllGroupsHaveEnded) {
  on_ranks(2, [](int) {
    struct AbortLooks final : CallLog {
      void on_abort() noexcept override {
        for (const Group& each : groups) ended = ended && !each->failure().ok();
        CallLog::on_abort();
      }
      std::vector<Group> groups;
      bool ended = true;
    };
    const auto looks = std::make_shared<AbortLooks>();
    const std::vector<Group> both{new_group(), new_group()};
    looks->groups = both;
    core_of(both.front()).observe(looks);
    barrier();
    abort_groups(both, "for the test");
    EXPECT_EQ(looks->aborts, 1);
    EXPECT_TRUE(looks->ended);
    looks->groups.clear();
  });
}

// spec: U2 an observer that makes a call of its own gets the outer call's number afterwards
TEST(CallObserver, MakesCallsOfItsOwn) {
  on_ranks(2, [](int) {
    const auto log = std::make_shared<CallLog>();
    log->group = new_group();
    core_of(log->group).observe(log);
    log->calls = true;
    all_reduce(torch::ones({3}), {.group = log->group});
    EXPECT_EQ(log->before, (std::vector<std::string>{"all_reduce", "barrier"}));
    EXPECT_EQ(log->after, (std::vector<std::string>{"barrier", "all_reduce"}));
    EXPECT_EQ(log->numbers, (std::vector<std::uint64_t>{1, 0}));
    log->group = nullptr;  // the group holds the log
  });
}

// spec: U2 a call that an observer refuses on one member fails on the others
TEST(CallObserver, RefusesForTheWholeGroup) {
  on_ranks(2, [](int rank) {
    const Group group = new_group();
    const auto log = std::make_shared<CallLog>();
    log->refuses = rank == 0;
    core_of(group).observe(log);
    if (rank == 0) {
      EXPECT_THROW(barrier({.group = group}), std::runtime_error);
    } else {
      EXPECT_THROW(barrier({.group = group}), DistError);
    }
    log->refuses = false;
    EXPECT_THROW(barrier({.group = group}), DistError);  // rank 0 learns of the failure here
  });
}

}  // namespace
}  // namespace muster
