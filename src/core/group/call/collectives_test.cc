// SPDX-License-Identifier: BSD-3-Clause
#include "muster/collectives.h"

#include <atomic>

#include "core/group/testing/ranks.h"
#include "testing/limits.h"

namespace muster {
namespace {

using testing::kMovable;
using testing::kReducible;
using testing::message_of;
using testing::on_ranks;
using testing::raw;
using testing::reduced;
using testing::same_bytes;
using testing::values;

// spec: F2 broadcast, F1 synchronous by default
TEST(Collectives, BroadcastGivesTheRootsValuesToAll) {
  on_ranks(3, [](int rank) {
    for (int root = 0; root < 3; ++root) {
      auto tensor = values(rank, {5, 2});
      EXPECT_EQ(broadcast(tensor, {.src = root}), nullptr);
      EXPECT_SAME(tensor, values(root, {5, 2}));
    }
  });
}

// spec: F5 lists and uneven sizes; F15 moved dtypes in all_gather and broadcast
TEST(Collectives, AllGatherLists) {
  on_ranks(3, [](int rank) {
    for (const auto dtype : kMovable) {
      TensorList all;
      for (int from = 0; from < 3; ++from) all.push_back(torch::zeros({4}, dtype));
      all_gather(all, raw(rank, 4, dtype));
      for (int from = 0; from < 3; ++from) EXPECT_TRUE(same_bytes(all[from], raw(from, 4, dtype)));
      auto tensor = raw(rank, 5, dtype);
      broadcast(tensor, {.src = 1});
      EXPECT_TRUE(same_bytes(tensor, raw(1, 5, dtype)));
    }
    TensorList uneven;
    for (int from = 0; from < 3; ++from) uneven.push_back(torch::zeros({2 * from + 1, 2}));
    all_gather(uneven, values(rank, {2 * rank + 1, 2}));
    for (int from = 0; from < 3; ++from) EXPECT_SAME(uneven[from], values(from, {2 * from + 1, 2}));
    EXPECT_HAS(message_of<DistError>([&] { all_gather({uneven[0]}, values(rank, {1})); }),
               "3 output tensors");
    EXPECT_HAS(message_of<DistError>([&] { all_gather(uneven, torch::zeros({100})); }),
               "the same number of elements");
    EXPECT_HAS(message_of<DistError>([&] {
                 all_gather(uneven, torch::zeros({2 * rank + 1, 2}, at::kLong));
               }),
               "one dtype");
  });
}

// spec: F15 gather, scatter, all_to_all and all_gather_into_tensor move every torch dtype
TEST(Collectives, OperationsThatOnlyMoveTakeEveryDtype) {
  on_ranks(2, [](int rank) {
    auto dtypes = kReducible;
    dtypes.insert(dtypes.end(), kMovable.begin(), kMovable.end());
    for (const auto dtype : dtypes) {
      if (dtype == at::kBool) continue;  // arbitrary bytes are not valid bools
      const TensorList mine{raw(rank, 3, dtype), raw(rank + 2, 3, dtype)};
      TensorList pair{torch::zeros({3}, dtype), torch::zeros({3}, dtype)};
      gather(mine[0], {.gather_list = rank == 1 ? pair : TensorList{}, .dst = 1});
      if (rank == 1) {
        EXPECT_TRUE(same_bytes(pair[0], raw(0, 3, dtype)) && same_bytes(pair[1], raw(1, 3, dtype)))
            << dtype;
      }
      auto part = torch::zeros({3}, dtype);
      scatter(part, {.scatter_list = rank == 0 ? mine : TensorList{}});
      EXPECT_TRUE(same_bytes(part, raw(2 * rank, 3, dtype))) << dtype;
      all_to_all(pair, mine);
      EXPECT_TRUE(same_bytes(pair[0], raw(2 * rank, 3, dtype)) &&
                  same_bytes(pair[1], raw(1 + 2 * rank, 3, dtype)))
          << dtype;
      auto whole = torch::zeros({2, 3}, dtype);
      all_gather_into_tensor(whole, mine[0]);
      EXPECT_TRUE(same_bytes(whole[1], raw(1, 3, dtype))) << dtype;
    }
  });
}

// spec: F6 concatenated or stacked, F16 0-dimensional input
TEST(Collectives, AllGatherIntoTensor) {
  on_ranks(3, [](int rank) {
    TensorList parts;
    for (int from = 0; from < 3; ++from) parts.push_back(values(from, {2, 4}));
    auto concatenated = torch::zeros({6, 4});
    all_gather_into_tensor(concatenated, parts[rank]);
    EXPECT_SAME(concatenated, torch::cat(parts));
    auto stacked = torch::zeros({3, 2, 4});
    all_gather_into_tensor(stacked, parts[rank]);
    EXPECT_SAME(stacked, torch::stack(parts));
    auto strided = torch::zeros({4, 6}).t();
    all_gather_into_tensor(strided, parts[rank]);
    EXPECT_SAME(strided, torch::cat(parts));
    auto scalars = torch::zeros({3}, at::kLong);
    all_gather_into_tensor(scalars, torch::tensor(rank, at::kLong));
    EXPECT_SAME(scalars, torch::arange(3));
    EXPECT_HAS(
        message_of<DistError>([&] { all_gather_into_tensor(torch::zeros({5}), parts[rank]); }),
        "[2, 4]");
  });
}

// spec: F7 list on dst only; F20 gather dst=0, an empty list elsewhere
TEST(Collectives, GatherFillsTheListOnDst) {
  on_ranks(3, [](int rank) {
    for (int root = 0; root < 3; ++root) {
      TensorList list;
      for (int from = 0; from < 3 && rank == root; ++from) list.push_back(torch::zeros({4}));
      if (root == 0)
        gather(values(rank, {4}), {.gather_list = list});
      else
        gather(values(rank, {4}), {.gather_list = list, .dst = root});
      for (int from = 0; from < 3 && rank == root; ++from)
        EXPECT_SAME(list[from], values(from, {4}));
    }
    const auto tensor = torch::zeros({1});
    if (rank == 0) {
      EXPECT_HAS(message_of<DistError>([&] {
                   gather(tensor, {.gather_list = {tensor, tensor, torch::zeros({2})}});
                 }),
                 "the same number of elements");
      EXPECT_HAS(message_of<DistError>([&] { gather(tensor); }), "3 output tensors");
    } else {
      for (int call = 0; call < 2; ++call)  // as many refused calls as on rank 0, so no rank waits
        EXPECT_HAS(message_of<DistError>([&] {
                     gather(tensor, {.gather_list = {tensor, tensor, tensor}});
                   }),
                   "only rank 0");
    }
  });
}

// spec: F8 list on src, equal sizes, complex; F20 scatter src=0, an empty list elsewhere
TEST(Collectives, ScatterGivesEachItsPart) {
  on_ranks(3, [](int rank) {
    for (const auto dtype : {at::kFloat, at::kComplexFloat, at::kLong}) {
      for (int root = 0; root < 3; ++root) {
        TensorList list;
        for (int to = 0; to < 3 && rank == root; ++to) list.push_back(values(to, {3}, dtype));
        auto mine = torch::zeros({3}, dtype);
        if (root == 0)
          scatter(mine, {.scatter_list = list});
        else
          scatter(mine, {.scatter_list = list, .src = root});
        EXPECT_SAME(mine, values(rank, {3}, dtype));
      }
    }
    if (rank == 0) {
      const TensorList unequal{torch::zeros({2}), torch::zeros({3}), torch::zeros({2})};
      EXPECT_HAS(
          message_of<DistError>([&] { scatter(torch::zeros({2}), {.scatter_list = unequal}); }),
          "the same number of elements");
    } else {
      EXPECT_HAS(message_of<DistError>(
                     [&] { scatter(torch::zeros({2}), {.scatter_list = {torch::zeros({2})}}); }),
                 "only rank 0");
    }
  });
}

// spec: F11 even, complex; F20 splits empty are even, indivisible rows are an error
TEST(Collectives, AllToAllSingleEven) {
  on_ranks(4, [](int rank) {
    for (const auto dtype : {at::kLong, at::kComplexFloat}) {
      const auto all = torch::stack({values(0, {4, 3}, dtype), values(1, {4, 3}, dtype),
                                     values(2, {4, 3}, dtype), values(3, {4, 3}, dtype)});
      auto output = torch::zeros({4, 3}, dtype);
      all_to_all_single(output, all[rank]);
      EXPECT_SAME(output, all.select(1, rank));
    }
    EXPECT_HAS(
        message_of<DistError>([&] { all_to_all_single(torch::zeros({5}), torch::zeros({5})); }),
        "5 rows");
    EXPECT_HAS(
        message_of<DistError>([&] {
          all_to_all_single(torch::zeros({4}), torch::zeros({4}), {.input_split_sizes = {1, 1, 1}});
        }),
        "3 entries");
    EXPECT_HAS(message_of<DistError>([&] {
                 all_to_all_single(torch::zeros({4}), torch::zeros({4}),
                                   {.input_split_sizes = {1, 1, 1, 2}});
               }),
               "sum");
  });
}

// spec: F11 uneven splits of dimension 0, empty splits
TEST(Collectives, AllToAllSingleUneven) {
  on_ranks(3, [](int rank) {
    // Rank r sends (r + c) % 3 rows to rank c: one split of each member is empty.
    std::vector<std::int64_t> sends, receives;
    for (int peer = 0; peer < 3; ++peer) {
      sends.push_back((rank + peer) % 3);
      receives.push_back((peer + rank) % 3);
    }
    auto output = torch::full({3, 2}, -1, at::kLong);
    all_to_all_single(output, values(rank, {3, 2}, at::kLong),
                      {.output_split_sizes = receives, .input_split_sizes = sends});
    TensorList expected;
    for (int from = 0; from < 3; ++from) {
      std::int64_t before = 0;
      for (int peer = 0; peer < rank; ++peer) before += (from + peer) % 3;
      expected.push_back(values(from, {3, 2}, at::kLong).narrow(0, before, (from + rank) % 3));
    }
    EXPECT_SAME(output, torch::cat(expected));
  });
}

// spec: F12 lists, uneven
TEST(Collectives, AllToAllLists) {
  on_ranks(3, [](int rank) {
    TensorList input, output;
    for (int peer = 0; peer < 3; ++peer) {
      input.push_back(values(rank * 3 + peer, {rank + 2 * peer}));
      output.push_back(torch::zeros({peer + 2 * rank}));
    }
    all_to_all(output, input);
    for (int peer = 0; peer < 3; ++peer)
      EXPECT_SAME(output[peer], values(peer * 3 + rank, {peer + 2 * rank}));
  });
}

// spec: F13 barrier with group, async_op, device_ids
TEST(Collectives, BarrierWaitsForAll) {
  std::atomic<int> arrived{0};
  on_ranks(4, [&](int rank) {
    ++arrived;
    EXPECT_EQ(barrier(), nullptr);
    EXPECT_EQ(arrived.load(), 4);
    const auto group = new_group({.ranks = std::vector<int>{0, 2}});
    const auto work = barrier({.group = group, .async_op = true, .device_ids = {0}});
    EXPECT_EQ(work == nullptr, rank % 2 == 1);
    if (work) work->wait();
  });
}

// spec: F1 async_op returns Work, none for a non-member; E3 is_completed; D1 non-members get none
TEST(Collectives, AsynchronousCallsGiveWork) {
  on_ranks(3, [](int rank) {
    auto a = torch::full({1000}, rank + 1.0);
    auto b = torch::full({3, 4}, rank + 1.0).t();
    auto first = all_reduce(a, {.async_op = true});
    auto second = all_reduce(b, {.async_op = true});
    second->wait();
    EXPECT_TRUE(first->is_completed());
    first->wait();
    EXPECT_SAME(a, torch::full({1000}, 6.0));
    EXPECT_SAME(b, torch::full({4, 3}, 6.0));
    EXPECT_EQ(second->source_rank(), -1);

    const auto group = new_group({.ranks = std::vector<int>{1, 2}});
    auto tensor = torch::full({2}, static_cast<double>(rank));
    const auto work = all_reduce(tensor, {.group = group, .async_op = true});
    EXPECT_EQ(work == nullptr, rank == 0);
    if (work) work->wait();
    EXPECT_SAME(tensor, torch::full({2}, rank == 0 ? 0.0 : 3.0));
    // Every other call of a non-member does nothing either.
    broadcast(tensor, {.src = 1, .group = group});
    reduce(tensor, {.dst = 2, .group = group});
    TensorList list{torch::zeros({2}), torch::zeros({2})};
    all_gather(list, tensor, {.group = group});
    EXPECT_EQ(list[0][0].item<double>(), rank == 0 ? 0.0 : 3.0);
    EXPECT_SAME(tensor, torch::full({2}, rank == 0 ? 0.0 : rank == 1 ? 3.0 : 6.0));
  });
}

// spec: E6 non-contiguous tensors in every collective
TEST(Collectives, TensorsNeedNotBeContiguous) {
  on_ranks(2, [](int rank) {
    const auto strided = [](double value) {
      return torch::full({3, 4, 2}, value).transpose(0, 2).slice(1, 0, 4, 2);
    };
    const double mine = rank + 1;
    auto tensor = strided(mine);
    all_reduce(tensor);
    EXPECT_SAME(tensor, strided(3));
    tensor = strided(mine);
    broadcast(tensor, {.src = 1});
    EXPECT_SAME(tensor, strided(2));
    tensor = strided(mine);
    reduce(tensor, {.dst = 0});
    EXPECT_SAME(tensor, strided(rank == 0 ? 3 : 2));
    TensorList pair{strided(0), strided(0)};
    all_gather(pair, strided(mine));
    EXPECT_SAME(pair[0], strided(1));
    EXPECT_SAME(pair[1], strided(2));
    TensorList gathered;
    if (rank == 0) gathered = {strided(0), strided(0)};
    gather(strided(mine), {.gather_list = gathered});
    if (rank == 0) {
      EXPECT_SAME(gathered[1], strided(2));
    }
    TensorList scattered;
    if (rank == 0) scattered = {strided(5), strided(6)};
    scatter(tensor, {.scatter_list = scattered});
    EXPECT_SAME(tensor, strided(5 + rank));
    reduce_scatter(tensor, {strided(mine), strided(mine * 10)});
    EXPECT_SAME(tensor, strided(rank == 0 ? 3 : 30));
    all_to_all(pair, {strided(mine), strided(mine * 10)});
    EXPECT_SAME(pair[1], strided(rank == 0 ? 2 : 20));
    auto columns = torch::zeros({3, 2}).t();
    all_to_all_single(columns, torch::full({3, 2}, mine).t());
    EXPECT_SAME(columns, torch::tensor({1.0f, 1.0f, 1.0f, 2.0f, 2.0f, 2.0f}).view({2, 3}));
    auto lazy = torch::full({2}, c10::complex<double>(1, mine), at::kComplexDouble).conj();
    all_reduce(lazy);
    EXPECT_SAME(torch::imag(lazy.resolve_conj()), torch::full({2}, -3.0, at::kDouble));
  });
}

// spec: F16 zero elements, 0-dimensional tensors
TEST(Collectives, EmptyAndScalarTensors) {
  on_ranks(3, [](int rank) {
    auto empty = torch::zeros({0, 4});
    all_reduce(empty);
    broadcast(empty, {.src = 2});
    reduce(empty, {.dst = 1});
    TensorList list{torch::zeros({0, 4}), torch::zeros({0, 4}), torch::zeros({0, 4})};
    all_gather(list, empty);
    reduce_scatter(empty, list);
    all_to_all(list, list);
    all_to_all_single(torch::zeros({0}), torch::zeros({0}));
    all_gather_into_tensor(torch::zeros({0, 4}), empty);
    gather(empty, {.gather_list = rank == 0 ? list : TensorList{}});
    scatter(empty, {.scatter_list = rank == 0 ? list : TensorList{}});
    EXPECT_EQ(empty.sizes(), (std::vector<std::int64_t>{0, 4}));
    auto scalar = torch::tensor(rank + 1.0);
    all_reduce(scalar);
    EXPECT_EQ(scalar.item<double>(), 6.0);
    EXPECT_EQ(scalar.dim(), 0);
    if (rank == 1) send(empty, {.dst = 2});
    if (rank == 2) {
      EXPECT_EQ(recv(empty, {.src = 1}), 1);
    }
  });
}

// spec: F16 one-rank groups
TEST(Collectives, OneRankGroups) {
  on_ranks(1, [](int) {
    auto tensor = values(0, {4});
    const auto before = tensor.clone();
    all_reduce(tensor);
    broadcast(tensor, {.src = 0});
    reduce(tensor, {.dst = 0});
    EXPECT_SAME(tensor, before);
    all_reduce(tensor, {.op = ReduceOp::premul_sum(2)});
    EXPECT_SAME(tensor, before * 2);
    auto output = torch::zeros({4});
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { all_gather({output}, before); }, [&] { all_gather_into_tensor(output, before); },
             [&] { gather(before, {.gather_list = {output}}); },
             [&] { scatter(output, {.scatter_list = {before}}); },
             [&] { reduce_scatter(output, {before}); },
             [&] { reduce_scatter_tensor(output, before); },
             [&] { all_to_all({output}, {before}); }, [&] { all_to_all_single(output, before); }}) {
      output.zero_();
      call();
      EXPECT_SAME(output, before);
    }
    barrier();
    const auto work = all_reduce(output, {.async_op = true});
    work->wait();
    EXPECT_TRUE(work->is_completed());
  });
}

// spec: F17 all_reduce_coalesced
TEST(Coalesced, AllReduce) {
  on_ranks(3, [](int rank) {
    const TensorList tensors{values(rank, {3}), values(rank, {2, 2}).t(), values(rank, {0}),
                             torch::tensor(1.0f + rank)};
    all_reduce_coalesced(tensors);
    EXPECT_SAME(tensors[0], reduced(3, {3}, at::kFloat, ReduceOp::SUM));
    EXPECT_SAME(tensors[1], reduced(3, {2, 2}, at::kFloat, ReduceOp::SUM).t());
    EXPECT_EQ(tensors[3].item<float>(), 6);
    const auto work = all_reduce_coalesced(tensors, {.op = ReduceOp::AVG, .async_op = true});
    work->wait();
    EXPECT_EQ(tensors[3].item<float>(), 6);
    EXPECT_HAS(message_of<DistError>([] { all_reduce_coalesced({}); }), "at least one");
    EXPECT_HAS(message_of<DistError>([] {
                 all_reduce_coalesced({torch::zeros({1}), torch::zeros({1}, at::kLong)});
               }),
               "one dtype");
  });
}

// spec: F17 all_gather_coalesced
TEST(Coalesced, AllGather) {
  on_ranks(2, [](int rank) {
    std::vector<TensorList> lists{{torch::zeros({3}), torch::zeros({2, 2})},
                                  {torch::zeros({3}), torch::zeros({2, 2})}};
    all_gather_coalesced(lists, {values(rank, {3}), values(rank, {2, 2})});
    for (int from = 0; from < 2; ++from) {
      EXPECT_SAME(lists[from][0], values(from, {3}));
      EXPECT_SAME(lists[from][1], values(from, {2, 2}));
    }
  });
}

// spec: F17 reduce_scatter_coalesced
TEST(Coalesced, ReduceScatter) {
  on_ranks(2, [](int rank) {
    const TensorList outputs{torch::zeros({3}), torch::zeros({2, 2})};
    reduce_scatter_coalesced(outputs, {{values(rank, {3}), values(rank, {2, 2})},
                                       {values(rank, {3}) * 10, values(rank, {2, 2}) * 10}});
    const float factor = rank == 0 ? 1 : 10;
    EXPECT_SAME(outputs[0], reduced(2, {3}, at::kFloat, ReduceOp::SUM) * factor);
    EXPECT_SAME(outputs[1], reduced(2, {2, 2}, at::kFloat, ReduceOp::SUM) * factor);
  });
}

// spec: F20 reduce and broadcast have no default root
TEST(Collectives, RootsMustBeNamed) {
  on_ranks(2, [](int) {
    const auto tensor = torch::zeros({1});
    EXPECT_HAS(message_of<DistError>([&] { broadcast(tensor, {}); }), "src");
    EXPECT_HAS(message_of<DistError>([&] { reduce(tensor, {}); }), "dst");
    EXPECT_HAS(message_of<DistError>([&] { broadcast(tensor, {.src = 7}); }), "rank 7");
    EXPECT_HAS(message_of<DistError>([&] { broadcast(tensor, {.src = 0, .group_src = 0}); }),
               "exclude each other");
  });
}

// spec: F18 a skipped call among identical ones is named at destroy; B10 destroy throws a failure
// not yet shown
TEST(Collectives, SkippedCallIsNamedAtDestroy) {
  const auto store = std::make_shared<HashStore>();
  std::atomic<int> named{0};
  const auto ranks = [&](int rank) {
    init_process_group(
        {.timeout = muster::testing::kMustHappen, .world_size = 2, .rank = rank, .store = store});
    auto tensor = torch::full({2}, static_cast<double>(rank));
    const int calls = rank == 0 ? 3 : 2;  // the root of a small broadcast does not wait
    std::vector<WorkRef> works;
    for (int i = 0; i < calls; ++i)
      works.push_back(broadcast(tensor, {.src = 0, .async_op = true}));
    try {
      destroy_process_group();
    } catch (const DistError& error) {
      ++named;
      EXPECT_EQ(error.code(), Code::mismatch);
      EXPECT_EQ(error.ranks(), std::vector<int>{1});
      EXPECT_HAS(error.what(),
                 "rank 1 made 2 (the last: broadcast(float32, 2 elements, root 0) as number 2)");
      EXPECT_HAS(error.what(), "rank 1 skipped a call");
    }
    EXPECT_FALSE(is_initialized());
  };
  spawn(ranks, {.nprocs = 2, .mode = SpawnMode::threads});
  EXPECT_EQ(named.load(), 2);
}

// spec: A2 an in-place result is not a change to autograd, as in torch: views of parameters can be
// reduced, and used further
TEST(Collectives, WriteInPlaceWithoutAWordToAutograd) {
  on_ranks(2, [](int rank) {
    for (const bool contiguous : {true, false}) {
      const auto fresh = [&] {
        return contiguous ? torch::full({2, 2}, rank + 1.0) : torch::full({2, 2}, rank + 1.0).t();
      };
      const auto weight = fresh().requires_grad_();
      broadcast(weight, {.src = 1});
      all_reduce(weight, {.async_op = true})->wait();
      EXPECT_EQ(weight[0][0].item<double>(), 4.0);
      const auto tensor = fresh();
      reduce(tensor, {.dst = 0});
      scatter(tensor, {.scatter_list = rank == 0 ? TensorList{fresh(), fresh()} : TensorList{}});
      all_to_all_single(tensor, fresh());
      rank == 0 ? send(tensor, {.dst = 1}) : static_cast<void>(recv(tensor, {.src = 0}));
      EXPECT_EQ(weight._version(), 0);
      EXPECT_EQ(tensor._version(), 0);
      const auto half = (weight * 2).split(1)[0];
      all_reduce(half);
      half.sum().backward();
      EXPECT_EQ(weight.grad().sum().item<double>(), 4.0);
    }
  });
}

// spec: A2 a result in a list of tensors, or in one tensor of all members' parts, is a change to
// autograd, as in torch
TEST(Collectives, TellAutogradOfWhatIsGathered) {
  on_ranks(2, [](int rank) {
    const auto input = torch::full({2}, rank + 1.0);
    const auto weight = torch::ones({4}).requires_grad_();
    const auto loss = (weight * weight).sum();
    all_gather_into_tensor(weight, input);
    EXPECT_THROW(loss.backward(), std::exception);  // needs the overwritten value
    TensorList parts{torch::ones({2}), torch::ones({2})};
    all_gather(parts, input);
    all_to_all(parts, {input, input});
    gather(input, {.gather_list = rank == 0 ? parts : TensorList{}, .dst = 0});
    reduce_scatter(parts[0], {input, input});
    all_reduce_coalesced(parts);
    EXPECT_EQ(parts[0]._version(), rank == 0 ? 5 : 4);
    EXPECT_EQ(parts[1]._version(), rank == 0 ? 4 : 3);
  });
}

// Some ranks use buffers from the arena, others private ones.
TEST(Collectives, SharedAndPrivateBuffersMix) {
  on_ranks(3, [](int rank) {
    for (const std::int64_t elements : {std::int64_t{0}, std::int64_t{3}, std::int64_t{100003}}) {
      auto tensor =
          rank == 1 ? torch::zeros({elements}, at::kDouble) : empty_shared({elements}, at::kDouble);
      tensor.copy_(values(rank, {elements}, at::kDouble));
      all_reduce(tensor);
      EXPECT_SAME(tensor, reduced(3, {elements}, at::kDouble, ReduceOp::SUM));
      auto output = rank == 2 ? torch::zeros({3, elements}, at::kDouble)
                              : empty_shared({3, elements}, at::kDouble);
      all_gather_into_tensor(output, tensor);
      EXPECT_SAME(output[2], tensor);
    }
  });
}

}  // namespace
}  // namespace muster
