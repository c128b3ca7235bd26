// SPDX-License-Identifier: BSD-3-Clause
// Groups on backend nccl that ranks join. NCCL is the stand-in (nccl_standin/standin.cc).
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "backends/nccl/link_exchange.h"
#include "core/group/group_core.h"
#include "nccl_ranks.h"

namespace muster::testing {
namespace {

/// The configuration that NCCL got with the newest communicator.
std::string last_config() {
  return reinterpret_cast<const char* (*)()>(standin_symbol("musterStandinConfig"))();
}

// spec: B13 pg_options: the fields of ProcessGroupNCCL.Options.config reach NCCL; those that cannot
// be are refused by name; D7 a group that is split or shrunk has its own, or those it comes from
TEST(NcclGrowth, OptionsReachNccl) {
  const auto options = std::make_shared<ProcessGroupNCCL::Options>();
  options->config = {.cga_cluster_size = 2, .max_ctas = 8, .net_name = "Socket"};
  const auto later = std::make_shared<ProcessGroupNCCL::Options>();
  later->config = {.traffic_class = 3, .comm_name = "tensor parallel"};
  const auto blocks = std::make_shared<ProcessGroupNCCL::Options>();
  blocks->config.blocking = 1;
  constexpr auto kOptions = "blocking=0 cgaClusterSize=2 maxCTAs=8 netName=Socket",
                 kLater = "blocking=0 trafficClass=3 commName=tensor parallel";
  on_failing_ranks(2, [&](int rank) {
    const auto expect_config = [](const char* text) {
      EXPECT_EQ(last_config(), text);
      barrier();  // of the CPU's backend
    };
    all_reduce(some(rank), {.group = new_group({.pg_options = options})});
    expect_config(kOptions);
    const auto parent = new_group({.pg_options = later});
    all_reduce(some(rank), {.group = parent});
    expect_config(kLater);
    split_group(parent, {{0, 1}}, {.pg_options = options});
    expect_config(kOptions);
    split_group(parent, {{0, 1}});
    expect_config(kLater);
    EXPECT_HAS(text_of([&] { new_group({.pg_options = blocks}); }), "config.blocking");
    EXPECT_HAS(text_of([&] {
                 split_group(parent, {{0, 1}}, {.pg_options = blocks});
               }),
               "config.blocking");
    if (rank == 1) return;
    shrink_group(
        {1}, {.group = parent, .shrink_flags = ShrinkFlags::SHRINK_ABORT, .pg_options = options});
    EXPECT_EQ(last_config(), kOptions);
  });
}

using deferred::on_device;
using nccl::GrowthOffer;
using Readiness = GrowthOffer::Readiness;

/// How often functions of the stand-in have been called since this was made.
class CallsSince {
 public:
  int opened() const { return standin_calls("ncclCommInitRankConfig") - opened_; }
  int grown() const { return standin_calls("ncclCommGrow") - grown_; }
  int ids() const { return standin_calls("ncclCommGetUniqueId") - ids_; }

 private:
  const int opened_ = standin_calls("ncclCommInitRankConfig"),
            grown_ = standin_calls("ncclCommGrow"), ids_ = standin_calls("ncclCommGetUniqueId");
};

/// The ranks of the default group in the order of `group`, as its collective on the device says.
std::vector<float> order_of(const Group& group, int rank) {
  const auto all = on_device(torch::zeros({group->size()}), rank);
  all_gather_into_tensor(all, on_device(torch::full({1}, static_cast<float>(rank)), rank),
                         {.group = group});
  const auto here = all.cpu();
  return {here.data_ptr<float>(), here.data_ptr<float>() + here.numel()};
}

/// A group of ranks 0 and 1, which NCCL has connected. `rank` is one of four.
Group connected_pair(int rank) {
  auto pair = new_group({.ranks = std::vector<int>{0, 1}});
  if (pair->is_member()) order_of(pair, rank);
  return pair;
}

const std::vector<int> kGrown{0, 1, 3, 2};
const std::vector<float> kGrownOrder{0, 1, 3, 2};

// spec: D7 grow_group on nccl: members keep their ranks and communicator, ranks that join get the
// next ones; calls in flight end first, and the old group goes on
TEST(NcclGrowth, RanksJoinTheCommunicator) {
  use_standin();
  const CallsSince calls;
  on_nccl_ranks(4, [](int rank) {
    const auto pair = connected_pair(rank);
    WorkRef work;
    const auto tensor = some(rank);
    if (rank < 2) work = all_reduce(tensor, {.group = pair, .async_op = true});
    const auto grown = grow_group(kGrown, {.group = pair});
    EXPECT_EQ(get_rank(grown), rank < 2 ? rank : 5 - rank);
    EXPECT_EQ(order_of(grown, rank), kGrownOrder);
    if (rank >= 2) return;
    work->wait();
    EXPECT_SAME(tensor.cpu(), reduced(2, {4}, at::kFloat, ReduceOp::SUM));
    EXPECT_EQ(order_of(pair, rank), (std::vector<float>{0, 1}));
  });
  EXPECT_EQ(calls.grown(), 4);
  EXPECT_EQ(calls.ids(), 1);
  EXPECT_EQ(calls.opened(), 2) << "the pair's alone";
}

// spec: D7 a group that has not been connected yet has nothing to grow: all ranks connect
TEST(NcclGrowth, WithoutACommunicatorAllRanksConnect) {
  use_standin();
  const CallsSince calls;
  on_nccl_ranks(4, [](int rank) {
    const auto pair = new_group({.ranks = std::vector<int>{0, 1}});
    EXPECT_EQ(order_of(grow_group(kGrown, {.group = pair}), rank), kGrownOrder);
  });
  EXPECT_EQ(calls.grown(), 0);
  EXPECT_EQ(calls.opened(), 4);
}

// spec: D7 if NCCL fails to grow, on the member that makes the id, on another one, or on a rank
// that joins, all ranks connect anew; and so again from a parent whose id is still unused
TEST(NcclGrowth, IfNcclFailsAllRanksConnectAnew) {
  use_standin();
  for (const int culprit : {0, 1, 2, 3}) {
    const Variable error("NCCL_STANDIN_GROW_ERROR", std::to_string(culprit));
    const CallsSince calls;
    on_nccl_ranks(4, [](int rank) {
      const auto pair = connected_pair(rank);
      EXPECT_EQ(order_of(grow_group(kGrown, {.group = pair}), rank), kGrownOrder);
      EXPECT_EQ(order_of(grow_group(kGrown, {.group = pair}), rank), kGrownOrder);
    });
    EXPECT_EQ(calls.opened(), 2 + 4 + 4) << "culprit " << culprit;
    EXPECT_EQ(calls.ids(), 2);
  }
}

// spec: D7 a rank that joins and does not get to the others in NCCL: all ranks are told at the
// deadline, and the old group goes on
TEST(NcclGrowth, EndsAtTheDeadline) {
  const Variable absent("NCCL_STANDIN_GROW_ABSENT", "2");
  on_nccl_ranks(3, [](int rank) {
    const auto pair = connected_pair(rank);
    const auto text = text_of([&] {
      grow_group({0, 1, 2}, {.group = pair, .timeout = std::chrono::seconds(2)});
    });
    EXPECT_NE(text, "");
    if (rank < 2) EXPECT_EQ(order_of(pair, rank), (std::vector<float>{0, 1}));
  });
}

// spec: D7 a group that has failed cannot grow: every rank is told
TEST(NcclGrowth, AFailedGroupIsNamed) {
  on_nccl_ranks(3, [](int rank) {
    const auto pair = connected_pair(rank);
    if (rank == 1) {
      core_of(pair).abort("enough of it");
      EXPECT_HAS(told([&] { all_reduce(some(rank), {.group = pair}); }), "enough of it");
    }
    const auto text = text_of([&] { grow_group({0, 1, 2}, {.group = pair}); });
    EXPECT_NE(text, "");
    if (rank != 0) EXPECT_HAS(text, rank == 1 ? "enough of it" : "cannot grow");
    if (rank < 2) text_of([&] { destroy_process_group(pair); });
  });
}

// spec: D7 a member that does not name the group that grows is named on every rank
TEST(NcclGrowth, AMemberThatJoinsIsNamed) {
  on_nccl_ranks(3, [](int rank) {
    const auto pair = connected_pair(rank);
    const auto text = text_of([&] {
      grow_group({0, 1, 2}, {.group = rank == 1 ? nullptr : pair});
    });
    EXPECT_HAS(text, "rank 1 does not come from the group of rank 0");
  });
}

// spec: D7 a member that names another group of the same ranks is named on every rank
TEST(NcclGrowth, AMemberOfAnotherGroupIsNamed) {
  on_nccl_ranks(3, [](int rank) {
    const auto one = connected_pair(rank), two = connected_pair(rank);
    const auto text = text_of([&] { grow_group({0, 1, 2}, {.group = rank == 1 ? two : one}); });
    EXPECT_HAS(text, "rank 1 does not come from the group of rank 0");
  });
}

TEST(NcclGrowth, OffersMustFitTogether) {
  const auto said = [](const std::vector<GrowthOffer>& offers) {
    return text_of([&] { nccl::can_grow(offers, {4, 5, 6}, "[4, 5, 6]"); });
  };
  const GrowthOffer member{.parent = 7, .members = 2}, joins{};
  EXPECT_TRUE(nccl::can_grow({member, member, joins}, {4, 5, 6}, "g"));
  EXPECT_FALSE(nccl::can_grow({joins, joins, joins}, {4, 5, 6}, "g"));
  auto cannot = member;
  cannot.readiness = Readiness::cannot;
  EXPECT_FALSE(nccl::can_grow({member, cannot, joins}, {4, 5, 6}, "g"));
  auto failed = member;
  failed.readiness = Readiness::failed;
  EXPECT_HAS(said({member, failed, joins}), "the group that rank 5 comes from has failed");
  EXPECT_HAS(said({member, joins, joins}), "rank 5 does not come from the group of rank 4");
  EXPECT_HAS(said({member, member, member}), "rank 6 comes from a group");
  EXPECT_HAS(said({member, {.parent = 9, .members = 2}, joins}), "rank 5 does not come from");
  EXPECT_HAS(said({joins, member, member}), "rank 5 comes from a group, and rank 4 says");
}

}  // namespace
}  // namespace muster::testing
