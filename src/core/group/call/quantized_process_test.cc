// SPDX-License-Identifier: BSD-3-Clause
// Collectives with compression between processes: over shared memory and TCP, on several hosts, and
// when a rank dies.
#include <ATen/Parallel.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "core/group/testing/compress_within_host.h"
#include "core/group/testing/ranks.h"
#include "muster/collectives.h"
#include "testing/limits.h"
#include "testing/network_namespaces.h"
#include "testing/rank_processes.h"
#include "testing/reserved_port.h"
#include "testing/scratch_folder.h"

namespace muster {
namespace {

using testing::NetworkNamespaces;
using testing::RankProcesses;
using testing::ScratchFolder;

constexpr Compression kEachCompression[] = {Compression::bf16, Compression::int8,
                                            Compression::int4};
constexpr auto kProcessLimit = muster::testing::kMustHappen;

at::Tensor wave_of(int rank, std::int64_t count) {
  return torch::sin(torch::arange(count, at::kFloat) * (0.37 + rank)) * (1.5 + rank);
}

/// "good", or what is wrong with the results of every function on `group`. Sums have two hops, each
/// within a step of the largest sum.
std::string play_calls(const Group& group, Compression compression) {
  constexpr std::int64_t kCount = 70'000;  // several segments over links
  const int rank = group->rank(), size = group->size();
  const double step = compression == Compression::int4   ? 1 / 13.9
                      : compression == Compression::int8 ? 1 / 252.0
                                                         : 1 / 256.0;
  at::Tensor exact = torch::zeros({kCount});
  double largest = 0;
  for (int each = 0; each < size; ++each) {
    exact += wave_of(each, kCount);
    largest += 1.5 + each;
  }
  const auto is_near = [](const at::Tensor& a, const at::Tensor& b, double by) {
    return (a - b).abs().max().item<double>() <= by;
  };
  auto sum = wave_of(rank, kCount);
  all_reduce(sum, {.group = group, .compression = compression});
  if (!is_near(sum, exact, 2.2 * step * largest)) return "all_reduce is off";
  auto sums = torch::empty({size * kCount});
  all_gather_into_tensor(sums, sum, {.group = group});
  for (const at::Tensor& each : sums.chunk(size))
    if (!torch::equal(each, sum)) return "all_reduce gives ranks different bits";

  auto later = wave_of(rank, kCount);
  const auto work =
      all_reduce(later, {.group = group, .async_op = true, .compression = compression});
  work->wait();
  if (!torch::equal(later, sum)) return "an asynchronous all_reduce gives something else";

  auto part = torch::empty({kCount});
  reduce_scatter_tensor(part, wave_of(rank, kCount).repeat({size}),
                        {.group = group, .compression = compression});
  if (!is_near(part, exact, 1.1 * step * largest)) return "reduce_scatter is off";
  auto whole = torch::empty({size * kCount});
  all_gather_into_tensor(whole, wave_of(rank, kCount),
                         {.group = group, .compression = compression});
  for (int each = 0; each < size; ++each)
    if (!is_near(whole.narrow(0, each * kCount, kCount), wave_of(each, kCount),
                 1.1 * step * (1.5 + each)))
      return "all_gather is off";
  auto sent = wave_of(rank, kCount);
  broadcast(sent, {.group = group, .group_src = size - 1, .compression = compression});
  return is_near(sent, wave_of(size - 1, kCount), 1.1 * step * (0.5 + size)) ? "good"
                                                                             : "broadcast is off";
}

std::string play_on_backends() {
  for (const char* backend : {"native", "tcp"}) {
    const Group group = new_group({.backend = backend});
    for (const Compression compression : kEachCompression)
      if (const auto said = play_calls(group, compression); said != "good")
        return std::string(backend) + ": " + said;
  }
  return "good";
}

// spec: X1 shared memory and TCP between processes of one host, and two hosts of two ranks
TEST(QuantizedProcesses, WorkWithinAndBetweenHosts) {
  const auto net = NetworkNamespaces::create(2);
  ASSERT_TRUE(net.ok()) << net.status().message();
  for (const bool on_two_hosts : {false, true}) {
    const ScratchFolder scratch;
    const auto port = std::to_string(testing::reserve_port());
    const std::string meeting = on_two_hosts ? "tcp://" + (*net)->address(0) + ":" + port
                                             : "file://" + scratch.file("meeting");
    RankProcesses ranks(4, [&](int rank) -> std::string {
      try {
        at::set_num_threads(1);
        if (on_two_hosts) {
          if (const Status entered = (*net)->enter(rank / 2); !entered) return entered.message();
          ::setenv("MUSTER_SECRET", "a secret that two hosts share, long enough", 1);
        }
        init_process_group(
            {.init_method = meeting, .timeout = kProcessLimit, .world_size = 4, .rank = rank});
        const auto said = play_on_backends();
        destroy_process_group();
        return said;
      } catch (const std::exception& error) {
        return error.what();
      }
    });
    for (const auto& end : ranks.join(kProcessLimit))
      EXPECT_EQ(end.report, "good") << (on_two_hosts ? "two hosts" : "one host");
  }
}

/// Three ranks call until rank 2 is killed after some calls. Returns what the others report.
std::vector<std::string> survivors_of_kill(const std::string& backend, bool async) {
  const ScratchFolder scratch;
  testing::SharedCounter through;
  RankProcesses ranks(3, [&](int rank) -> std::string {
    const rlimit none{0, 0};
    ::setrlimit(RLIMIT_CORE, &none);
    at::set_num_threads(1);
    init_process_group({.backend = backend,
                        .init_method = "file://" + scratch.file("meeting"),
                        .timeout = std::chrono::seconds(300),
                        .world_size = 3,
                        .rank = rank});
    try {
      for (int call = 0;; ++call) {
        auto tensor = wave_of(rank, 5000);
        const auto work = all_reduce(tensor, {.async_op = async, .compression = Compression::int8});
        if (rank == 2 && call == 3) {
          through.add(1);
          if (!through.wait_for(3, kProcessLimit)) return "the others do not come so far";
          ::kill(::getpid(), SIGKILL);
        }
        if (work != nullptr) work->wait();
        if (rank != 2 && call == 2) through.add(1);
      }
    } catch (const DistError& error) {
      return (error.ranks() == std::vector<int>{2} ? "names rank 2: " : "names others: ") +
             std::string(error.what());
    }
  });
  const auto ends = ranks.join(kProcessLimit);
  return {ends[0].report, ends[1].report};
}

// spec: X1 a rank that is killed among compressed calls is named by all others
TEST(QuantizedProcesses, AKilledRankIsNamed) {
  for (const char* backend : {"native", "tcp"})
    for (const bool async : {false, true})
      for (const std::string& said : survivors_of_kill(backend, async))
        EXPECT_EQ(said.substr(0, 12), "names rank 2") << backend << ": " << said;
}

}  // namespace
}  // namespace muster
