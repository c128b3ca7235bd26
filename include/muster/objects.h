// SPDX-License-Identifier: BSD-3-Clause
/// Collectives on objects of any type that cereal can serialise, with torch's names. Python's
/// keyword arguments are fields of an options struct.
///
/// A type is serialised by a member `template <class Archive> void serialize(Archive& archive) {
/// archive(a, b); }` or by a free function of that name, and needs a default constructor. Strings
/// and vectors work out of the box; other standard containers need cereal's header
/// (`<cereal/types/map.hpp>`).
///
/// All calls block. If lists, roots, types or calls do not match, every member throws the same
/// DistError. Lists are written only after everything has arrived. Objects are data: nothing
/// received is executed. Each rank may contribute at most `group::kObjectLimit` (4 GiB) to one
/// call. `src` and `dst` are ranks of the default group; `group_src` and `group_dst` are ranks of
/// `group`. On a non-member, lists stay unchanged.
#pragma once

#include <c10/core/Device.h>

#include <cereal/archives/binary.hpp>
#include <cereal/types/string.hpp>
#include <cereal/types/vector.hpp>
#include <cstdint>
#include <functional>
#include <istream>
#include <optional>
#include <ostream>
#include <sstream>
#include <streambuf>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "muster/clock.h"
#include "muster/errors.h"
#include "muster/process_group.h"

namespace muster {
namespace group {

// Object collectives on bytes: the basis of the templates below and of the Python bindings. Each
// begins with one all_gather of a short note: call, root, list length, element type, number of
// bytes. All members thus know the same facts before anything is allocated, and every member throws
// the same DistError if they do not match.
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

/// A hash of T's name: equal for equal types within one build.
template <class T>
std::uint64_t object_type() {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (const char* at = typeid(T).name(); *at != 0; ++at)
    hash = (hash ^ static_cast<unsigned char>(*at)) * 0x100000001b3u;
  return hash | 1;
}

template <class T>
std::string pack_object(const T& object) {
  std::ostringstream out(std::ios::binary);
  cereal::BinaryOutputArchive archive(out);
  archive(object);
  return std::move(out).str();
}

template <class T>
T unpack_object(std::string_view bytes, std::string_view call) {
  struct ByteView : std::streambuf {
    explicit ByteView(std::string_view bytes) {
      auto* begin = const_cast<char*>(bytes.data());  // this streambuf is only read
      setg(begin, begin, begin + bytes.size());
    }
    bool at_end() const { return gptr() == egptr(); }
  } view(bytes);
  try {
    std::istream in(&view);
    cereal::BinaryInputArchive archive(in);
    T object{};
    archive(object);
    if (view.at_end()) return object;
  } catch (const std::exception& error) {
    throw DistError(
        std::string(call) +
            ": an object that came cannot be read as the type of this list: " + error.what(),
        Code::mismatch);
  }
  throw DistError(std::string(call) + ": an object that came is longer than the type of this list",
                  Code::mismatch);
}

template <class T>
ObjectBytes pack_all(const std::vector<T>& objects) {
  ObjectBytes all;
  for (const auto& object : objects) all.push_back(pack_object(object));
  return all;
}
template <class T>
void unpack_into(std::vector<T>& list, const ObjectBytes& all, std::string_view call) {
  std::vector<T> objects;
  objects.reserve(all.size());
  for (const auto& bytes : all) objects.push_back(unpack_object<T>(bytes, call));
  list = std::move(objects);
}

}  // namespace group

struct BroadcastObjectOptions {
  std::optional<int> src = {};  ///< default without group_src: 0
  Group group = nullptr;
  std::optional<at::Device> device = {};
  std::optional<int> group_src = {};
  std::optional<Duration> timeout = {};
};
/// Copies the root's list to all members. Every list has the same length.
template <class T>
void broadcast_object_list(std::vector<T>& object_list,
                           const BroadcastObjectOptions& options = {}) {
  const auto all = group::broadcast_objects(
      {options.group, options.device, options.timeout, group::object_type<T>()},
      {options.src, options.group_src}, object_list.size(),
      [&] { return group::pack_all(object_list); });
  if (all) group::unpack_into(object_list, *all, "broadcast_object_list");
}

struct ObjectOptions {
  Group group = nullptr;
  std::optional<Duration> timeout = {};
};
/// object_list[r] receives the object of rank r. The list is as long as the group.
template <class T>
void all_gather_object(std::vector<T>& object_list, const std::type_identity_t<T>& obj,
                       const ObjectOptions& options = {}) {
  const auto all = group::all_gather_objects(
      {options.group, {}, options.timeout, group::object_type<T>()}, object_list.size(),
      [&] { return group::ObjectBytes{group::pack_object(obj)}; });
  if (all) group::unpack_into(object_list, *all, "all_gather_object");
}

struct GatherObjectOptions {
  std::optional<int> dst = {};  ///< default without group_dst: 0
  Group group = nullptr;
  std::optional<int> group_dst = {};
  std::optional<Duration> timeout = {};
};
/// On dst, the list is as long as the group and entry r receives the object of rank r. Elsewhere it
/// is null or empty.
template <class T>
void gather_object(const T& obj, std::type_identity_t<std::vector<T>>* object_gather_list = nullptr,
                   const GatherObjectOptions& options = {}) {
  const auto all =
      group::gather_objects({options.group, {}, options.timeout, group::object_type<T>()},
                            {options.dst, options.group_dst},
                            object_gather_list == nullptr ? 0 : object_gather_list->size(),
                            [&] { return group::ObjectBytes{group::pack_object(obj)}; });
  if (all) group::unpack_into(*object_gather_list, *all, "gather_object");
}

struct ScatterObjectOptions {
  std::optional<int> src = {};  ///< absent, and no group_src: 0
  Group group = nullptr;
  std::optional<int> group_src = {};
  std::optional<Duration> timeout = {};
};
/// Entry r of the root's input list becomes entry 0 of rank r's output list; that list's other
/// entries are unchanged. The input list is ignored on other ranks.
template <class T>
void scatter_object_list(std::vector<T>& scatter_object_output_list,
                         const std::type_identity_t<std::vector<T>>& scatter_object_input_list = {},
                         const ScatterObjectOptions& options = {}) {
  const auto mine = group::scatter_objects(
      {options.group, {}, options.timeout, group::object_type<T>()},
      {options.src, options.group_src}, scatter_object_output_list.size(),
      scatter_object_input_list.size(), [&] { return group::pack_all(scatter_object_input_list); });
  if (mine)
    scatter_object_output_list.front() = group::unpack_object<T>(*mine, "scatter_object_list");
}

struct SendObjectOptions {
  std::optional<int> dst = {};
  Group group = nullptr;
  std::optional<at::Device> device = {};
  std::optional<int> group_dst = {};
  std::optional<Duration> timeout = {};
};
/// Sends a list of objects to one rank, which calls recv_object_list.
template <class T>
void send_object_list(const std::vector<T>& object_list, const SendObjectOptions& options) {
  group::send_objects({options.group, options.device, options.timeout, group::object_type<T>()},
                      {options.dst, options.group_dst},
                      [&] { return group::pack_all(object_list); });
}

struct RecvObjectOptions {
  std::optional<int> src = {};  ///< default without group_src: any rank
  Group group = nullptr;
  std::optional<at::Device> device = {};
  std::optional<int> group_src = {};
  std::optional<Duration> timeout = {};
};
/// The list must be as long as the one sent. Returns the sender's rank in the default group; -1 on
/// a non-member.
template <class T>
int recv_object_list(std::vector<T>& object_list, const RecvObjectOptions& options = {}) {
  const auto came =
      group::recv_objects({options.group, options.device, options.timeout, group::object_type<T>()},
                          {options.src, options.group_src}, object_list.size());
  if (came.source >= 0) group::unpack_into(object_list, came.objects, "recv_object_list");
  return came.source;
}

}  // namespace muster
