// SPDX-License-Identifier: BSD-3-Clause
// References to values on other workers, with workers as threads.
#include "muster/rref.h"

#include <torch/types.h>

#include <atomic>
#include <condition_variable>
#include <latch>
#include <mutex>
#include <stdexcept>

#include "rpc/agent/agent.h"
#include "rpc/rref/rref_context.h"
#include "rpc/testing/workers.h"

namespace muster::rpc {
namespace {

using testing::on_workers;
using testing::soon;
using testing::Workers;

// An object that cannot travel.
struct Counter {
  std::shared_ptr<std::atomic<int>> value;
};

std::atomic<int> tracked_alive{0};
struct Tracked {
  Tracked() { ++tracked_alive; }
  Tracked(const Tracked&) { ++tracked_alive; }
  Tracked& operator=(const Tracked&) = default;
  ~Tracked() { --tracked_alive; }
};

// The references that a worker holds between calls: by rank, since workers are threads.
std::mutex held_mutex;
std::map<int, RRef<Tracked>> held;

void hold(const RRef<Tracked>& rref) {
  const std::lock_guard lock(held_mutex);
  held[get_worker_info().id()] = rref;
}
RRef<Tracked> taken(int rank) {
  const std::lock_guard lock(held_mutex);
  return std::exchange(held[rank], {});
}

void register_all() {
  static const bool once = [] {
    register_function("rref_test::ones", [](std::int64_t n) { return at::ones({n}); });
    register_function("rref_test::text", [](const std::string& text) { return text + "!"; });
    register_function("rref_test::fail",
                      [](int) -> int { throw std::out_of_range("no such key"); });
    register_function("rref_test::counter",
                      [](int start) { return Counter{std::make_shared<std::atomic<int>>(start)}; });
    register_function("rref_test::add", [](const RRef<Counter>& self, int by) {
      return *self.local_value().value += by;
    });
    register_function("rref_test::tracked", [] { return Tracked(); });
    register_function("rref_test::hold", hold);
    register_function("rref_test::give", [](int rank) { return taken(rank); });
    register_function("rref_test::is_owner",
                      [](const RRef<Tracked>& rref) { return rref.is_owner(); });
    register_function("rref_test::fetch",
                      [](const RRef<std::string>& rref) { return rref.to_here(); });
    register_function("rref_test::list", [](int n) {
      std::vector<RRef<int>> list;
      for (int i = 0; i < n; ++i) list.emplace_back(10 * i);
      return list;
    });
    return true;
  }();
  (void)once;
}

std::size_t owned() { return RRefContext::of(*current_agent("test"))->owned(); }

// spec: N7 RRef: is_owner, owner, owner_name, local_value, to_here on the owner the value itself,
// confirmed_by_owner always true there; N11 the owner's confirmed_by_owner is always true
TEST(RRef, OfThisWorker) {
  register_all();
  on_workers(1, [](int) {
    const RRef<at::Tensor> mine(at::ones({3}));
    EXPECT_TRUE(mine.is_owner());
    EXPECT_EQ(mine.owner().id(), 0);
    EXPECT_EQ(mine.owner_name(), "worker0");
    EXPECT_TRUE(mine.confirmed_by_owner());
    EXPECT_EQ(mine.to_here().unsafeGetTensorImpl(), mine.local_value().unsafeGetTensorImpl());
    EXPECT_EQ(owned(), 1U);
    const auto made = remote<std::string>("worker0", "rref_test::text", "here");
    EXPECT_TRUE(made.is_owner());
    EXPECT_EQ(made.to_here(), "here!");
    EXPECT_SAYS(RRef<int>().to_here(), "refers to nothing");
  });
}

// spec: N2 remote, N7 RRef of another worker: owner, to_here, confirmed_by_owner, local_value
// throws off the owner
TEST(RRef, OfAnotherWorker) {
  register_all();
  on_workers(2, [](int rank) {
    if (rank != 0) return;
    const auto rref = remote<at::Tensor>("worker1", "rref_test::ones", 4);
    EXPECT_FALSE(rref.is_owner());
    EXPECT_EQ(rref.owner_name(), "worker1");
    EXPECT_TRUE(at::equal(rref.to_here(), at::ones({4})));
    EXPECT_TRUE(soon([&] { return rref.confirmed_by_owner(); }));
    EXPECT_SAYS(rref.local_value(), "local_value is for the owner of an RRef, worker 'worker1'");
    const auto sum = remote<at::Tensor>("worker1", "aten::add", at::ones({2}), at::full({2}, 2.0));
    EXPECT_TRUE(at::equal(sum.to_here(), at::full({2}, 3.0)));
    const auto failed = remote<int>("worker1", "rref_test::fail", 1);
    EXPECT_SAYS(failed.to_here(), "no such key");
    EXPECT_SAYS(failed.to_here(), "worker1");
    EXPECT_THROW(failed.to_here(), std::out_of_range);
    EXPECT_SAYS(remote<int>("worker1", "rref_test::nothing").to_here(),
                "no function 'rref_test::nothing'");
    EXPECT_SAYS(remote<int>("nobody", "rref_test::fail", 1), "there is no worker 'nobody'");
    // Another type than is kept there.
    EXPECT_ANY_THROW(remote<int>("worker1", "rref_test::text", "x").to_here());
  });
}

// spec: N7 rpc_sync / rpc_async / remote proxies, on an object that cannot travel
TEST(RRef, Proxies) {
  register_all();
  on_workers(2, [](int rank) {
    if (rank != 0) return;
    const auto counter = remote<Counter>("worker1", "rref_test::counter", 5);
    EXPECT_EQ(counter.rpc_sync().call<int>("rref_test::add", 2), 7);
    EXPECT_EQ(counter.rpc_async().call<int>("rref_test::add", 3).wait(), 10);
    const auto kept = counter.remote().call<int>("rref_test::add", 1);
    EXPECT_EQ(kept.owner_name(), "worker1");
    EXPECT_EQ(kept.to_here(), 11);
  });
}

// spec: N7 passing it on in calls keeps it alive; global reference counting: the value goes with
// the last reference
TEST(RRef, PassingOnKeepsAlive) {
  register_all();
  on_workers(3, [](int rank) {
    if (rank != 0) return;
    ASSERT_EQ(tracked_alive.load(), 0);
    {
      const auto rref = remote<Tracked>("worker1", "rref_test::tracked");
      rpc_sync("worker2", "rref_test::hold", rref);
      EXPECT_TRUE(rpc_sync<bool>("worker1", "rref_test::is_owner", rref));
      EXPECT_FALSE(rpc_sync<bool>("worker2", "rref_test::is_owner", rref));
    }
    EXPECT_GE(tracked_alive.load(), 1);  // w2 holds it
    {
      const auto back = rpc_sync<RRef<Tracked>>("worker2", "rref_test::give", 2);
      EXPECT_EQ(back.owner_name(), "worker1");
      EXPECT_TRUE(rpc_sync<bool>("worker1", "rref_test::is_owner", back));
      EXPECT_GE(tracked_alive.load(), 1);
    }
    EXPECT_TRUE(soon([] { return tracked_alive.load() == 0; }));
  });
}

// spec: N7 many references in one answer, as results and inside of containers
TEST(RRef, InContainers) {
  register_all();
  on_workers(2, [](int rank) {
    if (rank == 0) {
      const auto list = rpc_sync<std::vector<RRef<int>>>("worker1", "rref_test::list", 20);
      ASSERT_EQ(list.size(), 20U);
      for (int i = 0; i < 20; ++i) EXPECT_EQ(list[static_cast<std::size_t>(i)].to_here(), 10 * i);
    }
  });
}

// spec: N7 many threads that make, pass on and drop references at once leave nothing behind
TEST(RRef, ManyAtOnce) {
  register_all();
  on_workers(3, [](int rank) {
    const auto scope = RpcScope::current();
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        const RpcScope::Binding binding(scope);
        for (int round = 0; round < 30; ++round) {
          const int owner = (rank + 1 + (round + t) % 2) % 3;
          const auto rref = remote<Tracked>(owner, "rref_test::tracked");
          const bool there = rpc_sync<bool>((rank + round) % 3, "rref_test::is_owner", rref);
          EXPECT_EQ(there, (rank + round) % 3 == owner);
          // Asked for, by another worker, perhaps before the call that makes it has come to its
          // owner.
          const auto text = remote<std::string>(owner, "rref_test::text", std::to_string(round));
          EXPECT_EQ(rpc_sync<std::string>((owner + 1 + t % 2) % 3, "rref_test::fetch", text),
                    std::to_string(round) + "!");
        }
      });
    }
    for (auto& thread : threads) thread.join();
  });
  EXPECT_EQ(tracked_alive.load(), 0);
}

// spec: N4 graceful shutdown drains user references: those that programs still hold are let go
TEST(RRef, ShutdownDrains) {
  register_all();
  on_workers(3, [](int rank) {
    if (rank == 0) {
      const auto rref = remote<Tracked>("worker1", "rref_test::tracked");
      rpc_sync("worker2", "rref_test::hold", rref);
    }
  });
  EXPECT_EQ(tracked_alive.load(), 0);
  const auto late = taken(2);  // held all the time, of no use now
  EXPECT_ANY_THROW(late.rpc_sync().call("rref_test::hold"));
}

// spec: N7 an owner that leaves fails the references to its values by name, N6 others go on
TEST(RRef, AnOwnerThatLeaves) {
  register_all();
  Workers(3).run(
      [](int rank) {
        static std::atomic<int> made{0};
        if (rank == 0) made = 0;
        if (rank == 0) {
          const auto lost = remote<std::string>("worker1", "rref_test::text", "lost");
          const auto good = remote<std::string>("worker2", "rref_test::text", "good");
          EXPECT_EQ(lost.to_here(), "lost!");
          made = 1;
          made.notify_all();
          const auto agent = current_agent("test");
          EXPECT_TRUE(soon([&] { return !agent->lost(1).ok(); }));
          EXPECT_SAYS(lost.to_here(), "worker1");
          EXPECT_ANY_THROW(rpc_sync("worker2", "rref_test::hold", lost));
          EXPECT_EQ(good.to_here(), "good!");
          made = 2;
          made.notify_all();
        } else {
          made.wait(0);
          if (rank == 2) made.wait(1);
        }
      },
      false);
}

// spec: N7 to_here of a value that is never made: an ungraceful end lets go of who waits, and of
// the worker's agent
TEST(RRef, TheEndLetsGoOfWhoWaitsForAValueThatNeverComes) {
  register_all();
  std::weak_ptr<Agent> owner;
  RpcBackendOptions options;
  options.num_worker_threads = 1;  // in the order in which calls come
  std::latch asked(2);
  Workers(2, options)
      .run(
          [&](int rank) {
            const auto agent = current_agent("test");
            if (rank == 0) owner = agent;
            if (rank == 1) {
              for (const MessageKind kind : {kRRefFetch, kRRefBackward}) {
                Agent::OutgoingCall call;
                call.to = 0;
                call.kind = kind;
                call.fill = [](Value& value, ValueDelivery& delivery) {
                  ValueOutput archive(value, delivery);
                  encode_rref(archive, RRefId{.creator = 1, .owner = 0, .number = 1'000'000});
                  archive(std::int64_t{-1});
                  archive(false);
                };
                agent->call(std::move(call),
                            [](const Answer& answer) { EXPECT_TRUE(answer.error); });
              }
              EXPECT_EQ(rpc_sync<std::string>("worker0", "rref_test::text", "after them"),
                        "after them!");
            }
            asked.arrive_and_wait();
            shutdown(false);
          },
          false);
  EXPECT_TRUE(owner.expired());
}

}  // namespace
}  // namespace muster::rpc
