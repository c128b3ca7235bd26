/// The channels of one rank and their ids. Private to `transport/`; under the engine's lock.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "core/transport/channel/channel_state.h"

namespace muster::transport {

class ChannelTable {
 public:
  using Map = std::unordered_map<std::uint32_t, std::shared_ptr<ChannelState>>;

  ChannelTable(EngineContext& engine, Links& links, PassLoop& loop)
      : engine_(engine), links_(links), loop_(loop) {}

  /// Makes the channels of all ranks. Once.
  void start();
  /// Channel 0.
  ChannelState& bootstrap() { return *bootstrap_; }
  /// The channel that survives the death of ranks (`Fabric::agreements`).
  ChannelState& agreements() { return *agreements_; }
  bool is_agreements(const std::shared_ptr<ChannelState>& channel) const {
    return channel == agreements_;
  }

  Result<std::shared_ptr<ChannelState>> open(std::uint32_t id, std::vector<int> members);
  /// The last user has released the channel.
  void retire(std::uint32_t id);
  /// An id that no rank has allocated before and this one has not used. 0 once all are used up.
  std::uint32_t next_id();

  /// Null where there is none.
  ChannelState* find(std::uint32_t id) const;
  /// The channel of an id in a frame: created if it may still be opened, null if it has ended.
  /// Fails if the peer has named too many unopened channels.
  Result<ChannelState*> for_frame(std::uint32_t id);
  const Map& all() const { return channels_; }
  void fail_all(const Status& cause);
  /// Whether a channel waits for `rank` or wants to reach it.
  bool needs(int rank) const;
  void clear();

 private:
  static constexpr std::uint32_t kAgreements = ~std::uint32_t{0};
  // Limit of channels that frames may name before they are opened here; honest peers stay far below
  // it.
  static constexpr std::size_t kMaxUnopened = 4096;  // limit: memory

  Status check_members(const std::vector<int>& members) const;
  bool was_used(std::uint32_t id) const;
  void note_used(std::uint32_t id);
  std::shared_ptr<ChannelState> make(std::uint32_t id) const {
    return std::make_shared<ChannelState>(engine_, links_, loop_, id);
  }

  EngineContext& engine_;
  Links& links_;
  PassLoop& loop_;
  Map channels_;
  std::size_t unopened_ = 0;
  std::map<std::uint32_t, std::uint32_t> used_ids_;  // runs: first -> last
  std::uint32_t given_ids_ = 0;  // number of ids allocated from this rank's own range
  std::shared_ptr<ChannelState> bootstrap_;
  std::shared_ptr<ChannelState> agreements_;
};

}  // namespace muster::transport
