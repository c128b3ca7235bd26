// The region between real processes: what threads on one mapping cannot show.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "muster/collective/communicator.h"
#include "muster/testing/process_job.h"
#include "muster/testing/rank_processes.h"
#include "muster/testing/scratch_folder.h"
#include "muster/transport/arena.h"

namespace muster::collective {
namespace {

constexpr int kProcesses = 4;
constexpr std::size_t kCount = 300'000;

// Sums float64 buffers, in the arena on the ranks of `in_arena`, private on the others; "" or what went wrong.
std::string sum_on(int rank, unsigned in_arena, bool read_only, Communicator& world) {
  const std::size_t bytes = kCount * sizeof(double);
  std::vector<std::byte> own(bytes);
  std::byte* memory = own.data();
  if ((in_arena >> rank & 1) != 0) {
    auto arena = transport::Arena::of_process();
    if (!arena.ok()) return arena.status().message();
    if (read_only) (*arena)->make_read_only();
    auto block = (*arena)->allocate(bytes);
    if (!block.ok()) return block.status().message();
    memory = *block;
  }
  auto* values = reinterpret_cast<double*>(memory);
  for (std::size_t i = 0; i < kCount; ++i) values[i] = static_cast<double>(rank + 1) * static_cast<double>(i);
  Args args;
  args.op = Op::all_reduce;
  args.dtype = DType::float64;
  args.inputs = {ConstBytes(memory, bytes)};
  args.outputs = {MutableBytes(memory, bytes)};
  if (Status done = world.run(args, steady_clock().now() + std::chrono::seconds(20)); !done) return done.message();
  for (std::size_t i = 0; i < kCount; ++i) {
    if (values[i] != 10.0 * static_cast<double>(i)) return "element " + std::to_string(i) + " is " + std::to_string(values[i]);
  }
  return "";
}

// All ranks map each other's arenas in the same call, each while it is asked for its own; to write to them too, or only to read.
// spec: F3 all_reduce between processes, arena and private buffers mixed
TEST(RegionProcesses, AllMapEachOthersArenasInOneCall) {
  struct Case {
    unsigned in_arena;
    bool read_only;
  };
  for (const Case& run : {Case{15, false}, Case{5, false}, Case{15, true}, Case{6, true}}) {
    const testing::ScratchFolder folder;
    testing::RankProcesses ranks(kProcesses, [&](int rank) -> std::string {
      testing::ProcessJobOptions options;
      options.rank = rank;
      options.world_size = kProcesses;
      options.store_path = folder.file("store");
      auto job = testing::join_process_job(options);
      if (!job.ok()) return job.status().message();
      for (int round = 0; round < 3; ++round) {
        if (std::string wrong = sum_on(rank, run.in_arena, run.read_only, *job->world); !wrong.empty()) return wrong;
      }
      const Status closed = job->world->close(steady_clock().now() + std::chrono::seconds(20));
      return closed.ok() ? "done" : closed.message();
    });
    for (const auto& end : ranks.join(std::chrono::seconds(60))) EXPECT_EQ(end.report, "done");
  }
}

}  // namespace
}  // namespace muster::collective
