// Tests of CallObserver.
#include <stdexcept>
#include <string>
#include <vector>

#include "muster/group/call.h"
#include "muster/group/group_core.h"
#include "muster/group/testing/ranks.h"

namespace muster {
namespace {

using testing::on_ranks;

struct CallLog : CallObserver {
  void on_call(const Call& call) override {
    before.push_back(std::string(call.name()));
    tensors += call.outputs().size();
    if (refuses) throw std::runtime_error("not this one");
  }
  void on_submitted(const Call& call, const WorkRef& work) override {
    after.push_back(std::string(call.name()));
    works += work != nullptr ? 1 : 0;
  }
  void on_abort() noexcept override { ++aborts; }

  std::vector<std::string> before, after;
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
