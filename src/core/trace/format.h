// SPDX-License-Identifier: BSD-3-Clause
/// The file that holds a rank's last calls: its layout, byte for byte, in the order and width of
/// the machine that wrote it.
///
///   FileHeader    one, at 0; `header_bytes` long
///   GroupSlot     `groups` of `group_bytes` each
///   Entry         `entries` (a power of two) of `entry_bytes` each: a ring, ticket t (from 1)
///                 stands in slot (t - 1) mod entries
///
/// The writer maps the file and changes it while readers look. Whatever changes is a 64-bit word,
/// written and read as an atomic. A stamp guards what is longer: it is odd while its owner writes,
/// and a reader that finds it odd, or changed after it has read, has a torn copy and drops it.
/// Times are nanoseconds of the host's monotonic clock; (mono_base, wall_base) are one instant on
/// both clocks.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace muster::trace {

inline constexpr std::uint64_t kMagic = 0x65636172'7473756d;  // "mustrace"
inline constexpr std::uint32_t kVersion = 3;
inline constexpr std::uint32_t kGroups =
    128;  ///< the last one collects all groups for which there is no slot
inline constexpr int kMembersShown = 1024;  ///< members of higher ranks are not recorded
inline constexpr std::uint32_t kMostEntries = 1u << 20;
inline constexpr int kMostRanks = 1 << 20;  // limit: a world size that is a mistake

enum class State : std::uint8_t { queued = 1, started, completed, failed };

struct FileHeader {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t header_bytes, group_bytes, groups, entry_bytes, entries;
  std::int32_t rank, world_size;
  std::int64_t pid;
  std::uint64_t pid_start;      ///< in clock ticks since boot, as /proc says; 0: not known
  std::uint64_t pid_namespace;  ///< its inode: `pid` means this process there alone; 0: not known
  std::int64_t wall_base_ns, mono_base_ns;
  char host[64];
  char boot[40];  ///< the kernel's boot id: whether the monotonic clock is the reader's own
  char job[128];
  char run_id[64];                    ///< the launcher's name for the job, --rdzv-id; empty: none
  alignas(64) std::uint64_t tickets;  ///< given to calls so far
  std::uint64_t group_count;
  std::uint64_t dropped;  ///< calls not recorded because another thread was writing their slot
  alignas(64) std::uint64_t failure_stamp;
  std::uint64_t failures;
  std::int64_t failure_at_ns;
  std::array<std::uint64_t, 128> failure;  ///< text of the last failed call, ended by zeros
};
inline constexpr std::uint32_t kHeaderBytes = 4096;
static_assert(sizeof(FileHeader) <= kHeaderBytes);

struct GroupSlot {
  std::uint64_t started;    ///< highest number of a collective that was called
  std::uint64_t completed;  ///< highest that has ended well
  std::int32_t size, rank;
  std::uint32_t occurrence;  ///< 1 for the first group of this name, ...
  std::uint32_t spare;
  char name[96];
  std::array<std::uint64_t, kMembersShown / 64> members;  ///< a bit per job rank
};
static_assert(sizeof(GroupSlot) == 256);

/// The contents of an entry, as words.
struct Body {
  std::uint64_t sequence;  ///< of the group's collectives, from 1; 0 for point-to-point calls
  std::int64_t start_ns;
  std::uint64_t bytes;
  std::int64_t tag;
  std::int64_t shape[4];
  char name[24];
  std::int32_t peer;  ///< job rank: the root, or the other end; -1: none, or any
  std::uint32_t thread;
  std::uint16_t group;
  std::uint8_t dtype;       ///< DType; 255: no data
  State state;              ///< when it was called: queued or started
  std::uint8_t dimensions;  ///< of the first tensor; at most four are kept in `shape`
  std::uint8_t async;
  std::uint8_t spare[2];
  std::uint64_t reserved;
};
using Words = std::array<std::uint64_t, sizeof(Body) / 8>;
static_assert(sizeof(Body) == 112);

struct alignas(64) TraceEntry {
  std::uint64_t stamp;    ///< 2 t for ticket t, 2 t + 1 while it is written; 0: never used
  std::uint64_t outcome;  ///< how the call has ended, see below; 0: it has not
  Words words;
};
static_assert(sizeof(TraceEntry) == 128);

/// State, the ticket's last 16 bits and the duration of the call, in one word. The thread that ends
/// the call writes it without claiming the entry. A duration of 1 means only that the call
/// completed without waiting. A word with another ticket's bits is ignored: a later call took the
/// slot at the same time.
inline constexpr std::uint64_t kLongestCall =
    (std::uint64_t{1} << 44) - 1;  // nanoseconds: almost five hours; longer ones read as that
constexpr std::uint64_t outcome_of(State state, std::uint64_t ticket, std::uint64_t took_ns) {
  return static_cast<std::uint64_t>(state) << 60 | (ticket & 0xffff) << 44 |
         (took_ns < kLongestCall ? took_ns : kLongestCall);
}
constexpr bool is_outcome_of(std::uint64_t outcome, std::uint64_t ticket) {
  return outcome != 0 && (outcome >> 44 & 0xffff) == (ticket & 0xffff);
}
constexpr State state_in(std::uint64_t outcome) { return static_cast<State>(outcome >> 60); }
constexpr std::uint64_t took_in(std::uint64_t outcome) { return outcome & kLongestCall; }

/// The words of a mapping as atomics. The release order of every word keeps them behind the odd
/// stamp that precedes them, and the even stamp behind them: readers compare the stamp before and
/// after (`reader.cc`).
inline std::uint64_t load(const std::uint64_t& word) {
  return std::atomic_ref(const_cast<std::uint64_t&>(word)).load(std::memory_order_acquire);
}
inline void store(std::uint64_t& word, std::uint64_t value) {
  std::atomic_ref(word).store(value, std::memory_order_release);
}

}  // namespace muster::trace
