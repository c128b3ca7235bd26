// SPDX-License-Identifier: BSD-3-Clause
#include "muster/rpc_calls.h"

#include <thread>

#include "core/store/factory.h"
#include "rpc/functions.h"
#include "rpc/testing/functions.h"
#include "rpc/testing/workers.h"

namespace muster::rpc {
namespace {

using namespace testing;

// ---- N1, N5, N10, N11, N14

// spec: N1 blocks until all joined; names are unique
TEST(Rpc, InitJoinsAllOverAStoreAndNamesAreUnique) {
  const auto store = store::make_hash_store(kSoon);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      const RpcScope::Binding binding(std::make_shared<RpcScope>());
      EXPECT_FALSE(is_initialized());
      init_rpc("w" + std::to_string(rank), {.rank = rank, .world_size = 3, .store = store});
      EXPECT_TRUE(is_initialized());
      const auto text = message_of<DistError>(
          [&] { init_rpc("again", {.rank = rank, .world_size = 3, .store = store}); });
      EXPECT_HAS(text, "called twice on worker 'w");
      EXPECT_EQ(rpc_sync<std::string>("w" + std::to_string((rank + 1) % 3), "whose", ""),
                "w" + std::to_string((rank + 1) % 3));
      shutdown(true, kSoon);
      EXPECT_FALSE(is_initialized());
    });
  }
  for (auto& thread : threads) thread.join();
}

// spec: N1 Names are unique
TEST(Rpc, TheSameNameTwiceThrowsOnAll) {
  const auto store = store::make_hash_store(kSoon);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      const RpcScope::Binding binding(std::make_shared<RpcScope>());
      const auto text = message_of<DistError>([&] {
        init_rpc(rank == 1 ? "only" : "twin", {.rank = rank, .world_size = 3, .store = store});
      });
      EXPECT_HAS(text, "ranks 0 and 2 both call themselves 'twin'");
    });
  }
  for (auto& thread : threads) thread.join();
}

// spec: N5 get_worker_info, WorkerInfo(name, id)
// spec: N11 get_worker_info() is this worker
TEST(Rpc, WorkersKnowEachOther) {
  on_workers(3, [](int rank) {
    EXPECT_EQ(get_worker_info().id(), rank);
    EXPECT_EQ(get_worker_info().name(), Workers::name(rank));
    EXPECT_EQ(get_worker_info("worker2").id(), 2);
    EXPECT_EQ(get_worker_info(1).name(), "worker1");
    EXPECT_EQ(get_worker_infos().size(), 3U);
    EXPECT_HAS(message_of<DistError>([] { get_worker_info("nobody"); }),
               "there is no worker 'nobody'; there are 'worker0', 'worker1', 'worker2'");
    EXPECT_HAS(message_of<DistError>([] { rpc_sync(7, "nothing"); }), "no worker of rank 7");
  });
}

// spec: N14 init_rpc starts RPC only
TEST(Rpc, CallsBeforeInitSayWhatToDo) {
  EXPECT_HAS(message_of<DistError>([] { rpc_sync("worker0", "nothing"); }),
             "rpc_sync was called before init_rpc");
  EXPECT_HAS(message_of<DistError>([] { shutdown(); }), "shutdown was called before init_rpc");
  EXPECT_FALSE(is_initialized());
}

// ---- N2, N10: calls

// spec: N2 rpc_sync, rpc_async (to: name, rank or WorkerInfo)
// spec: N10 rpc_sync, rpc_async, remote: (to, func, args=None, kwargs=None, timeout=-1.0), seconds
TEST(Rpc, CallsByNameRankAndInfo) {
  on_workers(2, [](int rank) {
    const int other = 1 - rank;
    const auto twos = rpc_sync<at::Tensor>(Workers::name(other), "scale", torch::ones({2, 2}), 2);
    EXPECT_TRUE(torch::equal(twos, torch::full({2, 2}, 2.0)));
    EXPECT_EQ(rpc_sync<std::string>(other, "whose", "I am "), "I am " + Workers::name(other));
    EXPECT_EQ(rpc_async<std::string>(get_worker_info(other), "whose", "").wait(),
              Workers::name(other));
    // To oneself as to others.
    EXPECT_EQ(rpc_sync<std::string>(rank, "whose", ""), Workers::name(rank));
    // By the function itself; what it takes decides the types.
    EXPECT_TRUE(torch::equal(rpc_sync(other, scale, torch::ones({3}), 3), torch::full({3}, 3.0)));
    EXPECT_EQ(rpc_async(other, whose, "x").wait(), "x" + Workers::name(other));
    rpc_sync(other, "nothing");
    rpc_sync(other, "add_at_once", 1, 2);  // a result that nobody wants
    EXPECT_EQ(rpc_sync<int>(other, "add_at_once", 1, 2U), 3);
  });
}

// spec: N10 func: a callable, a torch operator, a TorchScript function
TEST(Rpc, TorchsOperatorsByName) {
  on_workers(2, [](int rank) {
    const int other = 1 - rank;
    EXPECT_TRUE(torch::equal(rpc_sync<at::Tensor>(other, "aten::add", torch::ones({2}), 3),
                             torch::full({2}, 4.0)));
    EXPECT_TRUE(
        torch::equal(rpc_sync<at::Tensor>(other, "aten::add", torch::ones({2}), torch::ones({2})),
                     torch::full({2}, 2.0)));
    const auto large = torch::arange(100000, torch::kFloat);
    EXPECT_TRUE(torch::equal(rpc_sync<at::Tensor>(other, "aten::mul", large, 2), large * 2));
    EXPECT_TRUE(torch::equal(rpc_sync<at::Tensor>(other, "aten::sum", large), large.sum()));
    EXPECT_EQ(rpc_sync<std::vector<at::Tensor>>(other, "aten::split", torch::ones({6}), 2).size(),
              3U);
    EXPECT_HAS(message_of<DistError>([&] { rpc_sync<at::Tensor>(other, "aten::add", "text"); }),
               "no overload of 'aten::add'");
    EXPECT_HAS(
        message_of<DistError>([&] { rpc_sync<at::Tensor>(other, "aten::no_such_thing", 1); }),
        "there is no function 'aten::no_such_thing'");
  });
}

// spec: W5 RPC calls only what the callee allows: operators that compute, others one by one
TEST(Rpc, OperatorsThatDoMoreThanComputeMustBeAllowed) {
  on_workers(2, [](int rank) {
    const int other = 1 - rank;
    const auto refusal = message_of<DistError>(
        [&] { rpc_sync<at::Tensor>(other, "aten::from_file", "/etc/hostname", true, 8); });
    EXPECT_HAS(refusal, "'aten::from_file' is not among the operators that other workers may call");
    EXPECT_HAS(refusal, "allow_operator(\"aten::from_file\")");
    for (const char* name :
         {"aten::empty_like", "aten::set_", "aten::threshold_backward", "mkl::_mkl_linear",
          "aten::lstm", "aten::embedding_bag", "aten::grid_sampler", "aten::upsample_nearest1d",
          "aten::matrix_power", "aten::linalg_eigvals", "aten::lu_solve",
          "aten::binary_cross_entropy", "aten::multilabel_margin_loss", "aten::polygamma",
          "aten::special_polygamma", "aten::binomial", "aten::special_zeta",
          "aten::special_legendre_polynomial_p", "aten::random_"})
      EXPECT_HAS(
          message_of<DistError>([&] { rpc_sync<at::Tensor>(other, name, torch::ones({1})); }),
          "is not among the operators");
    EXPECT_EQ(rpc_sync<at::Tensor>(other, "aten::add_", torch::ones({1}), 1).item<float>(), 2.0F);
    // A number in a dtype's place is looked at before torch looks it up in its tables.
    for (const int dtype : {-1, 200})
      EXPECT_HAS(message_of<DistError>(
                     [&] { rpc_sync<at::Tensor>(other, "aten::view", torch::ones({2}), dtype); }),
                 "aten::view");
    for (const int reduction : {-1, 3})
      EXPECT_HAS(message_of<DistError>([&] {
                   rpc_sync<at::Tensor>(other, "aten::soft_margin_loss", torch::ones({2}),
                                        torch::ones({2}), reduction);
                 }),
                 "aten::soft_margin_loss");
    // Arithmetic of numbers is not a tensor's: it would divide by zero.
    EXPECT_HAS(message_of<DistError>([&] { rpc_sync<int>(other, "aten::remainder", 2, 0); }),
               "no overload of 'aten::remainder' takes the 2 arguments");
    EXPECT_EQ(
        rpc_sync<at::Tensor>(other, "aten::remainder", torch::full({1}, 5.0), 3).item<float>(),
        2.0F);
    const int doubles = static_cast<int>(torch::kDouble);
    EXPECT_EQ(rpc_sync<at::Tensor>(other, "aten::view", torch::ones({2}), doubles).numel(), 1);
  });
  allow_operator("aten::special_softmax");  // allowed already: nothing changes
  EXPECT_FALSE(is_allowed_operator("aten::empty_like"));
  allow_operator("aten::empty_like");
  EXPECT_TRUE(is_allowed_operator("aten::empty_like"));
  on_workers(2, [](int rank) {
    EXPECT_EQ(rpc_sync<at::Tensor>(1 - rank, "aten::empty_like", torch::ones({3})).numel(), 3);
  });
  EXPECT_HAS(message_of<DistError>([] { allow_operator("aten::no_such_thing"); }),
             "torch has no operator 'aten::no_such_thing'");
}

TEST(Rpc, ObjectsOfAnyTypeTravel) {
  on_workers(2, [](int rank) {
    Row row{"row", {torch::ones({2}), torch::zeros({70000})}, {{1, 2.5}}};
    const auto back = rpc_sync<Row>(1 - rank, "row_back", row);
    EXPECT_EQ(back.name, "row");
    EXPECT_EQ(back.weights.at(9), 0.5);
    EXPECT_EQ(back.parts.at(0).numel(), 70000);
    // More tensors than one message's head can describe, and bytes that are too many for it.
    std::vector<at::Tensor> many;
    for (int i = 0; i < 1500; ++i) many.push_back(torch::full({i % 3 + 1}, 1.0));
    EXPECT_EQ(rpc_sync<at::Tensor>(1 - rank, "sum_of", many).item<float>(), 3000.0);
    EXPECT_EQ(rpc_sync<std::string>(1 - rank, "whose", std::string(1 << 20, 'x')).size(),
              (1U << 20) + 7);
  });
}

// spec: N2 the callee's exception comes back with its text and worker name
TEST(Rpc, ExceptionsComeBackWithTypeTextAndWorker) {
  on_workers(2, [](int rank) {
    const int other = 1 - rank;
    const auto calls = [&](int kind) {
      return [other, kind] { rpc_sync<int>(other, "fail_with", kind); };
    };
    const auto text = message_of<std::out_of_range>(calls(0));
    EXPECT_HAS(text, "on worker '" + Workers::name(other) + "' (rank " + std::to_string(other) +
                         "), in 'fail_with': std::out_of_range: no such row");
    message_of<std::invalid_argument>(calls(1));
    try {
      calls(2)();
      ADD_FAILURE();
    } catch (const DistBackendError& error) {
      EXPECT_EQ(error.code(), Code::mismatch);
      EXPECT_EQ(error.ranks(), std::vector<int>{7});
      EXPECT_HAS(error.what(), "not this");
    }
    EXPECT_HAS(message_of<c10::Error>(calls(3)), "shape '[3]' is invalid");
    EXPECT_HAS(message_of<DistBackendError>(calls(4)), "int: something that is no std::exception");
    EXPECT_HAS(message_of<std::runtime_error>(calls(5)), "an error of mine");
    try {
      rpc_async<int>(other, "fail_with", 0).wait();
      ADD_FAILURE();
    } catch (const RemoteError& error) {
      EXPECT_EQ(error.worker(), Workers::name(other));
      EXPECT_EQ(error.type(), "std::out_of_range");
      EXPECT_EQ(error.text(), "no such row");
    }
    EXPECT_EQ(rpc_sync<int>(other, "fail_with", 9), 9);
  });
}

TEST(Rpc, WrongArgumentsSayWhich) {
  on_workers(2, [](int rank) {
    const int other = 1 - rank;
    EXPECT_HAS(message_of<std::runtime_error>(
                   [&] { rpc_sync<at::Tensor>(other, "scale", torch::ones({2}), "two"); }),
               "argument 2 of 'scale' is wanted as double; std::string was given");
    EXPECT_HAS(message_of<std::runtime_error>(
                   [&] { rpc_sync<at::Tensor>(other, "scale", torch::ones({2})); }),
               "'scale' takes 2 arguments; 1 were given");
    EXPECT_HAS(message_of<std::runtime_error>([&] { rpc_sync(other, "add_at_once", 1, 2.5); }),
               "argument 2 of 'add_at_once' is wanted as long");
    EXPECT_HAS(
        message_of<std::runtime_error>([&] { rpc_sync<at::Tensor>(other, "add_at_once", 1, 2); }),
        "the result of 'add_at_once' is wanted as at::Tensor");
    EXPECT_HAS(message_of<DistError>([&] { rpc_sync(other, "no_such_function"); }),
               "there is no function 'no_such_function' there; registered are ");
  });
}

// spec: N2 timeout, 0 = never, unset = the default of 60 s
TEST(Rpc, TimeoutsNameWorkerAndFunction) {
  EXPECT_EQ(kDefaultRpcTimeout, std::chrono::seconds(60));
  on_workers(2, [](int rank) {
    if (rank == 1) return;
    EXPECT_EQ(get_rpc_timeout(), kDefaultRpcTimeout);
    const int gate = next_gate++;
    const CallOptions brief{.timeout = std::chrono::milliseconds(30)};
    const auto text =
        message_of<DistBackendError>([&] { rpc_sync<int>(1, "wait_at", brief, gate); });
    EXPECT_HAS(text,
               "the call of 'wait_at' on worker 'worker1' (rank 1) had no answer within its "
               "timeout of 30 ms");
    const auto future = rpc_async<int>(1, "wait_at", brief, gate);
    EXPECT_HAS(message_of<DistBackendError>([&] { future.wait(); }),
               "no answer within its timeout of 30 ms");
    // The default that was set goes for calls that say none; zero means never.
    set_rpc_timeout(std::chrono::milliseconds(40));
    EXPECT_HAS(message_of<DistBackendError>([&] { rpc_sync<int>(1, "wait_at", gate); }),
               "timeout of 40 ms");
    const auto patient =
        rpc_async<int>(1, "wait_at", CallOptions{.timeout = Duration::zero()}, gate);
    EXPECT_FALSE(patient.wait_until(steady_clock().now() + std::chrono::milliseconds(80)));
    set_rpc_timeout(kSoon);
    gates.at(gate).set_value(5);
    EXPECT_EQ(patient.wait(), 5);
    EXPECT_HAS(message_of<DistError>(
                   [&] { rpc_sync(1, "nothing", CallOptions{.timeout = Duration(-1)}); }),
               "must not be negative");
  });
}

// spec: N2 thread-safe
TEST(Rpc, ManyThreadsCallAtOnceInBothDirections) {
  on_workers(3, [](int rank) {
    std::vector<std::thread> threads;
    const auto scope = RpcScope::current();
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        const RpcScope::Binding binding(scope);
        std::vector<Future<at::Tensor>> futures;
        for (int i = 0; i < 100; ++i) {
          const int to = (rank + i + t) % 3;
          const auto number = static_cast<std::int64_t>(1000 * t + i);
          EXPECT_EQ(rpc_sync<std::int64_t>(to, "add_at_once", number, 1), number + 1);
          futures.push_back(rpc_async<at::Tensor>(
              to, "scale", torch::full({i % 7 == 0 ? 5000 : 3}, static_cast<double>(i)), 2));
        }
        for (int i = 0; i < 100; ++i)
          EXPECT_EQ(futures[static_cast<std::size_t>(i)].wait()[0].item<double>(), 2.0 * i);
      });
    }
    for (auto& thread : threads) thread.join();
  });
}

TEST(Rpc, AnswersComeInAnyOrder) {
  on_workers(2, [](int rank) {
    if (rank == 1) return;
    const int first = next_gate++;
    const int second = next_gate++;
    const auto slow = rpc_async<int>(1, "wait_at", first);
    const auto quick = rpc_async<int>(1, "wait_at", second);
    gates.at(second).set_value(2);
    EXPECT_EQ(quick.wait(), 2);
    EXPECT_FALSE(slow.done());
    gates.at(first).set_value(1);
    EXPECT_EQ(slow.wait(), 1);
  });
}

TEST(Rpc, NestedCallsComeThroughEveryWorker) {
  on_workers(3, [](int rank) {
    if (rank != 0) return;
    EXPECT_EQ(rpc_sync<std::string>(1, "chain", 7),
              "worker1 worker2 worker0 worker1 worker2 worker0 worker1 worker2");
  });
}

TEST(Rpc, FunctionsDoNotSeeTheSettingsOfWhoeverWaits) {
  on_workers(2, [](int rank) {
    const at::NoGradGuard no_grad;
    for (int i = 0; i < 20; ++i) EXPECT_TRUE(rpc_sync<bool>(1 - rank, "has_grad_mode"));
    auto ones = torch::ones({2}).set_requires_grad(true);
    for (int i = 0; i < 20; ++i)
      EXPECT_TRUE(rpc_sync<at::Tensor>(1 - rank, "aten::mul", ones, 2).requires_grad());
  });
}

// ---- N3, N12: tensors

// spec: N3 Tensors keep shape, stride and dtype
TEST(Rpc, TensorsKeepShapeStrideAndType) {
  on_workers(2, [](int rank) {
    const auto base = torch::arange(60, torch::kFloat).view({3, 4, 5});
    const auto big = torch::arange(300000, torch::kDouble).view({300, 1000});
    std::vector<at::Tensor> tensors{
        base,
        base.transpose(0, 2),
        base.permute({1, 2, 0}),
        base.slice(2, 1, 4),
        base.select(0, 1),
        torch::ones({1}).expand({4, 3}),
        torch::empty({0, 3}),
        torch::tensor(3.5),
        base[0][0][0],
        big,
        big.t(),
        big.slice(1, 0, 10, 2),
        base.as_strided({3, 2}, {1, 1}),
        torch::complex(base, base).conj(),
        torch::imag(torch::complex(base, base).conj()),
        torch::ones({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast)};
    for (const auto dtype : {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong,
                             at::kHalf, at::kBFloat16, at::kDouble, at::kComplexFloat})
      tensors.push_back(torch::arange(6).to(dtype).view({2, 3}));
    for (const auto dtype : {at::kUInt16, at::kUInt32, at::kUInt64, at::kFloat8_e5m2})
      tensors.push_back(torch::ones({5}, at::kByte).view(at::kByte).to(dtype));
    for (const auto& tensor : tensors) {
      const auto back = rpc_sync<at::Tensor>(1 - rank, "echo", tensor);
      EXPECT_EQ(back.sizes(), tensor.sizes());
      EXPECT_EQ(back.strides(), tensor.strides());
      EXPECT_EQ(back.scalar_type(), tensor.scalar_type());
      const auto bytes = [](const at::Tensor& t) {
        return t.resolve_conj().resolve_neg().contiguous().flatten().view(at::kByte);
      };
      EXPECT_TRUE(torch::equal(bytes(back), bytes(tensor))) << tensor.sizes();
    }
    EXPECT_FALSE(rpc_sync<at::Tensor>(1 - rank, "echo", at::Tensor()).defined());
    EXPECT_TRUE(rpc_sync<at::Tensor>(1 - rank, "echo", torch::ones({2}).set_requires_grad(true))
                    .requires_grad());
  });
}

// spec: N3 CUDA tensors go by the device maps or are refused
TEST(Rpc, TensorsOfOtherDevicesAreRefusedWithoutAMap) {
  on_workers(2, [](int rank) {
    const auto there = torch::empty({2}, at::kMeta);
    const auto text = message_of<DistError>([&] { rpc_sync<at::Tensor>(1 - rank, "echo", there); });
    EXPECT_HAS(text, "a tensor on meta cannot go to worker '" + Workers::name(1 - rank) + "'");
    EXPECT_HAS(text, "set_device_map");
    EXPECT_HAS(message_of<DistError>(
                   [&] { rpc_sync<at::Tensor>(1 - rank, "echo", torch::ones({2}).to_sparse()); }),
               "to_dense");
    rpc_sync(1 - rank, "nothing");  // the worker goes on
  });
}

// spec: N3 a tensor whose type does not travel is refused where it is sent, and the workers go on
TEST(Rpc, TensorsWhoseTypeDoesNotTravelAreRefused) {
  on_workers(2, [](int rank) {
    const auto bytes = torch::ones({8}, at::kByte);
    EXPECT_HAS(message_of<DistError>(
                   [&] { rpc_sync<at::Tensor>(1 - rank, "echo", bytes.view(at::kBits8)); }),
               "is of type Bits8, which does not travel");
    const auto wanted = static_cast<std::int64_t>(at::kQUInt8);
    EXPECT_HAS(
        message_of<DistError>([&] { rpc_sync<at::Tensor>(1 - rank, "aten::view", bytes, wanted); }),
        "is of type QUInt8, which does not travel");
    rpc_sync(1 - rank, "nothing");
  });
}

// spec: N12 a change after `rpc_async` returns never shows
TEST(Rpc, ChangesAfterTheCallDoNotShow) {
  on_workers(2, [](int rank) {
    for (const std::int64_t elements : {4, 3000, 2000000}) {
      auto tensor = torch::ones({elements});
      std::vector<Future<at::Tensor>> futures;
      for (int i = 0; i < 4; ++i) {
        tensor.fill_(i);
        futures.push_back(rpc_async<at::Tensor>(1 - rank, "echo", tensor));
      }
      tensor.fill_(99);
      for (int i = 0; i < 4; ++i)
        EXPECT_TRUE((futures[static_cast<std::size_t>(i)].wait() == i).all().item<bool>())
            << elements;
    }
  });
}

// spec: N12 transfers do not block each other
TEST(Rpc, SmallCallsPassLargeOnes) {
  on_workers(2, [](int rank) {
    if (rank == 1) return;
    const auto large = torch::ones({8 << 20});
    std::vector<Future<at::Tensor>> transfers;
    for (int i = 0; i < 3; ++i) transfers.push_back(rpc_async<at::Tensor>(1, "scale", large, 2));
    int before = 0;
    for (int i = 0; i < 20; ++i) {
      rpc_sync(1, "nothing");
      before += transfers.back().done() ? 0 : 1;
    }
    EXPECT_GT(before, 0);
    for (const auto& transfer : transfers) EXPECT_EQ(transfer.wait()[12345].item<float>(), 2.0);
  });
}

// ---- N8: async_execution

// spec: N8 the callee returns a future and frees its thread
TEST(Rpc, AFunctionThatReturnsAFutureFreesItsThread) {
  RpcBackendOptions one_thread;
  one_thread.num_worker_threads = 1;
  on_workers(
      3,
      [](int rank) {
        if (rank != 0) return;
        // Three workers with one thread each, and a chain that comes back to each of them three
        // times.
        EXPECT_EQ(rpc_sync<std::string>(1, "chain_later", 8),
                  "worker1 worker2 worker0 worker1 worker2 worker0 worker1 worker2 worker0");
        const int gate = next_gate++;
        std::vector<Future<int>> waiting;
        for (int i = 0; i < 5; ++i) waiting.push_back(rpc_async<int>(1, "later", gate));
        EXPECT_EQ(rpc_sync<std::string>(1, "whose", ""), "worker1");  // its one thread is free
        for (const auto& future : waiting) EXPECT_FALSE(future.done());
        gates.at(gate).set_value(7);
        for (const auto& future : waiting) EXPECT_EQ(future.wait(), 7);
        const int failing = next_gate++;
        const auto failed = rpc_async<int>(1, "later", failing);
        gates.at(failing).set_exception(std::make_exception_ptr(std::out_of_range("no value")));
        EXPECT_HAS(message_of<std::out_of_range>([&] { failed.wait(); }), "no value");
      },
      one_thread);
}

// spec: N2 callbacks of futures may wait for each other deeper than a worker has threads
TEST(Rpc, CallbacksWaitForCallbacksDeeperThanThePool) {
  RpcBackendOptions few_threads;
  few_threads.num_worker_threads = 2;
  on_workers(
      2, [](int rank) { EXPECT_EQ(callbacks_that_wait(1 - rank, 7).wait(), 7); }, few_threads);
}

TEST(RpcFuture, ThenWaitAllAndDroppedPromises) {
  const Promise<int> promise{std::weak_ptr<Agent>()};
  const auto future = promise.future();
  const auto next = future.then([](const Future<int>& f) { return std::to_string(f.wait() + 1); });
  const auto nothing = next.then([](const Future<std::string>& f) {
    if (f.wait() == "5") throw std::out_of_range("five");
  });
  EXPECT_FALSE(next.done());
  promise.set_value(4);
  EXPECT_EQ(next.wait(), "5");
  EXPECT_THROW(nothing.wait(), std::out_of_range);
  EXPECT_THROW(promise.set_value(5), std::logic_error);
  EXPECT_EQ(wait_all<int>({made_ready(1), future}), (std::vector<int>{1, 4}));
  Future<int> dropped;
  {
    const Promise<int> gone{std::weak_ptr<Agent>()};
    dropped = gone.future();
  }
  EXPECT_HAS(message_of<std::runtime_error>([&] { dropped.wait(); }), "dropped without a value");
}

TEST(RpcFuture, WhoseValueNeverComesLetsItsCallbacksGo) {
  const auto token = std::make_shared<int>(0);
  {
    const Future<int> never(std::make_shared<FutureState<int>>(std::weak_ptr<Agent>()));
    never.then([token](const Future<int>&) {});
    never.state()->then([token](const std::shared_ptr<FutureState<int>>&) {});
    EXPECT_EQ(token.use_count(), 3);
  }
  EXPECT_EQ(token.use_count(), 1);
}

}  // namespace
}  // namespace muster::rpc
