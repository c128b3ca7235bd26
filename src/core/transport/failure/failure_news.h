/// Spreads the news of failures among the ranks. Private to `transport/`; under the engine's lock.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "core/transport/link/links.h"

namespace muster::transport {

/// The kind of news about a rank, as numbered in the frame.
enum class RankNews : std::uint8_t {
  lost = 0,     ///< others have found it dead
  failed = 1,   ///< it has reported its own failure
  trouble = 2,  ///< it will end without closing its groups; the cause is what had gone wrong in it,
                ///< not a failure
};

class FailureNews {
 public:
  FailureNews(EngineContext& engine, Links& links) : engine_(engine), links_(links) {}

  /// Notifies the members except `source`, which sent the news (-1: no rank). Kept for streams that
  /// are established later.
  void spread_channel_failure(std::uint32_t channel, std::span<const int> members,
                              const Status& cause, int source);
  /// Tells all ranks but `source`.
  void spread_rank_failure(int rank, const Status& cause, RankNews news, int source);
  /// Sends earlier news to a peer whose stream is new. Without them a close frame might be the
  /// first thing it receives.
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
