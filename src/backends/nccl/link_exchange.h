// SPDX-License-Identifier: BSD-3-Clause
/// The messages among the members of a group over muster's own links, beside NCCL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "backends/nccl/communicator.h"
#include "core/collective/communicator.h"
#include "muster/status.h"

namespace muster::nccl {
/// Throws DistBackendError.
[[noreturn]] void throw_backend_error(const Status& status);

/// Thread-safe. Throws DistBackendError with the links' failure or with what `give_up` throws.
class LinkExchange {
 public:
  /// `members`: the ranks' names in errors. `may_share_devices`: this member says that it is meant.
  LinkExchange(std::shared_ptr<collective::Communicator> links, std::vector<int> members,
               bool may_share_devices)
      : links_(std::move(links)),
        members_(std::move(members)),
        may_share_devices_(may_share_devices) {}

  /// The ids of all members' communicator number `number`: one, or one for each `ranks_per_id` of
  /// them if NCCL can connect by several. It throws on all of them, naming two, if members share a
  /// device, or differ in the number of ids.
  std::vector<UniqueId> group_ids(const NcclCommunicator& communicator, std::size_t number,
                                  int ranks_per_id, const NcclCommunicator::GiveUp& give_up) const;
  /// The same of two members' communicator for messages.
  std::vector<UniqueId> pair_ids(const NcclCommunicator& communicator, int peer,
                                 const NcclCommunicator::GiveUp& give_up) const;

  /// Every member's `mine`, by rank. All members call it, as every call below.
  template <class T>
  std::vector<T> gather(const T& mine, TimePoint deadline) {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto bytes = gather_bytes(std::as_bytes(std::span(&mine, 1)), deadline);
    std::vector<T> all(bytes.size() / sizeof(T));
    std::memcpy(all.data(), bytes.data(), bytes.size());
    return all;
  }
  /// Whether `mine` holds on all members.
  bool all_say(bool mine, TimePoint deadline);
  /// The first member's id.
  UniqueId from_first(const UniqueId& mine, TimePoint deadline);
  /// Throws, naming two, if members share a device. `mine`: this member's.
  void refuse_shared(const NcclLibrary& library, c10::Device mine, TimePoint deadline);

 private:
  std::vector<std::byte> gather_bytes(std::span<const std::byte> mine, TimePoint deadline);
  std::vector<UniqueId> ids_among(const std::vector<int>& ranks, std::uint64_t tag, int ids,
                                  const NcclCommunicator& communicator,
                                  const NcclCommunicator::GiveUp& give_up) const;

  const std::shared_ptr<collective::Communicator> links_;
  const std::vector<int> members_;
  const bool may_share_devices_;
};

/// How many ids so many ranks connect by.
int ids_for(const NcclLibrary& library, int ranks, int ranks_per_id);
/// Which of `ids` ids that rank makes, -1 if none: NCCL divides the ranks among the ids in order,
/// evenly but for one more in the first parts; the first rank of each part makes its id.
int id_made_by(int rank, int ranks, int ids);

// Whether the ranks of a group that is to grow out of another one fit together.

/// One rank's contribution to a growth.
struct GrowthOffer {
  enum class Readiness : std::int32_t {
    can,
    cannot,  ///< it lacks NCCL's function, or is not connected
    failed,  ///< the group it comes from
  };
  std::uint32_t parent = 0;  ///< id of the channel of the group it comes from; 0: it joins
  std::int32_t members = 0;  ///< of that group
  Readiness readiness = Readiness::can;
};

/// Whether NCCL can grow the first rank's group. Throws DistBackendError if a group has failed, or
/// if the ranks are not its members in their order and then ranks that join. `names`: the ranks'
/// names in errors.
bool can_grow(const std::vector<GrowthOffer>& offers, const std::vector<int>& names,
              const std::string& group);

}  // namespace muster::nccl
