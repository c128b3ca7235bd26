// SPDX-License-Identifier: BSD-3-Clause
/// The one table of performance numbers: how long threads poll, from which size on something else
/// is done, how much is under way. The rows stand in `tunables.cc`, with default, unit, reason and
/// the command that measures them; `docs/user/tunables.md` is printed from them.
///
///   if (bytes <= tunables().small_call) ...      // one load
///   std::array<Window, fixed::kWindows> ...       // part of a layout or of what peers send
///
/// To add a number: a field of `Tunables` (or a constant of `fixed`) here, its row in
/// `tunables.cc`, then `muster tunables --markdown > docs/user/tunables.md`. First ask whether it
/// changes a whole operation by 10 %; if not, share a row that has about that value.
/// `tools/check_tunables` refuses such numbers elsewhere: a limit that is none of performance (a
/// cap of a protocol, the size of a key, the patience of a person) says so by `// limit: WHY` on
/// its line.
///
/// Users override rows by `MUSTER_TUNE="link_spin=20us,small_call=64 KiB"`, or by lines
/// `link_spin = 20 us` of the tuning file (`core/tunables/tuning_file.h`); read once, when the
/// process starts. `name.oversubscribed = ...` overrides a row where ranks share cores only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/tunables/tunables_fixed.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster {

/// A number that differs where ranks share cores.
template <class T>
struct ByCores {
  T dedicated;
  T oversubscribed;
  T operator()(bool ranks_share_cores) const {
    return ranks_share_cores ? oversubscribed : dedicated;
  }
};

/// Numbers that an override may change. Sizes in bytes.
struct Tunables {
  // How threads wait.
  Duration link_spin, link_yield;
  std::int64_t peer_pauses, shared_core_pauses;
  Duration peer_yield, round_trip;
  std::int64_t offer_polls;
  Duration mpi_poll, nccl_poll;
  std::int64_t nccl_polls;
  Duration offer_taken, rpc_stand_by;
  // Background threads, and callbacks.
  Duration progress_tick, progress_linger, progress_idle_tick, driver_trust;
  Duration callback_look, callback_standstill, backward_standstill, callback_idle, callback_longest;
  // Calls and copies.
  std::size_t small_call, kept_scratch, past_caches, work_quantum, direct_read, direct_read_pair;
  // Which algorithm runs.
  std::size_t gathered_per_rank, pair_exchange, shared_exchange;
  std::size_t gather_by_hosts, host_hop, host_lane, shared_scatter, shared_reduce;
  std::int64_t few_ranks, near_hop, far_hop;
  ByCores<std::size_t> one_shot;
  // Connections between hosts.
  Duration strand_trip;
  std::int64_t most_strands;
  // Services.
  std::int64_t kept_connections, unpolled_answers;
  Duration file_poll;
  // Failures of NCCL.
  Duration nccl_look, nccl_end_grace, nccl_abort_grace;
};

namespace tunables_detail {
extern Tunables in_force;
}
/// The values in force. They never change once the process has started.
inline const Tunables& tunables() { return tunables_detail::in_force; }
/// The values of the table for this processor, without any override. Decisions that every member of
/// a group must compute alike use these.
const Tunables& default_tunables();
/// Why an override was not taken (the defaults are in force then); ok if all were. Making a group
/// or a job fails with it.
const Status& tunables_failure();

enum class CpuFamily : std::uint8_t { other, amd, arm };
CpuFamily cpu_family();

/// A row.
struct Tunable {
  enum class Unit : std::uint8_t { bytes, time, count };
  enum class TunableScope : std::uint8_t {
    local,   ///< each rank for itself
    agreed,  ///< the first member's value counts for a group
    fixed,   ///< no override: part of a layout, or of what members send each other
  };
  /// Larger than any size.
  static constexpr std::int64_t kNever = INT64_MAX;
  static constexpr std::int64_t kSame = -1;
  using Field = std::variant<std::monostate, std::size_t Tunables::*, std::int64_t Tunables::*,
                             Duration Tunables::*, ByCores<std::size_t> Tunables::*>;

  std::string_view name;
  Field field;  ///< none: fixed
  Unit unit;
  TunableScope scope;
  std::int64_t value;                     ///< by default; times in nanoseconds
  std::string_view reason;                ///< a sentence
  std::string_view bench;                 ///< the command that measures it
  std::int64_t amd = kSame, arm = kSame;  ///< where it differs there
  std::int64_t oversubscribed = kSame;    ///< where it differs for ranks that share cores
  /// For an agreed number: the operations whose algorithm it decides, "network.reduce
  /// shared_memory.reduce".
  std::string_view decides = {};
};

std::span<const Tunable> tunable_rows();
/// The agreed numbers that decide an operation's algorithm, "network.reduce".
std::vector<const Tunable*> tunables_deciding(std::string_view operation);
/// Without ".oversubscribed" and the like.
const Tunable* find_tunable(std::string_view name);

/// Sets `name` ("one_shot", "one_shot.oversubscribed") to `text`. Code::invalid_argument says what
/// is wrong and what to write.
Status override_tunable(Tunables& values, std::string_view name, std::string_view text);
/// `value` in the row's unit: "64 KiB", "40 us", "never".
std::string text_of(const Tunable& row, std::int64_t value);
/// The value in `values`, in the row's unit.
std::int64_t value_of(const Tunable& row, const Tunables& values, bool oversubscribed);
/// The table as docs/user/tunables.md.
std::string tunables_page();

}  // namespace muster
