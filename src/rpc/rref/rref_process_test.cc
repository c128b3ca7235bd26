// SPDX-License-Identifier: BSD-3-Clause
// Workers as processes that are killed: owners, users, callers and callees of remote references,
// and workers of a backward pass.
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>

#include <atomic>

#include "muster/dist_autograd.h"
#include "muster/rref.h"
#include "rpc/agent/agent.h"
#include "testing/limits.h"
#include "testing/rank_processes.h"
#include "testing/scratch_folder.h"

namespace muster::rpc {
namespace {

using muster::testing::RankProcesses;
using muster::testing::ScratchFolder;

constexpr Duration kLimit = muster::testing::kMustHappen;

std::atomic<int> living{0};
struct Living {
  Living() { ++living; }
  Living(const Living&) { ++living; }
  Living& operator=(const Living&) = default;
  ~Living() { --living; }
};

std::vector<RRef<Living>> held;

struct KillerOf : torch::autograd::Function<KillerOf> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    ::raise(SIGKILL);
    return {};
  }
};

void register_all() {
  register_function("tracked", [] { return Living(); });
  register_function("hold", [](const RRef<Living>& rref) { held.push_back(rref); });
  register_function("make", [](int owner) { held.push_back(remote<Living>(owner, "tracked")); });
  register_function("alive", [] { return living.load(); });
  register_function("die", [] { ::raise(SIGKILL); });
  register_function("hang and die", [](const RRef<Living>&) {
    ::raise(SIGKILL);
    return 0;
  });
  register_function("use", [](const RRef<Living>& rref) { return rref.is_owner(); });
  register_function("deadly", [](const at::Tensor& x) { return KillerOf::apply(x); });
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

bool soon(const std::function<bool()>& condition) {
  const auto agent = current_agent("soon");
  const auto limit = agent->clock().now() + kLimit;
  while (!condition()) {
    if (agent->clock().now() > limit) return false;
  }
  return true;
}

// Worker 0 plays `body`, 1 serves, 2 is killed by `body`. The others report "good" or their error.
void play(const std::function<std::string()>& body) {
  ScratchFolder folder;
  RankProcesses job(3, [&](int rank) -> std::string {
    try {
      register_all();
      RpcBackendOptions options;
      options.init_method = "file://" + folder.file("meet");
      init_rpc("worker" + std::to_string(rank),
               {.rank = rank, .world_size = 3, .rpc_backend_options = options});
      const std::string report = rank == 0 ? body() : "good";
      shutdown(true, kLimit);
      return report;
    } catch (const std::exception& error) {
      return error.what();
    }
  });
  const auto ends = job.join(muster::testing::kMustHappen);
  EXPECT_EQ(ends[0].report, "good");
  EXPECT_EQ(ends[1].report, "good");
  EXPECT_EQ(ends[2].report, "");
}

// spec: N7 kill -9 of the owner: references to its values fail by name on all users, others go on,
// shutdown ends
TEST(RRefProcess, TheOwnerIsKilled) {
  play([]() -> std::string {
    const auto doomed = remote<Living>("worker2", "tracked");
    const auto good = remote<Living>("worker1", "tracked");
    rpc_sync("worker1", "hold", doomed);
    error_of([] { rpc_sync("worker2", "die"); });
    const auto pass_on = [&] {
      return error_of([&] { rpc_sync<bool>("worker1", "use", doomed); });
    };
    if (!soon([&] { return pass_on() != "no error"; })) return "a lost reference can be passed on";
    for (const auto& text :
         {error_of([&] { doomed.rpc_sync().call<bool>("use"); }), pass_on(),
          error_of([&] { remote<Living>("worker2", "tracked").rpc_sync().call<bool>("use"); })}) {
      if (text.find("worker2") == std::string::npos) return "the error does not name it: " + text;
    }
    return good.rpc_sync().call<bool>("use") ? "good" : "another value was lost too";
  });
}

// spec: N7 kill -9 of users, of the caller that had a value made, and of a callee with references
// in its call: what they held is let go
TEST(RRefProcess, UsersAreKilled) {
  play([]() -> std::string {
    {
      const auto value = remote<Living>("worker1", "tracked");
      rpc_sync("worker2", "hold", value);
      const auto other = remote<Living>("worker1", "tracked");
      rpc_sync("worker2", "make", 1);
      if (!soon([] { return rpc_sync<int>("worker1", "alive") >= 3; }))
        return "the values were not made";
      const auto text = error_of([&] { rpc_sync<int>("worker2", "hang and die", other); });
      if (text.find("worker2") == std::string::npos) return "the error does not name it: " + text;
      if (!value.rpc_sync().call<bool>("use")) return "a value that is still held was lost";
    }
    return soon([] { return rpc_sync<int>("worker1", "alive") == 0; }) ? "good" : "values are left";
  });
}

// spec: O1 kill -9 of a worker in the middle of a backward pass: a named error, the others go on
TEST(RRefProcess, KilledInBackward) {
  play([]() -> std::string {
    const auto a = torch::ones({3}).set_requires_grad(true);
    const dist_autograd::context context;
    const auto loss = rpc_sync<at::Tensor>("worker2", "deadly", a * 2).sum();
    const auto text = error_of([&] { dist_autograd::backward(context.context_id(), {loss}); });
    if (text.find("worker2") == std::string::npos) return "the error does not name it: " + text;
    return rpc_sync<int>("worker1", "alive") == 0 ? "good" : "worker1 is not well";
  });
}

}  // namespace
}  // namespace muster::rpc
