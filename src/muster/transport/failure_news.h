/// Spreads the news of failures among the ranks. Private to `transport/`; under the engine's lock.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "muster/transport/links.h"

namespace muster::transport {

/// What is told of a rank, with a cause: the number of the frame.
enum class RankNews : std::uint8_t {
  lost = 0,     ///< others have found it dead
  failed = 1,   ///< it says itself that it has failed: its last words
  trouble = 2,  ///< it will end without closing its groups; what had gone wrong in it, no failure
};

class FailureNews {
 public:
  FailureNews(EngineContext& engine, Links& links) : engine_(engine), links_(links) {}

  /// Tells the members, but not `source`, from whom this rank has it (-1: from none). Kept for
  /// streams that come up later.
  void spread_channel_failure(std::uint32_t channel, std::span<const int> members,
                              const Status& cause, int source);
  /// Tells all ranks but `source`.
  void spread_rank_failure(int rank, const Status& cause, RankNews news, int source);
  /// To a peer that had no stream so far: what it would have been told. Otherwise a close frame may
  /// be the first that it hears.
  void tell_earlier(Link& link);

 private:
  struct News {
    std::vector<int> members;  // who ought to know
    FrameHeader header;
    std::string record;
  };

  void spread(std::vector<int> members, const FrameHeader& header, std::string record, int source);
  void tell(const News& news, int source);

  EngineContext& engine_;
  Links& links_;
  std::deque<News> told_;
};

}  // namespace muster::transport
