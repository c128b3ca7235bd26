// SPDX-License-Identifier: BSD-3-Clause
/// NCCL's functions, by our own declarations: neither NCCL's header nor CUDA's is needed to build.
///
/// `backends/nccl/` carries out calls on CUDA tensors by NCCL. From bottom to top: `library.h`
/// finds NCCL at run time, `rank_device.h` tells ranks that share a device, `communicator.h` owns
/// one of its communicators, `transfers.h` enqueues one call on a communicator, `lane.h` opens the
/// communicators of collectives in the background, `message_order.h`, `message_batch.h` and
/// `device_messages.h` launch messages, `link_exchange.h` carries what members tell each other
/// beside NCCL, `call_watch.h` compares the members' calls and enforces deadlines, `nccl_backend.h`
/// is the backend. May include `group/` and everything below it. Its tests, which run it without a
/// GPU: `ctest -R '^(nccl|nccl_model|nccl_standin)'`.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "muster/status.h"

namespace muster::nccl {
/// ncclResult_t.
using ErrorCode = int;
inline constexpr ErrorCode kSuccess = 0;
inline constexpr ErrorCode kInProgress = 7;

/// ncclComm_t and cudaStream_t.
using CommHandle = struct OpaqueComm*;
using StreamHandle = void*;

/// ncclDataType_t.
enum class Type : int {
  int8 = 0,
  uint8 = 1,
  int32 = 2,
  uint32 = 3,
  int64 = 4,
  uint64 = 5,
  float16 = 6,
  float32 = 7,
  float64 = 8,
  bfloat16 = 9,
  float8_e4m3 = 10,  ///< this and the next: NCCL 2.24
  float8_e5m2 = 11,
};

/// ncclRedOp_t; values above `avg` are operations made by ncclRedOpCreatePreMulSum.
enum class NcclReduction : int { sum = 0, product = 1, max = 2, min = 3, avg = 4 };

struct UniqueId {
  char bytes[128];
};

/// ncclConfig_t of NCCL 2.27. Every version takes it as what it is by its size and version: by
/// default as that of 2.18, which ends with `split_share`.
struct Config {
  static constexpr int kUndefined = -2147483647 - 1;
  static constexpr unsigned kLater = 22700;  ///< of NCCL with the later fields
  std::size_t size = kSizeBefore;
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
  int traffic_class = kUndefined;
  const char* comm_name = nullptr;
  int collnet_enable = kUndefined;
  int cta_policy = kUndefined;
  int shrink_share = kUndefined;
  int nvls_ctas = kUndefined;

 private:
  static constexpr std::size_t kSizeBefore = 48;
};
static_assert(offsetof(Config, traffic_class) == 44 && sizeof(Config) == 72);

/// Null: the library lacks the function.
struct Functions {
  ErrorCode (*get_version)(int* version);
  const char* (*get_error_string)(ErrorCode);
  const char* (*get_last_error)(CommHandle);
  ErrorCode (*get_unique_id)(UniqueId*);
  ErrorCode (*comm_init_rank_config)(CommHandle*, int ranks, UniqueId, int rank, Config*);
  ErrorCode (*comm_init_rank_scalable)(CommHandle*, int ranks, int rank, int ids, UniqueId*,
                                       Config*);
  ErrorCode (*comm_destroy)(CommHandle);
  ErrorCode (*comm_abort)(CommHandle);
  ErrorCode (*comm_get_async_error)(CommHandle, ErrorCode*);
  ErrorCode (*group_start)();
  ErrorCode (*group_end)();
  ErrorCode (*all_reduce)(const void*, void*, std::size_t count, Type, NcclReduction, CommHandle,
                          StreamHandle);
  ErrorCode (*reduce)(const void*, void*, std::size_t count, Type, NcclReduction, int root,
                      CommHandle, StreamHandle);
  ErrorCode (*broadcast)(const void*, void*, std::size_t count, Type, int root, CommHandle,
                         StreamHandle);
  ErrorCode (*all_gather)(const void*, void*, std::size_t count, Type, CommHandle, StreamHandle);
  ErrorCode (*reduce_scatter)(const void*, void*, std::size_t count, Type, NcclReduction,
                              CommHandle, StreamHandle);
  ErrorCode (*send)(const void*, std::size_t count, Type, int peer, CommHandle, StreamHandle);
  ErrorCode (*recv)(void*, std::size_t count, Type, int peer, CommHandle, StreamHandle);
  ErrorCode (*create_premul_sum)(NcclReduction*, void* scalar, Type, int residence, CommHandle);
  ErrorCode (*destroy_reduction)(NcclReduction, CommHandle);
  ErrorCode (*comm_split)(CommHandle, int color, int key, CommHandle*, Config*);
  ErrorCode (*comm_shrink)(CommHandle, int* excluded, int count, CommHandle*, Config*, int flags);
  ErrorCode (*comm_revoke)(CommHandle, int flags);
  ErrorCode (*comm_get_unique_id)(CommHandle, UniqueId*);
  ErrorCode (*comm_grow)(CommHandle, int ranks, const UniqueId*, int rank, CommHandle*, Config*);
};

/// One function of the table.
struct FunctionRow {
  const char* name;
  std::size_t offset;  ///< in `Functions`
  bool needed;         ///< without it the library is refused; otherwise only what needs it
  const char* since;   ///< NCCL's first version with it
};

inline constexpr FunctionRow kFunctions[] = {
    {"ncclGetVersion", offsetof(Functions, get_version), true, "2.0"},
    {"ncclGetErrorString", offsetof(Functions, get_error_string), true, "2.0"},
    {"ncclGetLastError", offsetof(Functions, get_last_error), true, "2.13"},
    {"ncclGetUniqueId", offsetof(Functions, get_unique_id), true, "2.0"},
    {"ncclCommInitRankConfig", offsetof(Functions, comm_init_rank_config), true, "2.14"},
    {"ncclCommInitRankScalable", offsetof(Functions, comm_init_rank_scalable), false, "2.23"},
    {"ncclCommDestroy", offsetof(Functions, comm_destroy), true, "2.0"},
    {"ncclCommAbort", offsetof(Functions, comm_abort), true, "2.4"},
    {"ncclCommGetAsyncError", offsetof(Functions, comm_get_async_error), true, "2.4"},
    {"ncclGroupStart", offsetof(Functions, group_start), true, "2.0"},
    {"ncclGroupEnd", offsetof(Functions, group_end), true, "2.0"},
    {"ncclAllReduce", offsetof(Functions, all_reduce), true, "2.0"},
    {"ncclReduce", offsetof(Functions, reduce), true, "2.0"},
    {"ncclBroadcast", offsetof(Functions, broadcast), true, "2.2"},
    {"ncclAllGather", offsetof(Functions, all_gather), true, "2.0"},
    {"ncclReduceScatter", offsetof(Functions, reduce_scatter), true, "2.0"},
    {"ncclSend", offsetof(Functions, send), true, "2.7"},
    {"ncclRecv", offsetof(Functions, recv), true, "2.7"},
    {"ncclRedOpCreatePreMulSum", offsetof(Functions, create_premul_sum), false, "2.11"},
    {"ncclRedOpDestroy", offsetof(Functions, destroy_reduction), false, "2.11"},
    {"ncclCommSplit", offsetof(Functions, comm_split), false, "2.18"},
    {"ncclCommShrink", offsetof(Functions, comm_shrink), false, "2.27"},
    {"ncclCommRevoke", offsetof(Functions, comm_revoke), false, "2.28"},
    {"ncclCommGetUniqueId", offsetof(Functions, comm_get_unique_id), false, "2.29"},
    {"ncclCommGrow", offsetof(Functions, comm_grow), false, "2.29"},
};

/// cudaUUID_t of a GPU, or of this process's part of one (MIG).
using DeviceUuid = std::array<std::uint8_t, 16>;

/// A function of CUDA's driver. Null: the process has not loaded that, or it has no such function.
void* cuda_driver_function(const char* name);

// Finds and loads NCCL's library at run time.

/// Thread-safe. A loaded library stays loaded until the process ends.
class NcclLibrary {
 public:
  /// The process's NCCL, loaded at the first call: MUSTER_NCCL_LIBRARY, otherwise the copy that
  /// torch has loaded, the wheel beside torch, or the system's. A process never holds two copies:
  /// if MUSTER_NCCL_LIBRARY names another copy than the one loaded, that is an error.
  static const Result<std::shared_ptr<const NcclLibrary>>& of_process();
  /// Loads `path`. Code::unsupported names the missing file, or the function that it lacks and its
  /// version.
  static Result<std::shared_ptr<const NcclLibrary>> open(const std::string& path);

  const Functions& functions() const { return functions_; }
  /// "2.28.9"
  const std::string& version() const { return version_; }
  /// 22809
  int version_code() const { return version_code_; }
  const std::string& path() const { return path_; }
  /// "NCCL 2.28.9 (/path/libnccl.so.2)"
  std::string text() const { return "NCCL " + version_ + " (" + path_ + ")"; }
  /// The device type of its buffers: CUDA, except for the stand-in of tests.
  c10::DeviceType device() const { return device_; }
  /// The UUID of one of this process's devices, as CUDA's driver tells it. Empty: it is not known.
  std::optional<DeviceUuid> device_uuid(c10::DeviceIndex index) const;
  /// 90 of a GPU that is sm90; 0: it is not known.
  int compute_capability(c10::DeviceIndex index) const;
  /// Communicators can be revoked, and survivors go on with what is left of them.
  bool can_revoke() const {
    return functions_.comm_revoke != nullptr && functions_.comm_shrink != nullptr;
  }
  /// Code::unsupported if the library lacks the function of that name.
  Status need(const char* function) const;
  /// NCCL's words for `code`: "unhandled cuda error".
  std::string error_text(ErrorCode code) const;

 private:
  Functions functions_{};
  std::string version_, path_;
  int version_code_ = 0;
  c10::DeviceType device_ = c10::DeviceType::CUDA;
  // A library of tests has these.
  int (*standin_uuid_)(int device, std::uint8_t* uuid) = nullptr;
  int (*standin_capability_)(int device) = nullptr;
};

}  // namespace muster::nccl
