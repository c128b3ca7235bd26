// SPDX-License-Identifier: BSD-3-Clause
/// One training step of every rank as a picture: what the model computed, and which of its calls
/// were under way meanwhile.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace bench_ddp {

/// Times in nanoseconds on the host's clock.
struct Span {
  std::string name;
  std::int64_t start_ns = 0, end_ns = 0;
  std::uint64_t bytes = 0;
};

struct RankTimeline {
  std::vector<Span> phases;  ///< forward, backward, optimizer
  std::vector<Span> calls;   ///< from the flight recorder
};

/// Adds to `timeline.calls` what this process's recorder kept of the step.
void add_calls(RankTimeline& timeline);

/// Between processes: one line for each span.
void write(const RankTimeline& timeline, const std::string& path);
RankTimeline read(const std::string& path);

/// An SVG with two lanes for each rank.
std::string draw(const std::vector<RankTimeline>& ranks, const std::string& title);

}  // namespace bench_ddp
