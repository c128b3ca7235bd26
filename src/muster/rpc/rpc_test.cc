#include "muster/rpc/rpc.h"

#include <algorithm>
#include <barrier>
#include <cereal/types/map.hpp>
#include <cereal/types/tuple.hpp>
#include <map>
#include <mutex>
#include <semaphore>

#include "muster/rpc/test_workers.h"
#include "muster/store/factory.h"

namespace muster::rpc {
namespace {

using testing::kSoon;
using testing::message_of;
using testing::on_workers;
using testing::Workers;

// ---- what the workers can do -----------------------------------------------------------------------------------------

at::Tensor scale(const at::Tensor& tensor, double by) { return tensor * by; }
std::string whose(const std::string& prefix) { return prefix + get_worker_info().name(); }
at::Tensor echo(at::Tensor tensor) { return tensor; }
int fail_with(int kind) {
  switch (kind) {
    case 0: throw std::out_of_range("no such row");
    case 1: throw std::invalid_argument("not like that");
    case 2: throw DistError("not this", Code::mismatch, {7});
    case 3: (void)torch::ones({2}).view({3}); break;
    case 4: throw 42;  // NOLINT
    case 5: {
      struct Own : std::runtime_error {
        using std::runtime_error::runtime_error;
      };
      throw Own("an error of mine");
    }
    default: break;
  }
  return kind;
}

struct Row {
  std::string name;
  std::vector<at::Tensor> parts;
  std::map<int, double> weights;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(name, parts, weights);
  }
};

/// A gate that functions wait at until a test opens it. One per name, process-wide: the workers are threads of one process.
struct Gates {
  std::mutex mutex;
  std::map<int, Promise<int>> gates;
  Promise<int> at(int number) {
    const std::lock_guard lock(mutex);
    return gates.try_emplace(number, std::weak_ptr<Agent>()).first->second;
  }
} gates;
std::atomic<int> next_gate{0};
std::atomic<int> entered{0};

struct Registered {
  Registered() {
    register_function("scale", scale);
    register_function("whose", whose);
    register_function("echo", echo);
    register_function("fail_with", fail_with);
    register_function("add_at_once", [](std::int64_t a, std::int64_t b) { return a + b; }, {.runs = Runs::at_once});
    register_function("nothing", [] {}, {.runs = Runs::at_once});
    register_function("row_back", [](Row row) {
      std::reverse(row.parts.begin(), row.parts.end());
      row.weights[9] = 0.5;
      return row;
    });
    register_function("wait_at", [](int gate) {
      ++entered;
      return gates.at(gate).future().wait();
    });
    register_function("later", [](int gate) { return gates.at(gate).future(); });
    register_function("sum_of", [](const std::vector<at::Tensor>& tensors) {
      auto sum = torch::zeros({});
      for (const auto& tensor : tensors) sum = sum + tensor.sum();
      return sum;
    });
    // Asks the next worker, and so on: many calls nested in one another.
    register_function("chain", [](int hops) -> std::string {
      const auto self = get_worker_info();
      if (hops == 0) return self.name();
      const int next = (self.id() + 1) % static_cast<int>(get_worker_infos().size());
      return self.name() + " " + rpc_sync<std::string>(next, "chain", hops - 1);
    });
    register_function("chain_later", [](int hops) -> Future<std::string> {
      const auto self = get_worker_info();
      if (hops == 0) return made_ready(self.name());
      const int next = (self.id() + 1) % static_cast<int>(get_worker_infos().size());
      return rpc_async<std::string>(next, "chain_later", hops - 1).then([self](const Future<std::string>& rest) {
        return self.name() + " " + rest.wait();
      });
    });
    register_function("echo_text", [](std::string text) { return text; });
    register_function("has_grad_mode", [] { return at::GradMode::is_enabled(); });
  }
} registered;

// ---- N1, N5, N10, N11, N14 -------------------------------------------------------------------------------------------

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
      const auto text = message_of<DistError>([&] { init_rpc("again", {.rank = rank, .world_size = 3, .store = store}); });
      EXPECT_HAS(text, "called twice on worker 'w");
      EXPECT_EQ(rpc_sync<std::string>("w" + std::to_string((rank + 1) % 3), "whose", ""), "w" + std::to_string((rank + 1) % 3));
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
      const auto text =
          message_of<DistError>([&] { init_rpc(rank == 1 ? "only" : "twin", {.rank = rank, .world_size = 3, .store = store}); });
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
  EXPECT_HAS(message_of<DistError>([] { rpc_sync("worker0", "nothing"); }), "rpc_sync was called before init_rpc");
  EXPECT_HAS(message_of<DistError>([] { shutdown(); }), "shutdown was called before init_rpc");
  EXPECT_FALSE(is_initialized());
}

// ---- N2, N10: calls --------------------------------------------------------------------------------------------------

// spec: N2 rpc_sync, rpc_async (to: name, rank or WorkerInfo)
// spec: N10 rpc_sync, rpc_async, remote: (to, func, args=None, kwargs=None, timeout=-1.0), seconds
TEST(Rpc, CallsByNameRankAndInfo) {
  on_workers(2, [](int rank) {
    const int other = 1 - rank;
    const auto twos = rpc_sync<at::Tensor>(Workers::name(other), "scale", torch::ones({2, 2}), 2);
    EXPECT_TRUE(torch::equal(twos, torch::full({2, 2}, 2.0)));
    EXPECT_EQ(rpc_sync<std::string>(other, "whose", "I am "), "I am " + Workers::name(other));
    EXPECT_EQ(rpc_async<std::string>(get_worker_info(other), "whose", "").wait(), Workers::name(other));
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
    EXPECT_TRUE(torch::equal(rpc_sync<at::Tensor>(other, "aten::add", torch::ones({2}), 3), torch::full({2}, 4.0)));
    EXPECT_TRUE(torch::equal(rpc_sync<at::Tensor>(other, "aten::add", torch::ones({2}), torch::ones({2})), torch::full({2}, 2.0)));
    const auto large = torch::arange(100000, torch::kFloat);
    EXPECT_TRUE(torch::equal(rpc_sync<at::Tensor>(other, "aten::mul", large, 2), large * 2));
    EXPECT_TRUE(torch::equal(rpc_sync<at::Tensor>(other, "aten::sum", large), large.sum()));
    EXPECT_EQ(rpc_sync<std::vector<at::Tensor>>(other, "aten::split", torch::ones({6}), 2).size(), 3U);
    EXPECT_HAS(message_of<DistError>([&] { rpc_sync<at::Tensor>(other, "aten::add", "text"); }), "no overload of 'aten::add'");
    EXPECT_HAS(message_of<DistError>([&] { rpc_sync<at::Tensor>(other, "aten::no_such_thing", 1); }),
               "there is no function 'aten::no_such_thing'");
  });
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
    EXPECT_EQ(rpc_sync<std::string>(1 - rank, "whose", std::string(1 << 20, 'x')).size(), (1U << 20) + 7);
  });
}

// spec: N2 the callee's exception comes back with its text and worker name
TEST(Rpc, ExceptionsComeBackWithTypeTextAndWorker) {
  on_workers(2, [](int rank) {
    const int other = 1 - rank;
    const auto calls = [&](int kind) { return [other, kind] { rpc_sync<int>(other, "fail_with", kind); }; };
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
    EXPECT_HAS(message_of<std::runtime_error>([&] { rpc_sync<at::Tensor>(other, "scale", torch::ones({2}), "two"); }),
               "argument 2 of 'scale' is wanted as double; std::string was given");
    EXPECT_HAS(message_of<std::runtime_error>([&] { rpc_sync<at::Tensor>(other, "scale", torch::ones({2})); }),
               "'scale' takes 2 arguments; 1 were given");
    EXPECT_HAS(message_of<std::runtime_error>([&] { rpc_sync(other, "add_at_once", 1, 2.5); }),
               "argument 2 of 'add_at_once' is wanted as long");
    EXPECT_HAS(message_of<std::runtime_error>([&] { rpc_sync<at::Tensor>(other, "add_at_once", 1, 2); }),
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
    const auto text = message_of<DistBackendError>([&] { rpc_sync<int>(1, "wait_at", brief, gate); });
    EXPECT_HAS(text, "the call of 'wait_at' on worker 'worker1' (rank 1) had no answer within its timeout of 30 ms");
    const auto future = rpc_async<int>(1, "wait_at", brief, gate);
    EXPECT_HAS(message_of<DistBackendError>([&] { future.wait(); }), "no answer within its timeout of 30 ms");
    // The default that was set goes for calls that say none; zero means never.
    set_rpc_timeout(std::chrono::milliseconds(40));
    EXPECT_HAS(message_of<DistBackendError>([&] { rpc_sync<int>(1, "wait_at", gate); }), "timeout of 40 ms");
    const auto patient = rpc_async<int>(1, "wait_at", CallOptions{.timeout = Duration::zero()}, gate);
    EXPECT_FALSE(patient.wait_until(steady_clock().now() + std::chrono::milliseconds(80)));
    set_rpc_timeout(kSoon);
    gates.at(gate).set_value(5);
    EXPECT_EQ(patient.wait(), 5);
    EXPECT_HAS(message_of<DistError>([&] { rpc_sync(1, "nothing", CallOptions{.timeout = Duration(-1)}); }), "must not be negative");
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
          futures.push_back(rpc_async<at::Tensor>(to, "scale", torch::full({i % 7 == 0 ? 5000 : 3}, static_cast<double>(i)), 2));
        }
        for (int i = 0; i < 100; ++i) EXPECT_EQ(futures[static_cast<std::size_t>(i)].wait()[0].item<double>(), 2.0 * i);
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
    EXPECT_EQ(rpc_sync<std::string>(1, "chain", 7), "worker1 worker2 worker0 worker1 worker2 worker0 worker1 worker2");
  });
}

TEST(Rpc, FunctionsDoNotSeeTheSettingsOfWhoeverWaits) {
  on_workers(2, [](int rank) {
    const at::NoGradGuard no_grad;
    for (int i = 0; i < 20; ++i) EXPECT_TRUE(rpc_sync<bool>(1 - rank, "has_grad_mode"));
    auto ones = torch::ones({2}).set_requires_grad(true);
    for (int i = 0; i < 20; ++i) EXPECT_TRUE(rpc_sync<at::Tensor>(1 - rank, "aten::mul", ones, 2).requires_grad());
  });
}

// ---- N3, N12: tensors ------------------------------------------------------------------------------------------------

// spec: N3 Tensors keep shape, stride and dtype
TEST(Rpc, TensorsKeepShapeStrideAndType) {
  on_workers(2, [](int rank) {
    const auto base = torch::arange(60, torch::kFloat).view({3, 4, 5});
    const auto big = torch::arange(300000, torch::kDouble).view({300, 1000});
    std::vector<at::Tensor> tensors{base,
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
    for (const auto dtype :
         {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kDouble, at::kComplexFloat})
      tensors.push_back(torch::arange(6).to(dtype).view({2, 3}));
    for (const auto dtype : {at::kUInt16, at::kUInt32, at::kUInt64, at::kFloat8_e5m2})
      tensors.push_back(torch::ones({5}, at::kByte).view(at::kByte).to(dtype));
    for (const auto& tensor : tensors) {
      const auto back = rpc_sync<at::Tensor>(1 - rank, "echo", tensor);
      EXPECT_EQ(back.sizes(), tensor.sizes());
      EXPECT_EQ(back.strides(), tensor.strides());
      EXPECT_EQ(back.scalar_type(), tensor.scalar_type());
      const auto bytes = [](const at::Tensor& t) { return t.resolve_conj().resolve_neg().contiguous().flatten().view(at::kByte); };
      EXPECT_TRUE(torch::equal(bytes(back), bytes(tensor))) << tensor.sizes();
    }
    EXPECT_FALSE(rpc_sync<at::Tensor>(1 - rank, "echo", at::Tensor()).defined());
    EXPECT_TRUE(rpc_sync<at::Tensor>(1 - rank, "echo", torch::ones({2}).set_requires_grad(true)).requires_grad());
  });
}

// spec: N3 CUDA tensors go by the device maps or are refused
TEST(Rpc, TensorsOfOtherDevicesAreRefusedWithoutAMap) {
  on_workers(2, [](int rank) {
    const auto there = torch::empty({2}, at::kMeta);
    const auto text = message_of<DistError>([&] { rpc_sync<at::Tensor>(1 - rank, "echo", there); });
    EXPECT_HAS(text, "a tensor on meta cannot go to worker '" + Workers::name(1 - rank) + "'");
    EXPECT_HAS(text, "set_device_map");
    EXPECT_HAS(message_of<DistError>([&] { rpc_sync<at::Tensor>(1 - rank, "echo", torch::ones({2}).to_sparse()); }), "to_dense");
    rpc_sync(1 - rank, "nothing");  // the worker goes on
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
      for (int i = 0; i < 4; ++i) EXPECT_TRUE((futures[static_cast<std::size_t>(i)].wait() == i).all().item<bool>()) << elements;
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

// ---- N8: async_execution ---------------------------------------------------------------------------------------------

// spec: N8 the callee returns a future and frees its thread
TEST(Rpc, AFunctionThatReturnsAFutureFreesItsThread) {
  RpcBackendOptions one_thread;
  one_thread.num_worker_threads = 1;
  on_workers(
      3,
      [](int rank) {
        if (rank != 0) return;
        // Three workers with one thread each, and a chain that comes back to each of them three times.
        EXPECT_EQ(rpc_sync<std::string>(1, "chain_later", 8), "worker1 worker2 worker0 worker1 worker2 worker0 worker1 worker2 worker0");
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

// ---- N4: the end -----------------------------------------------------------------------------------------------------

// spec: N4 `shutdown(graceful=True)` drains user references and waits for all
TEST(Rpc, GracefulShutdownWaitsForWhatIsUnderWay) {
  std::atomic<int> ended{0};
  Workers workers(3);
  workers.run([&](int rank) {
    if (rank != 2) return;
    // The others are in their shutdown already, and still serve; nobody waits for these answers but shutdown.
    const int gate = next_gate++;
    const auto future = rpc_async<int>(0, "wait_at", gate);
    future.then([&](const Future<int>&) { ++ended; });
    const auto chain = rpc_async<std::string>(1, "chain", 5);
    chain.then([&](const Future<std::string>&) { ++ended; });
    std::thread opener([gate] { gates.at(gate).set_value(1); });
    shutdown(true, kSoon);
    opener.join();
    EXPECT_EQ(ended.load(), 2);
  });
}

// spec: N4 It names the worker it waits for
TEST(Rpc, ShutdownNamesTheWorkerItWaitsFor) {
  std::barrier done(3);
  Workers workers(3);
  workers.run([&](int rank) {
    if (rank != 1) {
      const auto text = message_of<DistError>([&] { shutdown(true, std::chrono::milliseconds(rank == 0 ? 300 : 150)); });
      EXPECT_HAS(text, "still waits for worker 'worker1' (rank 1), which has not called shutdown");
    }
    done.arrive_and_wait();
    if (rank == 1) shutdown(false);
  });
}

// spec: N4 not graceful ends at once
TEST(Rpc, AnUngracefulEndFailsWhatIsUnderWay) {
  Workers workers(2);
  std::binary_semaphore called(0);
  workers.run([&](int rank) {
    const int gate = 1000;
    if (rank == 0) {
      const auto future = rpc_async<int>(1, "later", gate);
      rpc_sync(1, "nothing");
      called.release();
      EXPECT_HAS(message_of<DistError>([&] { future.wait(); }), "the call of 'later' on worker 'worker1' (rank 1) has failed");
      EXPECT_HAS(message_of<DistError>([&] { rpc_sync(1, "nothing"); }), "worker 'worker1' (rank 1) has failed");
      const auto own = rpc_async<int>(0, "later", gate);
      shutdown(false);
      EXPECT_HAS(message_of<DistError>([&] { own.wait(); }), "RPC of worker 'worker0' has ended");
      EXPECT_HAS(message_of<DistError>([&] { rpc_sync(1, "nothing"); }), "before init_rpc (or after shutdown)");
    } else {
      called.acquire();
      shutdown(false);
    }
  });
}

// ---- N6: failures ----------------------------------------------------------------------------------------------------

// spec: N6 pipes open when first needed; a failed peer closes only its own
TEST(Rpc, ADeadWorkerFailsExactlyItsCalls) {
  entered = 0;
  Workers workers(4);
  std::barrier all(3);
  workers.run([&](int rank) {
    const int gate = 2000;
    if (rank == 3) {
      current_agent("test")->wait([] { return entered.load() == 3; }, steady_clock().now() + kSoon);
      workers.hub->kill(3);
      shutdown(false);
      return;
    }
    const auto doomed = rpc_async<int>(3, "wait_at", gate);
    const auto spared = rpc_async<int>((rank + 1) % 3, "later", gate);
    EXPECT_HAS(message_of<DistBackendError>([&] { doomed.wait(); }), "the call of 'wait_at' on worker 'worker3' (rank 3) has failed");
    try {
      rpc_sync(3, "nothing");
      ADD_FAILURE();
    } catch (const DistError& error) {
      EXPECT_EQ(error.ranks(), std::vector<int>{3});
    }
    EXPECT_EQ(rpc_sync<std::string>((rank + 1) % 3, "whose", ""), Workers::name((rank + 1) % 3));
    EXPECT_FALSE(spared.done());
    all.arrive_and_wait();
    if (rank == 0) gates.at(gate).set_value(3);
    EXPECT_EQ(spared.wait(), 3);
  });
}

// Frames that are no calls, from a peer that is one of the job.
TEST(Rpc, AWorkerThatBreaksTheProtocolIsLostAloneAndNamed) {
  Workers workers(3);
  std::barrier all(3);
  workers.run([&](int rank) {
    if (rank == 0) rpc_sync(2, "nothing");
    all.arrive_and_wait();
    if (rank == 2) {
      auto& channel = current_agent("test")->fabric().agreements();
      const std::string noise(100, 'x');
      const auto sent = channel.send(0, 0, as_bytes(noise), {});
      current_agent("test")->wait([&] { return sent->done(); }, steady_clock().now() + kSoon);
    }
    if (rank == 0) {
      const auto agent = current_agent("test");
      EXPECT_TRUE(agent->wait([&] { return !agent->lost(2).ok(); }, steady_clock().now() + kSoon));
      EXPECT_HAS(message_of<DistError>([&] { rpc_sync(2, "nothing"); }), "a message that is not one of muster's calls");
      EXPECT_EQ(rpc_sync<std::string>(1, "whose", ""), "worker1");
    }
    all.arrive_and_wait();
    shutdown(false);
  });
}

TEST(Rpc, CancelledCallsThatHaveNotBegunNeverRun) {
  RpcBackendOptions one_thread;
  one_thread.num_worker_threads = 1;
  on_workers(
      2,
      [](int rank) {
        if (rank == 1) return;
        entered = 0;
        const int gate = next_gate++;
        const auto first = rpc_async<int>(1, "wait_at", gate);
        const auto agent = current_agent("test");
        std::vector<Future<int>> given_up;
        for (int i = 0; i < 10; ++i)
          given_up.push_back(rpc_async<int>(1, "wait_at", CallOptions{.timeout = std::chrono::milliseconds(50)}, gate));
        for (const auto& future : given_up) EXPECT_THROW(future.wait(), DistBackendError);
        rpc_sync(1, "nothing");  // what was said before has arrived
        gates.at(gate).set_value(1);
        EXPECT_EQ(first.wait(), 1);
        EXPECT_EQ(rpc_sync<std::string>(1, "whose", ""), "worker1");
        EXPECT_EQ(entered.load(), 1);
      },
      one_thread);
}

// spec: N6 `BackendType`, `register_backend`
// spec: N13 BackendType TENSORPIPE is the default's alias
TEST(Rpc, BackendsAreRegisteredByName) {
  EXPECT_TRUE(backend_registered("tensorpipe"));
  EXPECT_EQ(BackendType("tensorpipe"), BackendType::TENSORPIPE);
  EXPECT_HAS(message_of<DistError>([] { BackendType("carrier_pigeon"); }),
             "there is no RPC backend 'CARRIER_PIGEON'; there are NATIVE, TENSORPIPE");
  Workers workers(1);
  std::string asked;
  const auto ours = register_backend("ours", [&](const BackendRequest& request) {
    asked = request.name;
    return Agent::create(workers.fabric(0), {request.name}, {});
  });
  EXPECT_HAS(message_of<DistError>([] { register_backend("Ours", {}); }), "an RPC backend 'OURS' already");
  const RpcScope::Binding binding(std::make_shared<RpcScope>());
  init_rpc("solo", {.backend = ours, .rank = 0, .world_size = 1});
  EXPECT_EQ(asked, "solo");
  EXPECT_EQ(rpc_sync<std::string>("solo", "echo_text", "here"), "here");
  shutdown(true, kSoon);
}

// spec: N5 `RpcBackendOptions(num_worker_threads=16, rpc_timeout=60, init_method, device_maps, devices)`, `set_device_map` (cumulative),
// `set_devices` spec: N13 map keys take int, text or device; devices default from device_maps
TEST(RpcOptions, DefaultsAndDeviceMaps) {
  TensorPipeRpcBackendOptions options;
  EXPECT_EQ(options.num_worker_threads, 16);
  EXPECT_EQ(options.rpc_timeout, std::chrono::seconds(60));
  EXPECT_EQ(options.init_method, "env://");
  options.set_device_map("worker1", {{0, 1}});
  options.set_device_map("worker1", {{"cuda:1", at::Device("cuda:2")}});
  options.set_device_map("worker2", {{"cpu", "cuda:0"}});
  ASSERT_EQ(options.device_maps.at("worker1").size(), 2U);
  EXPECT_EQ(options.device_maps.at("worker1").at(1).device().str(), "cuda:2");
  EXPECT_HAS(message_of<DistError>([&] { options.set_device_map("worker1", {{0, 3}}); }), "takes cuda:0 to cuda:1 and to cuda:3");
  EXPECT_HAS(message_of<DistError>([&] { options.set_device_map("worker1", {{5, 2}}); }), "it must be one to one");
  EXPECT_HAS(message_of<DistError>([&] { options.set_device_map("worker1", {{"gpu", 2}}); }), "'gpu' is no device");
  check_options(options);
  options.set_devices({0});
  EXPECT_HAS(message_of<DistError>([&] { check_options(options); }), "names cuda:1, which is not among `devices`");
  EXPECT_HAS(message_of<DistError>([&] { options.set_devices({"cpu"}); }), "cpu is none");
  options.num_worker_threads = 0;
  EXPECT_HAS(message_of<DistError>([&] { check_options(options); }), "num_worker_threads is 0");
}

}  // namespace
}  // namespace muster::rpc
