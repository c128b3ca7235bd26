#include "muster/base/tunables.h"

#include <array>
#include <charconv>
#include <chrono>

#include "muster/base/env.h"
#include "muster/base/tuning_file.h"

namespace muster {
namespace {

using Unit = Tunable::Unit;
using Scope = Tunable::Scope;

constexpr std::int64_t kKiB = 1024, kMiB = 1024 * 1024;
constexpr std::int64_t kMicro = 1000, kMilli = 1000 * 1000, kSecond = 1000 * 1000 * 1000;
// Added to a clock's time, or multiplied by a number of ranks, it overflows nothing.
constexpr std::int64_t kLongestTime = 3600 * kSecond;

// What measures them.
constexpr std::string_view kSmall = "muster bench --op all_reduce --sizes 8,1024";
constexpr std::string_view kSmallShared = "muster bench --op all_reduce --sizes 8,1024 --ranks 8";
constexpr std::string_view kMessages =
    "muster bench --transport tcp --op all_reduce --sizes 8,65536";
constexpr std::string_view kLarge = "muster bench --sizes 1048576,16777216,67108864";
constexpr std::string_view kArena = "muster bench --memory arena --sizes 1048576,16777216";
constexpr std::string_view kSelection = "muster bench --check-selection --transport tcp";
constexpr std::string_view kRegion = "muster bench --check-selection --transport shm";
constexpr std::string_view kSimulate = "muster bench --simulate";
constexpr std::string_view kServices = "muster bench store";
constexpr std::string_view kRpc = "muster bench rpc";
constexpr std::string_view kDdp = "muster bench ddp";

constexpr Tunable kRows[] = {
    // ---- how threads wait
    {"link_spin", &Tunables::link_spin, Unit::time, Scope::local, 40 * kMicro,
     "A rank with a core of its own pauses so long between polls of its links before it gives the "
     "core away.",
     kMessages},
    {"link_yield", &Tunables::link_yield, Unit::time, Scope::local, 1 * kMilli,
     "After so long without news a waiting thread sleeps: longer than a sleeper takes to come "
     "back, else ranks that have slept once find each other asleep at every call.",
     kMessages},
    {"peer_pauses", &Tunables::peer_pauses, Unit::count, Scope::local, 500,
     "A rank with a core of its own polls so often, 40 ns each, for the members of a small call or "
     "a peer's message before it looks after everything else too.",
     kSmall},
    {"shared_core_pauses", &Tunables::shared_core_pauses, Unit::count, Scope::local, 100,
     "A rank keeps a shared core for so many polls while everything that is missing comes from "
     "other cores: less than until a core that is given away comes back.",
     kSmallShared},
    {"peer_yield", &Tunables::peer_yield, Unit::time, Scope::local, 100 * kMicro,
     "Ranks that share cores give them away so long for each rank of a core before the wait for a "
     "small call becomes a general one.",
     kSmallShared},
    {"round_trip", &Tunables::round_trip, Unit::time, Scope::local, 50 * kMicro,
     "What an answer takes that is on its way: so long a thread polls for it alone.", kMessages},
    {"offer_polls", &Tunables::offer_polls, Unit::count, Scope::local, 64,
     "A thread that waits for RPC offers its core after so many polls without news.", kRpc},
    {"offer_taken", &Tunables::offer_taken, Unit::time, Scope::local, 1200,
     "An offer of a core that took so long was taken by the peer that is waited for.", kRpc},
    {"rpc_stand_by", &Tunables::rpc_stand_by, Unit::time, Scope::local, 250 * kMicro,
     "The RPC listener keeps away from the core so long after it has seen a caller wait.", kRpc},

    // ---- background threads, and callbacks
    {"progress_tick", &Tunables::progress_tick, Unit::time, Scope::local, 1 * kMilli,
     "How often the progress thread looks at asynchronous operations, and how often a backward "
     "pass is looked at that callbacks wait for.",
     kDdp},
    {"progress_linger", &Tunables::progress_linger, Unit::time, Scope::local, 20 * kMilli,
     "So long after its last work the progress thread still looks every tick, so that a stream of "
     "short calls need not wake it each time.",
     kDdp},
    {"progress_idle_tick", &Tunables::progress_idle_tick, Unit::time, Scope::local, 50 * kMilli,
     "How often the progress thread, and the watcher of links in memory, look where hardly "
     "anything happens.",
     kDdp},
    {"driver_trust", &Tunables::driver_trust, Unit::time, Scope::local, 5 * kMilli,
     "For so long after a computing thread has polled for its calls no other thread does.", kDdp},
    {"callback_look", &Tunables::callback_look, Unit::time, Scope::local, 10 * kMilli,
     "How often a callback is looked at that others wait behind.", kDdp},
    {"callback_standstill", &Tunables::callback_standstill, Unit::time, Scope::local, 200 * kMilli,
     "A callback that has slept so long may be waiting for the next one, which "
     "another thread then begins.",
     kDdp},
    {"backward_standstill", &Tunables::backward_standstill, Unit::time, Scope::local, 20 * kMilli,
     "A backward pass whose thread has slept so long may be waiting for callbacks, "
     "which are then not held back for its end.",
     kDdp},
    {"callback_idle", &Tunables::callback_idle, Unit::time, Scope::local, 500 * kMilli,
     "The same for a thread that polls between short sleeps.", kDdp},
    {"callback_longest", &Tunables::callback_longest, Unit::time, Scope::local, 10 * kSecond,
     "The same for a thread that never rests: polling cannot be told from computing.", kDdp},

    // ---- calls and copies
    {"small_call", &Tunables::small_call, Unit::bytes, Scope::local, 32 * kKiB,
     "Calls of at most so much memory are completed by their caller's thread and may be under way "
     "beside others.",
     kMessages},
    {"kept_scratch", &Tunables::kept_scratch, Unit::bytes, Scope::local, 2 * kMiB,
     "So much temporary memory a group keeps between calls.", kLarge},
    {"past_caches", &Tunables::past_caches, Unit::bytes, Scope::local, 32 * kMiB,
     "Copies go past the caches where a host's ranks together write that much at once.", kLarge},
    {"work_quantum", &Tunables::work_quantum, Unit::bytes, Scope::local, 4 * kMiB,
     "After so many bytes a call looks whether its group has failed, and lets its thread look "
     "after other things.",
     kLarge},
    {"direct_read", &Tunables::direct_read, Unit::bytes, Scope::local, 128 * kKiB,
     "Slices of at least this size are read directly from the sender's memory "
     "(process_vm_readv); below it windows are faster.",
     kLarge, 2 * kMiB},
    {"direct_read_pair", &Tunables::direct_read_pair, Unit::bytes, Scope::local, 1 * kMiB,
     "The same between two ranks.", kLarge, Tunable::kNever},

    // ---- which algorithm runs
    {"gathered_per_rank", &Tunables::gathered_per_rank, Unit::bytes, Scope::agreed, 4 * kKiB,
     "Every rank gathers all inputs up to so much from each, or from each of 16 where there are "
     "fewer: more bytes cost less than more messages.",
     kSelection, Tunable::kSame, Tunable::kSame, Tunable::kSame,
     "links.all_reduce links.reduce links.all_gather links.gather links.scatter"},
    {"pair_exchange", &Tunables::pair_exchange, Unit::bytes, Scope::agreed, 1 * kMiB,
     "Two ranks exchange whole tensors up to this size (bruck): as many bytes travel whatever the "
     "algorithm, until what is held leaves the caches.",
     kSelection, Tunable::kSame, Tunable::kSame, Tunable::kSame, "links.all_reduce"},
    {"shared_exchange", &Tunables::shared_exchange, Unit::bytes, Scope::agreed, 32 * kKiB,
     "Ranks that share cores exchange whole tensors (bruck) up to this size; of many ranks less, "
     "as much in all as of few_ranks.",
     kSelection, Tunable::kSame, Tunable::kSame, Tunable::kSame, "links.all_reduce"},
    {"ring_from", &Tunables::ring_from, Unit::bytes, Scope::agreed, 256 * kKiB,
     "Above this an all_gather over hosts of several ranks goes round a ring.", kSimulate,
     Tunable::kSame, Tunable::kSame, Tunable::kSame, "links.all_gather"},
    {"host_hop", &Tunables::host_hop, Unit::bytes, Scope::agreed, 48 * kKiB,
     "A sum that travels from host to host waits at each as long as so many bytes take on the "
     "wire.",
     kSimulate, Tunable::kSame, Tunable::kSame, Tunable::kSame,
     "links.all_reduce links.reduce links.reduce_scatter"},
    {"host_lane", &Tunables::host_lane, Unit::bytes, Scope::agreed, 8 * kKiB,
     "The same for each rank of a host.", kSimulate, Tunable::kSame, Tunable::kSame, Tunable::kSame,
     "links.all_reduce links.reduce links.reduce_scatter"},
    {"shared_scatter", &Tunables::shared_scatter, Unit::bytes, Scope::agreed, 128 * kKiB,
     "Roots that share cores scatter by a tree up to so much for all ranks; 16 to 32 KiB each.",
     kSelection, Tunable::kSame, Tunable::kSame, Tunable::kSame, "links.scatter"},
    {"shared_reduce", &Tunables::shared_reduce, Unit::bytes, Scope::agreed, 128 * kKiB,
     "Where ranks share cores the root reduces alone up to this size; up to twice as much where "
     "there is hardly a core besides the root's own.",
     kSelection, Tunable::kSame, Tunable::kSame, Tunable::kSame, "links.reduce"},
    {"few_ranks", &Tunables::few_ranks, Unit::count, Scope::agreed, 8,
     "Up to so many ranks a root serves all others itself, and an all_gather sends directly.",
     kSelection, Tunable::kSame, Tunable::kSame, Tunable::kSame,
     "links.reduce links.all_gather links.gather links.scatter"},
    {"near_hop", &Tunables::near_hop, Unit::count, Scope::agreed, 2,
     "A message within a host is on its way as long as so many take to send.", kSimulate,
     Tunable::kSame, Tunable::kSame, Tunable::kSame, "links.gather links.scatter"},
    {"far_hop", &Tunables::far_hop, Unit::count, Scope::agreed, 10,
     "A message between hosts is on its way as long as so many take to send.", kSimulate,
     Tunable::kSame, Tunable::kSame, Tunable::kSame, "links.gather links.scatter"},
    {"one_shot", &Tunables::one_shot, Unit::bytes, Scope::agreed, 64 * kKiB,
     "In shared memory every rank reads all inputs itself, up to so much from all together.",
     kRegion, Tunable::kSame, Tunable::kSame, 128 * kKiB, "region.all_reduce region.reduce"},

    // ---- services
    {"kept_connections", &Tunables::kept_connections, Unit::count, Scope::local, 4,
     "A client of the store keeps so many connections for its threads.", kServices},
    {"unpolled_answers", &Tunables::unpolled_answers, Unit::count, Scope::local, 64,
     "A client of the store that has polled in vain sleeps for its answers at once, up to so many "
     "times in a row.",
     kServices},
    {"file_poll", &Tunables::file_poll, Unit::time, Scope::local, 50 * kMicro,
     "A file that others write is looked at again after so long, then after twice as long each "
     "time, at most 100 times as long.",
     kServices},

    // ---- fixed: what members send each other over links
    {"eager",
     {},
     Unit::bytes,
     Scope::fixed,
     fixed::kEagerBytes,
     "The largest message that is sent without asking first.",
     kMessages},
    {"fragment",
     {},
     Unit::bytes,
     Scope::fixed,
     fixed::kFragmentBytes,
     "Payloads travel in pieces of this size, trees and chains pass them on piece by piece, and "
     "so much may be eager to one peer.",
     kMessages},
    {"envelope_credit",
     {},
     Unit::count,
     Scope::fixed,
     fixed::kEnvelopeCredit,
     "So many small messages may be unmatched at one peer.",
     kMessages},
    {"small_message",
     {},
     Unit::bytes,
     Scope::fixed,
     fixed::kSmallMessage,
     "Messages up to this size are copied to travel with others, and kept beside their head.",
     kMessages},
    {"gathered_write",
     {},
     Unit::bytes,
     Scope::fixed,
     fixed::kGatheredWrite,
     "So many bytes of gathered messages make a write.",
     kMessages},
    {"inline_copy",
     {},
     Unit::bytes,
     Scope::fixed,
     fixed::kInlineCopy,
     "Pieces of together so many bytes are copied rather than handed over one by one, and so much "
     "of the next call's slot is fetched ahead.",
     kMessages},
    {"io_buffer",
     {},
     Unit::bytes,
     Scope::fixed,
     fixed::kIoBuffer,
     "What one read takes from a socket or pipe.",
     kServices},
    {"io_share",
     {},
     Unit::bytes,
     Scope::fixed,
     fixed::kIoShare,
     "What one connection may move before others have their turn; large values are read so.",
     kServices},
    {"reduce_chunk",
     {},
     Unit::bytes,
     Scope::fixed,
     fixed::kReduceChunk,
     "What is reduced or relayed at a time: it stays in the cache of a core.",
     kSelection},
    {"least_message",
     {},
     Unit::bytes,
     Scope::fixed,
     fixed::kLeastMessage,
     "The least that is worth a message of its own, or a word to the other side of a ring in "
     "memory: less is packed, or summed with more.",
     kSimulate},
    {"gathered_most",
     {},
     Unit::bytes,
     Scope::fixed,
     fixed::kGatheredMost,
     "What an algorithm that gathers everything may take of a member's memory.",
     kSelection},
    {"reduce_depth",
     {},
     Unit::count,
     Scope::fixed,
     fixed::kReduceDepth,
     "Chunks under way to a rank that reduces them.",
     kSelection},
    {"forward_depth",
     {},
     Unit::count,
     Scope::fixed,
     fixed::kForwardDepth,
     "Chunks under way to a rank that passes them on.",
     kSelection},
    {"in_flight",
     {},
     Unit::count,
     Scope::fixed,
     fixed::kInFlight,
     "Small calls, exchanges of an all_to_all, and RPC receives that are under way at a time.",
     kSelection},

    // ---- fixed: the region of a host
    {"region_slots",
     {},
     Unit::count,
     Scope::fixed,
     fixed::kRegionSlots,
     "Calls that a member may be ahead of the slowest one; a quarter in wide groups.",
     kSmallShared},
    {"inline",
     {},
     Unit::bytes,
     Scope::fixed,
     fixed::kInlineBytes,
     "Payload inside a control line.",
     kSmall},
    {"slot",
     {},
     Unit::bytes,
     Scope::fixed,
     fixed::kSlotBytes,
     "Payload staged beside a control line.",
     kRegion},
    {"windows",
     {},
     Unit::count,
     Scope::fixed,
     fixed::kWindows,
     "Windows that a member may have filled ahead of its readers.",
     kLarge},
    {"window",
     {},
     Unit::bytes,
     Scope::fixed,
     fixed::kWindowBytes,
     "What passes through shared memory at a time; half in wide groups.",
     kLarge},
    {"wide_group",
     {},
     Unit::count,
     Scope::fixed,
     fixed::kWideGroup,
     "Groups of more members take less memory each.",
     kLarge},
    {"cache_block",
     {},
     Unit::bytes,
     Scope::fixed,
     fixed::kCacheBlock,
     "What is reduced or handed on at a time within a rank: it is in the first cache still.",
     kLarge},
    {"reclaim_block",
     {},
     Unit::bytes,
     Scope::fixed,
     fixed::kReclaimBlock,
     "What is worked on before its cache lines are given back to their writer (AMD).",
     kLarge},
    {"reclaim",
     {},
     Unit::bytes,
     Scope::fixed,
     fixed::kReclaimBytes,
     "Several readers give back the lines of a broadcast, and a root reduces alone on shared "
     "cores, up to this size.",
     kLarge},
    {"reclaim_few",
     {},
     Unit::bytes,
     Scope::fixed,
     fixed::kReclaimFewBytes,
     "The same for other calls of few members, and what is lent from the arena.",
     kArena},
    {"early_copy",
     {},
     Unit::bytes,
     Scope::fixed,
     fixed::kEarlyCopy,
     "Members that share cores leave a copy and return, up to so much from all together.",
     kArena},
};

constexpr bool holds_each_field_once() {
  std::size_t bytes = 0;
  for (const Tunable& row : kRows) {
    if (row.field.index() != 0) bytes += row.field.index() == 4 ? 16 : 8;
    if ((row.field.index() == 0) != (row.scope == Scope::fixed)) return false;
    // All members compute these alike, whatever their processors.
    if (row.scope != Scope::local && (row.amd != Tunable::kSame || row.arm != Tunable::kSame))
      return false;
    if ((row.scope == Scope::agreed) == row.decides.empty()) return false;
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

constexpr std::pair<std::string_view, std::int64_t> kTimeUnits[] = {
    {"s", kSecond}, {"ms", kMilli}, {"us", kMicro}, {"ns", 1}};

std::optional<std::int64_t> time_of_text(std::string_view text) {
  const std::size_t unit = text.find_first_not_of("0123456789");
  if (unit == std::string_view::npos) return std::nullopt;
  const auto number = number_of_text(text.substr(0, unit));
  for (const auto& [name, nanoseconds] : kTimeUnits) {
    if (trimmed(text.substr(unit)) != name) continue;
    if (!number || *number > static_cast<std::uint64_t>(INT64_MAX / nanoseconds))
      return std::nullopt;
    return static_cast<std::int64_t>(*number) * nanoseconds;
  }
  return std::nullopt;
}

std::optional<std::int64_t> value_of_text(Unit unit, std::string_view text) {
  if (unit == Unit::time) return time_of_text(text);
  if (unit == Unit::bytes && text == "never") return Tunable::kNever;
  const auto value = unit == Unit::bytes ? size_of_text(text) : number_of_text(text);
  if (!value || *value > std::uint64_t{1} << 40) return std::nullopt;
  return static_cast<std::int64_t>(*value);
}

std::string example_of(Unit unit) {
  if (unit == Unit::time) return "a time, as in 40 us or 1 ms";
  return unit == Unit::bytes ? "a size, as in 65536, 64 KiB or never" : "a whole number, as in 8";
}

std::string names_like(std::string_view name) {
  std::string names;
  for (const Tunable& row : kRows) {
    if (row.scope == Scope::fixed || row.name.substr(0, 3) != name.substr(0, 3)) continue;
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

/// Once, before main. What runs sooner sees the defaults of a processor of no known family.
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
  if (row->scope == Scope::fixed)
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

std::string text_of(const Tunable& row, std::int64_t value) {
  if (row.unit == Unit::count) return std::to_string(value);
  if (row.unit == Unit::bytes)
    return value == Tunable::kNever ? "never" : text_of_size(static_cast<std::uint64_t>(value));
  for (const auto& [name, nanoseconds] : kTimeUnits)
    if (value % nanoseconds == 0)
      return std::to_string(value / nanoseconds) + " " + std::string(name);
  return "";
}

std::string tunables_page() {
  std::string page =
      "# Tunables\n\n"
      "Every performance number of muster, printed by `muster tunables --markdown`. Override one "
      "by\n`MUSTER_TUNE=\"link_spin=20us,small_call=64 KiB\"` or by a line `link_spin = 20 us` of "
      "the\n[tuning file](performance.md#which-algorithm-runs), on all ranks alike; read when the "
      "process starts. `muster tunables`\nprints the values in force.\n\n"
      "Scope: *local* numbers concern one rank; of *agreed* ones the first member's count for a "
      "group;\n*fixed* ones are part of a layout or of what members send each other, and cannot "
      "be overridden.\n\n"
      "| name | default | scope | what it decides | measured by |\n| --- | --- | --- | --- | --- "
      "|\n";
  for (const Tunable& row : kRows) {
    std::string value = text_of(row, row.value);
    if (row.amd != Tunable::kSame) value += "; AMD: " + text_of(row, row.amd);
    if (row.arm != Tunable::kSame) value += "; Arm: " + text_of(row, row.arm);
    if (row.oversubscribed != Tunable::kSame)
      value += "; shared cores: " + text_of(row, row.oversubscribed);
    constexpr std::string_view kScopes[] = {"local", "agreed", "fixed"};
    page += "| " + std::string(row.name) + " | " + value + " | " +
            std::string(kScopes[static_cast<int>(row.scope)]) + " | " + std::string(row.reason) +
            " | `" + std::string(row.bench) + "` |\n";
  }
  return page;
}

}  // namespace muster
