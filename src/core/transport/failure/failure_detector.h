// SPDX-License-Identifier: BSD-3-Clause
/// Decides which ranks have died, which have left, and which rank is at fault. Private to
/// `transport/`; under the engine's lock. The rules are in docs/internals/failure.md.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/transport/channel/channel_table.h"
#include "core/transport/link/links.h"

namespace muster::transport {

/// The kind of news about a rank, as numbered in the frame.
enum class RankNews : std::uint8_t {
  lost = 0,     ///< others have found it dead
  failed = 1,   ///< it has reported its own failure
  trouble = 2,  ///< it will end without closing its groups; the cause is what had gone wrong in it,
                ///< not a failure
};

/// Spreads the news of failures among the ranks.
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

class FailureDetector final : public FailureEvents {
 public:
  FailureDetector(EngineContext& engine, Links& links, ChannelTable& channels)
      : engine_(engine), links_(links), channels_(channels), news_(engine, links) {}

  // FailureEvents.
  void on_needed(int rank) override;
  void on_channel_failure(std::uint32_t channel, const Status& cause) override;
  void on_stream_end(Link& link, const Status& why) override;
  void on_stream_begin(Link& link) override { news_.tell_earlier(link); }

  // Reports of the connector.
  void on_connect_failed(int peer, const Status& cause);
  void on_death(int peer, Status evidence);

  // Frames from peers.
  void on_close(Link& link, bool unclosed);
  void fail_channel(ChannelState& channel, const Status& cause, int source);
  void on_told_rank_failure(int source, int rank, const Status& cause, RankNews news);

  /// `rank` is lost: every channel that has it as a member fails, and every rank is told.
  void declare_dead(int rank, const Status& evidence);
  /// `rank` has stated that it left. The reason, perhaps a failure unknown to this rank, may still
  /// arrive.
  void suspect_left(int rank);
  /// This rank itself has failed: its channels fail, and every rank is told why.
  void fail_this_rank(const std::string& why, const std::vector<int>& earlier);
  /// This rank ends without closing its groups: those that need it learn what had gone wrong in it.
  void tell_trouble(const std::string& trouble);
  /// A channel that was not open had failed: now its members are known.
  void spread_channel_failure(const ChannelState& channel, const Status& cause) {
    news_.spread_channel_failure(channel.id(), channel.members(), cause, -1);
  }

  void judge_suspects(TimePoint now);
  /// Marks a failure as too old to explain a later one: this rank did not give up because of it.
  void forget_old_cause(TimePoint now);

 private:
  struct Suspect {
    TimePoint judge_at;
    Status evidence;
  };

  void leave(int rank);
  void blame(int rank, const Status& evidence);
  void suspect(int rank, Duration hold, Status evidence);
  void on_own_word(int source, int rank, const Status& cause);
  void end_failed_rank(int rank);
  void end_stream(int rank, const Status& cause);
  void note_cause(const Status& cause);
  std::optional<Status> explanation(int rank) const;

  EngineContext& engine_;
  Links& links_;
  ChannelTable& channels_;
  FailureNews news_;
  std::map<int, Suspect> suspects_;
  std::map<int, std::string> troubles_;  // of ranks that end without closing their groups
  Status cause_;                         // the latest failure heard of
  TimePoint cause_at_ = TimePoint::min();
};

}  // namespace muster::transport
