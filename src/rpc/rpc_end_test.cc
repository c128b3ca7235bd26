// SPDX-License-Identifier: BSD-3-Clause
// How RPC ends: in good order, at once, and where workers die or break the protocol; backends and
// options.
#include "muster/rpc_calls.h"

#include <barrier>
#include <semaphore>
#include <thread>

#include "core/base/threads/thread_start.h"
#include "rpc/agent/agent.h"
#include "rpc/backends.h"
#include "rpc/testing/functions.h"
#include "rpc/testing/gated_fabric.h"
#include "rpc/testing/workers.h"
#include "testing/process_usage.h"

namespace muster::rpc {
namespace {

using namespace testing;
using muster::testing::kMemoryTells;
using muster::testing::memory_in_use;

// ---- N4: the end

// spec: N4 `shutdown(graceful=True)` drains user references and waits for all
TEST(Rpc, GracefulShutdownWaitsForWhatIsUnderWay) {
  std::atomic<int> ended{0};
  Workers workers(3);
  workers.run([&](int rank) {
    if (rank != 2) return;
    // The others are in their shutdown already, and still serve; nobody waits for these answers but
    // shutdown.
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

// An exception out of a wait, or out of the sending of a call, leaves no call behind that would
// write into the frame that is gone.
TEST(Rpc, ACallThatThrowsIsTakenBack) {
  struct Refuses final : testing::Gate {
    Refuses() : Gate(testing::GatePoint{"", 0, 0}) {}
    void pass(const std::string& label, int /*from*/, int /*to*/) override {
      if (armed && label == "call refused") throw std::bad_alloc();
    }
    std::atomic<bool> armed{true};
  } gate;
  Workers workers(2);
  workers.wrap = [&](std::unique_ptr<transport::Fabric> inner) {
    return std::make_unique<testing::GatedFabric>(std::move(inner), gate);
  };
  workers.run([&](int rank) {
    if (rank != 0) return;
    const auto agent = current_agent("test");
    const auto call = [](const char* name) {
      Agent::OutgoingCall made;
      made.to = 1;
      made.name = name;
      return made;
    };
    EXPECT_THROW(agent->call_sync(call("refused")), std::bad_alloc);
    bool completed = false;
    EXPECT_THROW(agent->call(call("refused"), [&](const Answer&) { completed = true; }),
                 std::bad_alloc);
    EXPECT_FALSE(completed);
    EXPECT_EQ(agent->counts().in_flight, 0u);

    EXPECT_THROW(agent->call_sync(call("nothing"),
                                  []() -> bool { throw std::out_of_range("not wanted any more"); }),
                 std::out_of_range);
    EXPECT_EQ(agent->counts().in_flight, 0u);
    EXPECT_EQ(rpc_sync<std::string>(1, "echo_text", std::string("goes on")), "goes on");
    gate.armed = false;
  });  // a graceful end: all that was sent has been handled
}

// spec: N4 It names the worker it waits for
TEST(Rpc, ShutdownNamesTheWorkerItWaitsFor) {
  std::barrier ready(3), done(3);
  Workers workers(3);
  workers.run([&](int rank) {
    ready.arrive_and_wait();
    if (rank != 1) {
      const auto text =
          message_of<DistError>([&] { shutdown(true, std::chrono::seconds(rank == 0 ? 4 : 2)); });
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
      EXPECT_HAS(message_of<DistError>([&] { future.wait(); }),
                 "the call of 'later' on worker 'worker1' (rank 1) has failed");
      EXPECT_HAS(message_of<DistError>([&] { rpc_sync(1, "nothing"); }),
                 "worker 'worker1' (rank 1) has failed");
      const auto own = rpc_async<int>(0, "later", gate);
      shutdown(false);
      EXPECT_HAS(message_of<DistError>([&] { own.wait(); }), "RPC of worker 'worker0' has ended");
      EXPECT_HAS(message_of<DistError>([&] { rpc_sync(1, "nothing"); }),
                 "before init_rpc (or after shutdown)");
    } else {
      called.acquire();
      shutdown(false);
    }
  });
}

// The end takes back what has not been sent, before it frees the memory that it was sent from.
TEST(Rpc, AnUngracefulEndTakesBackWhatIsBeingSent) {
  Workers workers(2);
  std::binary_semaphore ended(0);
  workers.run(
      [&](int rank) {
        if (rank == 1) return ended.acquire();
        const std::shared_ptr<void> end(nullptr, [&](void*) { ended.release(); });
        std::vector<Future<at::Tensor>> calls;
        for (int i = 0; i < 8; ++i)
          calls.push_back(rpc_async<at::Tensor>(1, "echo", torch::ones({1 << 20})));
        shutdown(false);
        for (const auto& call : calls) {
          EXPECT_TRUE(call.wait_until(steady_clock().now() + kSoon));
          if (!call.error()) {
            EXPECT_EQ(call.wait().numel(), 1 << 20);
          }
        }
      },
      false);
}

// spec: H7 N6 no thread to be had: an error of the call, or of init_rpc
TEST(Rpc, NoThreadIsAnErrorOfTheCall) {
  Workers workers(2);
  std::barrier all(2);
  workers.run([&](int rank) {
    all.arrive_and_wait();  // both have their own threads
    if (rank == 0) {
      const NoNewThreads none;
      EXPECT_HAS(message_of<DistError>([] { rpc_sync<std::string>(1, "whose", ""); }),
                 "no thread can be started there");
      all.arrive_and_wait();
    } else {
      all.arrive_and_wait();
    }
    EXPECT_EQ(rpc_sync<std::string>(1 - rank, "whose", ""), Workers::name(1 - rank));
  });
  Workers one(1);
  const auto agent = Agent::create(one.fabric(0), {"alone"}, {});
  const NoNewThreads none;
  EXPECT_HAS(message_of<DistError>([&] { agent->start(); }),
             "cannot start the thread that listens");
}

// A start that fails leaves no worker behind: the next init_rpc is the first.
TEST(Rpc, AFailedStartLeavesNothingOpen) {
  const RpcScope::Binding binding(std::make_shared<RpcScope>());
  Workers failing(1);
  {
    auto fabric = failing.fabric(0);
    const NoNewThreads none;
    EXPECT_HAS(message_of<DistError>([&] { init_rpc_on(std::move(fabric), failing.names()); }),
               "cannot start the thread that listens");
  }
  EXPECT_FALSE(is_initialized());
  Workers working(1);
  init_rpc_on(working.fabric(0), working.names());
  EXPECT_EQ(rpc_sync<std::string>(0, "echo_text", "here"), "here");
  shutdown(true, kSoon);
}

// A reply that cannot be sent is an error of the call, and holds up no shutdown.
TEST(Rpc, AReplyThatCannotBeSentIsAnErrorOfTheCall) {
  struct RefusesOnce final : testing::Gate {
    RefusesOnce() : Gate(testing::GatePoint{"", 0, 0}) {}
    void pass(const std::string& label, int /*from*/, int /*to*/) override {
      if (label == "reply" && armed.exchange(false)) throw std::bad_alloc();
    }
    std::atomic<bool> armed{true};
  } gate;
  Workers workers(2);
  workers.wrap = [&](std::unique_ptr<transport::Fabric> inner) {
    return std::make_unique<testing::GatedFabric>(std::move(inner), gate);
  };
  workers.run([&](int rank) {
    if (rank != 0) return;
    EXPECT_THROW(rpc_sync<std::string>(1, "echo_text", std::string("once")), std::bad_alloc);
    EXPECT_EQ(rpc_sync<std::string>(1, "echo_text", std::string("goes on")), "goes on");
  });
}

// ---- N6: failures

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
    EXPECT_HAS(message_of<DistBackendError>([&] { doomed.wait(); }),
               "the call of 'wait_at' on worker 'worker3' (rank 3) has failed");
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
      EXPECT_HAS(message_of<DistError>([&] { rpc_sync(2, "nothing"); }),
                 "a message that is not one of muster's calls");
      EXPECT_EQ(rpc_sync<std::string>(1, "whose", ""), "worker1");
    }
    all.arrive_and_wait();
    shutdown(false);
  });
}

// spec: N3 lying lengths: what a message promises costs no memory before it comes, and harms no
// other call
TEST(Rpc, WhatAPeerPromisesTakesNoMemory) {
  Workers workers(2);
  std::barrier both(2);
  workers.run([&](int rank) {
    if (rank == 0) {
      const auto before = memory_in_use().own;
      both.arrive_and_wait();
      both.arrive_and_wait();
      const std::size_t limit = before + (std::size_t{64} << 20);
      EXPECT_TRUE(!kMemoryTells || memory_in_use().own < limit);
      const std::string long_text(3 << 20, 'x');
      EXPECT_EQ(rpc_sync<std::string>(1, "echo_text", long_text), long_text);
      EXPECT_TRUE(current_agent("test")->lost(1).ok());
    } else {
      both.arrive_and_wait();
      const auto agent = current_agent("test");
      const auto promise = [&](MessageHead head, std::size_t payload) {
        head.first_tag = 1 << 20;
        place_parts(head, payload);
        const std::string nothing;  // parts that are sent separately are not read
        std::string bytes =
            encode(head, ConstBytes(as_bytes(nothing).data(), payload), std::vector<ConstBytes>(1));
        if (bytes.size() > kHeadBytes)
          bytes = encode_announcement(head.kind, bytes.size(), head.first_tag);
        const auto sent = agent->fabric().agreements().send(0, 0, as_bytes(bytes), {});
        EXPECT_TRUE(agent->wait([&] { return sent->done(); }, steady_clock().now() + kSoon));
      };
      for (int i = 0; i < 3; ++i) promise({}, kMaxPayloadBytes);
      MessageHead with_tensor;
      with_tensor.tensors.resize(1);
      with_tensor.tensors[0].dtype = static_cast<std::uint8_t>(at::kFloat);
      with_tensor.tensors[0].sizes = {1 << 28};
      with_tensor.tensors[0].strides = {1};
      with_tensor.tensors[0].bytes = std::uint64_t{4} << 28;
      promise(with_tensor, 10);
      {
        const std::string name(60 << 20, 'n');
        MessageHead too_long;
        too_long.name = name;
        promise(too_long, 10);
      }
      // Twice: what was sent before the first has then been looked at.
      EXPECT_EQ(rpc_sync<std::string>(0, "whose", ""), "worker0");
      EXPECT_EQ(rpc_sync<std::string>(0, "whose", ""), "worker0");
      both.arrive_and_wait();
      rpc_sync(0, "nothing");
    }
    both.arrive_and_wait();
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
          given_up.push_back(rpc_async<int>(
              1, "wait_at", CallOptions{.timeout = std::chrono::milliseconds(50)}, gate));
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
  EXPECT_HAS(message_of<DistError>([] { register_backend("Ours", {}); }),
             "an RPC backend 'OURS' already");
  const RpcScope::Binding binding(std::make_shared<RpcScope>());
  init_rpc("solo", {.backend = ours, .rank = 0, .world_size = 1});
  EXPECT_EQ(asked, "solo");
  EXPECT_EQ(rpc_sync<std::string>("solo", "echo_text", "here"), "here");
  shutdown(true, kSoon);
}

// spec: N5 `RpcBackendOptions(num_worker_threads=16, rpc_timeout=60, init_method, device_maps,
// devices)`, `set_device_map` (cumulative), `set_devices`; N13 map keys take int, text or
// device; devices default from device_maps
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
  EXPECT_HAS(message_of<DistError>([&] {
               options.set_device_map("worker1", {{0, 3}});
             }),
             "takes cuda:0 to cuda:1 and to cuda:3");
  EXPECT_HAS(message_of<DistError>([&] {
               options.set_device_map("worker1", {{5, 2}});
             }),
             "it must be one to one");
  EXPECT_HAS(message_of<DistError>([&] {
               options.set_device_map("worker1", {{"gpu", 2}});
             }),
             "'gpu' is no device");
  check_options(options);
  options.set_devices({0});
  EXPECT_HAS(message_of<DistError>([&] { check_options(options); }),
             "names cuda:1, which is not among `devices`");
  EXPECT_HAS(message_of<DistError>([&] { options.set_devices({"cpu"}); }), "cpu is none");
  options.num_worker_threads = 0;
  EXPECT_HAS(message_of<DistError>([&] { check_options(options); }), "num_worker_threads is 0");
}

}  // namespace
}  // namespace muster::rpc
