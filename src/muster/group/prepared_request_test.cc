#include <cstdlib>
#include <new>

#include "muster/group/requests.h"
#include "muster/group/test_ranks.h"

// Counts what this thread takes from the heap, where it asks for that. Sanitizers bring an operator
// new of their own.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define MUSTER_COUNTS_ALLOCATIONS 1
namespace {
thread_local bool counting = false;
thread_local std::size_t taken = 0;
}  // namespace
void* operator new(std::size_t size) {
  if (counting) ++taken;
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
#endif

namespace muster {
namespace {

using testing::message_of;
using testing::on_ranks;
using testing::reduced;
using testing::values;

// A prepared call is started often, works on what the tensors hold then, and mixes with ordinary
// calls.
TEST(PreparedRequests, StartAsOftenAsOneLikes) {
  for (const char* backend : {"native", "tcp"}) {
    on_ranks(
        3,
        [](int rank) {
          const auto group = default_group();
          auto tensor = torch::zeros({5});
          auto sum = group->prepare(requests::all_reduce(*group, tensor, {.op = ReduceOp::SUM}));
          auto strided = torch::zeros({4, 3}).t();
          auto turned =
              group->prepare(requests::all_reduce(*group, strided, {.op = ReduceOp::MAX}));
          auto parts = torch::zeros({3, 2});
          const auto mine = torch::zeros({2});
          auto gathered = group->prepare(requests::all_gather_into_tensor(*group, parts, mine, {}));
          auto later = group->prepare(requests::all_reduce(*group, tensor, {.async_op = true}));
          for (int round = 0; round < 20; ++round) {
            tensor.fill_(rank + round);
            EXPECT_EQ(sum.start(), nullptr);
            EXPECT_SAME(tensor, torch::full({5}, 3.0f * static_cast<float>(round) + 3));
            strided.fill_(rank * round);
            turned.start();
            EXPECT_SAME(strided, torch::full({3, 4}, 2.0f * static_cast<float>(round)));
            mine.fill_(10 * round + rank);
            gathered.start();
            EXPECT_EQ(parts[2][0].item<float>(), 10 * round + 2);
            barrier();
            tensor.fill_(1);
            later.start()->wait();
            EXPECT_SAME(tensor, torch::full({5}, 3.0f));
          }
        },
        backend);
  }
}

// Checked when it is made; nothing on a non-member.
TEST(PreparedRequests, AreCheckedWhenTheyAreMade) {
  on_ranks(3, [](int rank) {
    const auto world = default_group();
    EXPECT_HAS(message_of<DistError>(
                   [&] { world->prepare(requests::all_reduce(*world, at::Tensor(), {})); }),
               "undefined");
    const auto group = new_group({.ranks = std::vector<int>{0, 2}});
    auto tensor = torch::ones({2});
    auto call = group->prepare(requests::all_reduce(*group, tensor, {}));
    call.start();
    EXPECT_SAME(tensor, torch::full({2}, rank == 1 ? 1.0f : 2.0f));
  });
}

#ifdef MUSTER_COUNTS_ALLOCATIONS
// After the first few starts nothing is taken from the heap, for sizes that fit the line, the slot
// and neither.
TEST(PreparedRequests, TakeNoMemoryOnceTheyRun) {
  on_ranks(2, [](int) {
    const auto group = default_group();
    for (const std::int64_t elements : {1, 1000, 100000}) {
      auto tensor = torch::zeros({elements});
      auto whole = torch::zeros({2, elements});
      PreparedRequest prepared[] = {
          group->prepare(requests::all_reduce(*group, tensor, {})),
          group->prepare(requests::broadcast(*group, tensor, {.src = 0})),
          group->prepare(requests::all_gather_into_tensor(*group, whole, tensor, {})),
          group->prepare(requests::reduce_scatter_tensor(*group, tensor, whole, {}))};
      for (auto& request : prepared) {
        for (int i = 0; i < 20; ++i) request.start();
        std::size_t least =
            1000000;  // of ten rounds: a rank that has to sleep for the other may take some then
        for (int round = 0; round < 10; ++round) {
          taken = 0;
          counting = true;
          for (int i = 0; i < 20; ++i) request.start();
          counting = false;
          least = std::min(least, taken);
        }
        EXPECT_EQ(least, 0u) << elements << " elements, request " << &request - prepared;
      }
    }
  });
}
#endif

}  // namespace
}  // namespace muster
