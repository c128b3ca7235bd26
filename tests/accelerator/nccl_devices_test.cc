// SPDX-License-Identifier: BSD-3-Clause
// Ranks that have one device between them. NCCL is the stand-in (nccl_standin/standin.cc), to which
// devices of the same number are the same device.
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "backends/nccl/rank_device.h"
#include "nccl_ranks.h"

namespace muster::testing {
namespace {

using deferred::on_device;
using nccl::RankDevice;

/// Ranks 0 and 2 have device 0 as their current one, and the others that of their own number.
int shared_by_two(int rank) { return rank == 2 ? 0 : rank; }

void expect_words(const std::string& text) {
  for (const char* part :
       {"ranks 0 and 2 use the same GPU (deferred:0 of rank 0, deferred:0 of rank 2)", "set_device",
        "NCCL_MULTI_RANK_GPU_ENABLE=1"})
    EXPECT_HAS(text, part);
}

// spec: A3 A6 ranks of a group that use one GPU are refused on every rank, with the names of two
// and what to try, before NCCL is asked
TEST(NcclDevices, RanksThatShareOneAreNamed) {
  use_standin();
  const int before = standin_calls("ncclCommInitRankConfig");
  on_failing_ranks(3, [](int rank) {
    const int device = shared_by_two(rank);
    const c10::DeviceGuard on(device_of(device));
    const auto text = told([&] { all_reduce(on_device(values(rank, {4}), device)); });
    expect_words(text);
    EXPECT_HAS(text, "group default (backend nccl)");
  });
  EXPECT_EQ(standin_calls("ncclCommInitRankConfig"), before);
}

// spec: E1 A6 so are messages between ranks that use one GPU
TEST(NcclDevices, MessagesWithinOneAreNamed) {
  use_standin();
  const int before = standin_calls("ncclCommInitRankConfig");
  on_failing_ranks(3, [](int rank) {
    if (rank != 1) {
      const auto tensor = on_device(values(rank, {4}), 0);
      const auto work = rank == 0 ? isend(tensor, {.dst = 2}) : irecv(tensor, {.src = 0});
      expect_words(told([&] { work->wait(); }));
    }
    expect_words(told([&] { all_reduce(some(rank)); }));
  });
  EXPECT_EQ(standin_calls("ncclCommInitRankConfig"), before);
}

// spec: A3 with NCCL's variable for it, ranks may share a GPU
TEST(NcclDevices, SharingThatIsMeantIsLeftToNccl) {
  const Variable meant("NCCL_MULTI_RANK_GPU_ENABLE", "1");
  on_nccl_ranks(2, [](int rank) {
    // Ranks that are processes have no stream in common; behind each other they would never end.
    const c10::StreamGuard own(deferred::stream_of(0, 1 + rank));
    const auto tensor = on_device(values(rank, {4}), 0), got = on_device(torch::zeros({4}), 0);
    all_reduce(tensor);
    EXPECT_SAME(tensor.cpu(), reduced(2, {4}, at::kFloat, ReduceOp::SUM));
    for (const auto& work : batch_isend_irecv(
             {{isend, on_device(values(rank, {4}), 0), 1 - rank}, {irecv, got, 1 - rank}}))
      work->wait();
    EXPECT_SAME(got.cpu(), values(1 - rank, {4}));
  });
}

// spec: A6 D7 a rank that joins with the GPU of a member is refused on every rank, and the members'
// group goes on
TEST(NcclDevices, ARankThatJoinsWithAMembersIsNamed) {
  on_nccl_ranks(3, [](int rank) {
    const int device = shared_by_two(rank);
    const c10::DeviceGuard on(device_of(device));
    const auto pair = new_group({.ranks = std::vector<int>{0, 1}});
    const auto add = [&] {
      const auto tensor = on_device(torch::ones({2}), device);
      all_reduce(tensor, {.group = pair});
      EXPECT_SAME(tensor.cpu(), torch::full({2}, 2.0));
    };
    if (rank < 2) add();
    expect_words(text_of([&] { grow_group({0, 1, 2}, {.group = pair}); }));
    if (rank < 2) add();
  });
}

/// The device of that number, known.
RankDevice known(std::uint8_t number, bool may_be_shared = false) {
  RankDevice device;
  device.uuid.back() = number;
  device.index = number;
  device.is_known = 1;
  device.may_be_shared = may_be_shared ? 1 : 0;
  return device;
}

// spec: A6 only ranks that know their devices are compared, and both have to say that sharing is
// meant
TEST(NcclDevices, TheFirstTwoThatShareAreFound) {
  const auto found = [](const std::vector<RankDevice>& devices) {
    const auto shared = nccl::find_shared(devices);
    return std::vector<int>{shared.first, shared.second};
  };
  const std::vector<int> none{-1, -1};
  const RankDevice unknown;
  EXPECT_EQ(found({}), none);
  EXPECT_EQ(found({known(1), known(2), known(3)}), none);
  EXPECT_EQ(found({unknown, unknown}), none);
  EXPECT_EQ(found({known(2), known(1), known(3), known(1), known(2)}), (std::vector<int>{1, 3}));
  EXPECT_EQ(found({known(1, true), unknown, known(1, true)}), none);
  EXPECT_EQ(found({known(1, true), known(1, true), known(1)}), (std::vector<int>{0, 2}));
  EXPECT_EQ(found({known(1), known(1, true)}), (std::vector<int>{0, 1}));
}

}  // namespace
}  // namespace muster::testing
