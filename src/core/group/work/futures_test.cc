// SPDX-License-Identifier: BSD-3-Clause
// Futures of calls and their callbacks.
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <atomic>
#include <stdexcept>

#include "core/base/log/log.h"
#include "core/group/testing/ranks.h"

namespace muster {
namespace {

using testing::on_ranks;
using FutureRef = c10::intrusive_ptr<c10::ivalue::Future>;

/// Sums `value` over the ranks with a call whose callback waits for another such call, nested
/// `depth` deep, alternating between `groups`.
FutureRef nested(const at::Tensor& value, std::vector<Group> groups, int depth) {
  const auto work = all_reduce(value, {.group = groups.front(), .async_op = true});
  std::rotate(groups.begin(), groups.begin() + 1, groups.end());
  return work->get_future()->then(
      [groups, depth](c10::ivalue::Future& done) -> c10::IValue {
        const auto sum = done.value().toTensorVector().front();
        if (depth == 1) return sum;
        const auto inner = nested(sum / get_world_size(), groups, depth - 1);
        inner->waitAndThrow();
        return inner->value();
      },
      c10::TensorType::get());
}

// spec: E3 get_future: a callback may wait for calls whose callbacks wait, on one and on two
// groups; calls in it are its rank's
TEST(Futures, CallbacksWaitForOtherCalls) {
  on_ranks(3, [](int) {
    const std::vector<Group> groups{new_group(), new_group()};
    for (const std::vector<Group>& some :
         {std::vector<Group>{nullptr}, std::vector<Group>{groups.front()}, groups}) {
      for (const int depth : {2, 3, 6}) {
        const auto future = nested(torch::full({40}, 2.0), some, depth);
        future->waitAndThrow();
        EXPECT_SAME(future->value().toTensor(), torch::full({40}, 6.0));
      }
    }
  });
}

// spec: E3 get_future: a callback that throws does not end the process
TEST(Futures, CallbacksMayThrow) {
  on_ranks(2, [](int) {
    std::atomic<int> called{0};
    for (int i = 0; i < 20; ++i) {
      const auto work = all_reduce(torch::ones({5}), {.async_op = true});
      try {
        work->get_future()->addCallback([&](c10::ivalue::Future&) {
          ++called;
          throw std::runtime_error("from a callback of the test's");
        });
      } catch (const std::runtime_error&) {
        // It was already complete, so this thread has run the callback.
      }
      work->wait();
    }
    barrier();
    while (called.load() < 20) std::this_thread::yield();
  });
}

// spec: E3 get_future: after a wait for the Work, its future is completed
TEST(Futures, AreCompletedOnceTheWorkWasWaitedFor) {
  on_ranks(2, [](int) {
    for (int i = 0; i < 200; ++i) {
      const auto work = all_reduce(torch::ones({5}), {.async_op = true});
      const auto future = work->get_future();
      work->wait();
      EXPECT_TRUE(future->completed());
    }
  });
}

}  // namespace
}  // namespace muster
