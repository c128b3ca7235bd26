// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/core/ivalue.h>
#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "core/group/calls.h"
#include "core/group/group_core.h"
#include "core/group/testing/compress_within_host.h"
#include "core/group/testing/ranks.h"
#include "muster/collectives.h"
#include "testing/deferred_device.h"

namespace muster::testing {
namespace {

using deferred::on_device;

constexpr int kRanks = 3;

/// Runs `body` on ranks whose groups also serve the accelerator.
void on_devices(const std::function<void(int)>& body, int ranks = kRanks) {
  deferred::install();
  on_ranks(ranks, body, "cpu:native,deferred:native");
}

/// Checks that `call` gives device tensors the same results as CPU tensors. `call(place)` passes
/// its tensors through `place`.
using Place = std::function<at::Tensor(const at::Tensor&)>;
void expect_alike(int rank, int device, const char* what,
                  const std::function<std::vector<at::Tensor>(const Place&)>& call) {
  const auto there = call([=](const at::Tensor& tensor) { return on_device(tensor, device); });
  const auto here = call([](const at::Tensor& tensor) { return tensor.clone(); });
  ASSERT_EQ(there.size(), here.size()) << what;
  for (std::size_t i = 0; i < here.size(); ++i) {
    if (!here[i].defined()) continue;
    EXPECT_EQ(there[i].device().type(), deferred::kType) << what;
    EXPECT_TRUE(torch::equal(there[i].cpu(), here[i]))
        << what << " on rank " << rank << ": " << there[i].cpu() << "\nand\n"
        << here[i];
  }
}

std::vector<at::Tensor> blanks(const Place& place, int count) {
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < count; ++i) tensors.push_back(place(torch::zeros({2, 3})));
  return tensors;
}

/// Every operation, on rank `rank` of `ranks`, whose tensors are on device `device`.
void check_every_operation(int rank, int ranks, int device) {
  const auto check = [&](const char* what, const auto& call) {
    expect_alike(rank, device, what, call);
  };
  const auto mine = values(rank, {2, 3});
  const auto many = values(rank, {2 * ranks, 3});
  const std::vector<at::Tensor> none;
  check("broadcast", [&](const Place& place) {
    const auto tensor = place(mine);
    broadcast(tensor, {.src = 1});
    return std::vector{tensor};
  });
  for (const auto op : {ReduceOp::SUM, ReduceOp::MAX, ReduceOp::AVG})
    check("all_reduce", [&](const Place& place) {
      const auto tensor = place(mine);
      all_reduce(tensor, {.op = op});
      return std::vector{tensor};
    });
  check("reduce", [&](const Place& place) {
    const auto tensor = place(mine);
    reduce(tensor, {.dst = ranks - 1});
    return rank == ranks - 1 ? std::vector{tensor} : none;
  });
  check("all_gather", [&](const Place& place) {
    const auto tensors = blanks(place, ranks);
    all_gather(tensors, place(mine));
    return tensors;
  });
  check("all_gather_into_tensor", [&](const Place& place) {
    const auto tensor = place(many);
    all_gather_into_tensor(tensor, place(mine));
    return std::vector{tensor};
  });
  check("gather", [&](const Place& place) {
    const auto tensors = blanks(place, rank == 1 ? ranks : 0);
    gather(place(mine), {.gather_list = tensors, .dst = 1});
    return tensors;
  });
  check("scatter", [&](const Place& place) {
    auto tensors = blanks(place, rank == 0 ? ranks : 0);
    for (auto& tensor : tensors) tensor = place(mine + 1);
    const auto got = place(mine);
    scatter(got, {.scatter_list = tensors, .src = 0});
    return std::vector{got};
  });
  check("reduce_scatter", [&](const Place& place) {
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < ranks; ++i) tensors.push_back(place(mine + i));
    const auto got = place(mine);
    reduce_scatter(got, tensors);
    return std::vector{got};
  });
  check("reduce_scatter_tensor", [&](const Place& place) {
    const auto got = place(mine);
    reduce_scatter_tensor(got, place(many));
    return std::vector{got};
  });
  check("all_to_all", [&](const Place& place) {
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < ranks; ++i) tensors.push_back(place(mine + i));
    const auto got = blanks(place, ranks);
    all_to_all(got, tensors);
    return got;
  });
  check("all_to_all_single", [&](const Place& place) {
    const auto got = place(many);
    all_to_all_single(got, place(many));
    return std::vector{got};
  });
  check("send and recv", [&](const Place& place) {
    const auto got = place(mine);
    if (rank == 0) send(place(mine), {.dst = 1});
    if (rank == 1) recv(got, {.src = 0});
    return std::vector{got};
  });
  check("a transposed tensor", [&](const Place& place) {
    const auto tensor = place(mine).t();
    all_reduce(tensor);
    return std::vector{tensor};
  });
  check("no elements", [&](const Place& place) {
    const auto tensor = place(torch::zeros({0}));
    all_reduce(tensor);
    return std::vector{tensor};
  });
  check("a prepared request", [&](const Place& place) {
    const auto tensor = place(mine);
    auto prepared =
        core_of(default_group()).prepare(calls::all_reduce(*default_group(), tensor, {}));
    for (int i = 0; i < 2; ++i) prepared.submit();
    return std::vector{tensor};
  });
}

// spec: A2.staging every operation on an accelerator's tensors, staged through the host's memory;
// A12 the native backend's cells for accelerators
TEST(DeviceTensors, EveryOperationGivesWhatItGivesOnTheCpu) {
  on_devices([](int rank) { check_every_operation(rank, kRanks, rank); });
  EXPECT_GT(deferred::PinnedMemory::given, 0);
}

// spec: A2 ranks that share a device: the same, through the host's memory
TEST(DeviceTensors, RanksMayShareADevice) {
  for (const int ranks : {2, kRanks})
    on_devices([ranks](int rank) { check_every_operation(rank, ranks, 0); }, ranks);
}

// spec: F21 is_completed is true and wait returns once the output's copy is enqueued: not done, but
// usable on the stream of the call
TEST(DeviceTensors, AWorkIsCompletedOnceItsOutputIsEnqueued) {
  on_devices([](int rank) {
    const auto tensor = on_device(values(rank, {4}), rank);
    const auto work = all_reduce(tensor, {.async_op = true});
    EXPECT_TRUE(work->wait());
    EXPECT_TRUE(work->is_completed());
    EXPECT_TRUE(work->is_success());
    EXPECT_SAME(deferred::now(tensor),
                values(rank, {4}));  // the copy back is enqueued on the stream
    const auto used = at::empty_like(tensor).copy_(tensor, /*non_blocking=*/true);
    EXPECT_SAME(used.cpu(), reduced(kRanks, {4}, at::kFloat, ReduceOp::SUM));
  });
}

// spec: F21 device work enqueued after a wait on another stream runs after the output
TEST(DeviceTensors, WaitOrdersAnotherStreamBehindTheOutput) {
  on_devices([](int rank) {
    const auto device = static_cast<c10::DeviceIndex>(rank);
    const auto expected = reduced(kRanks, {4}, at::kFloat, ReduceOp::SUM);
    at::Tensor tensor;
    WorkRef work;
    c10::intrusive_ptr<c10::ivalue::Future> future;
    {
      const c10::StreamGuard side(deferred::stream_of(device, 7));
      tensor = on_device(values(rank, {4}), rank);
      work = all_reduce(tensor, {.async_op = true});
      future = work->get_future();
    }
    while (!work->is_completed()) std::this_thread::yield();
    EXPECT_SAME(deferred::now(tensor), values(rank, {4}));
    {
      const c10::StreamGuard other(deferred::stream_of(device, 3));
      EXPECT_FALSE(torch::equal(at::empty_like(tensor).copy_(tensor, true).cpu(), expected))
          << "the streams are ordered by something else";
      work->wait();
      EXPECT_SAME(at::empty_like(tensor).copy_(tensor, true).cpu(), expected);
    }
    const c10::StreamGuard another(deferred::stream_of(device, 5));
    future->wait();
    EXPECT_SAME(future->value().toTensorVector().at(0).cpu(), expected);
  });
}

// spec: X1 compressed calls on tensors of an accelerator, also asynchronous ones and their futures,
// give what they give on the CPU
TEST(DeviceTensors, CompressedCallsGiveWhatTheyGiveOnTheCpu) {
  on_devices([](int rank) {
    const auto mine = torch::sin(torch::arange(600, at::kFloat) * (0.3 + rank));
    for (const bool async : {false, true}) {
      const auto end = [](const WorkRef& work, const at::Tensor& result) {
        if (work) {
          work->wait();
          work->get_future()->waitAndThrow();
        }
        return std::vector{result};
      };
      constexpr auto kInt8 = Compression::int8;
      expect_alike(rank, rank, "all_reduce", [&](const Place& place) {
        const auto tensor = place(mine), rests = place(torch::full({600}, 0.001));
        const auto work =
            all_reduce(tensor, {.async_op = async, .compression = kInt8, .feedback = rests});
        return std::vector{end(work, tensor)[0], rests};
      });
      expect_alike(rank, rank, "broadcast", [&](const Place& place) {
        const auto tensor = place(mine);
        return end(broadcast(tensor, {.src = 1, .async_op = async, .compression = kInt8}), tensor);
      });
      expect_alike(rank, rank, "all_gather", [&](const Place& place) {
        const auto whole = place(torch::zeros({3 * 600}));
        const auto work =
            all_gather_into_tensor(whole, place(mine), {.async_op = async, .compression = kInt8});
        return end(work, whole);
      });
      expect_alike(rank, rank, "reduce_scatter", [&](const Place& place) {
        const auto part = place(torch::zeros({200}));
        const auto work =
            reduce_scatter_tensor(part, place(mine), {.async_op = async, .compression = kInt8});
        return end(work, part);
      });
    }
  });
}

// spec: F21 a synchronous call returns when its output is enqueued
TEST(DeviceTensors, ASynchronousCallLeavesItsOutputEnqueued) {
  on_devices([](int rank) {
    const auto tensor = on_device(values(rank, {4}), rank);
    all_reduce(tensor);
    EXPECT_SAME(deferred::now(tensor), values(rank, {4}));
    EXPECT_SAME(tensor.cpu(), reduced(kRanks, {4}, at::kFloat, ReduceOp::SUM));
  });
}

// spec: A2 an accelerator without pinned memory
TEST(DeviceTensors, GoThroughOrdinaryMemoryWhereNoneIsPinned) {
  on_devices([](int rank) {
    const auto tensor = on_device(values(rank, {4}), rank);
    barrier();
    deferred::PinnedMemory::refused = true;
    const auto work = all_reduce(tensor, {.async_op = true});
    work->get_future()->wait();
    EXPECT_SAME(tensor.cpu(), reduced(kRanks, {4}, at::kFloat, ReduceOp::SUM));
    barrier();
    deferred::PinnedMemory::refused = false;
  });
}

// spec: A6 a device whose tensors have no values is refused by name
TEST(DeviceTensors, MetaIsRefused) {
  on_ranks(
      1,
      [](int) {
        EXPECT_HAS(message_of<DistBackendError>([] { all_reduce(torch::empty({2}, at::kMeta)); }),
                   "meta");
      },
      "cpu:native,meta:native");
}

}  // namespace
}  // namespace muster::testing
