/// The object collectives over bytes: what `objects.h` (any C++ type) and the Python face (any
/// picklable object) stand on.
///
/// Every collective here begins with one all_gather of a short note: which call, root, list length,
/// type of the elements, bytes. So all members know the same facts before anything is allocated,
/// and where lists, roots, calls or types do not fit, or one member's arguments are wrong, every
/// member throws the same DistError and the group stays usable. Blocking. A process that is not a
/// member gets nothing and nothing of its is touched.
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

/// Most bytes that one rank may give to one call. Checked where they come from and before any
/// memory is taken for them.
inline constexpr std::int64_t kObjectLimit = std::int64_t{4} << 30;

/// One serialised object per entry.
using ObjectBytes = std::vector<std::string>;
/// Serialises; called on this thread, only where the bytes are needed. What it throws is thrown
/// again once the other members know.
using PackObjects = std::function<ObjectBytes()>;

struct ObjectCall {
  Group group = nullptr;  ///< null: the default group
  /// Where the bytes travel; absent: the CPU, or the current CUDA device where the group has no
  /// backend for CPU tensors.
  std::optional<at::Device> device = {};
  std::optional<Duration> timeout = {};
  std::uint64_t type =
      0;  ///< of the elements; 0: anything. Members that give two different ones are told so.
};
/// A rank of the default group or one of the group, as users give it.
struct ObjectRank {
  std::optional<int> global = {};
  std::optional<int> local = {};
};

/// The root's objects; nothing on the root itself and on non-members. `length` is of this rank's
/// list, the same everywhere.
std::optional<ObjectBytes> broadcast_objects(const ObjectCall& call, ObjectRank src,
                                             std::size_t length, const PackObjects& pack);
/// One object of every member, in group order. `length` is that of the list that they go to.
std::optional<ObjectBytes> all_gather_objects(const ObjectCall& call, std::size_t length,
                                              const PackObjects& pack);
/// The same on dst, nothing elsewhere. `length`: of the list on dst, 0 elsewhere.
std::optional<ObjectBytes> gather_objects(const ObjectCall& call, ObjectRank dst,
                                          std::size_t length, const PackObjects& pack);
/// This rank's object of those that `pack` gives on src. `input_length` counts there alone.
std::optional<std::string> scatter_objects(const ObjectCall& call, ObjectRank src,
                                           std::size_t output_length, std::size_t input_length,
                                           const PackObjects& pack);

/// Two messages on a tag of their own: one thread at a time per pair of ranks and direction.
void send_objects(const ObjectCall& call, ObjectRank dst, const PackObjects& pack);
/// What came and the sender's rank (of the default group). A list of another length than `length`
/// throws here, after it has been taken.
struct ReceivedObjects {
  ObjectBytes objects;
  int source = -1;  ///< -1 for a non-member
};
ReceivedObjects recv_objects(const ObjectCall& call, ObjectRank src, std::size_t length);

}  // namespace muster::group
