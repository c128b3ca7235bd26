// SPDX-License-Identifier: BSD-3-Clause
#include "core/tunables/tunables.h"

#include <array>
#include <chrono>

#include "core/base/environment.h"
#include "core/tunables/tunables_text.h"
#include "core/tunables/tuning_file.h"

namespace muster {
namespace {

using Unit = Tunable::Unit;
using TunableScope = Tunable::TunableScope;

constexpr std::int64_t kKiB = 1024, kMiB = 1024 * 1024;
constexpr std::int64_t kMicro = 1000, kMilli = 1000 * 1000, kSecond = 1000 * 1000 * 1000;
// Added to a clock's time, or multiplied by a number of ranks, it overflows nothing.
constexpr std::int64_t kLongestTime = 3600 * kSecond;

// The commands that measure the rows.
constexpr std::string_view kSmall = "muster bench --op all_reduce --sizes 8,1024";
constexpr std::string_view kSmallShared = "muster bench --op all_reduce --sizes 8,1024 --ranks 8";
constexpr std::string_view kMessages =
    "muster bench --transport tcp --op all_reduce --sizes 8,65536";
constexpr std::string_view kLarge = "muster bench --sizes 1048576,16777216,67108864";
constexpr std::string_view kArena = "muster bench --memory arena --sizes 1048576,16777216";
constexpr std::string_view kSelection = "muster bench --check-selection --transport tcp";
constexpr std::string_view kRegion = "muster bench --check-selection --transport shm";
constexpr std::string_view kSimulate = "muster-lab --simulate";
constexpr std::string_view kHosts = "muster-lab hosts";
constexpr std::string_view kFarLinks = "muster-lab far-links";
constexpr std::string_view kServices = "muster-lab store";
constexpr std::string_view kRpc = "muster-lab rpc";
constexpr std::string_view kDdp = "muster-lab ddp";
constexpr std::string_view kCompressed = "muster-lab compressed";
constexpr std::string_view kGpu = "tools/gpu_check";

constexpr Tunable kRows[] = {
    // ---- how threads wait
    {"link_spin", &Tunables::link_spin, Unit::time, TunableScope::local, 40 * kMicro,
     "How long a rank with a core of its own pauses between polls of its links before it yields.",
     kMessages},
    {"link_yield", &Tunables::link_yield, Unit::time, TunableScope::local, 1 * kMilli,
     "A waiting thread sleeps after this time without progress. It must be longer than a wake-up "
     "takes; otherwise ranks that have slept once find each other asleep at every call.",
     kMessages},
    {"peer_pauses", &Tunables::peer_pauses, Unit::count, TunableScope::local, 500,
     "How many times, 40 ns each, a rank with a core of its own polls for the members of a small "
     "call or for a peer's message before it polls everything else.",
     kSmall},
    {"shared_core_pauses", &Tunables::shared_core_pauses, Unit::count, TunableScope::local, 100,
     "An oversubscribed rank keeps its core for this many polls while all missing peers run on "
     "other cores. Shorter than a scheduling round.",
     kSmallShared},
    {"peer_yield", &Tunables::peer_yield, Unit::time, TunableScope::local, 100 * kMicro,
     "How long oversubscribed ranks yield, for each rank that shares the core, before the wait for "
     "a "
     "small call becomes a general one.",
     kSmallShared},
    {"round_trip", &Tunables::round_trip, Unit::time, TunableScope::local, 50 * kMicro,
     "How long a reply that is in flight takes: a thread polls only for that reply for this time.",
     kMessages},
    {"offer_polls", &Tunables::offer_polls, Unit::count, TunableScope::local, 64,
     "A thread that waits for RPC yields its core after this many polls without progress.", kRpc},
    {"offer_taken", &Tunables::offer_taken, Unit::time, TunableScope::local, 1200,
     "A yield that took at least this long is assumed to have let the awaited peer run.", kRpc},
    {"rpc_stand_by", &Tunables::rpc_stand_by, Unit::time, TunableScope::local, 250 * kMicro,
     "How long the RPC listener stays off the core after it has seen a caller wait.", kRpc},

    // ---- background threads, and callbacks
    {"mpi_poll", &Tunables::mpi_poll, Unit::time, TunableScope::local, 50 * kMicro,
     "How often backend mpi polls MPI once its spinning is over, and for calls that no thread "
     "waits "
     "for.",
     "muster-lab mpi"},
    {"nccl_polls", &Tunables::nccl_polls, Unit::count, TunableScope::local, 100,
     "A thread that waits for NCCL yields its core between this many polls, and then sleeps "
     "between "
     "them.",
     kGpu},
    {"nccl_poll", &Tunables::nccl_poll, Unit::time, TunableScope::local, 50 * kMicro,
     "How long a thread sleeps between polls of NCCL's communicator, or of the device.", kGpu},
    {"progress_tick", &Tunables::progress_tick, Unit::time, TunableScope::local, 1 * kMilli,
     "How often the progress thread polls asynchronous operations, and how often a backward pass "
     "that callbacks wait for is checked.",
     kDdp},
    {"progress_linger", &Tunables::progress_linger, Unit::time, TunableScope::local, 20 * kMilli,
     "For this time after its last work the progress thread still polls every tick, so that a "
     "stream of short calls need not wake it each time.",
     kDdp},
    {"progress_idle_tick", &Tunables::progress_idle_tick, Unit::time, TunableScope::local,
     50 * kMilli,
     "How often the progress thread, and the watcher of links in memory, poll while idle.", kDdp},
    {"driver_trust", &Tunables::driver_trust, Unit::time, TunableScope::local, 5 * kMilli,
     "After a computing thread has polled for its calls, no other thread polls for them for this "
     "time.",
     kDdp},
    {"callback_look", &Tunables::callback_look, Unit::time, TunableScope::local, 10 * kMilli,
     "How often a callback that delays others is checked.", kDdp},
    {"callback_standstill", &Tunables::callback_standstill, Unit::time, TunableScope::local,
     200 * kMilli,
     "A callback that has slept this long may be waiting for the next one, which another thread "
     "then begins.",
     kDdp},
    {"backward_standstill", &Tunables::backward_standstill, Unit::time, TunableScope::local,
     20 * kMilli,
     "A backward pass whose thread has slept this long may be waiting for callbacks, which are "
     "then no longer deferred to its end.",
     kDdp},
    {"callback_idle", &Tunables::callback_idle, Unit::time, TunableScope::local, 500 * kMilli,
     "As callback_standstill, for a thread that polls between short sleeps.", kDdp},
    {"callback_longest", &Tunables::callback_longest, Unit::time, TunableScope::local, 10 * kSecond,
     "As callback_standstill, for a thread that never sleeps: polling cannot be told from "
     "computing.",
     kDdp},

    // ---- calls and copies
    {"small_call", &Tunables::small_call, Unit::bytes, TunableScope::local, 32 * kKiB,
     "Calls of at most this much memory are completed by their caller's thread, and several may be "
     "in flight.",
     kMessages},
    {"kept_scratch", &Tunables::kept_scratch, Unit::bytes, TunableScope::local, 2 * kMiB,
     "How much temporary memory a group keeps between calls.", kLarge},
    {"past_caches", &Tunables::past_caches, Unit::bytes, TunableScope::local, 32 * kMiB,
     "Copies bypass the caches if a host's ranks together write this much at once.", kLarge},
    {"work_quantum", &Tunables::work_quantum, Unit::bytes, TunableScope::local, 4 * kMiB,
     "After this many bytes a call checks whether its group has failed, and yields its thread.",
     kLarge},
    {"direct_read", &Tunables::direct_read, Unit::bytes, TunableScope::local, 128 * kKiB,
     "Slices of at least this size are read directly from the sender's memory "
     "(process_vm_readv); below it windows are faster.",
     kLarge, 2 * kMiB},
    {"direct_read_pair", &Tunables::direct_read_pair, Unit::bytes, TunableScope::local, 1 * kMiB,
     "The same between two ranks.", kLarge, Tunable::kNever},

    // ---- which algorithm runs
    {"gathered_per_rank", &Tunables::gathered_per_rank, Unit::bytes, TunableScope::agreed, 4 * kKiB,
     "Up to this size per rank (with fewer than 16 ranks: 16 times this size in all), every rank "
     "gathers all inputs: extra bytes cost less than extra messages.",
     kSelection, Tunable::kSame, Tunable::kSame, Tunable::kSame,
     "network.all_reduce network.reduce network.all_gather network.gather network.scatter"},
    {"pair_exchange", &Tunables::pair_exchange, Unit::bytes, TunableScope::agreed, 1 * kMiB,
     "Two ranks exchange whole tensors up to this size (bruck): all algorithms send equally many "
     "bytes, and this one has the fewest rounds. Above this size its memory exceeds the caches.",
     kSelection, Tunable::kSame, Tunable::kSame, Tunable::kSame, "network.all_reduce"},
    {"shared_exchange", &Tunables::shared_exchange, Unit::bytes, TunableScope::agreed, 32 * kKiB,
     "Oversubscribed ranks exchange whole tensors (bruck) up to this size. With more than "
     "few_ranks ranks the limit shrinks, so that all ranks together exchange as much as few_ranks "
     "ranks do.",
     kSelection, Tunable::kSame, Tunable::kSame, Tunable::kSame, "network.all_reduce"},
    {"gather_by_hosts", &Tunables::gather_by_hosts, Unit::bytes, TunableScope::agreed, 256 * kKiB,
     "Above this size an all_gather over hosts with several ranks goes by hosts.", kSimulate,
     Tunable::kSame, Tunable::kSame, Tunable::kSame, "network.all_gather"},
    {"host_hop", &Tunables::host_hop, Unit::bytes, TunableScope::agreed, 48 * kKiB,
     "Assumed cost of a step within a host, as the bytes that the network could send meanwhile.",
     kSimulate, Tunable::kSame, Tunable::kSame, Tunable::kSame,
     "network.all_reduce network.reduce network.reduce_scatter"},
    {"host_lane", &Tunables::host_lane, Unit::bytes, TunableScope::agreed, 8 * kKiB,
     "What each rank of the host adds to that cost, in the same unit.", kSimulate, Tunable::kSame,
     Tunable::kSame, Tunable::kSame, "network.all_reduce network.reduce network.reduce_scatter"},
    {"shared_scatter", &Tunables::shared_scatter, Unit::bytes, TunableScope::agreed, 128 * kKiB,
     "An oversubscribed root scatters along a tree up to a limit: this size / ranks, kept between "
     "1/8 and 1/4 of this size.",
     kSelection, Tunable::kSame, Tunable::kSame, Tunable::kSame, "network.scatter"},
    {"shared_reduce", &Tunables::shared_reduce, Unit::bytes, TunableScope::agreed, 128 * kKiB,
     "An oversubscribed root reduces alone up to this size, at most 4 MiB / ranks. On one or two "
     "cores (4 ranks: three) it does so at every size with up to few_ranks ranks, and up to twice "
     "this size with more.",
     kSelection, Tunable::kSame, Tunable::kSame, Tunable::kSame, "network.reduce"},
    {"few_ranks", &Tunables::few_ranks, Unit::count, TunableScope::agreed, 8,
     "Up to this many ranks a root serves all others itself, and an all_gather sends directly.",
     kSelection, Tunable::kSame, Tunable::kSame, Tunable::kSame,
     "network.reduce network.all_gather network.gather network.scatter"},
    {"near_hop", &Tunables::near_hop, Unit::count, TunableScope::agreed, 2,
     "The latency of a message within a host, as the number of messages that can be sent in that "
     "time.",
     kSimulate, Tunable::kSame, Tunable::kSame, Tunable::kSame, "network.gather network.scatter"},
    {"far_hop", &Tunables::far_hop, Unit::count, TunableScope::agreed, 10,
     "The latency of a message between hosts, as the number of messages that can be sent in that "
     "time.",
     kSimulate, Tunable::kSame, Tunable::kSame, Tunable::kSame, "network.gather network.scatter"},
    {"one_shot", &Tunables::one_shot, Unit::bytes, TunableScope::agreed, 64 * kKiB,
     "In shared memory every rank reads all inputs itself, up to this size of all together.",
     kRegion, Tunable::kSame, Tunable::kSame, 128 * kKiB,
     "shared_memory.all_reduce shared_memory.reduce"},

    // ---- connections between hosts
    {"strand_trip", &Tunables::strand_trip, Unit::time, TunableScope::local, 20 * kMilli,
     "A link is made of one more connection for each time this long that its round trip has: one "
     "connection carries about 3 MB a round trip, whatever the link could, since the buffers of "
     "systems end there. 20 ms make that 1 Gbit/s.",
     kFarLinks},
    {"most_strands", &Tunables::most_strands, Unit::count, TunableScope::local, 16,
     "The most connections of a link, at most 64.", kFarLinks},

    // ---- services
    {"kept_connections", &Tunables::kept_connections, Unit::count, TunableScope::local, 4,
     "How many connections a client of the store keeps for its threads.", kServices},
    {"unpolled_answers", &Tunables::unpolled_answers, Unit::count, TunableScope::local, 64,
     "After a client of the store has polled in vain, it sleeps for its next replies without "
     "polling, up to this many times in a row.",
     kServices},
    {"file_poll", &Tunables::file_poll, Unit::time, TunableScope::local, 50 * kMicro,
     "A file that others write is checked again after this time, then after twice as long each "
     "time, at most 100 times as long.",
     kServices},

    // ---- failures of NCCL
    {"nccl_look", &Tunables::nccl_look, Unit::time, TunableScope::local, 20 * kMilli,
     "How often the watcher of backend nccl looks at the calls in flight, and a thread that waits "
     "for another rank at the group: how late a deadline or an error is noticed at most.",
     kGpu},
    {"nccl_end_grace", &Tunables::nccl_end_grace, Unit::time, TunableScope::local, 1 * kSecond,
     "How long after a failure of the links, or after its deadline, a call on nccl may still end "
     "with a reason of its own.",
     kGpu},
    {"nccl_abort_grace", &Tunables::nccl_abort_grace, Unit::time, TunableScope::local, 5 * kSecond,
     "How long an abort waits for threads that are in NCCL with the communicator, and then for "
     "NCCL to end it; then it is left alone.",
     kGpu},

    // ---- fixed: what members send each other over links
    {"eager",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kEagerBytes,
     "The eager threshold: the largest message that is sent without a request.",
     kMessages},
    {"fragment",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kFragmentBytes,
     "Payloads travel in fragments of this size, trees and chains forward them one by one, and one "
     "peer may have this much eager data.",
     kMessages},
    {"envelope_credit",
     {},
     Unit::count,
     TunableScope::fixed,
     fixed::kEnvelopeCredit,
     "How many small messages may be unmatched at one peer.",
     kMessages},
    {"small_message",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kSmallMessage,
     "Messages up to this size are copied to travel with others, and kept beside their header.",
     kMessages},
    {"gathered_write",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kGatheredWrite,
     "How many bytes of batched messages make a write.",
     kMessages},
    {"inline_copy",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kInlineCopy,
     "Pieces of this many bytes together are copied instead of passed one by one, and this much of "
     "the next call's slot is prefetched.",
     kMessages},
    {"io_buffer",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kIoBuffer,
     "How much one read takes from a socket or pipe.",
     kServices},
    {"io_share",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kIoShare,
     "How much one connection may move before others have their turn; large values are read in "
     "such pieces.",
     kServices},
    {"reduce_chunk",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kReduceChunk,
     "How much is reduced or forwarded at a time: it stays in the cache of a core.",
     kRegion},
    {"host_chunk",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kHostChunk,
     "How much of each rank's piece moves at a time between and within hosts. Until the first "
     "chunks are through all stages, and while the last ones are, part of the network is idle.",
     kHosts},
    {"least_message",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kLeastMessage,
     "The smallest payload worth a message of its own, or worth notifying the other side of a ring "
     "in memory: smaller ones are packed, or summed with more.",
     kSimulate},
    {"gathered_most",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kGatheredMost,
     "How much of a member's memory an algorithm that gathers everything may use.",
     kSelection},
    {"reduce_depth",
     {},
     Unit::count,
     TunableScope::fixed,
     fixed::kReduceDepth,
     "Chunks in flight to a rank that reduces them.",
     kSelection},
    {"forward_depth",
     {},
     Unit::count,
     TunableScope::fixed,
     fixed::kForwardDepth,
     "Chunks in flight to a rank that forwards them, or sums those of hosts.",
     kSelection},
    {"strand_window",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kStrandWindow,
     "What a member of a group over a long way keeps in flight, for each connection that the "
     "longest of its links needs (strand_trip). One and a half round trips of 1 Gbit/s: a large "
     "message waits for its clear-to-send.",
     kFarLinks},
    {"in_flight",
     {},
     Unit::count,
     TunableScope::fixed,
     fixed::kInFlight,
     "Small calls, exchanges of an all_to_all, and RPC receives that are in flight at a time.",
     kSelection},
    {"encoded_piece",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kEncodedPiece,
     "The smallest piece of a part of a compressed all_reduce: the others travel while it is "
     "encoded or summed.",
     kCompressed},
    {"encoded_pieces",
     {},
     Unit::count,
     TunableScope::fixed,
     fixed::kEncodedPieces,
     "How many pieces a part of a compressed all_reduce has at most.",
     kCompressed},
    {"mpi_direct",
     {},
     Unit::count,
     TunableScope::fixed,
     fixed::kMpiDirect,
     "Up to this many ranks on backend mpi reduce by muster's own messages; more of them by MPI's "
     "non-blocking all_reduce, which sends fewer.",
     "muster-lab mpi --op all_reduce --ranks 2,4,8"},
    {"mpi_round",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kMpiRound,
     "How much the members of a group on backend mpi reduce at a time, all together: few messages, "
     "and still in the caches.",
     "muster-lab mpi"},

    // ---- fixed: the region of a host
    {"region_slots",
     {},
     Unit::count,
     TunableScope::fixed,
     fixed::kRegionSlots,
     "How many calls a member may be ahead of the slowest one; a quarter in wide groups.",
     kSmallShared},
    {"inline",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kInlineBytes,
     "Payload inside a control line.",
     kSmall},
    {"slot",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kSlotBytes,
     "Payload staged beside a control line.",
     kRegion},
    {"windows",
     {},
     Unit::count,
     TunableScope::fixed,
     fixed::kWindows,
     "How many windows a member may have filled ahead of its readers.",
     kLarge},
    {"window",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kWindowBytes,
     "How much passes through shared memory at a time; half in wide groups.",
     kLarge},
    {"wide_group",
     {},
     Unit::count,
     TunableScope::fixed,
     fixed::kWideGroup,
     "Groups of more members use less memory per member.",
     kLarge},
    {"cache_block",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kCacheBlock,
     "How much is reduced or copied at a time within a rank: it is still in the first-level cache.",
     kLarge},
    {"reclaim_block",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kReclaimBlock,
     "How much is processed before its cache lines are written back to their writer (AMD).",
     kLarge},
    {"reclaim",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kReclaimBytes,
     "Several readers write back the lines of a broadcast, and a root reduces alone when "
     "oversubscribed, up to this size.",
     kLarge},
    {"reclaim_few",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kReclaimFewBytes,
     "The same for other calls of few members, and for arena memory that one member alone reads.",
     kArena},
    {"early_copy",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kEarlyCopy,
     "Up to this size of all members together, an oversubscribed member stages a copy and returns "
     "instead of waiting for its readers.",
     kArena},

    // ---- fixed: polls, and what is taken at once
    {"check_pauses",
     {},
     Unit::count,
     TunableScope::fixed,
     fixed::kCheckPauses,
     "Pauses before each check that costs more than a poll: reading the clock, or lines that "
     "peers are writing.",
     kSmall},
    {"clock_polls",
     {},
     Unit::count,
     TunableScope::fixed,
     fixed::kClockPolls,
     "Polls of another library between two looks at the clock.",
     "muster-lab mpi"},
    {"polls_on_one_core",
     {},
     Unit::count,
     TunableScope::fixed,
     fixed::kPollsOnOneCore,
     "How often a thread that shares its core polls after a yield that helped: the news may "
     "still come with the next poll.",
     kSmallShared},
    {"busy_pauses",
     {},
     Unit::count,
     TunableScope::fixed,
     fixed::kBusyPauses,
     "Pauses between two polls of a thread while another one makes the passes over the "
     "links.",
     kMessages},
    {"pass_pauses",
     {},
     Unit::count,
     TunableScope::fixed,
     fixed::kPassPauses,
     "Pauses between two passes of the thread that makes them; input that arrives during "
     "them is seen later.",
     kMessages},
    {"taken_without_pass",
     {},
     Unit::count,
     TunableScope::fixed,
     fixed::kTakenWithoutPass,
     "How many messages are taken from a ring before a pass over the other peers is due.",
     kMessages},
    {"plain_passes",
     {},
     Unit::count,
     TunableScope::fixed,
     fixed::kPlainPasses,
     "Passes of a spinning thread between two looks at all descriptors, where few links have "
     "one.",
     kMessages},
    {"plain_links",
     {},
     Unit::count,
     TunableScope::fixed,
     fixed::kPlainLinks,
     "Up to this many links are read in every pass without asking epoll, which saves a "
     "system call per message.",
     kMessages},
    {"ready_links",
     {},
     Unit::count,
     TunableScope::fixed,
     fixed::kReadyLinks,
     "How many descriptors one look at epoll can report.",
     kMessages},
    {"short_piece",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kShortPiece,
     "Pieces of up to this size, a header and four words, are copied into a ring without a "
     "call.",
     kSmall},
    {"quick_pages",
     {},
     Unit::count,
     TunableScope::fixed,
     fixed::kQuickPages,
     "Freed blocks of the arena of up to this many pages wait in a list for a request of the "
     "same size.",
     kArena},
    {"quick",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kQuickBytes,
     "How much waits there in all.",
     kArena},
    {"sweep",
     {},
     Unit::time,
     TunableScope::fixed,
     fixed::kSweepNanoseconds,
     "The least time between two checks of what the arena may give back to the system.",
     kArena},
    {"in_place_gradient",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kInPlaceGradient,
     "Gradients of at least this size are averaged where they lie instead of through a "
     "bucket.",
     kDdp},
    {"converted_part",
     {},
     Unit::bytes,
     TunableScope::fixed,
     fixed::kConvertedPart,
     "How much of a tensor the conversion of a checkpoint holds at a time.",
     "muster-lab checkpoint"},
};

constexpr bool holds_each_field_once() {
  std::size_t bytes = 0;
  for (const Tunable& row : kRows) {
    if (row.field.index() != 0) bytes += row.field.index() == 4 ? 16 : 8;
    if ((row.field.index() == 0) != (row.scope == TunableScope::fixed)) return false;
    // All members compute these alike, whatever their processors.
    if (row.scope != TunableScope::local &&
        (row.amd != Tunable::kSame || row.arm != Tunable::kSame))
      return false;
    if ((row.scope == TunableScope::agreed) == row.decides.empty()) return false;
    for (const Tunable& other : kRows)
      if (&other != &row &&
          (other.name == row.name || (row.field.index() != 0 && other.field == row.field)))
        return false;
  }
  return bytes == sizeof(Tunables);
}
static_assert(holds_each_field_once());

constexpr void store(Tunables& values, const Tunable& row, std::int64_t value,
                     std::int64_t oversubscribed) {
  if (const auto* size = std::get_if<1>(&row.field))
    values.** size = static_cast<std::size_t>(value);
  if (const auto* count = std::get_if<2>(&row.field)) values.** count = value;
  if (const auto* time = std::get_if<3>(&row.field)) values.** time = Duration(value);
  if (const auto* both = std::get_if<4>(&row.field))
    values.** both = {static_cast<std::size_t>(value), static_cast<std::size_t>(oversubscribed)};
}

constexpr Tunables defaults_of(CpuFamily family) {
  Tunables values{};
  for (const Tunable& row : kRows) {
    std::int64_t value = row.value;
    if (family == CpuFamily::amd && row.amd != Tunable::kSame) value = row.amd;
    if (family == CpuFamily::arm && row.arm != Tunable::kSame) value = row.arm;
    store(values, row, value, row.oversubscribed == Tunable::kSame ? value : row.oversubscribed);
  }
  return values;
}

constexpr Tunables kDefaults[] = {defaults_of(CpuFamily::other), defaults_of(CpuFamily::amd),
                                  defaults_of(CpuFamily::arm)};

std::string quoted(std::string_view text) { return "\"" + std::string(text) + "\""; }
Status wrong(const std::string& what) { return Status(Code::invalid_argument, what); }

std::string names_like(std::string_view name) {
  std::string names;
  for (const Tunable& row : kRows) {
    if (row.scope == TunableScope::fixed || row.name.substr(0, 3) != name.substr(0, 3)) continue;
    names += (names.empty() ? "; there are " : ", ") + std::string(row.name);
  }
  return names;
}

/// The overrides of the environment and the tuning file.
Status load(Tunables& values) {
  auto text = read_tuning_file();
  if (!text) return text.status();
  if (*text) {
    const std::string name = "tuning file " + tuning_path();
    const auto lines = tuning_lines(**text, name);
    if (!lines) return lines.status();
    for (const TuningLine& line : *lines) {
      if (find_tunable(line.key.substr(0, line.key.find('.'))) == nullptr) continue;  // not ours
      if (Status set = override_tunable(values, line.key, line.value); !set)
        return wrong_tuning_line(name, line.number, set.message());
    }
  }
  const auto given = env_text("MUSTER_TUNE");
  if (!given) return {};
  for (const std::string_view part : parts_of(*given, ',')) {
    const std::size_t sign = part.find('=');
    const Status set = sign == std::string_view::npos
                           ? wrong(quoted(part) + " is not NAME=VALUE")
                           : override_tunable(values, trimmed(part.substr(0, sign)),
                                              trimmed(part.substr(sign + 1)));
    if (!set)
      return wrong("MUSTER_TUNE holds " + quoted(*given) + ": " + set.message() +
                   "; muster tunables lists the names");
  }
  return {};
}

/// Reads the overrides once, before main. Code that runs sooner sees the defaults of a processor of
/// no known family.
const Status& loaded() {
  static const Status& status = *new Status([] {
    Tunables values = default_tunables();
    Status done = load(values);
    tunables_detail::in_force = done.ok() ? values : default_tunables();
    return done;
  }());
  return status;
}

}  // namespace

namespace tunables_detail {
constinit Tunables in_force = kDefaults[0];
namespace {
[[maybe_unused]] const Status& at_start = loaded();
}
}  // namespace tunables_detail

const Status& tunables_failure() { return loaded(); }

CpuFamily cpu_family() {
#if defined(__aarch64__)
  return CpuFamily::arm;
#elif defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd") != 0 ? CpuFamily::amd : CpuFamily::other;
#else
  return CpuFamily::other;
#endif
}

const Tunables& default_tunables() { return kDefaults[static_cast<int>(cpu_family())]; }

std::span<const Tunable> tunable_rows() { return kRows; }

std::vector<const Tunable*> tunables_deciding(std::string_view operation) {
  std::vector<const Tunable*> rows;
  for (const Tunable& row : kRows) {
    for (const std::string_view each : parts_of(row.decides, ' '))
      if (each == operation && !each.empty()) rows.push_back(&row);
  }
  return rows;
}

const Tunable* find_tunable(std::string_view name) {
  for (const Tunable& row : kRows)
    if (row.name == name) return &row;
  return nullptr;
}

Status override_tunable(Tunables& values, std::string_view name, std::string_view text) {
  const std::size_t dot = name.find('.');
  const Tunable* row = find_tunable(name.substr(0, dot));
  if (row == nullptr) return wrong(quoted(name) + " is no tunable" + names_like(name));
  if (row->scope == TunableScope::fixed)
    return wrong(quoted(name) + " is part of what members send or share and cannot be changed");
  const auto cores = dot == std::string_view::npos ? std::string_view() : name.substr(dot + 1);
  const bool by_cores = std::holds_alternative<ByCores<std::size_t> Tunables::*>(row->field);
  if (dot != std::string_view::npos &&
      (!by_cores || (cores != "dedicated" && cores != "oversubscribed")))
    return wrong(quoted(name) + " is no tunable; write " + std::string(row->name) +
                 (by_cores ? ", or .dedicated or .oversubscribed behind it" : ""));
  const auto value = value_of_text(row->unit, text);
  if (!value || *value < 1)
    return wrong(quoted(text) + " is no value of " + std::string(row->name) + "; write " +
                 example_of(row->unit) + ", at least 1");
  if (row->unit == Unit::time && *value > kLongestTime)
    return wrong(quoted(text) + " is too long for " + std::string(row->name) +
                 "; write at most 3600 s");
  store(values, *row, cores == "oversubscribed" ? value_of(*row, values, false) : *value,
        cores == "dedicated" ? value_of(*row, values, true) : *value);
  return {};
}

std::int64_t value_of(const Tunable& row, const Tunables& values, bool oversubscribed) {
  if (const auto* size = std::get_if<1>(&row.field))
    return static_cast<std::int64_t>(values.**size);
  if (const auto* count = std::get_if<2>(&row.field)) return values.**count;
  if (const auto* time = std::get_if<3>(&row.field)) return (values.**time).count();
  if (const auto* both = std::get_if<4>(&row.field))
    return static_cast<std::int64_t>((values.**both)(oversubscribed));
  return row.value;
}

}  // namespace muster
