// SPDX-License-Identifier: BSD-3-Clause
// Options of init_process_group and new_group: one deadline for all stages, defaults, pg_options,
// backend per device.

#include <cstdlib>
#include <future>
#include <map>
#include <mutex>

#include "core/group/creation/backend_registry.h"
#include "core/group/group_core.h"
#include "core/group/job.h"
#include "core/group/testing/ranks.h"
#include "core/group/world.h"
#include "core/store/factory.h"
#include "core/store/request.h"
#include "muster/init.h"
#include "testing/reserved_port.h"

namespace muster {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;
using testing::message_of;
using testing::on_ranks;

/// Sets environment variables for a scope; an empty value removes one.
class Environment {
 public:
  Environment(std::initializer_list<std::pair<std::string, std::string>> values) {
    for (const auto& [name, value] : values) {
      const char* old = std::getenv(name.c_str());
      before_[name] = old == nullptr ? "" : old;
      put(name, value);
    }
  }
  ~Environment() {
    for (const auto& [name, value] : before_) put(name, value);
  }

 private:
  static void put(const std::string& name, const std::string& value) {
    value.empty() ? ::unsetenv(name.c_str()) : ::setenv(name.c_str(), value.c_str(), 1);
  }
  std::map<std::string, std::string> before_;
};

/// Records the time limits of all requests. A request without a limit would escape the deadline.
class RecordingStore : public store::RequestStore<store::Store> {
 public:
  explicit RecordingStore(std::shared_ptr<store::Store> inner)
      : RequestStore(minutes(30)), inner_(std::move(inner)) {}

  store::Reply call(const store::Request& request) override {
    EXPECT_EQ(request.op, store::StoreOp::all_gather)
        << store::name_of(request.op) << " has no limit";
    {
      const std::lock_guard lock(mutex_);
      limits_.push_back(request.timeout);
    }
    if (!called_.exchange(true)) first_call_.set_value();
    auto all = inner_->all_gather(request.keys[0], request.index, request.members,
                                  request.values[0], request.timeout);
    store::Reply reply;
    reply.status = all.status();
    for (std::size_t i = 0; all.ok() && i < all->size(); ++i)
      reply.values.push_back(std::make_shared<const std::string>((*all)[i]));
    return reply;
  }
  Result<std::shared_ptr<store::Store>> clone() override {
    return Status(Code::unsupported, "no clone");
  }
  const char* kind() const override { return "recording"; }

  std::vector<Duration> limits() const {
    const std::lock_guard lock(mutex_);
    return limits_;
  }
  std::future<void> first_call() { return first_call_.get_future(); }

 private:
  std::shared_ptr<store::Store> inner_;
  mutable std::mutex mutex_;
  std::vector<Duration> limits_;
  std::atomic<bool> called_{false};
  std::promise<void> first_call_;
};

// spec: B1 blocks up to one timeout: with a late rank every stage gets the time the earlier ones
// left
TEST(InitDeadline, NoStageStartsTheClockAnew) {
  const auto inner = store::make_hash_store();
  std::vector<std::shared_ptr<RecordingStore>> stores{std::make_shared<RecordingStore>(inner),
                                                      std::make_shared<RecordingStore>(inner)};
  auto early = stores[0]->first_call();
  const auto ranks = [&](int rank) {
    if (rank == 1) early.wait();
    init_process_group({.timeout = seconds(120),
                        .world_size = 2,
                        .rank = rank,
                        .store = std::make_shared<Store>(stores[rank])});
    EXPECT_EQ(default_group()->timeout(), seconds(120));
    destroy_process_group();
  };
  spawn(ranks, {.nprocs = 2, .mode = SpawnMode::threads});
  for (const auto& store : stores) {
    const auto limits = store->limits();
    ASSERT_GE(limits.size(), 3U);  // joining, and the fabric's rounds
    EXPECT_LT(limits.front(), seconds(120));
    for (std::size_t i = 1; i < limits.size(); ++i)
      EXPECT_LT(limits[i], limits[i - 1]) << "request " << i;
    EXPECT_EQ(store->timeout(), minutes(30));  // the user's store
  }
}

// spec: B1 the last stage, the default group's making, has the same deadline
TEST(InitDeadline, GroupsAreMadeWithinIt) {
  std::promise<void> seen;
  const auto over = seen.get_future().share();
  on_ranks(2, [&](int rank) {
    if (rank == 1) return over.wait();
    const auto job = World::current().job("test");
    const auto passed = steady_clock().now();
    const auto said = message_of<DistBackendError>([&] {
      group::make_group(job, "late", {0, 1}, BackendConfig::parse("native"), minutes(30),
                        {.deadline = passed});
    });
    EXPECT_HAS(said, "rank 1");
    seen.set_value();
  });
}

// spec: D1 timeout of new_group holds for its making too, from the comparison of calls on
TEST(InitDeadline, NewGroupHasOne) {
  std::promise<void> seen;
  const auto over = seen.get_future().share();
  const auto store = std::make_shared<HashStore>();
  const auto ranks = [&](int rank) {
    init_process_group({.timeout = minutes(30), .world_size = 2, .rank = rank, .store = store});
    if (rank == 1) return over.wait();
    EXPECT_HAS(message_of<DistBackendError>([] { new_group({.timeout = milliseconds(200)}); }),
               "rank 1");
    seen.set_value();
  };
  spawn(ranks, {.nprocs = 2, .mode = SpawnMode::threads});
}

// spec: B2 neither store nor init_method means env://; B9 rank and world size as arguments
TEST(InitDefaults, NeitherStoreNorMethodMeansTheEnvironment) {
  const Environment environment({{"MASTER_ADDR", "127.0.0.1"},
                                 {"MASTER_PORT", std::to_string(testing::reserve_port())},
                                 {"RANK", ""},
                                 {"WORLD_SIZE", "2"}});
  const auto ranks = [](int rank) {
    init_process_group({.timeout = seconds(60), .rank = rank});
    EXPECT_EQ(get_world_size(), 2);
    auto tensor = torch::ones({1});
    all_reduce(tensor);
    EXPECT_EQ(tensor.item<int>(), 2);
    destroy_process_group();
  };
  spawn(ranks, {.nprocs = 2, .mode = SpawnMode::threads});

  const Environment alone{
      {"MASTER_PORT", std::to_string(testing::reserve_port())}, {"RANK", "0"}, {"WORLD_SIZE", "1"}};
  init_process_group();
  EXPECT_EQ(get_rank(), 0);
  destroy_process_group();
  const Environment broken{{"MASTER_PORT", ""}};
  const auto said = message_of<DistError>([] { init_process_group(); });
  EXPECT_HAS(said, "env://");
  EXPECT_HAS(said, "MASTER_PORT");
}

// spec: B4.timeout timeout 30 minutes, 10 for nccl; B14 30 minutes, nccl 10
TEST(InitDefaults, TimeoutOfEachBackend) {
  for (const auto& name : Backend::known())
    EXPECT_EQ(Backend(name).default_timeout(), name == "nccl" ? minutes(10) : minutes(30)) << name;
  EXPECT_EQ(BackendConfig::parse({}).default_timeout(), minutes(30));
  EXPECT_EQ(BackendConfig::parse("nccl").default_timeout(), minutes(10));
  EXPECT_EQ(BackendConfig::parse("cuda:nccl").default_timeout(), minutes(10));
  EXPECT_EQ(BackendConfig::parse("cpu:native,cuda:nccl").default_timeout(), minutes(30));
}

// spec: B13 pg_options: ProcessGroupNCCL.Options(is_high_priority_stream) in init and new_group,
// refused by name by other backends
TEST(InitDefaults, ProcessGroupOptions) {
  EXPECT_FALSE(ProcessGroupNCCL::Options().is_high_priority_stream);
  const auto options = std::make_shared<ProcessGroupNCCL::Options>(true);
  EXPECT_TRUE(options->is_high_priority_stream);
  for (const char* can : {"nccl", "cpu:native,cuda:nccl"})
    EXPECT_NO_THROW(check_pg_options(options.get(), BackendConfig::parse(can), "test"));
  EXPECT_NO_THROW(check_pg_options(nullptr, BackendConfig::parse("native"), "test"));
  const auto store = std::make_shared<HashStore>();
  const auto refused = message_of<DistBackendError>([&] {
    init_process_group(
        {.backend = "native", .world_size = 1, .rank = 0, .store = store, .pg_options = options});
  });
  for (const char* part : {"init_process_group", "ProcessGroupNCCL.Options", "'native'", "'nccl'"})
    EXPECT_HAS(refused, part);
  EXPECT_FALSE(is_initialized());
  on_ranks(
      1,
      [&](int) {
        const auto said = message_of<DistBackendError>([&] { new_group({.pg_options = options}); });
        for (const char* part : {"new_group", "ProcessGroupNCCL.Options", "'gloo'"})
          EXPECT_HAS(said, part);
      },
      "gloo");
}

// spec: D1 ranks=None: a list in braces, a vector, none
TEST(InitDefaults, RanksMayBeLeftOut) {
  on_ranks(3, [](int rank) {
    EXPECT_EQ(new_group({.ranks = {0, 2}})->ranks(), (std::vector<int>{0, 2}));
    EXPECT_EQ(get_world_size(new_group({.ranks = {rank}, .use_local_synchronization = true})), 1);
    EXPECT_EQ(new_group({.ranks = std::nullopt})->ranks(), (std::vector<int>{0, 1, 2}));
    EXPECT_EQ(new_group({.ranks = {}})->ranks(), (std::vector<int>{0, 1, 2}));
    EXPECT_HAS(message_of<DistError>([] { new_group({.ranks = std::vector<int>{}}); }), "empty");
    barrier();
  });
}

// spec: C2 defaults: world_size None, is_master False, timeout 300 s, wait_for_workers True,
// multi_tenant False, master_listen_fd None
TEST(TCPStoreDefaults, AreTheDocuments) {
  const TCPStoreOptions options;
  EXPECT_EQ(options.world_size, std::nullopt);
  EXPECT_FALSE(options.is_master);
  EXPECT_EQ(options.timeout, seconds(300));
  EXPECT_TRUE(options.wait_for_workers);
  EXPECT_FALSE(options.multi_tenant);
  EXPECT_EQ(options.master_listen_fd, std::nullopt);
  // world_size None: waits for no client
  const TCPStore master("127.0.0.1", 0, {.is_master = true});
  EXPECT_EQ(master.timeout(), seconds(300));
  EXPECT_EQ(TCPStore("127.0.0.1", master.port()).timeout(), seconds(300));  // is_master False
  // wait_for_workers True
  EXPECT_HAS(message_of<DistStoreError>([] {
               TCPStore("127.0.0.1", 0,
                        {.world_size = 2, .is_master = true, .timeout = seconds(2)});
             }),
             "1 of 2 users");
  // multi_tenant False
  EXPECT_THROW(TCPStore("127.0.0.1", master.port(), {.is_master = true}), DistNetworkError);
}

// spec: C3 master_listen_fd without is_master is an error
TEST(TCPStoreDefaults, ListenDescriptorNeedsTheMaster) {
  EXPECT_HAS(message_of<DistError>(
                 [] { TCPStore("127.0.0.1", 1, {.master_listen_fd = ::dup(STDERR_FILENO)}); }),
             "is_master");
  EXPECT_HAS(message_of<DistError>(
                 [] { TCPStore("127.0.0.1", 1, {.is_master = true, .master_listen_fd = -5}); }),
             "-5");
}

/// Records its calls.
class FakeBackend : public ProcessGroupBackend {
 public:
  explicit FakeBackend(std::string name) : name_(std::move(name)), has_{.name = name_} {}
  const BackendCapabilities& capabilities() const override { return has_; }
  bool supports(Op op, at::ScalarType, c10::DeviceType, std::string* why) const override {
    if (op == Op::reduce) *why = "it is a fake";
    return op != Op::reduce;
  }
  WorkRef submit(BackendCall& call) override {
    if (!call.is_refused()) calls.emplace_back(call.name());
    return nullptr;
  }
  std::shared_ptr<void> scope(BackendScope) override { return nullptr; }
  BackendState state() const override { return {}; }
  Status close(TimePoint) override { return {}; }
  void abort(const std::string&) override {}

  std::vector<std::string> calls;

 private:
  const std::string name_;
  const BackendCapabilities has_;
};

// spec: A7 the tensor's device selects the backend of each call; A6 an unsupported operation
// throws, naming the backend and the operation
TEST(DevicePicksTheBackend, OnEachCall) {
  const auto cpu = std::make_shared<FakeBackend>("first"),
             meta = std::make_shared<FakeBackend>("second");
  const auto group = std::make_shared<GroupCore>(
      ProcessGroupParts{.name = "two",
                        .ranks = {0},
                        .rank = 0,
                        .config = BackendConfig::parse("cpu:native,meta:gloo"),
                        .backends = {{at::kCPU, cpu}, {at::kMeta, meta}}});
  const auto here = torch::zeros({2}), there = torch::zeros({2}, at::kMeta);
  all_reduce(here, {.group = group});
  broadcast(there, {.group = group, .group_src = 0});
  all_gather_into_tensor(there, there, {.group = group});
  reduce_scatter_tensor(here, here, {.group = group});
  EXPECT_EQ(cpu->calls, (std::vector<std::string>{"all_reduce", "reduce_scatter_tensor"}));
  EXPECT_EQ(meta->calls, (std::vector<std::string>{"broadcast", "all_gather_into_tensor"}));
  const auto lacks =
      message_of<DistBackendError>([&] { reduce(there, {.group = group, .group_dst = 0}); });
  for (const char* part : {"'second'", "reduce", "it is a fake"}) EXPECT_HAS(lacks, part);
}

}  // namespace
}  // namespace muster
