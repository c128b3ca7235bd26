/// Object collectives on bytes: the basis of `objects.h` (any C++ type) and of the Python bindings
/// (any picklable object).
///
/// Every collective begins with one all_gather of a short note: call, root, list length, element
/// type, number of bytes. All members thus know the same facts before anything is allocated. If
/// lists, roots, calls or types do not match, or one member's arguments are invalid, every member
/// throws the same DistError and the group stays usable. All calls block. On a non-member they
/// return nothing and change nothing.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/base/clock.h"
#include "muster/group/process_group.h"

namespace muster::group {

/// Maximum number of bytes one rank may contribute to one call. Checked by the sender, and by
/// receivers before they allocate memory.
inline constexpr std::int64_t kObjectLimit = std::int64_t{4} << 30;

/// One serialised object per entry.
using ObjectBytes = std::vector<std::string>;
/// Serialises the objects. Called on this thread, only if the bytes are needed. Its exceptions are
/// rethrown after the other members have been told.
using PackObjects = std::function<ObjectBytes()>;

struct ObjectCall {
  Group group = nullptr;  ///< null: the default group
  /// Device of the transferred bytes. Default: the CPU, or the current CUDA device if the group has
  /// no backend for CPU tensors.
  std::optional<at::Device> device = {};
  std::optional<Duration> timeout = {};
  /// Hash of the element type; 0: any. Two different hashes are a mismatch.
  std::uint64_t type = 0;
};
/// A rank as given by the user: of the default group or of the group.
struct ObjectRank {
  std::optional<int> global = {};
  std::optional<int> local = {};
};

/// Returns the root's objects; nothing on the root itself and on non-members. `length` is this
/// rank's list length, equal on all members.
std::optional<ObjectBytes> broadcast_objects(const ObjectCall& call, ObjectRank src,
                                             std::size_t length, const PackObjects& pack);
/// Returns one object per member, in group order. `length` is the length of the destination list.
std::optional<ObjectBytes> all_gather_objects(const ObjectCall& call, std::size_t length,
                                              const PackObjects& pack);
/// As all_gather_objects on dst; nothing elsewhere. `length` is the length of dst's list, 0
/// elsewhere.
std::optional<ObjectBytes> gather_objects(const ObjectCall& call, ObjectRank dst,
                                          std::size_t length, const PackObjects& pack);
/// Returns this rank's object of those `pack` returns on src. `input_length` is used on src only.
std::optional<std::string> scatter_objects(const ObjectCall& call, ObjectRank src,
                                           std::size_t output_length, std::size_t input_length,
                                           const PackObjects& pack);

/// Sends two messages with reserved tags. Use one thread at a time per pair of ranks and direction.
void send_objects(const ObjectCall& call, ObjectRank dst, const PackObjects& pack);
/// The received objects and the sender's rank in the default group. If the list's length differs
/// from `length`, throws after receiving it.
struct ReceivedObjects {
  ObjectBytes objects;
  int source = -1;  ///< -1 for a non-member
};
ReceivedObjects recv_objects(const ObjectCall& call, ObjectRank src, std::size_t length);

}  // namespace muster::group
