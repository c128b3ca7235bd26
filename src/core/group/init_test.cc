// SPDX-License-Identifier: BSD-3-Clause
#include "muster/init.h"

#include <unistd.h>

#include <cstdlib>

#include "core/group/errors.h"
#include "core/group/testing/ranks.h"
#include "testing/limits.h"

namespace muster {
namespace {

using testing::message_of;
using testing::on_ranks;
using testing::values;

// spec: A8 values, either case, unknown names, UNDEFINED; A13 Backend.GLOO == "gloo" and so for all
TEST(BackendName, IsLikeAnEnumeration) {
  EXPECT_EQ(Backend::GLOO, "gloo");
  EXPECT_EQ(Backend::NATIVE, "native");
  EXPECT_EQ(Backend::TCP, "tcp");
  EXPECT_EQ(Backend::NCCL, "nccl");
  EXPECT_EQ(Backend::MPI, "mpi");
  EXPECT_EQ(Backend::UCC, "ucc");
  EXPECT_EQ(Backend("GLOO"), Backend::GLOO);
  EXPECT_EQ(Backend("Native"), "native");
  const auto unknown = message_of<DistError>([] { Backend("smoke"); });
  EXPECT_HAS(unknown, "smoke");
  for (const auto* known : {"native", "gloo", "tcp", "nccl", "mpi", "ucc"})
    EXPECT_HAS(unknown, known);
  EXPECT_EQ(Backend::UNDEFINED, "undefined");
  EXPECT_THROW(Backend("undefined"), DistError);
  EXPECT_THROW(Backend("UNDEFINED"), DistError);
}

// spec: A7 backend strings by device, none given
TEST(BackendName, EachDeviceHasItsBackend) {
  const auto config = BackendConfig::parse("cpu:GLOO,cuda:nccl");
  EXPECT_EQ(config.for_device(at::kCPU), Backend::GLOO);
  EXPECT_EQ(config.for_device(at::kCUDA), Backend::NCCL);
  EXPECT_EQ(config.for_device(at::kMeta), std::nullopt);
  EXPECT_EQ(config.text(), "cpu:gloo,cuda:nccl");
  EXPECT_EQ(BackendConfig::parse("tcp").for_device(at::kCPU), Backend::TCP);
  EXPECT_EQ(BackendConfig::parse({}).text(),
            is_nccl_available() ? "cpu:native,cuda:nccl" : "cpu:native");
  EXPECT_EQ(BackendConfig::parse({}).for_device(at::kCPU), Backend::NATIVE);
  for (const auto* broken : {"cpu:native,", "cpu:native,nccl", "toaster:native",
                             "cpu:native,cpu:gloo", "cpu:smoke", ":native", "cpu:"})
    EXPECT_THROW(BackendConfig::parse(broken), DistError) << broken;
}

// spec: A7 the tensor's device picks the backend of each call
TEST(BackendName, TensorsOfOtherDevicesAreRefused) {
  on_ranks(
      1,
      [](int) {
        const auto elsewhere = torch::zeros({2}, torch::kMeta);
        EXPECT_HAS(message_of<DistBackendError>([&] { all_reduce(elsewhere); }), "meta");
      },
      "cpu:native");
}

// spec: A9 availability, is_torchelastic_launched
TEST(Availability, SaysWhatThisBuildHas) {
  EXPECT_TRUE(is_available());
  EXPECT_TRUE(is_gloo_available());
  EXPECT_FALSE(is_initialized());
  for (const auto& engine :
       std::vector<std::pair<std::string, bool>>{{"mpi", is_mpi_available()},
                                                 {"nccl", is_nccl_available()},
                                                 {"ucc", is_ucc_available()}}) {
    if (engine.second) continue;
    // On a host with an MPI the error says what its plugin lacks.
    const auto refused =
        message_of<DistBackendError>([&] { init_process_group({.backend = engine.first}); });
    EXPECT_HAS(refused, engine.first);
    if (engine.first != "mpi") EXPECT_HAS(refused, "native");
  }
  ::unsetenv("TORCHELASTIC_RUN_ID");
  EXPECT_FALSE(is_torchelastic_launched());
  ::setenv("TORCHELASTIC_RUN_ID", "job", 1);
  EXPECT_TRUE(is_torchelastic_launched());
  ::unsetenv("TORCHELASTIC_RUN_ID");
}

// spec: B12 every call before init says so
TEST(Init, EveryCallBeforeItSaysSo) {
  const auto tensor = torch::zeros({1});
  const std::vector<std::pair<std::string, std::function<void()>>> calls{
      {"get_rank", [] { get_rank(); }},
      {"get_world_size", [] { get_world_size(); }},
      {"get_backend", [] { get_backend(); }},
      {"new_group", [] { new_group(); }},
      {"destroy_process_group", [] { destroy_process_group(); }},
      {"get_group_rank", [] { get_group_rank(nullptr, 0); }},
      {"get_global_rank", [] { get_global_rank(nullptr, 0); }},
      {"get_process_group_ranks", [] { get_process_group_ranks(nullptr); }},
      {"broadcast", [&] { broadcast(tensor, {.src = 0}); }},
      {"all_reduce", [&] { all_reduce(tensor); }},
      {"reduce", [&] { reduce(tensor, {.dst = 0}); }},
      {"all_gather", [&] { all_gather({tensor}, tensor); }},
      {"all_gather_into_tensor", [&] { all_gather_into_tensor(tensor, tensor); }},
      {"gather", [&] { gather(tensor); }},
      {"scatter", [&] { scatter(tensor); }},
      {"reduce_scatter", [&] { reduce_scatter(tensor, {tensor}); }},
      {"reduce_scatter_tensor", [&] { reduce_scatter_tensor(tensor, tensor); }},
      {"all_to_all_single", [&] { all_to_all_single(tensor, tensor); }},
      {"all_to_all", [&] { all_to_all({tensor}, {tensor}); }},
      {"barrier", [] { barrier(); }},
      {"all_reduce_coalesced", [&] { all_reduce_coalesced({tensor}); }},
      {"all_gather_coalesced", [&] { all_gather_coalesced({{tensor}}, {tensor}); }},
      {"reduce_scatter_coalesced", [&] { reduce_scatter_coalesced({tensor}, {{tensor}}); }},
      {"send", [&] { send(tensor, {.dst = 0}); }},
      {"recv", [&] { recv(tensor); }},
      {"isend", [&] { isend(tensor, {.dst = 0}); }},
      {"irecv", [&] { irecv(tensor); }},
      {"batch_isend_irecv", [&] { batch_isend_irecv({P2POp(isend, tensor, 0)}); }},
  };
  for (const auto& [name, call] : calls) {
    const auto said = message_of<DistError>(call);
    EXPECT_HAS(said, name);
    EXPECT_HAS(said, "init_process_group");
  }
  EXPECT_FALSE(is_initialized());
}

// spec: B2 store and init_method exclude each other, store needs rank and world_size; B13 a rank
// outside 0..world_size-1
TEST(Init, WrongOptionsAreNamed) {
  const auto store = std::make_shared<HashStore>();
  EXPECT_HAS(
      message_of<DistError>([&] {
        init_process_group({.init_method = "env://", .world_size = 1, .rank = 0, .store = store});
      }),
      "exclude");
  EXPECT_HAS(message_of<DistError>([&] { init_process_group({.store = store}); }),
             "needs rank and world_size");
  EXPECT_HAS(message_of<DistError>([&] { init_process_group({.world_size = 2, .store = store}); }),
             "rank -1");
  EXPECT_HAS(message_of<DistError>([&] { init_process_group({.rank = 0, .store = store}); }),
             "world_size -1");
  EXPECT_HAS(message_of<DistError>(
                 [&] { init_process_group({.world_size = 2, .rank = 2, .store = store}); }),
             "rank 2");
  EXPECT_HAS(message_of<DistError>([&] { init_process_group({.world_size = 2, .rank = -3}); }),
             "rank -3");
  EXPECT_HAS(message_of<DistError>(
                 [&] { init_process_group({.world_size = 0, .rank = 0, .store = store}); }),
             "world_size 0");
  EXPECT_HAS(message_of<DistError>([&] { init_process_group({.backend = "smoke"}); }), "smoke");
}

// spec: B13 defaults
TEST(Init, Defaults) {
  const InitProcessGroupOptions options;
  EXPECT_EQ(options.backend, std::nullopt);
  EXPECT_EQ(options.init_method, std::nullopt);
  EXPECT_EQ(options.timeout, std::nullopt);
  EXPECT_EQ(options.world_size, -1);
  EXPECT_EQ(options.rank, -1);
  EXPECT_EQ(options.store, nullptr);
  EXPECT_EQ(options.group_name, "");
  EXPECT_EQ(options.pg_options, nullptr);
}

// spec: B1 at the timeout names the ranks that did not join
TEST(Init, TimeoutNamesTheMissing) {
  const auto store = std::make_shared<HashStore>();
  const auto began = steady_clock().now();
  try {
    init_process_group(
        {.timeout = std::chrono::milliseconds(200), .world_size = 3, .rank = 1, .store = store});
    ADD_FAILURE() << "joined alone";
  } catch (const DistStoreError& error) {
    EXPECT_EQ(error.code(), Code::timed_out);
    EXPECT_EQ(error.ranks(), (std::vector<int>{0, 2})) << error.what();
  }
  EXPECT_LT(steady_clock().now() - began, std::chrono::seconds(20));
  EXPECT_FALSE(is_initialized());
}

// spec: B12 a second init without destroy; B11 get_rank, get_world_size, get_backend; A1 gloo is
// another name for native
TEST(Init, DescribesTheDefaultGroup) {
  for (const auto& [asked, answered] :
       std::vector<std::pair<std::optional<std::string>, std::string>>{
           {std::nullopt, BackendConfig::parse({}).text()},
           {"gloo", "gloo"},
           {"NATIVE", "native"},
           {"tcp", "tcp"},
           {"cpu:Native", "cpu:native"}}) {
    on_ranks(
        2,
        [&, answered = answered](int rank) {
          EXPECT_TRUE(is_initialized());
          EXPECT_EQ(get_rank(), rank);
          EXPECT_EQ(get_world_size(), 2);
          EXPECT_EQ(get_backend(), answered);
          EXPECT_HAS(message_of<DistError>([] { init_process_group(); }), "twice");
          auto tensor = torch::ones({3});
          all_reduce(tensor);
          EXPECT_SAME(tensor, torch::full({3}, 2.0));
        },
        asked);
  }
}

// spec: B10 init after destroy, any number of times, on the same store
TEST(Init, WorksAgainAfterDestroy) {
  const auto store = std::make_shared<HashStore>();
  const auto ranks = [&](int rank) {
    for (int round = 0; round < 5; ++round) {
      init_process_group(
          {.timeout = muster::testing::kMustHappen, .world_size = 2, .rank = rank, .store = store});
      auto tensor = torch::full({2}, round + rank);
      all_reduce(tensor);
      EXPECT_EQ(tensor[0].item<int>(), 2 * round + 1);
      destroy_process_group();
      EXPECT_FALSE(is_initialized());
      EXPECT_HAS(message_of<DistError>([] { barrier(); }), "destroy_process_group");
    }
  };
  spawn(ranks, {.nprocs = 2, .mode = SpawnMode::threads});
}

// spec: B10 init after destroy over tcp:// on one port
TEST(Init, WorksAgainOnTheSameAddress) {
  std::uint16_t port = 0;
  { port = TCPStore("127.0.0.1", 0, {.is_master = true, .wait_for_workers = false}).port(); }
  const auto ranks = [&](int rank) {
    for (int round = 0; round < 5; ++round) {
      init_process_group({.init_method = "tcp://127.0.0.1:" + std::to_string(port),
                          .timeout = muster::testing::kMustHappen,
                          .world_size = 2,
                          .rank = rank});
      barrier();
      destroy_process_group();
    }
  };
  spawn(ranks, {.nprocs = 2, .mode = SpawnMode::threads});
}

// spec: B8 group_name keeps jobs that share one store apart
TEST(Init, GroupNameKeepsJobsApart) {
  const auto store = std::make_shared<HashStore>();
  const auto ranks = [&](int thread) {
    const int job = thread / 2, rank = thread % 2;
    init_process_group({.timeout = muster::testing::kMustHappen,
                        .world_size = 2,
                        .rank = rank,
                        .store = store,
                        .group_name = "job" + std::to_string(job)});
    auto tensor = torch::full({1}, job + 1);
    all_reduce(tensor);
    EXPECT_EQ(tensor.item<int>(), 2 * (job + 1));
    destroy_process_group();
  };
  spawn(ranks, {.nprocs = 4, .mode = SpawnMode::threads});
}

// Ranks with different backends get an error that names them.
TEST(Init, DifferentBackendsAreNamed) {
  const auto store = std::make_shared<HashStore>();
  const auto ranks = [&](int rank) {
    const auto said = message_of<DistError>([&] {
      init_process_group({.backend = rank == 0 ? "native" : "tcp",
                          .timeout = muster::testing::kMustHappen,
                          .world_size = 2,
                          .rank = rank,
                          .store = store});
    });
    EXPECT_HAS(said, "'native'");
    EXPECT_HAS(said, "'tcp'");
    EXPECT_HAS(said, "rank 1");
  };
  spawn(ranks, {.nprocs = 2, .mode = SpawnMode::threads});
}

// spec: B4.timeout timeout: the default is 30 minutes; B13 timeout None; B14 timeout 30 minutes
TEST(Init, TimeoutIsThirtyMinutes) {
  const auto ranks = [store = std::make_shared<HashStore>()](int rank) {
    init_process_group({.world_size = 2, .rank = rank, .store = store});
    EXPECT_EQ(default_group()->timeout(), std::chrono::minutes(30));
    EXPECT_EQ(new_group()->timeout(), std::chrono::minutes(30));
    EXPECT_EQ(new_group({.timeout = std::chrono::minutes(2)})->timeout(), std::chrono::minutes(2));
    destroy_process_group();
  };
  spawn(ranks, {.nprocs = 2, .mode = SpawnMode::threads});
}

// spec: D1.members ranks, non-members, default backend; D4 get_group_rank, get_global_rank,
// get_process_group_ranks; D8 sorted; B11 -1 and members only
TEST(NewGroup, TranslatesRanks) {
  on_ranks(
      4,
      [](int rank) {
        const auto group = new_group({.ranks = std::vector<int>{3, 1}});
        const bool member = rank == 1 || rank == 3;
        EXPECT_EQ(get_rank(group), member ? rank / 2 : -1);
        EXPECT_EQ(get_world_size(group), member ? 2 : -1);
        EXPECT_EQ(get_process_group_ranks(group), (std::vector<int>{1, 3}));
        EXPECT_EQ(get_group_rank(group, 3), 1);
        EXPECT_EQ(get_global_rank(group, 0), 1);
        EXPECT_HAS(message_of<DistError>([&] { get_group_rank(group, 2); }), "rank 2");
        EXPECT_HAS(message_of<DistError>([&] { get_global_rank(group, 2); }), "rank 2");
        EXPECT_EQ(get_group_rank(default_group(), 2), 2);
        EXPECT_EQ(get_global_rank(nullptr, 2), 2);
        if (member) {
          EXPECT_EQ(get_backend(group), "gloo");
          auto tensor = torch::full({1}, rank);
          all_reduce(tensor, {.group = group});
          EXPECT_EQ(tensor.item<int>(), 4);
          broadcast(tensor, {.src = 3, .group = group});
          broadcast(tensor, {.group = group, .group_src = 0});
          destroy_process_group(group);
          EXPECT_THROW(destroy_process_group(group), DistError);
        } else {
          EXPECT_HAS(message_of<DistError>([&] { get_backend(group); }), "not a member");
        }
        barrier();
        EXPECT_TRUE(is_initialized());
      },
      "gloo");
}

// spec: D1.mismatch a mismatch is an error naming both calls
TEST(NewGroup, DifferentCallsAreNamed) {
  on_ranks(3, [](int rank) {
    const auto said = message_of<DistError>([&] {
      new_group({.ranks = rank == 1 ? std::vector<int>{0, 1} : std::vector<int>{0, 2}});
    });
    EXPECT_HAS(said, "[0, 2]");
    EXPECT_HAS(said, "[0, 1]");
    EXPECT_HAS(message_of<DistError>([] {
                 new_group({.ranks = std::vector<int>{0, 3}});
               }),
               "[0, 3]");
    EXPECT_HAS(message_of<DistError>([] {
                 new_group({.ranks = std::vector<int>{0, 0}});
               }),
               "twice");
    EXPECT_HAS(message_of<DistError>([] { new_group({.ranks = std::vector<int>{}}); }), "empty");
    barrier();
  });
}

// spec: D2 only members call
TEST(NewGroup, LocalSynchronization) {
  on_ranks(3, [](int rank) {
    if (rank == 1) return barrier(), void();
    for (int round = 0; round < 2; ++round) {
      const auto group =
          new_group({.ranks = std::vector<int>{0, 2}, .use_local_synchronization = true});
      auto tensor = torch::full({1}, rank);
      all_reduce(tensor, {.group = group});
      EXPECT_EQ(tensor.item<int>(), 2);
    }
    barrier();
  });
}

// spec: D3 groups used at the same time from two threads in opposite order
TEST(NewGroup, TwoThreadsInOppositeOrder) {
  on_ranks(3, [](int) {
    const auto a = new_group({.ranks = std::vector<int>{0, 1}});
    const auto b = new_group({.ranks = std::vector<int>{0, 1, 2}});
    const auto use = [](const Group& group, int times) {
      auto tensor = torch::ones({1000});
      for (int i = 0; i < times; ++i) all_reduce(tensor, {.op = ReduceOp::MAX, .group = group});
    };
    std::thread other([&] { use(a, 100); });
    use(b, 100);
    other.join();
  });
}

// spec: H7 classes, std::runtime_error
TEST(Errors, HaveTheirClasses) {
  EXPECT_TRUE((std::is_base_of_v<std::runtime_error, DistError>));
  EXPECT_TRUE((std::is_base_of_v<DistError, DistBackendError>));
  EXPECT_TRUE((std::is_base_of_v<DistError, DistNetworkError>));
  EXPECT_TRUE((std::is_base_of_v<DistError, DistStoreError>));
  EXPECT_THROW(group::raise(Status(Code::network, "")), DistNetworkError);
  EXPECT_THROW(group::raise(Status(Code::refused, "")), DistNetworkError);
  EXPECT_THROW(group::raise(Status(Code::store, "")), DistStoreError);
  EXPECT_THROW(group::raise_from_store(Status(Code::timed_out, "")), DistStoreError);
  EXPECT_THROW(group::raise(Status(Code::timed_out, "")), DistBackendError);
  try {
    group::raise(Status(Code::peer_failed, "rank 3 died", {3}));
  } catch (const DistBackendError& error) {
    EXPECT_STREQ(error.what(), "rank 3 died");
    EXPECT_EQ(error.code(), Code::peer_failed);
    EXPECT_EQ(error.ranks(), std::vector<int>{3});
  }
}

// spec: C1 HashStore, FileStore, TCPStore, PrefixStore in C++; C7 get names key and time; C10 wait
// names the missing keys; C16 num_keys
TEST(Stores, ThrowWhatTheyReport) {
  const auto file = std::string(::testing::TempDir()) + "stores_" + std::to_string(::getpid());
  const auto hash = std::make_shared<HashStore>();
  const std::vector<std::pair<std::shared_ptr<Store>, int>> stores{
      {hash, 1},
      {std::make_shared<FileStore>(file), 1},
      {std::make_shared<TCPStore>("127.0.0.1", 0, TCPStoreOptions{.is_master = true}), 2},
      {std::make_shared<PrefixStore>("p", std::make_shared<HashStore>()), 1}};
  for (const auto& [store, keys] : stores) {
    store->set("first", std::string_view("a\0b", 3));
    EXPECT_EQ(store->get("first"), std::string("a\0b", 3));
    EXPECT_EQ(store->num_keys(), keys) << store->engine()->kind();
    EXPECT_EQ(store->add("count", 1), 1);
    EXPECT_EQ(store->add("count", 6), 7);
    EXPECT_EQ(store->get("count"), "7");
    EXPECT_EQ(store->compare_set("first", "nothing", "x"), std::string("a\0b", 3));
    EXPECT_EQ(store->compare_set("new", "", "x"), "x");
    EXPECT_TRUE(store->check({"first", "new"}));
    store->set_timeout(std::chrono::milliseconds(50));
    EXPECT_EQ(store->timeout(), Duration(std::chrono::milliseconds(50)));
    EXPECT_HAS(message_of<DistStoreError>([&, store = store] { store->get("absent"); }), "absent");
    EXPECT_HAS(
        message_of<QueueEmptyError>([&, store = store] { store->queue_pop("nobody's", false); }),
        "nobody's");
    EXPECT_HAS(message_of<DistStoreError>([&, store = store] {
                 store->wait({"first", "missing"}, std::chrono::milliseconds(30));
               }),
               "missing");
    EXPECT_THROW(store->add("first", 1), DistStoreError);
    if (std::string(store->engine()->kind()) == "file") {
      EXPECT_THROW(store->delete_key("first"), DistError);
    } else {
      EXPECT_TRUE(store->delete_key("first"));
      EXPECT_FALSE(store->delete_key("first"));
    }
  }
  const PrefixStore prefix("p", hash);
  EXPECT_EQ(prefix.underlying_store(), hash);
  EXPECT_THROW(PrefixStore("p", nullptr), DistError);
  ::unlink(file.c_str());
}

// Golden values of torch.utils.data.DistributedSampler, torch 2.15.
TEST(DistributedSampler, DividesByTorchsRules) {
  using Indices = std::vector<std::int64_t>;
  const auto sample = [](std::int64_t size, int replicas, int rank, std::uint64_t seed,
                         std::uint64_t epoch, bool drop, bool shuffle = true) {
    DistributedSampler sampler(size, {.num_replicas = replicas,
                                      .rank = rank,
                                      .shuffle = shuffle,
                                      .seed = seed,
                                      .drop_last = drop});
    sampler.set_epoch(epoch);
    EXPECT_EQ(static_cast<std::int64_t>(sampler.indices().size()), sampler.size());
    return sampler.indices();
  };
  EXPECT_EQ(sample(11, 3, 0, 0, 0, false), (Indices{10, 3, 2, 7}));
  EXPECT_EQ(sample(11, 3, 2, 0, 1, false), (Indices{2, 6, 1, 0}));
  EXPECT_EQ(sample(11, 3, 1, 5, 2, true), (Indices{0, 5, 10}));
  EXPECT_EQ(sample(2, 5, 4, 0, 0, false), (Indices{0}));
  EXPECT_EQ(sample(11, 3, 1, 0, 0, false, false), (Indices{1, 4, 7, 10}));
  EXPECT_EQ(sample(11, 3, 1, 0, 0, true, false), (Indices{1, 4, 7}));
  EXPECT_EQ(sample(11, 3, 2, 0, 0, false, false), (Indices{2, 5, 8, 0}));
  EXPECT_THROW(DistributedSampler(10, {.num_replicas = 2, .rank = 2}), DistError);
  EXPECT_THROW(DistributedSampler(0, {.num_replicas = 2, .rank = 1}), DistError);
}

// Every sample belongs to some rank, for any sizes; all ranks have equally many.
TEST(DistributedSampler, CoversTheDataSet) {
  for (std::int64_t size = 1; size <= 20; ++size) {
    for (int replicas = 1; replicas <= 8; ++replicas) {
      std::vector<int> seen(static_cast<std::size_t>(size));
      for (int rank = 0; rank < replicas; ++rank)
        for (const auto index :
             DistributedSampler(size, {.num_replicas = replicas, .rank = rank}).indices())
          ++seen.at(static_cast<std::size_t>(index));
      for (const auto count : seen) EXPECT_GE(count, 1);
      std::vector<int> kept(static_cast<std::size_t>(size));
      std::int64_t total = 0;
      for (int rank = 0; rank < replicas; ++rank)
        for (const auto index :
             DistributedSampler(size, {.num_replicas = replicas, .rank = rank, .drop_last = true})
                 .indices())
          ++kept.at(static_cast<std::size_t>(index)), ++total;
      for (const auto count : kept) EXPECT_LE(count, 1);
      EXPECT_EQ(total, size / replicas * replicas);
    }
  }
}

// Rank and size default to the group's.
TEST(DistributedSampler, AsksTheDefaultGroup) {
  on_ranks(2, [](int rank) {
    EXPECT_EQ(DistributedSampler(4, {.shuffle = false}).indices(),
              (std::vector<std::int64_t>{rank, rank + 2}));
  });
}

}  // namespace
}  // namespace muster
