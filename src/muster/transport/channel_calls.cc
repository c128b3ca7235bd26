/// The part of a channel that compares the members' calls.
#include <algorithm>

#include "muster/base/dtype.h"
#include "muster/transport/channel_state.h"
#include "muster/transport/engine.h"

namespace muster::transport {

std::string ChannelState::describe(const Fingerprint& call) const {
  if (call.sequence == 0) {
    const bool known = call.dtype < kDTypes;
    return "a message" +
           (known ? " of " + std::string(name_of(static_cast<DType>(call.dtype))) : std::string());
  }
  if (engine_.rules() != nullptr) return engine_.rules()->describe(call);
  return "operation " + std::to_string(call.op) + " (dtype " + std::to_string(call.dtype) +
         ", reduction " + std::to_string(call.reduce) + ", root " + std::to_string(call.root) +
         ", " + std::to_string(call.count) + " elements)";
}

void ChannelState::begin(const Fingerprint& call) {
  Engine::Entry entry(engine_);
  if (!failure_.ok() || call.sequence == 0) return;
  Begun& slot = begun_[call.sequence % kRememberedCalls];
  slot.call = call;
  slot.valid = true;
  last_begun_ = std::max(last_begun_, call.sequence);
  // What nobody will begin any more is forgotten.
  if (call.sequence > kRememberedCalls)
    early_.erase(early_.begin(), early_.lower_bound(call.sequence - kRememberedCalls));
  const auto early = early_.find(call.sequence);
  if (early == early_.end()) return;
  const auto calls = std::move(early->second);
  early_.erase(early);
  for (const auto& [source, theirs] : calls) {
    if (!check_call(source, theirs)) return;
  }
}

void ChannelState::compare(int member, const Fingerprint& call) {
  Engine::Entry entry(engine_);
  if (!failure_.ok() || member < 0 || member >= size()) return;
  check_call(members_[static_cast<std::size_t>(member)], call);
}

bool ChannelState::check_call(int source, const Fingerprint& call) {
  if (call.sequence == 0) return true;
  const Begun& begun = begun_[call.sequence % kRememberedCalls];
  if (begun.valid && begun.call.sequence == call.sequence) {
    const bool agree =
        engine_.rules() != nullptr ? engine_.rules()->agree(call, begun.call) : call == begun.call;
    if (!agree) fail_mismatch(source, call, begun.call);
    return agree;
  }
  if (call.sequence <= last_begun_) return true;  // long over, or begun out of turn
  auto& calls = early_[call.sequence];
  if (std::none_of(calls.begin(), calls.end(),
                   [source](const auto& known) { return known.first == source; }))
    calls.emplace_back(source, call);
  return true;
}

void ChannelState::fail_mismatch(int source, const Fingerprint& theirs, const Fingerprint& ours) {
  const int me = engine_.rank();
  const auto half = [this](int rank, const Fingerprint& call) {
    return "rank " + std::to_string(rank) + " called " + describe(call);
  };
  std::vector<int> ranks{source, me};
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  const bool mine_first = me <= source;
  engine_.fail_channel(*this,
                       Status(Code::mismatch,
                              "the members of this group make different calls: as number " +
                                  std::to_string(ours.sequence) + ", " +
                                  (mine_first ? half(me, ours) : half(source, theirs)) + " while " +
                                  (mine_first ? half(source, theirs) : half(me, ours)) +
                                  "; every member must make the same calls in the same order",
                              std::move(ranks)));
}

}  // namespace muster::transport
