// SPDX-License-Identifier: BSD-3-Clause
// Backend nccl against backend native: every operation, dtype and reduction on 1 to 5 ranks. NCCL
// is the stand-in (nccl_standin/standin.cc), over tensors of the test device.
#include <ATen/core/ivalue.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backend_cells.h"
#include "core/tunables/tunables.h"
#include "testing/budget.h"
#include "testing/seed.h"

namespace muster::testing {
namespace {

using deferred::on_device;

/// Whether NCCL lacks the reduction. Backend native has all of them.
bool is_refused(ReduceOp op, at::ScalarType dtype) {
  switch (op.kind()) {
    case ReduceOp::BAND:
    case ReduceOp::BOR:
    case ReduceOp::BXOR: return true;
    case ReduceOp::AVG: return dtype == at::kBool || dtype == at::kShort;
    case ReduceOp::PREMUL_SUM: return c10::isIntegralType(dtype, true);
    default: return dtype == at::kShort;
  }
}

void expect_equal(const TensorList& theirs, const TensorList& ours, const std::string& what) {
  ASSERT_EQ(theirs.size(), ours.size()) << what;
  for (std::size_t i = 0; i < theirs.size(); ++i) {
    EXPECT_EQ(theirs[i].device().type(), deferred::kType) << what;
    const auto there = theirs[i].cpu();
    const auto& here = ours[i];
    EXPECT_TRUE(are_close(there, here)) << what << "\n" << there << "\nand\n" << here;
  }
}

/// Plays one of `of` cells, or all with MUSTER_TEST_LONG.
class Draw {
 public:
  explicit Draw(int of) : random_(test_seed()), of_(long_tests() ? 1 : of) {}
  bool operator()() { return static_cast<int>(random_() % static_cast<unsigned>(of_)) == 0; }

 private:
  std::mt19937_64 random_;  // the same on every rank
  const int of_;
};

// spec: A3 every reduction that NCCL has; BAND, BOR, BXOR throw by name; F14 F15 every dtype on
// nccl; A6 an operation that nccl lacks names backend and operation; A12.nccl nccl's cells of the
// second table: all_reduce, reduce, reduce_scatter
TEST(NcclCollectives, ReduceAsNativeDoes) {
  for (int ranks = 1; ranks <= 5; ++ranks) {
    on_nccl_ranks(ranks, [ranks](int rank) {
      Draw drawn(8);
      for (const auto dtype : kReducible) {
        for (const auto& op : kReductions) {
          for (const auto& [name, cell] : reductions(rank, ranks, dtype, op)) {
            if (!drawn()) continue;
            const auto what = name + " of " + c10::toString(dtype) + ", reduction " +
                              std::to_string(op.kind()) + ", rank " + std::to_string(rank) +
                              " of " + std::to_string(ranks);
            TensorList ours;
            const auto refused = text_of([&, &cell = cell] { ours = cell(on_cpu); });
            if (!refused.empty()) {
              EXPECT_NE(message_of<DistError>([&, &cell = cell] { cell(on_device_of(rank)); }), "")
                  << what;
            } else if (is_refused(op, dtype)) {
              EXPECT_HAS(
                  message_of<DistBackendError>([&, &cell = cell] { cell(on_device_of(rank)); }),
                  "backend 'nccl' cannot do " + name.substr(0, name.find(',')))
                  << what;
            } else {
              expect_equal(cell(on_device_of(rank)), ours, what);
            }
          }
        }
      }
    });
  }
}

/// Those of the two float8 types that NCCL reduces.
void reduce_float8_as_float(int rank, at::ScalarType dtype) {
  for (const ReduceOp& op :
       std::vector<ReduceOp>{ReduceOp::SUM, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX,
                             ReduceOp::AVG, ReduceOp::premul_sum(3)}) {
    const auto narrow = reductions(rank, 2, dtype, op), wide = reductions(rank, 2, at::kFloat, op);
    for (std::size_t i = 0; i < narrow.size(); ++i) {
      const auto what = narrow[i].first + " of " + c10::toString(dtype) + ", reduction " +
                        std::to_string(op.kind()) + ", rank " + std::to_string(rank);
      const auto theirs = narrow[i].second(on_device_of(rank)), ours = wide[i].second(on_cpu);
      for (std::size_t at = 0; at < ours.size(); ++at)
        EXPECT_TRUE(same_bytes(theirs[at].cpu(), ours[at].to(dtype))) << what;
    }
  }
}

// spec: A3 F15 float8 is reduced as NCCL has it; A6 the types and reductions that it lacks, and the
// native backend's, are refused by name, and the group stays usable
TEST(NcclCollectives, Float8) {
  const auto refusal = [](const at::Tensor& tensor, ReduceOp op = ReduceOp::SUM) {
    return message_of<DistBackendError>([&] { all_reduce(tensor, {.op = op}); });
  };
  on_nccl_ranks(2, [&](int rank) {
    for (const auto dtype : {at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
      reduce_float8_as_float(rank, dtype);
      const auto tensor = on_device(values(rank, {4}, dtype), rank);
      EXPECT_HAS(refusal(tensor, ReduceOp::BOR), "NCCL has no BOR");
    }
    const auto other = on_device(values(rank, {4}, at::kFloat8_e5m2fnuz), rank);
    EXPECT_HAS(refusal(other), "NCCL reduces no Float8_e5m2fnuz tensors");
    reduce_float8_as_float(rank, at::kFloat8_e5m2);
  });
  on_nccl_ranks(
      2,
      [&](int rank) {
        const auto tensor = on_device(values(rank, {4}, at::kFloat8_e5m2), rank);
        EXPECT_HAS(refusal(tensor),
                   "'native' cannot do all_reduce: elements of Float8_e5m2 can be moved but not "
                   "reduced");
        all_reduce(some(rank));
      },
      "cpu:native,deferred:native");
}

// spec: A6 float8 on a GPU for which NCCL does not reduce it is refused by name, and the group
// stays usable
TEST(NcclCollectives, Float8NeedsAGpu) {
  const Variable old("NCCL_STANDIN_CAPABILITY", "86");
  on_nccl_ranks(2, [](int rank) {
    const auto tensor = on_device(values(rank, {4}, at::kFloat8_e4m3fn), rank);
    EXPECT_HAS(message_of<DistBackendError>([&] { all_reduce(tensor); }),
               "NCCL reduces Float8_e4m3fn tensors on GPUs from sm90 on, and this is sm86");
    broadcast(tensor, {.src = 0});
    EXPECT_TRUE(same_bytes(tensor.cpu(), values(0, {4}, at::kFloat8_e4m3fn)));
  });
}

// spec: A3 every operation on nccl that only moves bytes; F15 takes every torch dtype; A12.nccl
// nccl's cells: broadcast, all_gather, gather, scatter, all_to_all, send, recv; E1 E5 on nccl
TEST(NcclCollectives, MoveAsNativeDoes) {
  for (int ranks = 1; ranks <= 5; ++ranks) {
    on_nccl_ranks(ranks, [ranks](int rank) {
      auto dtypes = kReducible;
      dtypes.insert(dtypes.end(), kMovable.begin(), kMovable.end());
      Draw drawn(4);
      for (const auto dtype : dtypes) {
        for (const auto& [name, cell] : moves(rank, ranks, dtype)) {
          if (!drawn()) continue;
          const auto what = name + " of " + c10::toString(dtype) + ", rank " +
                            std::to_string(rank) + " of " + std::to_string(ranks);
          const auto theirs = cell(on_device_of(rank)), ours = cell(on_cpu);
          ASSERT_EQ(theirs.size(), ours.size()) << what;
          for (std::size_t i = 0; i < ours.size(); ++i)
            EXPECT_TRUE(same_bytes(theirs[i].cpu(), ours[i])) << what << ", tensor " << i;
        }
      }
    });
  }
}

// spec: F16 zero-element, 0-dimensional tensors on nccl; E6 tensors that are not contiguous
TEST(NcclCollectives, UnusualShapes) {
  on_nccl_ranks(3, [](int rank) {
    for (const auto& tensor : {torch::zeros({0}), torch::zeros({4, 0}), torch::full({}, rank + 1.0),
                               values(rank, {3, 4}).t(), values(rank, {4, 4}).slice(1, 0, 4, 2)}) {
      const auto there = on_device(tensor, rank), here = tensor.clone();
      all_reduce(there);
      all_reduce(here);
      EXPECT_SAME(there.cpu(), here);
    }
  });
}

// spec: F1 F21 an asynchronous call on nccl: is_completed once it is enqueued, wait orders the
// current stream behind it; the future's value is usable in its callback
TEST(NcclCollectives, AsynchronousCallsAreOrderedByStreams) {
  on_nccl_ranks(3, [](int rank) {
    const auto expected = reduced(3, {4}, at::kFloat, ReduceOp::SUM);
    const auto tensor = on_device(values(rank, {4}), rank);
    const auto work = all_reduce(tensor, {.async_op = true});
    EXPECT_TRUE(work->wait());
    EXPECT_TRUE(work->is_completed());
    EXPECT_TRUE(work->is_success());
    EXPECT_EQ(work->exception(), nullptr);
    EXPECT_TRUE(work->result().at(0).is_same(tensor));
    EXPECT_SAME(tensor.cpu(), expected);

    const c10::StreamGuard side(deferred::stream_of(static_cast<c10::DeviceIndex>(rank), 7));
    const auto other = on_device(values(rank, {4}), rank);
    const auto again = all_reduce(other, {.async_op = true});
    const auto doubled = again->get_future()->then(
        [](c10::ivalue::Future& done) { return done.value().toTensorVector().at(0) * 2; },
        c10::TensorType::get());
    doubled->wait();
    EXPECT_SAME(doubled->value().toTensor().cpu(), expected * 2);
  });
}

// spec: E7 a nonzero tag on nccl throws, never ignored; E2 a receive from any rank is refused by
// name
TEST(NcclCollectives, TagsAndAnySourceAreRefused) {
  on_nccl_ranks(2, [](int rank) {
    const auto tensor = on_device(values(rank, {4}), rank);
    EXPECT_HAS(message_of<DistBackendError>([&] { isend(tensor, {.dst = 1 - rank, .tag = 5}); }),
               "NCCL has no tags, and the tag is 5");
    EXPECT_HAS(message_of<DistBackendError>([&] { recv(tensor); }),
               "NCCL cannot receive from any rank");
    EXPECT_HAS(message_of<DistBackendError>([&] { irecv(tensor, {.tag = 2}); }), "any rank");
  });
}

// spec: A12.cpu_on_nccl a CPU tensor on nccl throws DistBackendError; A7 the tensor's device picks
// the backend
TEST(NcclCollectives, TheDevicePicksTheBackend) {
  on_nccl_ranks(
      2,
      [](int rank) {
        EXPECT_EQ(get_backend(), "nccl");
        EXPECT_HAS(message_of<DistBackendError>([&] { all_reduce(values(rank, {2})); }), "cpu");
        const auto tensor = on_device(values(rank, {2}), rank);
        all_reduce(tensor);
        EXPECT_SAME(tensor.cpu(), reduced(2, {2}, at::kFloat, ReduceOp::SUM));
      },
      "nccl");
  on_nccl_ranks(2, [](int rank) {
    const auto here = values(rank, {2}), there = on_device(here, rank);
    all_reduce(here);
    all_reduce(there);
    EXPECT_SAME(there.cpu(), here);
  });
}

// spec: G1 G3 object collectives on nccl, whose bytes travel on the current device
TEST(NcclCollectives, Objects) {
  on_nccl_ranks(
      3,
      [](int rank) {
        std::vector<std::string> all(3);
        all_gather_object(all, std::string(static_cast<std::size_t>(rank), 'x') + "end");
        EXPECT_EQ(all, (std::vector<std::string>{"end", "xend", "xxend"}));
        std::vector<std::string> list{rank == 1 ? "one" : "", rank == 1 ? "two" : ""};
        broadcast_object_list(list, {.src = 1});
        EXPECT_EQ(list, (std::vector<std::string>{"one", "two"}));
        std::vector<int> gathered(rank == 2 ? 3 : 0);
        gather_object(rank * 10, &gathered, {.dst = 2});
        if (rank == 2) EXPECT_EQ(gathered, (std::vector<int>{0, 10, 20}));
        std::vector<int> got(1);
        scatter_object_list(got, rank == 0 ? std::vector<int>{5, 6, 7} : std::vector<int>{});
        EXPECT_EQ(got[0], 5 + rank);
      },
      "nccl");
}

// spec: F13 barrier on nccl, sync and async; H1.nccl monitored_barrier on nccl
TEST(NcclCollectives, Barriers) {
  on_nccl_ranks(
      3,
      [](int rank) {
        static std::atomic<int> arrived;
        ++arrived;
        barrier();
        EXPECT_GE(arrived, 3);
        barrier({.async_op = true})->wait();
        monitored_barrier();
        if (rank != 2)
          EXPECT_HAS(
              message_of<DistBackendError>(
                  [] { monitored_barrier({.timeout = std::chrono::milliseconds(300)}); }),
              rank == 0 ? "Rank 2 failed to pass monitoredBarrier in 300 ms" : "monitoredBarrier");
        barrier();
      },
      "nccl");
}

// spec: D1 new_group and split_group on nccl; B13 is_high_priority_stream in init and new_group
TEST(NcclCollectives, GroupsOfNccl) {
  on_nccl_ranks(
      4,
      [](int rank) {
        const auto fast = std::make_shared<ProcessGroupNCCL::Options>(true);
        const auto pair = new_group(
            {.ranks = std::vector<int>{rank % 2, rank % 2 + 2}, .use_local_synchronization = true});
        const auto check = [&](const Group& group, int members) {
          const auto tensor = on_device(torch::ones({3}), rank);
          all_reduce(tensor, {.group = group});
          EXPECT_SAME(tensor.cpu(), torch::full({3}, static_cast<double>(members)));
        };
        check(pair, 2);
        check(new_group({.pg_options = fast}), 4);
        check(split_group(nullptr, {{0, 1}, {2, 3}}), 2);
        check(nullptr, 4);
      },
      "nccl");
}

// spec: D7 split_group on nccl divides NCCL's communicator: ranks of one part, in its order, and a
// rank in none
TEST(NcclCollectives, SplitGroupsDivideTheCommunicator) {
  use_standin();
  const int splits = standin_calls("ncclCommSplit"),
            inits = standin_calls("ncclCommInitRankConfig");
  on_nccl_ranks(4, [](int rank) {
    all_reduce(some(rank));
    const auto part = split_group(nullptr, {{2, 0}, {3}});
    if (rank == 1) {
      EXPECT_FALSE(part->is_member());
      return;
    }
    const auto ranks = rank == 3 ? std::vector<float>{3} : std::vector<float>{2, 0};
    const auto all = on_device(torch::zeros({static_cast<std::int64_t>(ranks.size())}), rank);
    all_gather_into_tensor(all, on_device(torch::full({1}, static_cast<float>(rank)), rank),
                           {.group = part});
    EXPECT_SAME(all.cpu(), torch::tensor(ranks));
  });
  EXPECT_EQ(standin_calls("ncclCommSplit") - splits, 4);
  EXPECT_EQ(standin_calls("ncclCommInitRankConfig") - inits, 4) << "the first group's alone";
}

// spec: F13 device_ids: the backend of that device makes the barrier, on it
TEST(NcclCollectives, ABarrierMayNameItsDevice) {
  use_standin();
  const auto inits = [] { return standin_calls("ncclCommInitRankConfig"); };
  int before = inits();
  on_nccl_ranks(2, [](int) { barrier(); });
  EXPECT_EQ(inits(), before) << "the CPU's backend made it";
  before = inits();
  on_nccl_ranks(2, [](int rank) {
    barrier({.device_ids = {rank + 2}});
    const auto tensor = on_device(values(rank, {4}), rank + 2);
    all_reduce(tensor);
    EXPECT_SAME(tensor.cpu(), reduced(2, {4}, at::kFloat, ReduceOp::SUM));
    EXPECT_HAS(message_of<DistBackendError>([] { barrier({.device_ids = {99}}); }),
               "there is no deferred:99");
  });
  EXPECT_EQ(inits() - before, 2) << "one communicator for both calls";
}

// spec: B13 a device_id has nccl connect the ranks before any call; the rest is as without one
TEST(NcclCollectives, ADeviceConnectsTheRanksAtOnce) {
  use_standin();
  const int before = standin_calls("ncclCommInitRankConfig");
  const auto connected = [&] { return standin_calls("ncclCommInitRankConfig") - before; };
  const auto store = std::make_shared<HashStore>();
  spawn(
      [&](int rank) {
        const auto device = device_of(rank);
        const c10::DeviceGuard on(device);
        init_process_group({.backend = "cpu:native,deferred:nccl",
                            .timeout = std::chrono::seconds(20),
                            .world_size = 2,
                            .rank = rank,
                            .store = store,
                            .device_id = device});
        const auto limit = steady_clock().now() + std::chrono::seconds(20);
        while (connected() < 2 && steady_clock().now() < limit) std::this_thread::yield();
        EXPECT_EQ(connected(), 2);
        const auto tensor = on_device(values(rank, {4}), rank);
        all_reduce(tensor);
        EXPECT_SAME(tensor.cpu(), reduced(2, {4}, at::kFloat, ReduceOp::SUM));
        destroy_process_group();
      },
      {.nprocs = 2, .mode = SpawnMode::threads});
  EXPECT_EQ(connected(), 2);
}

// spec: A3 tensors of calls that the device has done are released by the calls that follow
TEST(NcclCollectives, TheNextCallsReleaseTensors) {
  auto& look = tunables_detail::in_force.nccl_look;
  const auto usual = std::exchange(look, std::chrono::hours(1));
  on_nccl_ranks(2, [&](int rank) {
    auto tensor = some(rank);
    const c10::weak_intrusive_ptr<c10::TensorImpl> held(tensor.getIntrusivePtr());
    all_reduce(tensor);
    tensor.reset();
    bool are_released = false;
    for (int i = 0; i < 10'000 && !are_released; ++i) {
      const auto next = some(rank);
      all_reduce(next);
      EXPECT_SAME(next.cpu(), reduced(2, {4}, at::kFloat, ReduceOp::SUM));
      const auto everywhere = torch::tensor({held.expired() ? 1 : 0});
      all_reduce(everywhere, {.op = ReduceOp::MIN});
      are_released = everywhere.item<int>() == 1;
    }
    EXPECT_TRUE(are_released);
    look = usual;
  });
}

}  // namespace
}  // namespace muster::testing
