/// Interface between group creation (`group_creation.cc`) and the group itself (`communicator.cc`).
/// Private to `collective/`.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/collective/communicator.h"
#include "core/collective/creation/agreement.h"
#include "core/collective/queue/progress.h"
#include "core/collective/select/selection.h"

namespace muster::collective {

/// Value of a descriptor without a segment: the group runs over links.
inline constexpr std::uint64_t kNoSegment = ~std::uint64_t{0};

/// Placement of a group of these members.
GroupPlacement placement_of(const transport::Fabric& fabric, std::span<const int> members);

/// State shared by the communicators of one fabric.
struct FabricState final : transport::Fabric::Companion {
  Progress progress;
  /// When a group was last closed without waiting for all its members (`closing.h`).
  std::atomic<TimePoint> close_missed{TimePoint(Duration::min() / 2)};
  std::mutex lock;
  std::map<std::pair<std::vector<int>, std::string>, std::uint64_t> uses;

  /// How many groups of these members and this name have been created before; increments it.
  std::uint64_t next_use(std::vector<int> members, const std::string& name);
};
std::shared_ptr<FabricState> fabric_state_of(transport::Fabric& fabric);

/// Builds the group that its members have agreed on. Local.
std::shared_ptr<Communicator> assemble(std::shared_ptr<transport::Fabric> fabric, Agreement agreed,
                                       std::string name,
                                       std::shared_ptr<const trace::PeerTraces> peer_traces);
std::shared_ptr<transport::Fabric> fabric_of(Communicator& group);

}  // namespace muster::collective
