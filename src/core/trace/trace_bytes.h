/// Traces as bytes, for those who cannot open the file: ranks and people on other hosts get them
/// through the job's store.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/trace/reader.h"

namespace muster::trace {

/// Only the latest call of each group, and of the groups only the latest 32: some hundred bytes
/// each.
RankTrace cut_to_latest(const RankTrace& trace);
/// Only the latest `records` calls.
RankTrace cut_to(RankTrace trace, std::size_t records);

/// All of it. Begins with the present instant, by this host's clock.
std::string encode_trace(const RankTrace& trace);

struct SentTrace {
  RankTrace trace;
  std::int64_t as_of_ns = 0;  ///< when it was written, by its writer's clock
};
/// Nothing where the bytes are damaged or of another version.
std::optional<SentTrace> decode_trace(std::string_view bytes);

/// Moves every time by so much: from another host's clock to this one's.
void shift(RankTrace& trace, std::int64_t by_ns);

}  // namespace muster::trace
