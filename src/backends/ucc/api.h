// SPDX-License-Identifier: BSD-3-Clause
/// The part of UCC's public interface that muster uses, declared here so that nothing of UCC is
/// needed to build. Names, values and the order of fields are those of ucc/api/ucc.h 1.9.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace muster::ucc {

/// The version whose structures these are.
inline constexpr unsigned kApiMajor = 1, kApiMinor = 9;

using UccStatus = int;  // negative: an error
inline constexpr UccStatus kOk = 0, kInProgress = 1, kErrorTimedOut = -8, kErrorUnsupported = -1,
                           kErrorNoMessage = -6;

struct UccLib;
struct UccLibConfig;
struct UccContext;
struct UccContextConfig;
struct UccTeam;
/// The head of a request; UCC changes it while `ucc_context_progress` runs.
struct UccRequest {
  UccStatus status;
};

enum class UccColl : std::uint32_t {
  allgather = 1U << 0,
  allreduce = 1U << 2,
  alltoallv = 1U << 4,
  barrier = 1U << 5,
  bcast = 1U << 6,
  gather = 1U << 9,
  reduce = 1U << 11,
  reduce_scatterv = 1U << 13,
  scatterv = 1U << 15,
};

enum class UccOp : std::uint32_t { sum, prod, max, min, land, lor, lxor, band, bor, bxor };

enum class UccType : std::uint64_t {
  int8 = 0 << 3,
  int16 = 1 << 3,
  int32 = 2 << 3,
  int64 = 3 << 3,
  uint8 = 5 << 3,
  uint16 = 6 << 3,
  uint32 = 7 << 3,
  uint64 = 8 << 3,
  float32 = 11 << 3,
  float64 = 12 << 3,
};

/// An allgather by other means than UCC, by which it makes a team.
struct UccOob {
  UccStatus (*allgather)(void* mine, void* all, std::size_t bytes, void* info, void** request);
  UccStatus (*test)(void* request);
  UccStatus (*free)(void* request);
  void* info;
  std::uint32_t members;
  std::uint32_t rank;
};

struct UccLibParams {
  std::uint64_t mask;
  std::uint32_t thread_mode;
  std::uint64_t coll_types, reduction_types;
  std::uint32_t sync_type;
};
inline constexpr std::uint64_t kLibThreadMode = 1;  // bit of the mask
inline constexpr std::uint32_t kThreadMultiple = 2;

struct UccMemory {
  void* segments;
  std::uint64_t count;
};

struct UccContextParams {
  std::uint64_t mask;
  std::uint32_t type, sync_type;
  UccOob oob;
  std::uint64_t id;
  UccMemory memory;
};

struct UccTeamParams {
  std::uint64_t mask, flags;
  std::uint32_t ordering;
  std::uint64_t outstanding, rank;
  std::uint64_t* ranks;
  std::uint32_t rank_range;
  std::uint64_t size;
  std::uint32_t sync_type;
  UccOob oob;
  void* point_to_point[5];
  UccMemory memory;
  struct {
    std::uint32_t type;
    std::uint64_t count;
    std::uint64_t data[2];
  } map;
  std::uint64_t id;
};
inline constexpr std::uint64_t kTeamRank = 1 << 2, kTeamRankRange = 1 << 4, kTeamOob = 1 << 7;

/// One side of a collective. `counts` and `places` are used by those with lists ("v").
struct UccBuffer {
  void* data;
  std::uint64_t count;
  UccType type;
  std::uint32_t memory;  // 0: of the host
};
struct UccBufferV {
  void* data;
  const std::uint64_t *counts, *places;
  UccType type;
  std::uint32_t memory;
};
union UccSide {
  UccBuffer whole;
  UccBufferV list;
};

struct UccArgs {
  std::uint64_t mask;
  UccColl coll;
  UccSide in, out;
  UccOp op;
  std::uint64_t flags, root;
  std::uint32_t error_type;
  std::uint16_t tag;
  void* work_buffer;
  void* callback[2];
  double timeout;
  std::uint64_t active_set[3];
  void* memory_handles[2];
};
inline constexpr std::uint64_t kArgsFlags = 1;  // bit of the mask
inline constexpr std::uint64_t kInPlace = 1 << 0, kCount64 = 1 << 2, kPlaces64 = 1 << 3;

static_assert(sizeof(UccOob) == 40 && sizeof(UccLibParams) == 40 && sizeof(UccContextParams) == 80);
static_assert(sizeof(UccTeamParams) == 208 && sizeof(UccBufferV) == 40 && sizeof(UccArgs) == 200);

/// The functions of libucc.
struct UccFunctions {
  void (*get_version)(unsigned*, unsigned*, unsigned*);
  const char* (*status_string)(UccStatus);
  UccStatus (*lib_config_read)(const char*, const char*, UccLibConfig**);
  void (*lib_config_release)(UccLibConfig*);
  UccStatus (*init_version)(unsigned, unsigned, const UccLibParams*, UccLibConfig*, UccLib**);
  UccStatus (*context_config_read)(UccLib*, const char*, UccContextConfig**);
  void (*context_config_release)(UccContextConfig*);
  UccStatus (*context_create)(UccLib*, const UccContextParams*, UccContextConfig*, UccContext**);
  UccStatus (*context_progress)(UccContext*);
  UccStatus (*team_create_post)(UccContext**, std::uint32_t, const UccTeamParams*, UccTeam**);
  UccStatus (*team_create_test)(UccTeam*);
  UccStatus (*team_destroy)(UccTeam*);
  UccStatus (*collective_init)(UccArgs*, UccRequest**, UccTeam*);
  UccStatus (*collective_post)(UccRequest*);
  UccStatus (*collective_finalize)(UccRequest*);
};

struct UccFunction {
  const char* name;
  std::size_t offset;  // in UccFunctions
};
inline constexpr UccFunction kUccFunctions[] = {
    {"ucc_get_version", offsetof(UccFunctions, get_version)},
    {"ucc_status_string", offsetof(UccFunctions, status_string)},
    {"ucc_lib_config_read", offsetof(UccFunctions, lib_config_read)},
    {"ucc_lib_config_release", offsetof(UccFunctions, lib_config_release)},
    {"ucc_init_version", offsetof(UccFunctions, init_version)},
    {"ucc_context_config_read", offsetof(UccFunctions, context_config_read)},
    {"ucc_context_config_release", offsetof(UccFunctions, context_config_release)},
    {"ucc_context_create", offsetof(UccFunctions, context_create)},
    {"ucc_context_progress", offsetof(UccFunctions, context_progress)},
    {"ucc_team_create_post", offsetof(UccFunctions, team_create_post)},
    {"ucc_team_create_test", offsetof(UccFunctions, team_create_test)},
    {"ucc_team_destroy", offsetof(UccFunctions, team_destroy)},
    {"ucc_collective_init", offsetof(UccFunctions, collective_init)},
    {"ucc_collective_post", offsetof(UccFunctions, collective_post)},
    {"ucc_collective_finalize", offsetof(UccFunctions, collective_finalize)},
};

}  // namespace muster::ucc
