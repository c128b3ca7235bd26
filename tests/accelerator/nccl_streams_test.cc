// SPDX-License-Identifier: BSD-3-Clause
// Programs rely on the streams of torch's ProcessGroupNCCL (its test_c10d_nccl.py and
// ProcessGroupNCCLTest.cpp): calls follow the current stream, `wait` orders the stream that is
// current at `wait`, and neither blocks the CPU. NCCL is the stand-in (nccl_standin/standin.cc).
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "nccl_ranks.h"

namespace muster::testing {
namespace {

using deferred::on_device;
using deferred::Timeline;

/// A stream whose later work waits until this object opens it.
class GatedStream {
 public:
  explicit GatedStream(const c10::Stream& stream) {
    Timeline::get().run(stream, [gate = gate_] { gate->wait(); });
  }
  ~GatedStream() { open(); }
  GatedStream(const GatedStream&) = delete;
  void open() {
    if (!std::exchange(is_open_, true)) gate_->count_down();
  }

 private:
  const std::shared_ptr<RankLatch> gate_ = std::make_shared<RankLatch>(1);
  bool is_open_ = false;
};

c10::Stream numbered_stream(int rank, c10::StreamId id) {
  return deferred::stream_of(static_cast<c10::DeviceIndex>(rank), id);
}
c10::Stream current_stream(int rank) {
  return c10::impl::VirtualGuardImpl(deferred::kType).getStream(device_of(rank));
}
/// Whether the device has done all that the stream has. A thread runs the stream from now on.
bool has_passed(const c10::Stream& stream) {
  return Timeline::get().query(stream, Timeline::get().length(stream));
}

constexpr c10::StreamId kSide = 7, kOther = 8;

/// A tensor that is there, on a group whose ranks are connected.
at::Tensor ready_tensor(int rank) {
  all_reduce(some(rank));
  const auto tensor = some(rank);
  EXPECT_SAME(tensor.cpu(), values(rank, {4}));
  return tensor;
}
at::Tensor sum_of_both() { return reduced(2, {4}, at::kFloat, ReduceOp::SUM); }

// spec: F1 F21 `wait` of an asynchronous call on nccl returns, and says that it is completed, while
// the device is not done with it
TEST(NcclStreams, WaitDoesNotBlockTheCpu) {
  on_nccl_ranks(2, [](int rank) {
    const auto tensor = ready_tensor(rank);
    GatedStream gate(current_stream(rank));
    const auto work = all_reduce(tensor, {.async_op = true});
    EXPECT_TRUE(work->wait());
    EXPECT_TRUE(work->is_completed());
    EXPECT_SAME(deferred::now(tensor), values(rank, {4}));
    EXPECT_FALSE(has_passed(current_stream(rank)));
    gate.open();
    EXPECT_SAME(tensor.cpu(), sum_of_both());
  });
}

// spec: F1 F21 a synchronous call on nccl returns while the device is not done with it; what
// follows it on its stream sees its result
TEST(NcclStreams, ASynchronousCallDoesNotBlockTheCpu) {
  on_nccl_ranks(2, [](int rank) {
    const auto tensor = ready_tensor(rank);
    GatedStream gate(current_stream(rank));
    all_reduce(tensor);
    EXPECT_SAME(deferred::now(tensor), values(rank, {4}));
    const auto copy = at::empty_like(tensor);
    copy.copy_(tensor, true);
    gate.open();
    EXPECT_SAME(copy.cpu(), sum_of_both());
  });
}

// spec: F1 F21 `wait` orders the stream that is current then behind the call, and no other
TEST(NcclStreams, WaitOrdersTheStreamThatIsCurrent) {
  on_nccl_ranks(2, [](int rank) {
    const auto tensor = ready_tensor(rank);
    const auto side = numbered_stream(rank, kSide), other = numbered_stream(rank, kOther);
    GatedStream gate(current_stream(rank));
    const auto work = all_reduce(tensor, {.async_op = true});
    {
      const c10::StreamGuard on(side);
      work->wait();
    }
    Timeline::get().enqueue(other, [] {});
    EXPECT_TRUE(comes_true([&] { return has_passed(other); }));
    EXPECT_FALSE(has_passed(side));
    gate.open();
    const c10::StreamGuard on(side);
    EXPECT_SAME(tensor.cpu(), sum_of_both());
  });
}

// spec: F1 a call on nccl follows the side stream that is current, on which its tensors are made,
// and waits for no other stream
TEST(NcclStreams, TensorsMayBeMadeOnSideStreams) {
  on_nccl_ranks(2, [](int rank) {
    const auto made = ready_tensor(rank), tensor = at::empty_like(made);
    GatedStream unrelated(current_stream(rank));
    const auto side = numbered_stream(rank, kSide);
    const c10::StreamGuard on(side);
    GatedStream gate(side);
    tensor.copy_(made, true);
    const auto work = all_reduce(tensor, {.async_op = true});
    gate.open();
    work->wait();
    EXPECT_SAME(tensor.cpu(), sum_of_both());
  });
}

// spec: F1 E3 the same of messages, whose `wait` returns once NCCL has them: a message follows the
// stream that is current when it is called, and `wait` orders the one that is current then
TEST(NcclStreams, MessagesFollowSideStreams) {
  on_nccl_ranks(2, [](int rank) {
    const auto made = ready_tensor(rank), tensor = at::empty_like(made);
    GatedStream unrelated(current_stream(rank));
    const auto side = numbered_stream(rank, kSide), other = numbered_stream(rank, kOther);
    WorkRef work;
    {
      const c10::StreamGuard on(side);
      tensor.copy_(made, true);
      work = rank == 0 ? isend(tensor, {.dst = 1}) : irecv(tensor, {.src = 0});
    }
    const c10::StreamGuard on(other);
    work->wait();
    EXPECT_SAME(tensor.cpu(), values(0, {4}));
  });
}

}  // namespace
}  // namespace muster::testing
