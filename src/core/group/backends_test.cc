// SPDX-License-Identifier: BSD-3-Clause
// Backends that a program registers.
#include <atomic>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include "core/group/calls.h"
#include "core/group/creation/backend_registry.h"
#include "core/group/group_core.h"
#include "core/group/job.h"
#include "core/group/testing/ranks.h"
#include "core/group/world.h"
#include "core/trace/reader.h"
#include "muster/collectives.h"
#include "testing/limits.h"

namespace muster {
namespace {

using testing::message_of;
using testing::on_ranks;

/// Supports only barriers, and counts them.
class BarrierBackend final : public ProcessGroupBackend {
 public:
  explicit BarrierBackend(std::atomic<int>& barriers) : barriers_(barriers) {}
  const BackendCapabilities& capabilities() const override {
    static constexpr BackendCapabilities kHas{.name = "counting"};
    return kHas;
  }
  bool supports(Op op, at::ScalarType, c10::DeviceType, std::string* why) const override {
    *why = "it only counts barriers";
    return op == Op::barrier;
  }
  WorkRef submit(BackendCall& call) override {
    if (!call.is_refused()) ++barriers_;
    return nullptr;
  }
  std::shared_ptr<void> scope(BackendScope) override { return nullptr; }
  BackendState state() const override { return {}; }
  Status close(TimePoint) override { return {}; }
  void abort(const std::string&) override {}

 private:
  std::atomic<int>& barriers_;
};

// spec: A11.function register_backend at run time: func gets (store, rank, world_size, timeout),
// devices omitted are cpu and cuda; A6 an operation that a backend lacks names both; A1 any
// registered one
TEST(RegisteredBackend, IsUsedByItsName) {
  static std::atomic<int> barriers{0};
  std::atomic<int> made{0};
  Backend::register_backend("Counting", [&](const std::shared_ptr<Store>& store, int rank,
                                            int world_size, Duration timeout) {
    EXPECT_EQ(world_size, 2);
    EXPECT_EQ(timeout, Duration(muster::testing::kMustHappen));  // what on_ranks gives
    store->set("made" + std::to_string(rank), "yes");
    EXPECT_EQ(store->get("made" + std::to_string(1 - rank)), "yes");
    ++made;
    return std::make_shared<BarrierBackend>(barriers);
  });
  EXPECT_EQ(Backend("COUNTING"), "counting");
  EXPECT_TRUE(Backend("counting").is_available());
  const auto known = Backend::known();
  EXPECT_NE(std::find(known.begin(), known.end(), "counting"), known.end());
  const auto config = BackendConfig::parse("counting");
  EXPECT_EQ(config.for_device(c10::DeviceType::CPU), Backend("counting"));
  EXPECT_EQ(config.for_device(c10::DeviceType::CUDA), Backend("counting"));
  EXPECT_HAS(message_of<DistError>([] {
               Backend::register_backend("counting",
                                         [](auto&&, int, int, Duration) { return nullptr; });
             }),
             "there is a backend 'counting' already");
  on_ranks(
      2,
      [](int) {
        EXPECT_EQ(get_backend(), "counting");
        barrier();
        const auto said = message_of<DistBackendError>([] { all_reduce(torch::ones({1})); });
        EXPECT_HAS(said, "'counting'");
        EXPECT_HAS(said, "all_reduce");
      },
      "counting");
  EXPECT_EQ(made, 2);
  EXPECT_EQ(barriers, 2);
}

/// As those of a program that hangs in its own abort.
class StandingBackend final : public ProcessGroupBackend {
 public:
  explicit StandingBackend(std::shared_future<void> over) : over_(std::move(over)) {}
  const BackendCapabilities& capabilities() const override {
    static constexpr BackendCapabilities kHas{.name = "standing"};
    return kHas;
  }
  bool supports(Op, at::ScalarType, c10::DeviceType, std::string*) const override { return true; }
  WorkRef submit(BackendCall&) override { return nullptr; }
  std::shared_ptr<void> scope(BackendScope) override { return nullptr; }
  BackendState state() const override { return {}; }
  Status close(TimePoint) override { return {}; }
  void abort(const std::string&) override { over_.wait(); }

 private:
  std::shared_future<void> over_;
};

// spec: U2 a registered backend whose abort never returns holds up no end of other groups' calls
TEST(RegisteredBackend, MayStandInItsAbort) {
  static std::promise<void> over;
  static const std::shared_future<void> is_over = over.get_future().share();
  Backend::register_backend("standing", [](const std::shared_ptr<Store>&, int, int, Duration) {
    return std::make_shared<StandingBackend>(is_over);
  });
  on_ranks(2, [](int rank) {
    const std::vector<Group> both{new_group({.backend = "standing"}), new_group()};
    barrier();
    std::thread aborts([&both] { abort_groups(both, "for the test"); });
    const auto deadline = std::chrono::steady_clock::now() + muster::testing::kMustHappen;
    while (both.back()->failure().ok() && std::chrono::steady_clock::now() < deadline)
      std::this_thread::yield();
    EXPECT_FALSE(both.back()->failure().ok());
    barrier();
    if (rank == 0) over.set_value();
    aborts.join();
  });
}

/// Keeps every call and carries it out when its Work is waited for; a receive writes nines.
class LaterBackend final : public ProcessGroupBackend {
 public:
  const BackendCapabilities& capabilities() const override {
    static constexpr BackendCapabilities kHas{.name = "later"};
    return kHas;
  }
  bool supports(Op, at::ScalarType, c10::DeviceType, std::string*) const override { return true; }
  WorkRef submit(BackendCall& given) override {
    auto& call = static_cast<Call&>(given);
    if (call.is_refused()) return nullptr;
    const bool waits = !call.is_async() && call.op() != Op::recv;
    auto work = std::make_shared<LaterWork>(std::move(call));
    if (waits) work->wait({});
    return waits ? nullptr : work;
  }
  std::shared_ptr<void> scope(BackendScope) override { return nullptr; }
  BackendState state() const override { return {}; }
  Status close(TimePoint) override { return {}; }
  void abort(const std::string&) override {}

 private:
  class LaterWork final : public Work {
   public:
    explicit LaterWork(Call call) : call_(std::move(call)) {}
    bool is_completed() override { return done_; }
    bool is_success() override { return done_; }
    bool wait(std::optional<Duration>) override {
      for (const auto& slice : call_.outputs())
        for (const auto& tensor : slice)
          if (tensor.is_cpu()) tensor.fill_(9);
      return done_ = true;
    }
    c10::intrusive_ptr<c10::ivalue::Future> get_future() override { return nullptr; }
    int source_rank() override { return 0; }
    std::exception_ptr exception() override { return nullptr; }
    std::vector<at::Tensor> result() override { return {}; }

   private:
    Call call_;
    std::atomic<bool> done_{false};
  };
};

void register_later() {
  static std::once_flag once;
  std::call_once(once, [] {
    Backend::register_backend("later", [](const std::shared_ptr<Store>&, int, int, Duration) {
      return std::make_shared<LaterBackend>();
    });
  });
}

trace::RankTrace recorded_here() {
  auto recorded = trace::read_trace(World::current().job("test")->recorder->path());
  EXPECT_TRUE(recorded.ok()) << recorded.status().message();
  return recorded.ok() ? *std::move(recorded) : trace::RankTrace();
}

// An asynchronous call is recorded as in flight until its Work has ended, even if the backend keeps
// the call.
TEST(RegisteredBackend, CallsAreRecordedUntilTheirWorksEnd) {
  register_later();
  on_ranks(
      1,
      [](int) {
        auto tensor = torch::zeros({2});
        const auto work = all_reduce(tensor, {.async_op = true});
        EXPECT_TRUE(recorded_here().latest()->under_way());
        EXPECT_FALSE(work->is_completed());
        EXPECT_TRUE(recorded_here().latest()->under_way());
        work->wait();
        EXPECT_EQ(recorded_here().latest()->state, trace::State::completed);
        all_reduce(tensor);
        EXPECT_EQ(recorded_here().latest()->state, trace::State::completed);
        EXPECT_EQ(recorded_here().latest()->sequence, 2u);
      },
      "later");
}

// A backend may keep the call; a prepared call can still be submitted again.
TEST(RegisteredBackend, MayTakeTheCallAway) {
  register_later();
  on_ranks(
      1,
      [](int) {
        const auto group = default_group();
        auto tensor = torch::zeros({2});
        auto prepared = core_of(group).prepare(calls::all_reduce(*group, tensor, {}));
        for (int round = 0; round < 3; ++round) {
          tensor.zero_();
          prepared.submit();
          EXPECT_SAME(tensor, torch::full({2}, 9.0f));
        }
      },
      "later");
}

// A synchronous receive has its data on return, even if the backend returns a Work.
TEST(RegisteredBackend, ReceivesHaveTheirDataOnReturn) {
  register_later();
  on_ranks(
      2,
      [](int rank) {
        if (rank == 0) return;
        for (const auto& from : {std::optional<int>(0), std::optional<int>()}) {
          auto tensor = torch::zeros({2});
          EXPECT_EQ(recv(tensor, {.src = from}), 0);
          EXPECT_SAME(tensor, torch::full({2}, 9.0f));
        }
      },
      "later");
}

// Each backend of a group numbers its own calls, and the trace separates them.
TEST(RegisteredBackend, BackendsOfOneGroupAreNumberedApart) {
  register_later();
  on_ranks(
      2,
      [](int) {
        auto here = torch::zeros({2}), there = torch::zeros({2}, at::kMeta);
        for (std::uint64_t number = 1; number < 4; ++number) {
          for (const auto& tensor : {here, there}) {
            all_reduce(tensor);
            const auto recorded = recorded_here();
            const auto& group = recorded.groups[recorded.latest()->group];
            EXPECT_EQ(recorded.latest()->sequence, number);
            EXPECT_EQ(group.name, tensor.is_cpu() ? "default" : "default on meta");
            EXPECT_EQ(group.started, number);
          }
        }
      },
      "cpu:native,meta:later");
}

// A refused call is announced by the backend that would have carried it out.
TEST(RegisteredBackend, RefusalsGoToTheBackendOfTheTensors) {
  register_later();
  for (const auto& wrong :
       {std::function<void()>([] {
          all_gather({torch::zeros({2}), torch::zeros({2}, at::kInt)}, torch::zeros({2}));
        }),
        std::function<void()>([] { broadcast(torch::eye(2).to_sparse(), {.src = 0}); })}) {
    on_ranks(
        2,
        [&](int rank) {
          default_group()->set_timeout(std::chrono::hours(1));
          if (rank == 1) {
            EXPECT_NE(message_of<DistError>(wrong), "");
          }
          EXPECT_HAS(message_of<DistBackendError>([] { all_reduce(torch::zeros({2})); }), "rank 1");
        },
        "meta:later,cpu:native");
  }
}

// spec: H1 monitored_barrier on every backend: on one that carries no messages too, by the job's
// store
TEST(RegisteredBackend, MonitoredBarrierNeedsNothingOfIt) {
  static std::atomic<int> barriers{0};
  Backend::register_backend("silent", [](const std::shared_ptr<Store>&, int, int, Duration) {
    return std::make_shared<BarrierBackend>(barriers);
  });
  using std::chrono::milliseconds;
  testing::RankLatch late(1);
  on_ranks(
      3,
      [&](int rank) {
        for (int i = 0; i < 3; ++i) monitored_barrier();
        monitored_barrier({.wait_all_ranks = true});
        // Rank 1 skips the next barrier.
        if (rank == 1) {
          late.wait();
          EXPECT_HAS(message_of<DistBackendError>([] { monitored_barrier(); }),
                     "rank 0 says: Rank 1 failed to pass monitoredBarrier");
        } else {
          const auto said = message_of<DistBackendError>(
              [] { monitored_barrier({.timeout = milliseconds(500)}); });
          EXPECT_HAS(said,
                     "Rank 1 failed to pass monitoredBarrier in 500 ms\n Original exception:\n");
          if (rank == 0) late.count_down();
        }
        monitored_barrier();
      },
      "silent");
  EXPECT_EQ(barriers, 0);
}

// spec: B1 a rank whose init ends by any exception tells the others why, at once
TEST(RegisteredBackend, WhatItThrowsInInitIsToldToAll) {
  struct Thrown {
    std::function<void()> by_rank_one;
    std::string told;
  };
  static const Thrown* now = nullptr;
  static std::atomic<int> barriers{0};
  Backend::register_backend("mortal", [](const std::shared_ptr<Store>&, int rank, int, Duration) {
    if (rank == 1) now->by_rank_one();
    return std::make_shared<BarrierBackend>(barriers);
  });
  for (const Thrown& thrown : {Thrown{[] { throw std::bad_alloc(); }, "gets no more memory"},
                               Thrown{[] { throw std::runtime_error("no luck"); }, "no luck"},
                               Thrown{[] { throw 7; }, "an exception of an unknown kind"},
                               Thrown{[] { throw DistError("no such luck"); }, "no such luck"}}) {
    SCOPED_TRACE(thrown.told);
    now = &thrown;
    const auto store = std::make_shared<HashStore>();
    spawn(
        [&](int rank) {
          const InitProcessGroupOptions options{.backend = "meta:mortal,cpu:native",
                                                .timeout = muster::testing::kMustHappen,
                                                .world_size = 3,
                                                .rank = rank,
                                                .store = store};
          if (rank == 1) {
            EXPECT_ANY_THROW(init_process_group(options));
            return;
          }
          try {
            init_process_group(options);
            ADD_FAILURE() << "it went on";
          } catch (const DistError& error) {
            EXPECT_EQ(error.ranks(), std::vector<int>{1}) << error.what();
            EXPECT_HAS(std::string(error.what()), thrown.told);
          }
        },
        {.nprocs = 3, .mode = SpawnMode::threads});
  }
}

struct CountingOptions : ProcessGroupOptions {
  int value = 7;
};

// spec: A11.extended extended_api gets the two options structs, devices by name, for one device of
// several; new_group too
TEST(RegisteredBackend, ExtendedFormGetsBothOptions) {
  static std::atomic<int> barriers{0};
  std::atomic<int> value{0};
  Backend::register_backend(
      "extended",
      [&](const DistributedBackendOptions& options,
          const std::shared_ptr<ProcessGroupOptions>& pg_options) {
        EXPECT_EQ(options.group_size, 2);
        EXPECT_EQ(options.global_ranks_in_group, (std::vector<int>{0, 2}));
        EXPECT_EQ(options.global_ranks_in_group[static_cast<std::size_t>(options.group_rank)] % 2,
                  0);
        EXPECT_FALSE(options.group_id.empty());
        EXPECT_NE(options.store, nullptr);
        value += std::dynamic_pointer_cast<CountingOptions>(pg_options)->value;
        return std::make_shared<BarrierBackend>(barriers);
      },
      true, {"cuda"});
  EXPECT_FALSE(BackendConfig::parse("extended").for_device(c10::DeviceType::CPU));
  EXPECT_HAS(message_of<DistError>([] {
               Backend::register_backend(
                   "wrong",
                   [](const std::shared_ptr<Store>&, int, int, Duration) { return nullptr; }, true);
             }),
             "extended_api");
  EXPECT_HAS(message_of<DistError>([] {
               Backend::register_backend(
                   "wrong",
                   [](const std::shared_ptr<Store>&, int, int, Duration) { return nullptr; }, false,
                   {"toaster"});
             }),
             "'toaster'");
  on_ranks(3, [](int rank) {
    const auto group = new_group({.ranks = std::vector<int>{0, 2},
                                  .backend = "cpu:native,cuda:extended",
                                  .pg_options = std::make_shared<CountingOptions>()});
    if (rank == 1) return;
    auto tensor = torch::ones({1});
    all_reduce(tensor, {.group = group});  // the tensor's device selects the native backend
    EXPECT_EQ(tensor.item<float>(), 2);
  });
  EXPECT_EQ(value, 14);
  on_ranks(
      3,
      [](int) {
        const auto parts =
            split_group(nullptr, {{0, 2}, {1}},
                        {.timeout = muster::testing::kMustHappen, .backend = "cpu:native"});
        EXPECT_EQ(parts->backend(), "cpu:native");
        for (const auto& call :
             {std::function<void()>([] {
                split_group(nullptr, {{0, 1, 2}},
                            {.pg_options = std::make_shared<ProcessGroupNCCL::Options>()});
              }),
              std::function<void()>(
                  [] { shrink_group({}, {.pg_options = std::make_shared<CountingOptions>()}); })})
          EXPECT_HAS(message_of<DistBackendError>(call),
                     "which backend 'cpu:native' cannot use; leave them out");
      },
      "cpu:native");
}

// spec: D7 split_group and shrink_group give pg_options to the backends that they make
TEST(RegisteredBackend, DividedAndShrunkGroupsGetTheirOptions) {
  static std::atomic<int> barriers{0};
  std::atomic<int> value{0};
  Backend::register_backend(
      "divided",
      [&](const DistributedBackendOptions&,
          const std::shared_ptr<ProcessGroupOptions>& pg_options) {
        if (const auto ours = std::dynamic_pointer_cast<CountingOptions>(pg_options))
          value += ours->value;
        return std::make_shared<BarrierBackend>(barriers);
      },
      true, {"cuda"});
  const auto options = std::make_shared<CountingOptions>();
  on_ranks(
      3,
      [&](int rank) {
        const auto part = split_group(nullptr, {{0, 2}}, {.pg_options = options});
        EXPECT_EQ(part->is_member(), rank != 1);
        barrier();
        EXPECT_EQ(value.load(), 14);
        barrier();
        if (rank == 1) {
          EXPECT_HAS(message_of<DistBackendError>([] { barrier(); }), "shrunk");
          return;
        }
        shrink_group({1}, {.pg_options = options});
      },
      "cpu:native,cuda:divided");
  EXPECT_EQ(value, 28);
}

// spec: A11 from a plugin library too: a library that is not a plugin is named
TEST(Plugin, WrongLibrariesAreNamed) {
  EXPECT_HAS(message_of<DistError>([] { load_backend_plugin("/no/such/library.so"); }),
             "/no/such/library.so cannot be loaded");
  EXPECT_HAS(message_of<DistError>([] { load_backend_plugin("libm.so.6"); }),
             "is no backend plugin");
}

}  // namespace
}  // namespace muster
