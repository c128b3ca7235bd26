// SPDX-License-Identifier: BSD-3-Clause
// Eight clients, processes of their own, call one store at random while some are killed or stand
// still, and so do its server's members; then each key's calls must have an order that explains
// every answer (testing/histories.h).

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <csignal>
#include <filesystem>
#include <functional>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "core/store/factory.h"
#include "core/store/testing/histories.h"
#include "core/store/testing/long_wait.h"
#include "testing/budget.h"
#include "testing/etcd_cluster.h"
#include "testing/rank_processes.h"
#include "testing/reserved_port.h"
#include "testing/seed.h"

namespace muster::store {
namespace {

using muster::testing::EtcdCluster;
using muster::testing::RankProcesses;
using muster::testing::SharedCounter;
using std::chrono::milliseconds;

constexpr int kClients = 8;
constexpr int kCalls = 14;  // of each client
constexpr int kRegisters = 2;
constexpr int kQueue = kRegisters;  // its number among the keys

/// The clients' notes, in memory that outlives those that are killed.
class Records {
 public:
  Records()
      : calls_(static_cast<Call*>(
            ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    if (calls_ == MAP_FAILED) std::abort();
  }
  ~Records() { ::munmap(calls_, kBytes); }
  Records(const Records&) = delete;

  Call& of(int client, int number) { return calls_[client * kCalls + number]; }
  /// Calls on `key` that were begun.
  std::vector<Call> on(int key) const {
    std::vector<Call> found;
    for (int i = 0; i < kClients * kCalls; ++i)
      if (calls_[i].begin != 0 && calls_[i].key == key) found.push_back(calls_[i]);
    return found;
  }

 private:
  static constexpr std::size_t kBytes = sizeof(Call) * kClients * kCalls;
  Call* const calls_;
};

std::int64_t now() { return steady_clock().now().time_since_epoch().count(); }

std::int64_t number(std::string_view text) {
  std::int64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

std::string text_of(std::int64_t value) {
  return value == 0 ? std::string() : std::to_string(value);
}

/// One client's calls. The store keeps what it was told of before the client is killed.
class Client {
 public:
  Client(int client, std::uint64_t seed, Store& store)
      : client_(client),
        random_(seed),
        store_(store),
        deletes_(store.kind() != std::string("file")) {}

  Call next(int number) {
    Call call;
    call.client = static_cast<std::int16_t>(client_);
    const std::int64_t value = client_ * 1000 + number + 1;
    if (random_() % 3 == 0) {
      call.key = kQueue;
      call.act = std::array{Act::push, Act::push, Act::pop, Act::length}[random_() % 4];
      call.argument = call.act == Act::push ? value : 0;
      return call;
    }
    call.key = static_cast<std::int16_t>(random_() % kRegisters);
    call.act = std::array{Act::set, Act::get,         Act::get,   Act::add,
                          Act::add, Act::compare_set, Act::check, Act::erase}[random_() % 8];
    if (call.act == Act::erase && !deletes_) call.act = Act::compare_set;
    if (call.act == Act::set || call.act == Act::compare_set) call.argument = value;
    if (call.act == Act::add) call.argument = 1;
    if (call.act == Act::compare_set) call.expected = random_() % 4 == 0 ? 0 : seen_;
    return call;
  }

  /// Sets `ending` last: killed before that, it was never answered.
  void carry_out(Call& call) {
    const Result<std::int64_t> told = ask(call);
    call.end = now();
    if (told.ok()) {
      call.result = *told;
      if (call.key != kQueue) seen_ = *told;
    }
    const bool may_wait_in_vain = call.act == Act::get || call.act == Act::pop;
    std::atomic_ref(call.ending)
        .store(told.ok() ? Ending::answered
               : may_wait_in_vain && told.status().code() == Code::timed_out
                   ? Ending::without_effect
                   : Ending::unknown,
               std::memory_order_release);
  }

 private:
  Result<std::int64_t> ask(const Call& call) {
    const std::string key = "key" + std::to_string(call.key);
    const auto as_number = [](const Result<std::string>& text) -> Result<std::int64_t> {
      if (!text.ok()) return text.status();
      return number(*text);
    };
    const auto as_nothing = [](const Status& status) -> Result<std::int64_t> {
      if (!status.ok()) return status;
      return std::int64_t{0};
    };
    const auto as_flag = [](const Result<bool>& flag) -> Result<std::int64_t> {
      if (!flag.ok()) return flag.status();
      return std::int64_t{*flag ? 1 : 0};
    };
    switch (call.act) {
      case Act::set: return as_nothing(store_.set(key, text_of(call.argument)));
      case Act::get: return as_number(store_.get(key, milliseconds(2)));
      case Act::add: return store_.add(key, call.argument);
      case Act::compare_set:
        return as_number(store_.compare_set(key, text_of(call.expected), text_of(call.argument)));
      case Act::erase: return as_flag(store_.delete_key(key));
      case Act::check: return as_flag(store_.check(std::array{key}));
      case Act::push: return as_nothing(store_.queue_push(key, text_of(call.argument)));
      case Act::pop: return as_number(store_.queue_pop(key, true, milliseconds(1)));
      case Act::length: return store_.queue_len(key);
    }
    return Status(Code::internal, "no such call");
  }

  const int client_;
  std::mt19937_64 random_;
  Store& store_;
  const bool deletes_;
  std::int64_t seen_ = 0;
};

using Opener = std::function<Result<std::shared_ptr<Store>>()>;

/// Something done to the store itself at a random moment, and its end.
struct Trouble {
  std::function<void()> begin, end;
};
struct Troubles {
  std::vector<Trouble> kinds{};
  /// How long one may hold up all clients. A pause shorter than an etcd's election shows less.
  Duration patience = milliseconds(20);
};

/// Plays one history; the text says what cannot be explained, or is empty.
std::string play(std::uint64_t seed, const Opener& open, const Troubles& troubles) {
  Records records;
  SharedCounter progress, ready;
  std::mt19937_64 random(seed);
  RankProcesses clients(kClients, [&](int rank) -> std::string {
    Result<std::shared_ptr<Store>> store = open();
    ready.add(1);
    if (!store.ok()) return store.status().message();
    ready.wait_for(kClients, kLong);
    Client client(rank, seed * kClients + static_cast<std::uint64_t>(rank), **store);
    for (int i = 0; i < kCalls; ++i) {
      Call& call = records.of(rank, i);
      call = client.next(i);
      call.begin = now();
      client.carry_out(call);
      progress.add(1);
      std::this_thread::yield();  // to the others, of whom few have a core
    }
    return "done";
  });
  if (!ready.wait_for(kClients, kLong)) return "the clients did not come";
  const auto reach = [&](int more, Duration patience = milliseconds(20)) {
    // If that which stands still holds up all, the counter stays: the limit goes on then.
    progress.wait_for(progress.value() + more, patience);
  };
  std::vector<bool> killed(kClients, false);
  for (auto faults = random() % 4; faults > 0; --faults) {
    reach(static_cast<int>(random() % 40));
    const int victim = static_cast<int>(random() % kClients);
    const auto kind = random() % (troubles.kinds.empty() ? 2 : 3);
    if (kind == 0) {
      clients.kill(victim, SIGKILL);
      killed[static_cast<std::size_t>(victim)] = true;
    } else if (kind == 1) {
      clients.kill(victim, SIGSTOP);
      reach(static_cast<int>(random() % 30));
      clients.kill(victim, SIGCONT);
    } else {
      const Trouble& trouble = troubles.kinds[random() % troubles.kinds.size()];
      trouble.begin();
      reach(static_cast<int>(random() % 30), troubles.patience);
      trouble.end();
    }
  }
  std::string wrong;
  const auto ends = clients.join(kLong);
  for (int client = 0; client < kClients; ++client) {
    const auto& end = ends[static_cast<std::size_t>(client)];
    if (end.report != "done" && !killed[static_cast<std::size_t>(client)])
      wrong += "client " + std::to_string(client) + " has not ended well: " + end.report + "\n";
  }
  std::size_t made = 0, answered = 0;
  for (int key = 0; key <= kQueue; ++key) {
    const std::vector<Call> calls = records.on(key);
    made += calls.size();
    for (const Call& call : calls) answered += call.ending != Ending::unknown;
    if (const auto why = why_not_linearizable(calls)) wrong += *why;
  }
  // One call of each client that was killed has no answer.
  if (made - answered > static_cast<std::size_t>(std::ranges::count(killed, true)))
    wrong += std::to_string(made - answered) + " of " + std::to_string(made) + " calls failed\n";
  return wrong;
}

void play_all(int histories, const std::function<std::string(std::uint64_t seed)>& one) {
  if (muster::testing::long_tests()) histories *= 100;
  const std::uint64_t first = muster::testing::test_seed();
  for (int i = 0; i < histories; ++i) {
    const std::uint64_t seed = first * 100'003 + static_cast<std::uint64_t>(i);
    const std::string wrong = one(seed);
    ASSERT_EQ(wrong, "") << "history " << i << " of MUSTER_TEST_SEED=" << first;
  }
}

/// Options of a store on a free port.
TcpStoreOptions tcp_options(Duration timeout) {
  TcpStoreOptions options;
  options.host = "127.0.0.1";
  options.port = muster::testing::reserve_port();
  options.secret = Secret::given("the secret of the histories");
  options.timeout = timeout;
  return options;
}

/// Serves the store until the process is killed; what it returns is why it could not.
std::string serve(TcpStoreOptions options) {
  options.is_server = true;
  const auto store = make_tcp_store(options);
  if (!store.ok()) return store.status().message();
  while (true) ::pause();
}

void play_on_tcp(bool within_host, std::uint64_t seed, std::string* wrong) {
  TcpStoreOptions options = tcp_options(kLong);
  options.within_host = within_host;
  RankProcesses server(1, [&](int) { return serve(options); });
  *wrong = play(seed,
                [&]() -> Result<std::shared_ptr<Store>> {
                  auto store = make_tcp_store(options);
                  if (!store.ok()) return store.status();
                  return std::static_pointer_cast<Store>(*store);
                },
                {.kinds = {{[&] { server.kill(0, SIGSTOP); }, [&] { server.kill(0, SIGCONT); }}}});
}

// spec: C17
TEST(StoreHistories, OfATcpStoreAreLinearizable) {
  play_all(40, [](std::uint64_t seed) {
    std::string wrong;
    play_on_tcp(seed % 2 == 0, seed, &wrong);
    return wrong;
  });
}

// spec: C17
TEST(StoreHistories, OfAFileStoreAreLinearizable) {
  play_all(40, [](std::uint64_t seed) {
    const auto path =
        std::filesystem::temp_directory_path() / ("muster-histories-" + std::to_string(::getpid()));
    std::filesystem::remove(path);
    const std::string wrong =
        play(seed, [&] { return make_file_store(path.string(), -1, kLong); }, {});
    std::filesystem::remove(path);
    return wrong;
  });
}

// spec: C17 who waits when the store dies hears of it, long before its own time is over
TEST(StoreHistories, WhoWaitsHearsThatTheStoreDied) {
  // Without a limit: what ends the wait is the news.
  const TcpStoreOptions options = tcp_options(Duration(-1));
  RankProcesses server(1, [&](int) { return serve(options); });
  SharedCounter waiting;
  RankProcesses clients(4, [&](int rank) -> std::string {
    TcpStoreOptions own = options;
    own.within_host = rank % 2 == 0;
    const auto store = make_tcp_store(own);
    if (!store.ok()) return store.status().message();
    waiting.add(1);
    const std::string key = "never";
    const Status heard =
        rank < 2 ? (*store)->wait(std::array{key}) : (*store)->queue_pop(key, true).status();
    return heard.code() == Code::network ? heard.message() : "not the network: " + heard.message();
  });
  ASSERT_TRUE(waiting.wait_for(4, kLong));
  server.kill(0, SIGKILL);
  for (const auto& end : clients.join(kLong)) {
    EXPECT_FALSE(end.killed_at_the_limit);
    EXPECT_NE(end.report.find(":" + std::to_string(options.port)), std::string::npos) << end.report;
  }
}

Opener etcd_opener(const EtcdCluster& cluster, std::uint64_t seed) {
  EtcdOptions options;
  options.endpoints = cluster.endpoints();
  options.prefix = "history-" + std::to_string(seed);
  options.timeout = kLong;
  return [options] { return make_etcd_store(options); };
}

// spec: C17
TEST(StoreHistories, OfAnEtcdStoreAreLinearizable) {
  if (!EtcdCluster::installed()) GTEST_SKIP() << EtcdCluster::kMissing;
  EtcdCluster cluster;
  const Troubles troubles{.kinds = {{[&] { cluster.stop(0); }, [&] { cluster.resume(0); }},
                                    {[&] { cluster.kill(0); }, [&] { cluster.start(0); }}}};
  play_all(14,
           [&](std::uint64_t seed) { return play(seed, etcd_opener(cluster, seed), troubles); });
}

// spec: C17
TEST(StoreHistories, OfAnEtcdClusterAreLinearizable) {
  if (!EtcdCluster::installed()) GTEST_SKIP() << EtcdCluster::kMissing;
  EtcdCluster cluster(EtcdCluster::Options{.members = 3});
  Troubles troubles{.patience = std::chrono::milliseconds(2500)};
  for (int member = 0; member < 3; ++member) {
    troubles.kinds.push_back(
        {[&, member] { cluster.stop(member); }, [&, member] { cluster.resume(member); }});
    troubles.kinds.push_back(
        {[&, member] { cluster.kill(member); }, [&, member] { cluster.start(member); }});
  }
  play_all(6, [&](std::uint64_t seed) { return play(seed, etcd_opener(cluster, seed), troubles); });
}

}  // namespace
}  // namespace muster::store
