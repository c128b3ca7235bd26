// SPDX-License-Identifier: BSD-3-Clause
// libnccl_standin.so: NCCL's functions, as far as muster uses them, over host memory. It stands in
// for NCCL in tests without a GPU: tensors are on the device of testing/deferred_device.h, and
// a stream is a `NativeStream` of it.
//
// Variables, read when a communicator is made, let it misbehave. R is a rank of the communicator, N
// the number of one of its operations, from 1:
//   NCCL_STANDIN_HANG=R:N         the operation does nothing until the communicator is aborted
//   NCCL_STANDIN_LATE=R:N:MS      it begins so many milliseconds later
//   NCCL_STANDIN_ASYNC_ERROR=R:N  after it (while it hangs, with NCCL_STANDIN_HANG for the same
//                                 operation), the communicator has an asynchronous error: later
//                                 calls are refused
//   NCCL_STANDIN_DEAF=R:N         the operation ends after musterStandinRelease() only, and an
//                                 abort waits for it
//   NCCL_STANDIN_KEPT=R:N         ncclGroupEnd does not return before musterStandinRelease()
//   NCCL_STANDIN_IN_PROGRESS=K    each enqueueing is in progress for K looks at the communicator,
//                                 and only then on its stream; 1 if it is not set
//   NCCL_STANDIN_ROOM=K           a device has room for K kernels (device_room.h); 0: for all; 3 if
//                                 it is not set: two groups and their messages
//   NCCL_STANDIN_SEES_DEATH=1     the death of a rank's process is an asynchronous error
//   NCCL_STANDIN_ABORT_TOGETHER=0 aborting a communicator does not wait for its other ranks
//   NCCL_STANDIN_INIT_ABSENT=R    that rank never gets to the others; ncclCommInit is in progress
// and, read when a communicator grows, R being a rank of the new one:
//   NCCL_STANDIN_GROW_ERROR=R     ncclCommGrow fails on that rank
//   NCCL_STANDIN_GROW_ABSENT=R    that rank never gets to the others; ncclCommGrow is in progress
// and, read at each reduction of float8:
//   NCCL_STANDIN_CAPABILITY=N     the devices are smN, rather than sm90
// Compiled with STANDIN_VERSION and STANDIN_LACKS_CONFIG or STANDIN_LACKS_PREMUL it is an older
// version without these functions, and without those that came later.
//
// It tells of this process: musterStandinCalls(FUNCTION), how often it called one of those
// that make, divide and stop communicators, or "kernels"; musterStandinRunning(DEVICE) and
// musterStandinWaiting(DEVICE), the kernels that have room there and that wait for it;
// musterStandinViolation(), the first use that NCCL's documents forbid since it was last asked;
// musterStandinKept(), the threads that NCCL_STANDIN_KEPT and NCCL_STANDIN_DEAF keep;
// musterStandinConfig(), the fields that are set of the newest communicator's configuration.
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backends/nccl/library.h"
#include "comm.h"
#include "device_room.h"
#include "kernels.h"
#include "reductions.h"

#ifndef STANDIN_VERSION
#define STANDIN_VERSION 23007
#endif
#define STANDIN_EXPORT extern "C" __attribute__((visibility("default")))

namespace muster::standin {
namespace {

using nccl::NcclReduction;
using nccl::Type;

/// Every rank's `bytes` bytes; empty if aborted.
std::vector<std::vector<std::byte>> gathered(Comm& comm, const void* data, std::size_t bytes) {
  const int ranks = comm.boxes.ranks(), me = comm.boxes.rank();
  std::vector<std::vector<std::byte>> all(static_cast<std::size_t>(ranks));
  std::vector<NcclTransfer> transfers;
  std::vector<std::byte> mine(static_cast<const std::byte*>(data),
                              static_cast<const std::byte*>(data) + bytes);
  for (int peer = 0; peer < ranks; ++peer) {
    auto& theirs = all[static_cast<std::size_t>(peer)];
    theirs = mine;
    if (peer == me) continue;
    transfers.push_back({peer, true, mine.data(), bytes});
    transfers.push_back({peer, false, theirs.data(), bytes});
  }
  if (!comm.exchange(std::move(transfers))) return {};
  if (bytes > 0 && std::memcmp(mine.data(), data, bytes) != 0)
    note_violation("the input of a collective changed while it ran");
  return all;
}

/// Reduces all ranks' inputs; writes `count` elements from element `first` on, if `out` is there.
void reduce_all(Comm& comm, const void* input, std::size_t total, std::byte* out, std::size_t first,
                std::size_t count, Type type, NcclReduction reduction) {
  const auto factor_of = [&](NcclReduction made) {
    const std::lock_guard lock(comm.mutex);
    return comm.premul.at(static_cast<int>(made));
  };
  std::vector<double> factors;
  const bool premul = static_cast<int>(reduction) > static_cast<int>(NcclReduction::avg);
  if (premul) {
    const double mine = factor_of(reduction);
    for (const auto& one : gathered(comm, &mine, sizeof mine)) {
      double factor = 0;
      std::memcpy(&factor, one.data(), sizeof factor);
      factors.push_back(factor);
    }
  }
  const auto all = gathered(comm, input, total * bytes_of(type));
  if (out == nullptr || all.empty()) return;
  std::vector<const std::byte*> parts;
  for (const auto& one : all) parts.push_back(one.data() + first * bytes_of(type));
  reduce(parts, premul ? &factors : nullptr, out, count, type,
         premul ? NcclReduction::sum : reduction);
}

[[maybe_unused]] int current_device() {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1).getDevice().index();
}

[[maybe_unused]] ErrorCode open_comm(nccl::CommHandle* handle, int ranks, const std::string& name,
                                     int rank, int device) {
  try {
    auto* const comm = new Comm(name, ranks, rank, device);
    comm->looks_left = comm->looks_in_progress;
    *handle = reinterpret_cast<nccl::CommHandle>(comm);
    return nccl::kInProgress;
  } catch (const std::exception& error) {
    last_error() = error.what();
    return kInvalidUsage;
  }
}

[[maybe_unused]] ErrorCode init_comm(nccl::CommHandle* handle, int ranks, const std::string& name,
                                     int rank) {
  const bool absent = read_number("NCCL_STANDIN_INIT_ABSENT", -1) == rank;
  return open_comm(handle, ranks, name + (absent ? ".absent" : ""), rank, current_device());
}

/// Whether NCCL refuses the communicator for that. Looks once all ranks are there.
bool shares_a_device(Comm& comm) {
  if (comm.may_share_devices || !comm.boxes.all_here()) return false;
  if (!comm.are_devices_known) {
    comm.has_shared_device = comm.boxes.share_a_device();
    comm.are_devices_known = true;
  }
  return comm.has_shared_device;
}

std::mutex config_mutex;  // guards last_config
std::string last_config;

/// Keeps the fields that are set, as far as the version that it says it has goes.
[[maybe_unused]] void note_config(const nccl::Config& config) {
  std::string text;
  const auto add = [&](const char* name, int value) {
    if (value != nccl::Config::kUndefined)
      text += std::string(text.empty() ? "" : " ") + name + "=" + std::to_string(value);
  };
  add("blocking", config.blocking);
  add("cgaClusterSize", config.cga_cluster_size);
  add("minCTAs", config.min_ctas);
  add("maxCTAs", config.max_ctas);
  add("splitShare", config.split_share);
  if (config.net_name != nullptr) text += std::string(" netName=") + config.net_name;
  if (config.size >= sizeof(nccl::Config) && config.version >= nccl::Config::kLater) {
    add("trafficClass", config.traffic_class);
    add("collnetEnable", config.collnet_enable);
    add("CTAPolicy", config.cta_policy);
    add("shrinkShare", config.shrink_share);
    add("nvlsCTAs", config.nvls_ctas);
    if (config.comm_name != nullptr) text += std::string(" commName=") + config.comm_name;
  }
  const std::lock_guard lock(config_mutex);
  last_config = text;
}

[[maybe_unused]] std::string growth_name(const Comm& parent) {
  return parent.name + ".g" + std::to_string(parent.divisions + 1);
}

/// ncclCommGrow on a rank that is no member of the parent.
[[maybe_unused]] ErrorCode join_growth(int ranks, const nccl::UniqueId* id, int rank,
                                       nccl::CommHandle* made) {
  if (id == nullptr || rank < 0 || rank >= ranks) {
    last_error() = "a rank that joins has other arguments";
    return kInvalidArgument;
  }
  if (!Mailboxes::is_begun(id->bytes)) {
    last_error() = "a rank that joins came before the parent's members";
    return kInternalError;
  }
  if (read_number("NCCL_STANDIN_GROW_ERROR", -1) == rank) {
    last_error() = "NCCL_STANDIN_GROW_ERROR says so";
    return kInternalError;
  }
  const bool absent = read_number("NCCL_STANDIN_GROW_ABSENT", -1) == rank;
  return open_comm(made, ranks, std::string(id->bytes) + (absent ? ".absent" : ""), rank,
                   current_device());
}

}  // namespace
}  // namespace muster::standin

using namespace muster::standin;
namespace nccl = muster::nccl;

STANDIN_EXPORT const char* musterStandinConfig() {
  static thread_local std::string text;
  const std::lock_guard lock(config_mutex);
  text = last_config;
  return text.c_str();
}
STANDIN_EXPORT const char* musterStandinDevice() { return "deferred"; }

// All processes see the same devices, so a device's number says which it is.
STANDIN_EXPORT int musterStandinUuid(int device, std::uint8_t* uuid) {
  std::memset(uuid, 0x5a, 16);
  uuid[15] = static_cast<std::uint8_t>(device);
  return 0;
}

STANDIN_EXPORT int musterStandinCapability(int) {
  return read_number("NCCL_STANDIN_CAPABILITY", 90);
}

STANDIN_EXPORT int musterStandinCalls(const char* function) { return counted(function); }
STANDIN_EXPORT int musterStandinRunning(int device) { return DeviceRoom::of(device).running(); }
STANDIN_EXPORT int musterStandinWaiting(int device) { return DeviceRoom::of(device).waiting(); }
STANDIN_EXPORT int musterStandinKept() { return kept_threads(); }
STANDIN_EXPORT void musterStandinRelease() { release_kept_threads(); }
STANDIN_EXPORT const char* musterStandinViolation() {
  static thread_local std::string text;
  text = violation();
  return text.c_str();
}

STANDIN_EXPORT ErrorCode ncclGetVersion(int* version) {
  *version = STANDIN_VERSION;
  return nccl::kSuccess;
}
STANDIN_EXPORT const char* ncclGetErrorString(ErrorCode code) {
  return code == kRemoteError ? "remote process exited or there was a network error"
                              : "invalid usage";
}
STANDIN_EXPORT const char* ncclGetLastError(nccl::CommHandle) { return last_error().c_str(); }
STANDIN_EXPORT ErrorCode ncclGetUniqueId(nccl::UniqueId* id) {
  count("ncclGetUniqueId");
  std::random_device random;
  std::snprintf(id->bytes, sizeof id->bytes, "/nccl_standin.%08x%08x", random(), random());
  return nccl::kSuccess;
}
#ifndef STANDIN_LACKS_CONFIG
STANDIN_EXPORT ErrorCode ncclCommInitRankConfig(nccl::CommHandle* comm, int ranks,
                                                nccl::UniqueId id, int rank, nccl::Config* config) {
  count("ncclCommInitRankConfig");
  note_config(*config);
  return init_comm(comm, ranks, id.bytes, rank);
}
#endif
#if STANDIN_VERSION >= 22300
/// Ranks whose ids are others, or in another order, do not meet.
STANDIN_EXPORT ErrorCode ncclCommInitRankScalable(nccl::CommHandle* comm, int ranks, int rank,
                                                  int id_count, nccl::UniqueId* ids,
                                                  nccl::Config* config) {
  count("ncclCommInitRankScalable");
  note_config(*config);
  if (id_count < 1 || id_count > ranks) {
    last_error() = "more ids than ranks, or none";
    return kInvalidArgument;
  }
  std::string all;
  for (int i = 0; i < id_count; ++i) all += ids[i].bytes;
  return init_comm(comm, ranks,
                   ids[0].bytes + ("." + std::to_string(std::hash<std::string>()(all))), rank);
}
#endif
#if STANDIN_VERSION >= 21800
STANDIN_EXPORT ErrorCode ncclCommSplit(nccl::CommHandle handle, int color, int key,
                                       nccl::CommHandle* made, nccl::Config* config) {
  count("ncclCommSplit");
  note_config(*config);
  Comm* const parent = comm_of(handle);
  if (is_busy(*parent)) return kInvalidArgument;
  const std::string name = parent->name + ".s" + std::to_string(++parent->divisions);
  *made = nullptr;
  parent->dividing = true;
  ++parent->running;
  std::thread([=] {
    struct Part {
      int color, key;
    };
    const Part mine{color, key};
    std::vector<std::pair<int, int>> members;  // key and rank
    const auto all = gathered(*parent, &mine, sizeof mine);
    for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
      Part part;
      std::memcpy(&part, all[static_cast<std::size_t>(rank)].data(), sizeof part);
      if (part.color == color) members.emplace_back(part.key, rank);
    }
    std::sort(members.begin(), members.end());
    const auto me = std::find(members.begin(), members.end(), std::pair(key, parent->boxes.rank()));
    if (color >= 0 && me != members.end())
      open_comm(made, static_cast<int>(members.size()), name + "." + std::to_string(color),
                static_cast<int>(me - members.begin()), parent->device);
    parent->change([=] {
      parent->dividing = false;
      --parent->running;
    });
  }).detach();
  return nccl::kInProgress;
}
#endif
#if STANDIN_VERSION >= 22700
STANDIN_EXPORT ErrorCode ncclCommShrink(nccl::CommHandle handle, int* excluded, int excluded_count,
                                        nccl::CommHandle* made, nccl::Config* config, int) {
  count("ncclCommShrink");
  note_config(*config);
  Comm* const parent = comm_of(handle);
  if (is_busy(*parent)) return kInvalidArgument;
  const int me = parent->boxes.rank();
  const auto before =
      std::count_if(excluded, excluded + excluded_count, [&](int rank) { return rank < me; });
  return open_comm(made, parent->boxes.ranks() - excluded_count,
                   parent->name + ".k" + std::to_string(++parent->divisions),
                   me - static_cast<int>(before), parent->device);
}
#endif
#if STANDIN_VERSION >= 22800
STANDIN_EXPORT ErrorCode ncclCommRevoke(nccl::CommHandle handle, int) {
  count("ncclCommRevoke");
  revoke_comm(*comm_of(handle));
  return nccl::kInProgress;
}
#endif
#if STANDIN_VERSION >= 22900
STANDIN_EXPORT ErrorCode ncclCommGetUniqueId(nccl::CommHandle handle, nccl::UniqueId* id) {
  count("ncclCommGetUniqueId");
  Comm* const parent = comm_of(handle);
  if (std::exchange(parent->has_growth_id, true)) {
    last_error() = "an earlier id has not been used";
    return kInvalidUsage;
  }
  std::snprintf(id->bytes, sizeof id->bytes, "%s", growth_name(*parent).c_str());
  return nccl::kSuccess;
}
STANDIN_EXPORT ErrorCode ncclCommGrow(nccl::CommHandle handle, int ranks, const nccl::UniqueId* id,
                                      int rank, nccl::CommHandle* made, nccl::Config* config) {
  count("ncclCommGrow");
  note_config(*config);
  *made = nullptr;
  Comm* const parent = comm_of(handle);
  if (parent == nullptr) return join_growth(ranks, id, rank, made);
  if (is_busy(*parent)) return kInvalidArgument;
  const int old = parent->boxes.ranks(), me = parent->boxes.rank();
  const bool made_the_id = id != nullptr && growth_name(*parent) == id->bytes;
  if (rank != -1 || ranks <= old || made_the_id != parent->has_growth_id) {
    last_error() = "a member of the parent has other arguments";
    return kInvalidArgument;
  }
  const std::string name = growth_name(*parent);
  ++parent->divisions;
  if (read_number("NCCL_STANDIN_GROW_ERROR", -1) == me) {
    last_error() = "NCCL_STANDIN_GROW_ERROR says so";
    return kInternalError;
  }
  parent->has_growth_id = false;
  return open_comm(made, ranks, name, me, parent->device);
}
#endif
STANDIN_EXPORT ErrorCode ncclCommAbort(nccl::CommHandle handle) {
  count("ncclCommAbort");
  abort_comm(comm_of(handle));
  return nccl::kSuccess;
}
STANDIN_EXPORT ErrorCode ncclCommDestroy(nccl::CommHandle handle) {
  destroy_comm(comm_of(handle));
  return nccl::kSuccess;
}
STANDIN_EXPORT ErrorCode ncclCommGetAsyncError(nccl::CommHandle handle, ErrorCode* error) {
  Comm* const comm = comm_of(handle);
  if (shares_a_device(*comm)) {
    last_error() = "Multiple Ranks are using the same GPU/Partition";
    *error = kInvalidUsage;
    return nccl::kSuccess;
  }
  if (comm->revoked) {
    *error = comm->running > 0 ? nccl::kInProgress : nccl::kSuccess;
    return nccl::kSuccess;
  }
  const bool in_progress = !comm->boxes.all_here() || comm->dividing || look_for_progress(*comm);
  *error = comm->has_error ? kRemoteError : in_progress ? nccl::kInProgress : nccl::kSuccess;
  return nccl::kSuccess;
}
STANDIN_EXPORT ErrorCode ncclGroupStart() {
  begin_group();
  return nccl::kSuccess;
}
STANDIN_EXPORT ErrorCode ncclGroupEnd() { return end_group(); }

STANDIN_EXPORT ErrorCode ncclAllReduce(const void* in, void* out, std::size_t count, Type type,
                                       NcclReduction reduction, nccl::CommHandle comm,
                                       nccl::StreamHandle stream) {
  return enqueue_collective(comm, stream, [=](Comm& on) {
    reduce_all(on, in, count, static_cast<std::byte*>(out), 0, count, type, reduction);
  });
}
STANDIN_EXPORT ErrorCode ncclReduce(const void* in, void* out, std::size_t count, Type type,
                                    NcclReduction reduction, int root, nccl::CommHandle comm,
                                    nccl::StreamHandle stream) {
  return enqueue_collective(comm, stream, [=](Comm& on) {
    auto* const to = on.boxes.rank() == root ? static_cast<std::byte*>(out) : nullptr;
    reduce_all(on, in, count, to, 0, count, type, reduction);
  });
}
STANDIN_EXPORT ErrorCode ncclReduceScatter(const void* in, void* out, std::size_t count, Type type,
                                           NcclReduction reduction, nccl::CommHandle comm,
                                           nccl::StreamHandle stream) {
  return enqueue_collective(comm, stream, [=](Comm& on) {
    const auto rank = static_cast<std::size_t>(on.boxes.rank());
    reduce_all(on, in, count * static_cast<std::size_t>(on.boxes.ranks()),
               static_cast<std::byte*>(out), rank * count, count, type, reduction);
  });
}
STANDIN_EXPORT ErrorCode ncclBroadcast(const void* in, void* out, std::size_t count, Type type,
                                       int root, nccl::CommHandle comm, nccl::StreamHandle stream) {
  return enqueue_collective(comm, stream, [=](Comm& on) {
    const std::size_t bytes = count * bytes_of(type);
    std::vector<NcclTransfer> transfers;
    auto* const data = static_cast<std::byte*>(out);
    if (on.boxes.rank() != root) {
      transfers.push_back({root, false, data, bytes});
    } else {
      if (in != out) std::memcpy(out, in, bytes);
      for (int peer = 0; peer < on.boxes.ranks(); ++peer)
        if (peer != root) transfers.push_back({peer, true, data, bytes});
    }
    on.exchange(std::move(transfers));
  });
}
STANDIN_EXPORT ErrorCode ncclAllGather(const void* in, void* out, std::size_t count, Type type,
                                       nccl::CommHandle comm, nccl::StreamHandle stream) {
  return enqueue_collective(comm, stream, [=](Comm& on) {
    const std::size_t bytes = count * bytes_of(type);
    const auto all = gathered(on, in, bytes);
    for (std::size_t rank = 0; rank < all.size(); ++rank)
      std::memcpy(static_cast<std::byte*>(out) + rank * bytes, all[rank].data(), bytes);
  });
}
STANDIN_EXPORT ErrorCode ncclSend(const void* data, std::size_t count, Type type, int peer,
                                  nccl::CommHandle comm, nccl::StreamHandle stream) {
  return enqueue_message(
      comm, stream,
      {peer, true, static_cast<std::byte*>(const_cast<void*>(data)), count * bytes_of(type), true});
}
STANDIN_EXPORT ErrorCode ncclRecv(void* data, std::size_t count, Type type, int peer,
                                  nccl::CommHandle comm, nccl::StreamHandle stream) {
  return enqueue_message(
      comm, stream, {peer, false, static_cast<std::byte*>(data), count * bytes_of(type), true});
}

#ifndef STANDIN_LACKS_PREMUL
STANDIN_EXPORT ErrorCode ncclRedOpCreatePreMulSum(NcclReduction* made, void* scalar, Type type, int,
                                                  nccl::CommHandle handle) {
  Comm* const comm = comm_of(handle);
  const double factor = number_at(scalar, type);
  const std::lock_guard lock(comm->mutex);
  const int number =
      static_cast<int>(NcclReduction::avg) + 1 + static_cast<int>(comm->premul.size());
  comm->premul[number] = factor;
  *made = static_cast<NcclReduction>(number);
  return nccl::kSuccess;
}
// The factor stays: an operation that is enqueued may use it later.
STANDIN_EXPORT ErrorCode ncclRedOpDestroy(NcclReduction, nccl::CommHandle) {
  return nccl::kSuccess;
}
#endif
