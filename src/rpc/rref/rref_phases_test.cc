// SPDX-License-Identifier: BSD-3-Clause
// Each worker of a small job with remote references is killed at each point of their protocol: the
// others' errors name it, calls that do not need it go on, nothing is left, and shutdown ends.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <iostream>
#include <mutex>
#include <random>

#include "core/store/factory.h"
#include "core/transport/factory.h"
#include "muster/rref.h"
#include "rpc/backends.h"
#include "rpc/testing/gated_fabric.h"
#include "testing/budget.h"
#include "testing/limits.h"
#include "testing/scratch_folder.h"

namespace muster::rpc {
namespace {

using muster::testing::RankEnd;
using muster::testing::RankProcesses;
using muster::testing::ScratchFolder;
using muster::testing::SharedCounter;
using testing::Gate;
using testing::GatedFabric;
using testing::GatePoint;

constexpr Duration kSoon = muster::testing::kMustHappen;

// The caller has a value made by the owner and gives it to the user, who gives it to the friend.
constexpr int kCaller = 0, kOwner = 1, kUser = 2, kFriend = 3, kNobody = -1;
const std::vector<std::string> kNames{"caller", "owner", "user", "friend"};

// In the order of the script below.
constexpr GatePoint kGatePoints[] = {
    {"create", kCaller, kOwner},      // the call that makes the value has not left
    {"in tracked", kOwner, kNobody},  // the value is being made
    {"confirm", kOwner, kCaller},     // the creator's reference is counted, and does not know it
    {"reply", kOwner, kCaller},       // the value is made, and its creator does not know it
    {"call hold", kCaller, kUser},    // passed on, not left
    {"in hold", kUser, kNobody},      // arrived
    {"register", kUser, kOwner},      // the owner does not know the new reference
    {"confirm", kOwner, kUser},       // the owner counts it, and it does not know it
    {"accept", kUser, kCaller},       // confirmed, but who passed it on still waits for it
    {"reply", kUser, kCaller},        // the call that carried it has no answer
    {"call hold", kUser, kFriend},    // the same from a user to a user
    {"register", kFriend, kOwner},    //
    {"confirm", kOwner, kFriend},     //
    {"accept", kFriend, kUser},       //
    {"call use", kUser, kOwner},      // home again
    {"accept", kOwner, kUser},        //
    {"in own", kOwner, kNobody},   // the owner gives a reference to a value of its own in an answer
    {"fetch", kCaller, kOwner},    // the value's copy is asked for
    {"release", kCaller, kOwner},  // let go, and the owner does not know it
    {"release", kUser, kOwner},    //
    {"release", kFriend, kOwner},  //
    {"closing", kUser, kCaller},   // the end: a worker tells the one that leads
    {"closing", kCaller, kOwner},  // the end: the one that leads asks
};

std::atomic<int> alive{0};
struct Tracked {
  Tracked() { ++alive; }
  Tracked(const Tracked&) { ++alive; }
  Tracked& operator=(const Tracked&) = default;
  ~Tracked() { --alive; }
  int number = 5;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(number);
  }
};

/// The references that a worker's functions keep.
struct Kept {
  std::mutex mutex;
  std::vector<RRef<Tracked>> references;
  bool closed = false;  // nothing is kept any more: calls of a caller that has died may still come
  void add(const RRef<Tracked>& reference) {
    const std::lock_guard lock(mutex);
    if (!closed) references.push_back(reference);
  }
  std::vector<RRef<Tracked>> copies() {
    const std::lock_guard lock(mutex);
    return references;
  }
  std::vector<RRef<Tracked>> take(bool for_good) {
    const std::lock_guard lock(mutex);
    closed = closed || for_good;
    return std::exchange(references, {});
  }
} kept;

void register_all(Gate& gate) {
  register_function("tracked", [&gate] {
    gate.pass("in tracked", get_worker_info().id(), kNobody);
    return Tracked();
  });
  register_function("hold", [&gate](const RRef<Tracked>& reference) {
    gate.pass("in hold", get_worker_info().id(), kNobody);
    kept.add(reference);
  });
  register_function("give", [] {
    for (const auto& reference : kept.copies()) rpc_sync("friend", "hold", reference);
  });
  register_function("use",
                    [](const RRef<Tracked>& reference) { return reference.local_value().number; });
  register_function("bring home", [] {
    for (const auto& reference : kept.copies()) rpc_sync<int>("owner", "use", reference);
  });
  register_function("own", [&gate] {
    gate.pass("in own", get_worker_info().id(), kNobody);
    return RRef<Tracked>(Tracked());
  });
  register_function("let go", [] { kept.take(false); });
  register_function("who", [] { return get_worker_info().name(); });
}

/// One worker's part. Failures are kept as text.
class Worker {
 public:
  Worker(int rank, int victim, SharedCounter& survivors_let_go)
      : rank_(rank), victim_(victim), let_go_(survivors_let_go) {}

  /// Errors are to name the victim.
  template <class Call>
  void attempt(const char* what, Call call) {
    try {
      call();
    } catch (const std::exception& error) {
      const std::string text = error.what();
      const auto names = [&](const std::string& part) {
        return text.find(part) != std::string::npos;
      };
      const std::string& name = kNames[static_cast<std::size_t>(victim_)];
      if (!names("'" + name + "'") || !names("(rank " + std::to_string(victim_) + ")")) {
        note(std::string(what) + ": an error that does not name the dead: " + text);
      }
    }
  }

  void script() {
    attempt("remote", [&] { made_ = remote<Tracked>("owner", "tracked"); });
    attempt("hold", [&] { rpc_sync("user", "hold", made_); });
    attempt("give", [&] { rpc_sync("user", "give"); });
    attempt("bring home", [&] { rpc_sync("user", "bring home"); });
    attempt("own", [&] { own_ = rpc_sync<RRef<Tracked>>("owner", "own"); });
    attempt("to_here", [&] {
      if (made_.to_here().number != 5) note("another value came");
    });
    attempt("let go", [&] { made_ = {}; });
    attempt("let go", [&] { rpc_sync("user", "let go"); });
    attempt("let go", [&] { rpc_sync("friend", "let go"); });
  }

  /// After the death: references are good or name the dead, calls among the living go on, and the
  /// owner's values go with the last of them.
  void look_around() {
    for (auto& reference : kept.take(true)) use(reference);
    use(own_);
    own_ = made_ = {};
    for (int other = 0; other < static_cast<int>(kNames.size()); ++other) {
      if (other == victim_) continue;
      if (rpc_sync<std::string>(other, "who") != kNames[static_cast<std::size_t>(other)])
        note("somebody else answers");
    }
    const auto none_is_left = [] { return alive.load() == 0; };
    let_go_.add(1);
    if (!let_go_.wait_for(static_cast<int>(kNames.size()) - 1, kSoon))
      note("the others have not come as far");
    if (rank_ == kOwner && !current_agent("test")->wait(none_is_left, steady_clock().now() + kSoon))
      note(std::to_string(alive.load()) + " values are left");
  }

  std::string report() const { return trouble_.empty() ? "good" : trouble_; }

 private:
  void use(const RRef<Tracked>& reference) {
    if (!reference.valid()) return;
    bool works = false;
    attempt("use", [&] { works = reference.rpc_sync().call<int>("use") == 5; });
    if (works && victim_ == kOwner) note("a dead worker's value is used");
  }
  void note(const std::string& what) {
    trouble_ += kNames[static_cast<std::size_t>(rank_)] + ": " + what + "\n";
  }

  const int rank_, victim_;
  SharedCounter& let_go_;
  RRef<Tracked> made_, own_;
  std::string trouble_;
};

std::unique_ptr<transport::Fabric> join(int rank, const std::string& file) {
  const int count = static_cast<int>(kNames.size());
  auto store = store::make_file_store(file, count, kSoon);
  if (!store.ok()) throw std::runtime_error(store.status().message());
  transport::ConnectorOptions connector;
  connector.rank = rank;
  connector.world_size = count;
  connector.job = file;
  transport::FabricOptions options;
  options.rank = rank;
  options.world_size = count;
  options.timeout = kSoon;
  options.heartbeat_limit = std::chrono::seconds(30);  // a loaded machine is not dead
  auto fabric = transport::Fabric::create(
      options,
      transport::make_socket_connector(connector, Secret::given("a secret for tests only")),
      transport::exchange_over(*store, "fabric", rank, count,
                               deadline_after(steady_clock(), kSoon)));
  if (!fabric.ok()) throw std::runtime_error(fabric.status().message());
  return std::move(*fabric);
}

std::string play(int rank, Gate& gate, int victim, SharedCounter& let_go, const std::string& file) {
  try {
    register_all(gate);
    init_rpc_on(std::make_unique<GatedFabric>(join(rank, file), gate), kNames);
    Worker worker(rank, victim, let_go);
    if (rank == kCaller) worker.script();
    if (gate.point.label != std::string("closing")) {
      if (!gate.open.wait_for(1, kSoon)) return "nobody was killed";
      worker.look_around();
    }
    shutdown(true, kSoon);
    return worker.report();
  } catch (const std::exception& error) {
    return kNames[static_cast<std::size_t>(rank)] + " threw " + error.what();
  }
}

void kill_at(const GatePoint& point, int victim) {
  SCOPED_TRACE(
      "worker '" + kNames[static_cast<std::size_t>(victim)] + "' dies when '" +
      kNames[static_cast<std::size_t>(point.from)] + "' is at '" + point.label + "'" +
      (point.to == kNobody ? "" : " to '" + kNames[static_cast<std::size_t>(point.to)] + "'"));
  ScratchFolder folder;
  Gate gate(point);
  SharedCounter let_go;
  RankProcesses job(static_cast<int>(kNames.size()), [&](int rank) {
    return play(rank, gate, victim, let_go, folder.file("meet"));
  });
  EXPECT_TRUE(gate.reached.wait_for(1, kSoon));
  job.kill(victim, SIGKILL);
  siginfo_t ended;
  ::waitid(P_PID, static_cast<id_t>(job.pid(victim)), &ended, WEXITED | WNOWAIT);
  gate.open.add(1);
  const auto ends = job.join(muster::testing::kMustHappen);
  for (int rank = 0; rank < static_cast<int>(kNames.size()); ++rank)
    EXPECT_EQ(ends[static_cast<std::size_t>(rank)].report, rank == victim ? "" : "good");
}

// spec: N7 kill -9 of owner, caller, user and callee at every point of the protocol: named errors,
// the others go on, nothing is left; N4 shutdown waits for no worker that has died, whenever
// that was
TEST(RRefPhases, EachWorkerIsKilledAtEachPoint) {
  std::vector<std::pair<GatePoint, int>> cases;
  for (const GatePoint& point : kGatePoints) {
    for (int victim = 0; victim < static_cast<int>(kNames.size()); ++victim)
      cases.emplace_back(point, victim);
  }
  std::mt19937_64 random(muster::testing::test_seed());
  std::shuffle(cases.begin(), cases.end(), random);
  const auto until = std::chrono::steady_clock::now() + muster::testing::test_budget(8);
  std::size_t played = 0;
  for (const auto& [point, victim] : cases) {
    if (std::chrono::steady_clock::now() >= until || ::testing::Test::HasFailure()) break;
    kill_at(point, victim);
    ++played;
  }
  std::cout << played << " of " << cases.size() << " cases\n";
}

}  // namespace
}  // namespace muster::rpc
