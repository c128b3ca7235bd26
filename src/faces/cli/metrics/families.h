// SPDX-License-Identifier: BSD-3-Clause
/// The metrics of `muster run --metrics` as families of prometheus-cpp, and their text. Names
/// follow OpenTelemetry's conventions (`muster.call.io` in bytes is `muster_call_io_bytes_total`
/// in Prometheus's spelling); docs/user/metrics.md lists them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "core/trace/analysis.h"
#include "faces/cli/metrics/call_totals.h"
#include "jobs/launch/node_numbers.h"

namespace muster::cli {

/// The contents of one scrape.
struct NodeSample {
  launch::NodeNumbers::Values numbers;
  /// The traces of this node's ranks; none yet, or no longer: null.
  const trace::JobTrace* job = nullptr;
  const CallTotals* totals = nullptr;    ///< never null
  std::map<int, std::uint64_t> memory;   ///< resident bytes, by rank
  std::optional<std::uint64_t> refused;  ///< connections, by the store that this node serves
  double collection_seconds = 0;         ///< that the looks have taken
};

/// In Prometheus's text format, version 0.0.4.
std::string metrics_text(const NodeSample& sample);

}  // namespace muster::cli
