// SPDX-License-Identifier: BSD-3-Clause
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/types.h>

#include <algorithm>
#include <cstdlib>
#include <iomanip>
#include <set>
#include <sstream>

#include "programs.h"

namespace documents {
namespace {

namespace profiler = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;

/// Code runs on each rank.
void on_streams(int rank) {
  muster::init_process_group({.backend = "gloo", .world_size = 2, .rank = rank});
  const auto output = torch::tensor({rank}, torch::kInt64).to(accelerator(rank));
  const c10::impl::VirtualGuardImpl device(output.device().type());
  const auto s = device.getNewStream(output.device());
  const auto default_stream = device.getStream(output.device());
  const auto handle = muster::all_reduce(output, {.async_op = true});
  // Wait ensures the operation is enqueued, but not necessarily complete.
  handle->wait();
  // Using result on non-default stream.
  {
    const c10::StreamGuard on(s);
    c10::Event event(s.device_type());
    event.record(default_stream);
    event.block(s);
    output.add_(100);
  }
  // if the explicit wait for default_stream was omitted, the output below will be
  // non-deterministically 1 or 101, depending on whether the allreduce overwrote the value after
  // the add completed.
  if (rank == 0) say(text_of(output));
  muster::destroy_process_group();
}

void streams(const Arguments&) {
  setenv("MASTER_ADDR", "localhost", 0);
  setenv("MASTER_PORT", "29501", 0);
  muster::spawn(on_streams, {.nprocs = 2});
}

struct Calls {
  double cpu_total_us = 0;
  int calls = 0;
};

/// What Python's key_averages().table() prints of the CPU: a line for each name.
std::string table_of(const profiler::ProfilerResult& profile) {
  std::map<std::string, Calls> names;
  std::size_t longest = 4;
  for (const auto& event : profile.events()) {
    auto& entry = names[event.name()];
    entry.cpu_total_us += static_cast<double>(event.durationNs()) / 1000;
    ++entry.calls;
    longest = std::max(longest, event.name().size());
  }
  std::ostringstream table;
  const auto line = [&](const std::string& name, const std::string& total,
                        const std::string& calls) {
    table << std::setw(static_cast<int>(longest)) << name << "  " << std::setw(14) << total << "  "
          << std::setw(12) << calls << "\n";
  };
  line("Name", "CPU total", "# of Calls");
  for (const auto& [name, entry] : names) {
    std::ostringstream total;
    total << std::fixed << std::setprecision(3) << entry.cpu_total_us << "us";
    line(name, total.str(), std::to_string(entry.calls));
  }
  return table.str();
}

/// Of a launcher: torch profiles one thread of a process at a time.
void profile(const Arguments&) {
  muster::init_process_group();
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  const std::set<ActivityType> activities{ActivityType::CPU};
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  const auto tensor = torch::randn({20, 10});
  muster::all_reduce(tensor);
  const auto prof = profiler::disableProfiler();
  if (muster::get_rank() == 0) say(table_of(*prof));
  muster::destroy_process_group();
}

}  // namespace

Programs observing() { return {{"streams", streams}, {"profiler", profile}}; }

}  // namespace documents
