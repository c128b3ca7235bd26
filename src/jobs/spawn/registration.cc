// SPDX-License-Identifier: BSD-3-Clause
// Gives muster::spawn the processes of jobs/launch, in programs that link this layer.
#include <utility>

#include "core/group/errors.h"
#include "core/group/spawn.h"
#include "jobs/launch/spawn.h"

namespace muster::launch {
namespace {

class ProcessContext : public SpawnContext {
 public:
  explicit ProcessContext(SpawnedProcesses processes) : processes_(std::move(processes)) {}
  bool join(std::optional<Duration> timeout) override {
    auto joined = processes_.join(timeout.value_or(Duration(-1)));
    if (!joined.ok()) throw SpawnError(joined.status());
    return *joined;
  }
  std::vector<pid_t> pids() const override { return processes_.pids(); }

 private:
  SpawnedProcesses processes_;
};

std::unique_ptr<SpawnContext> start(int count, const SpawnBody& body, Duration shutdown_timeout) {
  return std::make_unique<ProcessContext>(
      group::take(start_processes(count, body, {.shutdown_timeout = shutdown_timeout})));
}

}  // namespace
}  // namespace muster::launch

/// The linker takes this file because the layer's link options name this symbol.
extern "C" const bool muster_spawn_registration;
extern "C" const bool muster_spawn_registration = [] {
  muster::group::set_process_spawner(&muster::launch::start);
  return true;
}();
