// SPDX-License-Identifier: BSD-3-Clause
// Works whose results are computed after a call has ended.
#include "core/group/work/following_work.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <atomic>
#include <thread>

#include "core/group/testing/compress_within_host.h"
#include "core/group/testing/ranks.h"
#include "muster/collectives.h"

namespace muster::group {
namespace {

/// A call that ends when the test says so, and its future later, as in a backward pass.
class HeldCall final : public Work {
 public:
  bool is_completed() override { return ended; }
  bool is_success() override { return ended; }
  bool wait(std::optional<Duration>) override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> get_future() override { return future_; }
  int source_rank() override { return -1; }
  std::exception_ptr exception() override { return nullptr; }
  std::vector<at::Tensor> result() override { return {}; }
  std::atomic<bool> ended{false};

 private:
  const c10::intrusive_ptr<c10::ivalue::Future> future_ =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
};

// spec: E3 is_completed: never computes on the thread that asks; the results appear even so
TEST(FollowingWorks, AskingNeverComputes) {
  const auto call = std::make_shared<HeldCall>();
  std::atomic<std::thread::id> computed_on{};
  const auto work =
      FollowingWork::create(call, [&] { computed_on.store(std::this_thread::get_id()); }, {});
  EXPECT_FALSE(work->is_completed());
  call->ended.store(true);
  while (!work->is_completed()) std::this_thread::yield();
  EXPECT_NE(computed_on.load(), std::thread::id());
  EXPECT_NE(computed_on.load(), std::this_thread::get_id());
  EXPECT_TRUE(work->is_success());
  call->get_future()->markCompleted(c10::IValue(TensorList()));  // lets go of the Work
}

// spec: E3 wait: computes at once, and once, if another thread has been asked to
TEST(FollowingWorks, WaitingComputesOnce) {
  const auto call = std::make_shared<HeldCall>();
  std::atomic<int> times{0};
  const auto work = FollowingWork::create(call, [&] { ++times; }, {});
  call->ended.store(true);
  static_cast<void>(work->is_completed());
  EXPECT_TRUE(work->wait());
  EXPECT_TRUE(work->is_completed());
  call->get_future()->markCompleted(c10::IValue(TensorList()));
  EXPECT_TRUE(work->get_future()->completed());
  EXPECT_EQ(times.load(), 1);
}

// spec: E3 get_future: after a wait for the Work of a compressed call, its future is completed
TEST(FollowingWorks, AWaitCompletesTheFuture) {
  testing::on_ranks(2, [](int) {
    for (int i = 0; i < 200; ++i) {
      const auto work =
          all_reduce(torch::ones({300}), {.async_op = true, .compression = Compression::int8});
      const auto future = work->get_future();
      work->wait();
      EXPECT_TRUE(future->completed());
    }
  });
}

}  // namespace
}  // namespace muster::group
