#include "core/transport/channel/channel_table.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <string>
#include <utility>

namespace muster::transport {

void ChannelTable::start() {
  std::vector<int> all_ranks(static_cast<std::size_t>(engine_.world_size()));
  std::iota(all_ranks.begin(), all_ranks.end(), 0);
  bootstrap_ = channels_[0] = make(0);
  bootstrap_->open_locked(all_ranks);
  agreements_ = channels_[kAgreements] = make(kAgreements);
  agreements_->open_locked(std::move(all_ranks));
  used_ids_[0] = 0;
}

void ChannelTable::clear() {
  channels_.clear();
  bootstrap_.reset();
  agreements_.reset();
}

Status ChannelTable::check_members(const std::vector<int>& members) const {
  const int size = engine_.world_size();
  std::vector<bool> seen(static_cast<std::size_t>(size));
  for (const int member : members) {
    if (member < 0 || member >= size || seen[static_cast<std::size_t>(member)]) {
      return Status(Code::invalid_argument,
                    "a channel's members must be different ranks of the job; " +
                        std::to_string(member) + " is not, or is there twice");
    }
    seen[static_cast<std::size_t>(member)] = true;
  }
  if (seen[static_cast<std::size_t>(engine_.rank())]) return {};
  return Status(
      Code::invalid_argument,
      rank_text(engine_.rank()) + " is not among the members of the channel that it opens");
}

bool ChannelTable::was_used(std::uint32_t id) const {
  return std::prev(used_ids_.upper_bound(id))->second >= id;
}

/// Merges adjacent runs of used ids.
void ChannelTable::note_used(std::uint32_t id) {
  const auto next = used_ids_.upper_bound(id);
  const auto previous = std::prev(next);
  std::uint32_t last = id;
  if (next != used_ids_.end() && next->first == id + 1) {
    last = next->second;
    used_ids_.erase(next);
  }
  if (previous->second + 1 == id) {
    previous->second = last;
  } else {
    used_ids_[id] = last;
  }
}

Result<std::shared_ptr<ChannelState>> ChannelTable::open(std::uint32_t id,
                                                         std::vector<int> members) {
  if (Status status = check_members(members); !status) return status;
  if (id == kAgreements || was_used(id))
    return Status(Code::invalid_argument,
                  "channel " + std::to_string(id) + " has been used before");
  note_used(id);
  std::shared_ptr<ChannelState>& channel = channels_[id];
  if (channel) {
    --unopened_;
  } else {
    channel = make(id);
  }
  channel->open_locked(std::move(members));
  engine_.pass.completed = true;
  return channel;
}

void ChannelTable::retire(std::uint32_t id) {
  const auto found = channels_.find(id);
  if (found == channels_.end()) return;
  found->second->fail_locked(Status(Code::aborted, "the channel was closed"));
  channels_.erase(found);
}

/// Every rank has its own range of ids, so that no two ranks allocate the same one. Ids are
/// allocated in order, so that there are few runs.
std::uint32_t ChannelTable::next_id() {
  const std::uint32_t range = (kAgreements - 1) / static_cast<std::uint32_t>(engine_.world_size());
  const std::uint32_t first = 1 + range * static_cast<std::uint32_t>(engine_.rank());
  while (given_ids_ < range) {
    const std::uint32_t id = first + given_ids_++;
    if (!was_used(id)) return id;
  }
  return 0;  // the channel of all ranks: `open` says that it is taken
}

ChannelState* ChannelTable::find(std::uint32_t id) const {
  const auto found = channels_.find(id);
  return found == channels_.end() ? nullptr : found->second.get();
}

Result<ChannelState*> ChannelTable::for_frame(std::uint32_t id) {
  if (ChannelState* const channel = find(id)) return channel;
  if (was_used(id)) return static_cast<ChannelState*>(nullptr);
  if (unopened_ >= kMaxUnopened)
    return Status(Code::internal, "it has named more channels than may wait to be opened");
  ++unopened_;
  return (channels_[id] = make(id)).get();
}

void ChannelTable::fail_all(const Status& cause) {
  for (const auto& [id, channel] : channels_) channel->fail_locked(cause);
}

bool ChannelTable::needs(int rank) const {
  return std::any_of(channels_.begin(), channels_.end(),
                     [rank](const auto& entry) { return entry.second->needs_locked(rank); });
}

}  // namespace muster::transport
