// SPDX-License-Identifier: BSD-3-Clause
#include "core/trace/recorder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "core/base/environment.h"
#include "core/base/hash.h"
#include "core/base/log/log.h"
#include "core/base/process/limits.h"
#include "core/base/process/process_start.h"
#include "core/net/socket_address.h"
#include "core/trace/run_directory.h"

namespace muster::trace {
namespace {

std::uint32_t this_thread() {
  static constinit thread_local std::uint32_t id = 0;
  if (id == 0) id = static_cast<std::uint32_t>(::gettid());
  return id;
}

std::int64_t nanoseconds(TimePoint time) { return time.time_since_epoch().count(); }

template <std::size_t Size>
void put_text(char (&target)[Size], std::string_view text) {
  std::memset(target, 0, Size);
  std::memcpy(target, text.data(), std::min(text.size(), Size - 1));
}

/// A shortened name, equal on every member and different for different long names.
std::string short_name(std::string_view name) {
  constexpr std::size_t kLongest = sizeof(GroupSlot::name) - 1;
  if (name.size() <= kLongest) return std::string(name);
  char tail[24];
  std::snprintf(tail, sizeof tail, "...%016llx", static_cast<unsigned long long>(hash_of(name)));
  return std::string(name.substr(0, kLongest - 19)) + tail;
}

// If two threads end calls of one group at once, the higher number may be lost until the next call.
// That is cheaper than an atomic exchange per call.
void raise_to(std::uint64_t& word, std::uint64_t value) {
  std::atomic_ref shared(word);
  if (shared.load(std::memory_order_relaxed) < value)
    shared.store(value, std::memory_order_release);
}

}  // namespace

Result<std::shared_ptr<Recorder>> Recorder::from_environment(const std::string& job, int rank,
                                                             int world_size) {
  const auto entries = env_integer("MUSTER_TRACE_ENTRIES", 0, kMostEntries);
  if (!entries) return entries.status();
  RecorderOptions options;
  options.job = job;
  options.run_id = env_text("TORCHELASTIC_RUN_ID").value_or("none");
  if (options.run_id == "none") options.run_id.clear();  // the launchers' name for an unnamed job
  options.rank = rank;
  options.world_size = world_size;
  if (*entries) options.entries = static_cast<std::uint32_t>(**entries);
  if (options.entries == 0) return std::shared_ptr<Recorder>();
  auto recorder = create(options);
  if (recorder) return recorder;
  log(LogLevel::warning, "this rank keeps no trace of its calls: " + recorder.status().message());
  return std::shared_ptr<Recorder>();
}

Result<std::shared_ptr<Recorder>> Recorder::create(const RecorderOptions& options) {
  const auto entries = std::bit_ceil(std::clamp(options.entries, 1u, kMostEntries));
  std::shared_ptr<Recorder> recorder(new Recorder(options, entries));
  if (Status opened = recorder->open(); !opened) return opened;
  return recorder;
}

Recorder::Recorder(const RecorderOptions& options, std::uint32_t entries)
    : options_(options), entry_count_(entries) {}

Recorder::~Recorder() {
  if (memory_ != nullptr) ::munmap(memory_, bytes_);
}

// The file gets its name only when it is complete and locked. Its blocks are allocated here: on a
// full disk a write to the mapping would kill the process.
Status Recorder::open() {
  const std::string base = options_.directory.empty() ? run_directory() : options_.directory;
  const std::string folder = job_folder(options_.job);
  auto directory = open_job_directory(base, folder);
  if (!directory) return directory.status();
  directory_ = base + "/" + folder;
  path_ = directory_ + "/" + trace_name(options_.rank);
  const auto fail = [&](const char* what) {
    return Status(Code::refused,
                  std::string("cannot ") + what + " the trace " + path_ + ": " + errno_text(errno));
  };
  const std::uint64_t needed =
      kHeaderBytes + kGroups * sizeof(GroupSlot) + entry_count_ * sizeof(TraceEntry);
  if (Status fits = check_file_size("the trace " + path_, needed); !fits) return fits;
  const std::string temporary =
      ".rank" + std::to_string(options_.rank) + "." + std::to_string(::getpid());
  Descriptor file(::openat(directory->get(), temporary.c_str(),
                           O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!file) return fail("make");
  bytes_ = needed;
  int full = 0;
  do {
    full = ::posix_fallocate(file.get(), 0, static_cast<off_t>(bytes_));
  } while (full == EINTR);
  void* memory = full == 0 ? ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                                    MAP_SHARED | MAP_POPULATE, file.get(), 0)
                           : MAP_FAILED;
  if (memory == MAP_FAILED) {
    if (full != 0) errno = full;
    Status failed = fail("find room for");
    ::unlinkat(directory->get(), temporary.c_str(), 0);
    return failed;
  }
  memory_ = static_cast<std::byte*>(memory);
  header_ = new (memory_) FileHeader{};
  groups_ = reinterpret_cast<GroupSlot*>(memory_ + kHeaderBytes);
  entries_ = reinterpret_cast<TraceEntry*>(memory_ + kHeaderBytes + kGroups * sizeof(GroupSlot));
  write_header(options_, entry_count_);
  // Without the lock readers would take this rank for dead.
  const bool locked = ::flock(file.get(), LOCK_EX | LOCK_NB) == 0;
  if (!locked || ::renameat(directory->get(), temporary.c_str(), directory->get(),
                            trace_name(options_.rank).c_str()) != 0) {
    Status failed = fail(locked ? "name" : "lock");
    ::unlinkat(directory->get(), temporary.c_str(), 0);
    return failed;
  }
  file_ = GuardedDescriptor(std::move(file));
  return {};
}

void Recorder::write_header(const RecorderOptions& options, std::uint32_t entries) {
  header_->magic = kMagic;
  header_->version = kVersion;
  header_->header_bytes = kHeaderBytes;
  header_->group_bytes = sizeof(GroupSlot);
  header_->groups = kGroups;
  header_->entry_bytes = sizeof(TraceEntry);
  header_->entries = entries;
  header_->rank = options.rank;
  header_->world_size = options.world_size;
  header_->pid = ::getpid();
  header_->pid_start = process_start(header_->pid).value_or(0);
  header_->pid_namespace = namespace_inode("pid");
  header_->mono_base_ns = nanoseconds(steady_clock().now());
  header_->wall_base_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(
                              std::chrono::system_clock::now().time_since_epoch())
                              .count();
  char host[64] = {};
  ::gethostname(host, sizeof host - 1);
  put_text(header_->host, host);
  put_text(header_->boot, boot_id());
  put_text(header_->job, options.job);
  put_text(header_->run_id, options.run_id);
}

std::uint16_t Recorder::add_group(std::string_view name, std::span<const int> ranks, int rank) {
  if (mark_.forked()) return kGroups - 1;
  const std::lock_guard guard(lock_);
  const auto index = static_cast<std::uint16_t>(group_names_.size());
  GroupSlot& slot = groups_[std::min<std::size_t>(index, kGroups - 1)];
  if (index >= kGroups - 1) {
    put_text(slot.name, "(further groups)");
    slot.occurrence = 1;
    store(header_->group_count, kGroups);
    return kGroups - 1;
  }
  const std::string shown = short_name(name);
  slot.occurrence =
      1 + static_cast<std::uint32_t>(std::count(group_names_.begin(), group_names_.end(), shown));
  slot.size = static_cast<std::int32_t>(ranks.size());
  slot.rank = rank;
  put_text(slot.name, shown);
  for (const int member : ranks) {
    if (member >= 0 && member < kMembersShown)
      slot.members[static_cast<std::size_t>(member) / 64] |=
          std::uint64_t{1} << (static_cast<unsigned>(member) % 64);
  }
  group_names_.push_back(shown);
  store(header_->group_count, group_names_.size());
  return index;
}

[[gnu::always_inline]] inline void Recorder::write(TraceEntry& entry, std::uint16_t group,
                                                   const RecordedCall& call,
                                                   std::int64_t start_ns) noexcept {
  // Word for word, not by way of a Body: what was put together from bytes is slow to read again as
  // words.
  const auto put = [&entry](std::size_t at, std::uint64_t word) {
    store(entry.words[at / 8], word);
  };
  store(entry.outcome, 0);
  put(offsetof(Body, sequence), call.sequence);
  put(offsetof(Body, start_ns), static_cast<std::uint64_t>(start_ns));
  put(offsetof(Body, bytes), call.bytes);
  put(offsetof(Body, tag), static_cast<std::uint64_t>(call.tag));
  const std::size_t dimensions = call.shape.size();
  for (std::size_t i = 0; i < std::size(Body().shape); ++i)
    put(offsetof(Body, shape) + 8 * i,
        i < dimensions ? static_cast<std::uint64_t>(call.shape[i]) : 0);
  for (std::size_t i = 0; i < call.name.words.size(); ++i)
    put(offsetof(Body, name) + 8 * i, call.name.words[i]);
  put(offsetof(Body, peer),
      static_cast<std::uint32_t>(call.peer) | std::uint64_t{this_thread()} << 32);
  const State state = call.async ? State::queued : State::started;
  static_assert(offsetof(Body, thread) == offsetof(Body, peer) + 4 &&
                offsetof(Body, dtype) == offsetof(Body, group) + 2 &&
                offsetof(Body, state) == offsetof(Body, group) + 3 &&
                offsetof(Body, dimensions) == offsetof(Body, group) + 4 &&
                offsetof(Body, async) == offsetof(Body, group) + 5);
  put(offsetof(Body, group), group | std::uint64_t{call.dtype} << 16 |
                                 static_cast<std::uint64_t>(state) << 24 |
                                 std::uint64_t{std::min<std::size_t>(dimensions, 255)} << 32 |
                                 std::uint64_t{call.async} << 40);
  put(offsetof(Body, reserved), 0);
}

void Recorder::begin(std::uint16_t group, const RecordedCall& call, TimePoint now,
                     Ticket& ticket) noexcept {
  ticket.number = 0;
  if (mark_.forked()) return;
  if (call.sequence != 0) raise_to(groups_[group].started, call.sequence);
  ticket.sequence = call.sequence;
  ticket.start_ns = nanoseconds(now);
  ticket.group = group;
  if (!biased_lock_.enter()) return begin_among_others(group, call, ticket);
  // No other thread can take a ticket or claim an entry here.
  const std::uint64_t number =
      std::atomic_ref(header_->tickets).load(std::memory_order_relaxed) + 1;
  std::atomic_ref(header_->tickets).store(number, std::memory_order_relaxed);
  TraceEntry& entry = entries_[(number - 1) & (entry_count_ - 1)];
  std::atomic_ref(entry.stamp).store(2 * number + 1, std::memory_order_relaxed);
  write(entry, group, call, ticket.start_ns);
  store(entry.stamp, 2 * number);
  biased_lock_.leave();
  ticket.number = number;
}

/// The path for several calling threads.
void Recorder::begin_among_others(std::uint16_t group, const RecordedCall& call,
                                  Ticket& ticket) noexcept {
  biased_lock_.revoke();
  std::uint64_t number = 0;
  TraceEntry* const entry = claim(number);
  if (entry == nullptr) return;
  write(*entry, group, call, ticket.start_ns);
  store(entry->stamp, 2 * number);
  ticket.number = number;
}

/// Takes a ticket and its entry, whose stamp is odd then; null where another thread writes there.
TraceEntry* Recorder::claim(std::uint64_t& number) noexcept {
  number = std::atomic_ref(header_->tickets).fetch_add(1, std::memory_order_relaxed) + 1;
  TraceEntry& entry = entries_[(number - 1) & (entry_count_ - 1)];
  std::atomic_ref stamp(entry.stamp);
  std::uint64_t before = stamp.load(std::memory_order_relaxed);
  const bool free = (before & 1) == 0 && before < 2 * number;
  if (free && stamp.compare_exchange_strong(before, 2 * number + 1, std::memory_order_acq_rel,
                                            std::memory_order_relaxed))
    return &entry;
  std::atomic_ref(header_->dropped).fetch_add(1, std::memory_order_relaxed);
  return nullptr;
}

void Recorder::settle(const Ticket& ticket, State state, TimePoint now) noexcept {
  if (mark_.forked()) return;
  if (state == State::completed && ticket.sequence != 0)
    raise_to(groups_[ticket.group].completed, ticket.sequence);
  if (ticket.number == 0) return;
  TraceEntry& entry = entries_[(ticket.number - 1) & (entry_count_ - 1)];
  if (load(entry.stamp) != 2 * ticket.number) return;  // the entry belongs to a later call by now
  store(entry.outcome, outcome_of(state, ticket.number,
                                  static_cast<std::uint64_t>(std::max<std::int64_t>(
                                      nanoseconds(now) - ticket.start_ns, 1))));
}

void Recorder::fail(const Ticket& ticket, std::string_view text, TimePoint now) noexcept {
  settle(ticket, State::failed, now);
  if (mark_.forked()) return;
  const std::lock_guard guard(lock_);
  std::array<std::uint64_t, std::tuple_size_v<decltype(FileHeader::failure)>> words{};
  std::memcpy(words.data(), text.data(), std::min(text.size(), sizeof words - 1));
  std::atomic_ref stamp(header_->failure_stamp);
  const std::uint64_t before = stamp.load(std::memory_order_relaxed);
  stamp.store(before + 1, std::memory_order_relaxed);
  std::atomic_ref(header_->failure_at_ns).store(nanoseconds(now), std::memory_order_release);
  for (std::size_t i = 0; i < words.size(); ++i) store(header_->failure[i], words[i]);
  store(header_->failures, load(header_->failures) + 1);
  stamp.store(before + 2, std::memory_order_release);
}

void Recorder::remove() {
  if (mark_.forked()) return;
  ::unlink(path_.c_str());
  ::rmdir(directory_.c_str());  // succeeds once its last file is removed
}

std::uint64_t Recorder::changes() const {
  std::uint64_t sum = load(header_->tickets) + load(header_->failures);
  const std::uint64_t groups = std::min<std::uint64_t>(load(header_->group_count), kGroups);
  for (std::uint64_t i = 0; i < groups; ++i) sum += load(groups_[i].completed);
  return sum;
}

}  // namespace muster::trace
