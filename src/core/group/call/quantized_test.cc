// SPDX-License-Identifier: BSD-3-Clause
// Collectives with compression, on ranks as threads.
#include "core/group/call/quantized.h"

#include <ATen/core/ivalue.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/group/testing/compress_within_host.h"
#include "core/group/testing/ranks.h"
#include "muster/collectives.h"

namespace muster {
namespace {

using testing::message_of;
using testing::on_ranks;

constexpr Compression kCompressions[] = {Compression::bf16, Compression::int8, Compression::int4};
constexpr at::ScalarType kTypes[] = {at::kFloat, at::kHalf, at::kBFloat16};
constexpr double kInf = std::numeric_limits<double>::infinity();

/// Values of a rank, of both signs, no two alike.
at::Tensor waves(int rank, std::int64_t count, at::ScalarType dtype = at::kFloat) {
  return (torch::sin(torch::arange(count, at::kDouble) * (0.37 + rank)) * (1.5 + rank)).to(dtype);
}

/// How far a value may be off after one hop, relative to the largest value of its block.
double step(Compression compression) {
  return compression == Compression::int4   ? 1 / 13.9
         : compression == Compression::int8 ? 1 / 252.0
                                            : 1 / 256.0;
}
double rounding(at::ScalarType dtype) {
  return dtype == at::kFloat ? 1e-6 : dtype == at::kHalf ? 0x1p-10 : 0x1p-7;
}

void expect_near(const at::Tensor& result, const at::Tensor& exact, double tolerance) {
  ASSERT_EQ(result.sizes(), exact.sizes());
  if (result.numel() == 0) return;
  const auto error = (result.to(at::kDouble) - exact).abs().max().item<double>();
  EXPECT_LE(error, tolerance) << "the largest value is " << exact.abs().max().item<double>();
}

void expect_same_everywhere(const at::Tensor& tensor) {
  const auto bytes = tensor.contiguous().view({-1}).view(at::kByte);
  auto all = torch::empty({get_world_size(), bytes.numel()}, at::kByte);
  all_gather_into_tensor(all, bytes);
  for (int rank = 0; rank < get_world_size(); ++rank)
    EXPECT_TRUE(torch::equal(all[rank], bytes)) << "rank " << rank << " has other bits";
}

/// The sum of all ranks' waves in float64, and how far an all_reduce of them may be off: each
/// rank's values are up to 1.5 + rank.
struct ExactSum {
  ExactSum(int ranks, std::int64_t count, at::ScalarType dtype) {
    sum = torch::zeros({count}, at::kDouble);
    for (int rank = 0; rank < ranks; ++rank) {
      sum += waves(rank, count, dtype).to(at::kDouble);
      largest += 1.51 + rank;
    }
  }
  /// After `hops` hops.
  double tolerance(Compression compression, at::ScalarType dtype, int hops) const {
    return largest * (hops * 1.1 * step(compression) + rounding(dtype));
  }
  at::Tensor sum;
  double largest = 0;
};

// spec: X1 all_reduce: same bits on every rank, stated error; float32, float16, bfloat16; any size
TEST(QuantizedCollectives, AllReduceGivesAllRanksTheSameBits) {
  for (const int ranks : {2, 3}) {
    on_ranks(ranks, [ranks](int rank) {
      for (const auto compression : kCompressions) {
        for (const auto dtype : kTypes) {
          for (const std::int64_t count : {0, 1, 127, 128, 300, 2000}) {
            for (const auto op : {ReduceOp::SUM, ReduceOp::AVG}) {
              auto tensor = waves(rank, count, dtype);
              EXPECT_EQ(all_reduce(tensor, {.op = op, .compression = compression}), nullptr);
              const ExactSum exact(ranks, count, dtype);
              const double divisor = op == ReduceOp::AVG ? ranks : 1;
              expect_near(tensor, exact.sum / divisor,
                          exact.tolerance(compression, dtype, 2) / divisor);
              expect_same_everywhere(tensor);
            }
          }
        }
      }
    });
  }
}

// spec: X1 bf16, int8, int4 differ from the exact sum and from each other: they are really used
TEST(QuantizedCollectives, CompressionLosesWhatItsFormatLoses) {
  on_ranks(2, [](int rank) {
    std::vector<double> errors;
    for (const auto compression : kCompressions) {
      auto tensor = waves(rank, 4000);
      all_reduce(tensor, {.compression = compression});
      const ExactSum exact(2, 4000, at::kFloat);
      errors.push_back((tensor.to(at::kDouble) - exact.sum).abs().mean().item<double>());
    }
    EXPECT_GT(errors[0], 1e-4);
    EXPECT_GT(errors[2], 8 * errors[1]);
  });
}

// spec: X1 NaN and infinite values reach every rank, and only their own elements
TEST(QuantizedCollectives, NanAndInfiniteValuesAreCarried) {
  on_ranks(3, [](int rank) {
    for (const auto compression : kCompressions) {
      for (const auto dtype : kTypes) {
        auto tensor = waves(rank, 700, dtype);
        if (rank == 0) tensor[5] = kInf;
        if (rank == 1) tensor[6] = -kInf;
        if (rank == 2) tensor[300] = std::numeric_limits<double>::quiet_NaN();
        if (rank != 1) tensor[699] = rank == 0 ? kInf : -kInf;
        all_reduce(tensor, {.compression = compression});
        EXPECT_EQ(tensor[5].item<double>(), kInf);
        EXPECT_EQ(tensor[6].item<double>(), -kInf);
        EXPECT_TRUE(tensor[300].isnan().item<bool>() && tensor[699].isnan().item<bool>());
        EXPECT_EQ(tensor.isfinite().sum().item<std::int64_t>(), 696);
        expect_same_everywhere(tensor);
      }
    }
  });
}

// spec: X1 reduce_scatter: a list of uneven sizes, one tensor, strided memory
TEST(QuantizedCollectives, ReduceScatterSumsOnce) {
  on_ranks(3, [](int rank) {
    for (const auto compression : kCompressions) {
      for (const auto dtype : kTypes) {
        const auto size_for = [](int to) { return 100 + 70 * to; };
        TensorList inputs;
        for (int to = 0; to < 3; ++to) inputs.push_back(waves(rank, size_for(to), dtype));
        auto output = torch::empty({size_for(rank)}, inputs[0].options());
        EXPECT_EQ(reduce_scatter(output, inputs, {.compression = compression}), nullptr);
        const ExactSum exact(3, size_for(rank), dtype);
        expect_near(output, exact.sum, exact.tolerance(compression, dtype, 1));

        const auto whole = waves(rank, 600, dtype).view({3, 200});
        auto strided = torch::empty({400}, whole.options()).slice(0, 0, 400, 2);
        reduce_scatter_tensor(strided, whole, {.op = ReduceOp::AVG, .compression = compression});
        const ExactSum all(3, 600, dtype);
        expect_near(strided, all.sum.view({3, 200})[rank] / 3,
                    all.tolerance(compression, dtype, 1) / 3);
      }
    }
  });
}

// spec: X1 all_gather: uneven lists, one tensor; the sender has the bits that the others have
TEST(QuantizedCollectives, AllGatherGivesAllRanksTheSameBits) {
  on_ranks(3, [](int rank) {
    for (const auto compression : kCompressions) {
      for (const auto dtype : kTypes) {
        TensorList outputs;
        for (int from = 0; from < 3; ++from)
          outputs.push_back(torch::empty({130 * from}, waves(0, 0, dtype).options()));
        all_gather(outputs, waves(rank, 130 * rank, dtype), {.compression = compression});
        for (int from = 0; from < 3; ++from) {
          expect_near(outputs[from], waves(from, 130 * from, dtype).to(at::kDouble),
                      (1.5 + from) * (step(compression) + rounding(dtype)));
          expect_same_everywhere(outputs[from]);
        }
        auto whole = torch::empty({2, 3 * 50}, outputs[0].options()).t();  // not contiguous
        all_gather_into_tensor(whole, waves(rank, 100, dtype).view({50, 2}),
                               {.compression = compression});
        for (int from = 0; from < 3; ++from)
          expect_near(whole.slice(0, 50 * from, 50 * from + 50),
                      waves(from, 100, dtype).to(at::kDouble).view({50, 2}),
                      (1.5 + from) * (step(compression) + rounding(dtype)));
        expect_same_everywhere(whole);
      }
    }
  });
}

// spec: X1 broadcast: the root takes the bits that it sends
TEST(QuantizedCollectives, BroadcastGivesAllRanksTheSameBits) {
  on_ranks(3, [](int rank) {
    for (int root = 0; root < 3; ++root) {
      for (const auto compression : kCompressions) {
        auto tensor = waves(rank, 333).view({3, 111}).t();
        EXPECT_EQ(broadcast(tensor, {.src = root, .compression = compression}), nullptr);
        expect_near(tensor, waves(root, 333).to(at::kDouble).view({3, 111}).t(),
                    (1.5 + root) * (step(compression) + rounding(at::kFloat)));
        expect_same_everywhere(tensor);
      }
    }
  });
}

// Leaves of autograd are reduced as without compression, an asynchronous call gives a finished
// Work, and where nothing would be saved the ordinary call is made.
TEST(QuantizedCollectives, FollowTheRulesOfOrdinaryCalls) {
  on_ranks(2, [](int rank) {
    auto leaf = waves(rank, 200).requires_grad_();
    const auto work = all_reduce(leaf, {.async_op = true, .compression = Compression::int8});
    ASSERT_NE(work, nullptr);
    EXPECT_TRUE(work->wait() && work->is_completed());
    EXPECT_TRUE(work->result()[0].is_same(leaf));
    expect_same_everywhere(leaf.detach());

    auto half = waves(rank, 200, at::kHalf), plain = half.clone();
    all_reduce(half, {.compression = Compression::bf16});
    all_reduce(plain);
    EXPECT_SAME(half, plain);

    const auto alone = new_group({.ranks = {1}});
    auto same = waves(rank, 200);
    EXPECT_EQ(all_reduce(same, {.group = alone, .compression = Compression::int4}), nullptr);
    EXPECT_SAME(same, waves(rank, 200));
  });
}

// Asynchronous calls of all kinds, one after another, give what synchronous ones give, whether they
// are waited for or dropped.
TEST(QuantizedCollectives, AsynchronousCallsKeepTheirOrder) {
  on_ranks(3, [](int rank) {
    for (const auto compression : kCompressions) {
      const auto run = [&](bool async) {
        std::vector<at::Tensor> results;
        std::vector<WorkRef> works;
        const auto keep = [&](const at::Tensor& result, const WorkRef& work) {
          results.push_back(result);
          if (work != nullptr && results.size() % 3 != 0) works.push_back(work);
        };
        for (int repeat = 0; repeat < 4; ++repeat) {
          auto sum = waves(rank, 500 + repeat), plain = waves(rank, 10), sent = waves(rank, 300);
          auto whole = torch::empty({3 * 140}), part = torch::empty({200});
          keep(sum, all_reduce(sum, {.async_op = async, .compression = compression}));
          keep(plain, all_reduce(plain, {.async_op = async}));
          keep(whole, all_gather_into_tensor(whole, waves(rank, 140),
                                             {.async_op = async, .compression = compression}));
          keep(sent, broadcast(sent, {.src = 1, .async_op = async, .compression = compression}));
          keep(part, reduce_scatter_tensor(part, waves(rank, 600),
                                           {.async_op = async, .compression = compression}));
          auto mean = waves(rank, 257);
          keep(mean,
               all_reduce(mean,
                          {.op = ReduceOp::AVG, .async_op = async, .compression = compression}));
        }
        auto last = waves(rank, 100);
        const auto work = all_reduce(last, {.async_op = async, .compression = compression});
        for (const auto& each : works) EXPECT_TRUE(each->wait() && each->is_success());
        if (work != nullptr) work->get_future()->wait();  // after those of the dropped ones
        return results;
      };
      const auto expected = run(false), results = run(true);
      for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_SAME(results[i], expected[i]);
    }
  });
}

// spec: X1 an all_reduce in pieces, over links, gives the bits and the rests of one in two steps,
// in shared memory
TEST(QuantizedCollectives, PiecesGiveTheBitsOfTheWhole) {
  on_ranks(3, [](int rank) {
    const Group whole = new_group({.backend = "native"}), pieces = new_group({.backend = "tcp"});
    // No piece, one that is no whole block, one, and several of which the last is smaller.
    for (const std::int64_t count : {0, 5, 3000, 1'200'007}) {
      for (const auto compression : kCompressions) {
        for (const bool async : {false, true}) {
          for (const auto dtype : kTypes) {
            if (dtype != at::kFloat && compression == Compression::bf16) continue;
            const auto sum = [&](const Group& group, at::Tensor& rests) {
              auto tensor = waves(rank, count, dtype);
              AllReduceOptions options{.op = ReduceOp::AVG,
                                       .group = group,
                                       .async_op = async,
                                       .compression = compression};
              if (dtype == at::kFloat && async) options.feedback = rests;
              if (const auto work = all_reduce(tensor, options)) work->wait();
              return tensor;
            };
            auto rests = waves(rank + 7, count) / 100, others = rests.clone();
            EXPECT_SAME(sum(pieces, rests), sum(whole, others));
            EXPECT_SAME(rests, others);
          }
        }
      }
    }
  });
}

// spec: X1 error feedback: results and rests together are the exact sums, so that the mean over
// many calls loses nothing
TEST(QuantizedCollectives, FeedbackKeepsWhatRoundingLoses) {
  constexpr int kCalls = 40;
  on_ranks(3, [](int rank) {
    for (const auto compression : kCompressions) {
      for (const auto op : {ReduceOp::SUM, ReduceOp::AVG}) {
        for (const bool async : {false, true}) {
          const ExactSum exact(3, 1000, at::kFloat);
          const double divisor = op == ReduceOp::AVG ? 3 : 1;
          auto rests = torch::zeros({1000}), results = torch::zeros({1000}, at::kDouble);
          for (int call = 0; call < kCalls; ++call) {
            auto tensor = waves(rank, 1000);
            const auto work = all_reduce(
                tensor,
                {.op = op, .async_op = async, .compression = compression, .feedback = rests});
            if (work != nullptr) work->wait();
            results += tensor;
          }
          expect_same_everywhere(results);
          const auto mean = results / kCalls;
          expect_near(mean, exact.sum / divisor,
                      exact.tolerance(compression, at::kFloat, 2) / divisor / kCalls * 2);
          auto lost = rests.to(at::kDouble);
          all_reduce(lost);
          expect_near(results * divisor + lost, exact.sum * kCalls, 1e-2);
        }
      }
    }
  });
}

// spec: X1.refusal error feedback: one tensor of rests in two calls at a time; free once the call
// has ended, well or badly
TEST(QuantizedCollectives, FeedbackIsOfOneCallAtATime) {
  on_ranks(2, [](int rank) {
    const Group group = new_group({.ranks = std::vector<int>{0, 1}});
    auto rests = torch::zeros({300}), first = waves(rank, 300), second = waves(rank, 300);
    const auto sum = [&](const at::Tensor& tensor) {
      return all_reduce(
          tensor,
          {.group = group, .async_op = true, .compression = Compression::int8, .feedback = rests});
    };
    // Rank 0's call cannot end: rank 1 has made none.
    const WorkRef work = rank == 0 ? sum(first) : nullptr;
    if (rank == 0) EXPECT_HAS(message_of<DistError>([&] { sum(second); }), "feedback is in use");
    barrier();
    const auto fails = [&](const std::function<WorkRef()>& call) {
      EXPECT_HAS(message_of<DistError>([&] {
                   call()->wait();
                   barrier({.group = group});  // number 3, which rank 0 was refused
                 }),
                 "");
    };
    fails([&] { return rank == 0 ? work : sum(first); });
    auto third = waves(rank, 300);
    all_reduce(third, {.compression = Compression::int8, .feedback = rests});
    expect_same_everywhere(third);
  });
}

// spec: X1 error feedback: a tensor that is given other memory during a call leaves none in use
TEST(QuantizedCollectives, FeedbackMayBeGivenOtherMemory) {
  on_ranks(2, [](int rank) {
    const Group group = new_group({.ranks = std::vector<int>{0, 1}});
    auto rests = torch::zeros({300}), values = waves(rank, 300);
    const auto memory = rests.detach();
    const auto sum = [&](const at::Tensor& feedback) {
      return all_reduce(values, {.group = group,
                                 .async_op = true,
                                 .compression = Compression::int8,
                                 .feedback = feedback});
    };
    WorkRef work;
    if (rank == 0) {  // it cannot end: rank 1 has made none
      work = sum(rests);
      rests.set_(torch::zeros({300}));
    }
    barrier();
    if (rank == 1) work = sum(rests);
    work->wait();
    sum(memory)->wait();
    expect_same_everywhere(values);
  });
}

// spec: X1 error feedback forgets NaN and infinite values, which have arrived
TEST(QuantizedCollectives, FeedbackForgetsWhatIsNotFinite) {
  on_ranks(2, [](int rank) {
    auto rests = torch::zeros({300}), tensor = waves(rank, 300);
    if (rank == 0) tensor[3] = kInf;
    if (rank == 1) tensor[200] = std::numeric_limits<double>::quiet_NaN();
    all_reduce(tensor, {.compression = Compression::int8, .feedback = rests});
    EXPECT_EQ(tensor[3].item<double>(), kInf);
    EXPECT_TRUE(rests.isfinite().all().item<bool>());

    const auto alone = new_group({.ranks = std::vector<int>{1}});
    if (rank == 0) return;
    rests.fill_(0.25);
    tensor = waves(rank, 300);
    all_reduce(tensor, {.group = alone, .compression = Compression::int8, .feedback = rests});
    EXPECT_SAME(tensor, waves(rank, 300) + 0.25);
    EXPECT_SAME(rests, torch::zeros({300}));
  });
}

// spec: X1.refusal integers, float64, other reductions and sparse tensors, by name on every rank
TEST(QuantizedCollectives, RefuseWhatTheyCannotDo) {
  on_ranks(2, [](int rank) {
    const auto refused = [](at::Tensor tensor, ReduceOp op, const std::string& part) {
      EXPECT_HAS(message_of<DistError>(
                     [&] { all_reduce(tensor, {.op = op, .compression = Compression::int8}); }),
                 part);
    };
    refused(torch::ones({4}, at::kLong), ReduceOp::SUM, "not for int64");
    refused(torch::ones({4}, at::kDouble), ReduceOp::SUM, "not for float64");
    refused(torch::ones({4}), ReduceOp::MAX, "only SUM and AVG");
    refused(torch::ones({4}).to_sparse(), ReduceOp::SUM, "to_dense()");
    refused(at::Tensor(), ReduceOp::SUM, "undefined");
    EXPECT_HAS(message_of<DistError>([&] {
                 all_reduce_coalesced({torch::ones({4})}, {.compression = Compression::int8});
               }),
               "has no compression");
    EXPECT_HAS(message_of<DistError>([&] {
                 prepare_all_reduce(torch::ones({4}), {.compression = Compression::int8});
               }),
               "prepared call");
    const auto refuses_rests = [](const at::Tensor& tensor, const at::Tensor& rests,
                                  Compression compression, const std::string& part) {
      EXPECT_HAS(message_of<DistError>(
                     [&] { all_reduce(tensor, {.compression = compression, .feedback = rests}); }),
                 part);
    };
    const auto ones = torch::ones({4});
    refuses_rests(ones.to(at::kHalf), ones, Compression::int8, "feedback goes with");
    refuses_rests(ones, torch::zeros({3}), Compression::int8, "as many elements");
    refuses_rests(ones, ones, Compression::int8, "of its own");
    refuses_rests(ones, torch::zeros({4}), Compression::none, "feedback needs a compression");
    auto tensor = waves(rank, 200);  // the group goes on
    all_reduce(tensor, {.compression = Compression::int8});
    expect_same_everywhere(tensor);
  });
}

// spec: X1 shared memory: no function compresses there, as the ordinary call is faster; links do
TEST(QuantizedCollectives, OrdinaryCallsAreMadeInSharedMemory) {
  const testing::CompressWithinHost by_default(false);
  on_ranks(3, [](int rank) {
    const auto all = [](const at::Tensor& each) {
      auto whole = torch::empty({3 * each.numel()});
      all_gather_into_tensor(whole, each);
      return whole;
    };
    const auto mine = waves(rank, 999);
    auto exact = mine.clone();
    all_reduce(exact);
    const auto senders = waves(1, 999);
    for (const auto compression : kCompressions) {
      auto sum = mine.clone(), later = mine.clone(), fed = mine / 2, rests = mine / 2;
      all_reduce(sum, {.compression = compression});
      EXPECT_SAME(sum, exact);
      all_reduce(later, {.async_op = true, .compression = compression})->wait();
      EXPECT_SAME(later, exact);
      all_reduce(fed, {.compression = compression, .feedback = rests});
      EXPECT_SAME(fed, exact);
      EXPECT_EQ(rests.abs().max().item<float>(), 0);
      auto part = torch::empty({333}), whole = torch::empty({3 * 999}), sent = mine.clone();
      reduce_scatter_tensor(part, mine, {.compression = compression});
      EXPECT_SAME(part, exact.chunk(3)[rank]);
      all_gather_into_tensor(whole, mine, {.compression = compression});
      EXPECT_SAME(whole, all(mine));
      broadcast(sent, {.src = 1, .compression = compression});
      EXPECT_SAME(sent, senders);
      auto doubles = torch::ones({3}, at::kDouble);
      EXPECT_HAS(message_of<DistError>([&] { all_reduce(doubles, {.compression = compression}); }),
                 "not for float64");
    }
  });
  const auto over_links = [](int rank) {
    auto sum = waves(rank, 999), exact = sum.clone();
    all_reduce(exact);
    all_reduce(sum, {.compression = Compression::int8});
    EXPECT_FALSE(torch::equal(sum, exact));
  };
  on_ranks(2, over_links, "tcp");
}

/// Ranks whose calls differ, in shared memory and over links, with and without `async_op`: every
/// rank throws a DistError that has both texts, at the latest in its next call.
void expect_mismatch(const std::function<WorkRef(int, bool)>& call, const std::string& one,
                     const std::string& other) {
  for (const char* backend : {"native", "tcp"}) {
    for (const bool async : {false, true}) {
      SCOPED_TRACE(std::string(backend) + (async ? ", asynchronous" : ""));
      const auto body = [&](int rank) {
        const std::string said = message_of<DistError>([&] {
          if (const WorkRef work = call(rank, async)) work->wait();
          barrier();
        });
        EXPECT_HAS(said, one);
        EXPECT_HAS(said, other);
      };
      on_ranks(2, body, backend);
    }
  }
}

// spec: X1 ranks that differ in compression, reduction, dtype or size get an error that names both
// calls, never a sum
TEST(QuantizedCollectives, DifferentCallsAreRefusedByName) {
  const auto sums = [](const at::Tensor& tensor, bool async, Compression compression,
                       ReduceOp op = ReduceOp::SUM) {
    return all_reduce(tensor, {.op = op, .async_op = async, .compression = compression});
  };
  constexpr auto kInt4 = Compression::int4, kInt8 = Compression::int8;
  expect_mismatch(
      [&](int rank, bool async) {
        return sums(waves(rank, 200), async, kInt8, rank == 0 ? ReduceOp::SUM : ReduceOp::AVG);
      },
      "all_reduce(SUM, float32, 200 elements, in int8)",
      "all_reduce(AVG, float32, 200 elements, in int8)");
  expect_mismatch(
      [&](int rank, bool async) {
        return sums(waves(rank, 200, rank == 0 ? at::kFloat : at::kBFloat16), async, kInt8);
      },
      "float32", "bfloat16");
  expect_mismatch(  // 65 and 66 values of the last block take as many bytes
      [&](int rank, bool async) { return sums(waves(rank, 128 + 65 + rank), async, kInt4); },
      "193 elements", "194 elements");
  expect_mismatch(
      [&](int rank, bool async) {
        return sums(waves(rank, 3000), async, rank == 0 ? kInt8 : kInt4);
      },
      "all_reduce(SUM, float32, 3000 elements, in int8)",
      "all_reduce(SUM, float32, 3000 elements, in int4)");
  expect_mismatch(
      [&](int rank, bool async) {
        return sums(waves(rank, 3000), async, rank == 0 ? kInt8 : Compression::none);
      },
      "all_reduce(SUM, float32, 3000 elements, in int8)",
      "all_reduce(SUM, float32, 3000 elements)");
  expect_mismatch(
      [&](int rank, bool async) { return sums(waves(rank, 3000 + 500 * rank), async, kInt8); },
      "3000 elements", "3500 elements");
  expect_mismatch(
      [](int rank, bool async) {
        return broadcast(waves(rank, 70 + rank),
                         {.src = 0, .async_op = async, .compression = kInt4});
      },
      "broadcast(float32, 70 elements, root 0, in int4)",
      "broadcast(float32, 71 elements, root 0, in int4)");
  expect_mismatch(
      [](int rank, bool async) {
        const auto whole = torch::empty({400});
        return all_gather_into_tensor(
            whole, waves(rank, 200), {.async_op = async, .compression = rank == 0 ? kInt8 : kInt4});
      },
      "in int8", "in int4");
  expect_mismatch(
      [](int rank, bool async) {
        const auto part = torch::empty({200});
        return reduce_scatter_tensor(part, waves(rank, 400),
                                     {.op = rank == 0 ? ReduceOp::SUM : ReduceOp::AVG,
                                      .async_op = async,
                                      .compression = kInt8});
      },
      "reduce_scatter(SUM", "reduce_scatter(AVG");
}

}  // namespace
}  // namespace muster
