// SPDX-License-Identifier: BSD-3-Clause
/// How a launcher tells apart the descriptors that wake it up.
#pragma once

#include <cstdint>

#include "jobs/launch/workers/node_workers.h"

namespace muster::launch {

/// The upper half of an epoll event's data tells the kind of descriptor.
enum class WakeupSource : std::uint32_t {
  signals,
  timer,
  nodes,
  fence,
  worker,
  spare,
  words,
  output
};

inline WakeupSource source_of(WorkerWakeup what) {
  switch (what) {
    case WorkerWakeup::end: return WakeupSource::worker;
    case WorkerWakeup::spare_end: return WakeupSource::spare;
    case WorkerWakeup::words: break;
  }
  return WakeupSource::words;
}

inline std::uint64_t pack(WakeupSource source, std::uint64_t index) {
  return static_cast<std::uint64_t>(source) << 32 | index;
}

}  // namespace muster::launch
