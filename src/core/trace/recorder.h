// SPDX-License-Identifier: BSD-3-Clause
/// The flight recorder: what this rank called last, in memory that outlives it.
///
/// `trace/` has the file's format (`format.h`), its writer (here), its reader (`reader.h`), what
/// can be concluded from the files of a job (`analysis.h`), and what a rank can find out about the
/// others when a deadline has passed (`peer_traces.h`). May include base/ and store/. Test it
/// alone: `ctest -R '^trace'`.
///
/// The ring is a file mapped shared: the kernel keeps it whatever ends the process. Recording a
/// call takes no lock, no allocation and no system call; slots are claimed with one
/// compare-and-swap (while one thread alone makes calls, with plain stores:
/// `core/base/threads/biased_lock.h`), and where two threads meet in one slot (the ring is too
/// small for what is under way) the later call is not recorded and counted as dropped.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/dtype.h"
#include "core/base/process/fork_guard.h"
#include "core/base/threads/biased_lock.h"
#include "core/trace/format.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::trace {

struct RecorderOptions {
  std::string job;  ///< the same on all ranks, another for every job
  int rank = 0;
  int world_size = 1;
  std::uint32_t entries = 2000;  ///< at least so many calls are kept; rounded up to a power of two
  std::string directory;         ///< empty: `run_directory()`
  std::string run_id = {};       ///< the launcher's name for the job
};

inline constexpr std::uint8_t kNoDType = 255;

/// The name of a function as entries hold it: its first 23 characters, in words. The compiler makes
/// it of a literal.
struct Name {
  std::array<std::uint64_t, sizeof(Body::name) / 8> words{};

  constexpr Name() = default;
  constexpr Name(std::string_view text) {
    static_assert(std::endian::native == std::endian::little);
    for (std::size_t i = 0; i < std::min(text.size(), sizeof(Body::name) - 1); ++i)
      words[i / 8] |= std::uint64_t{static_cast<unsigned char>(text[i])} << i % 8 * 8;
  }
  constexpr Name(const char* text) : Name(std::string_view(text)) {}
};

/// A call, as it is made.
struct RecordedCall {
  Name name;                   ///< of the function
  std::uint64_t sequence = 0;  ///< 0: point-to-point
  std::uint64_t bytes = 0;
  std::uint8_t dtype = kNoDType;
  std::span<const std::int64_t> shape = {};
  int peer = -1;  ///< job rank of the root or the other end
  std::int64_t tag = 0;
  bool async = false;
};

/// Names a recorded call; number 0: it was not recorded.
struct Ticket {
  std::uint64_t number = 0;
  std::uint64_t sequence = 0;
  std::int64_t start_ns = 0;
  std::uint16_t group = 0;
};

/// Thread-safe. In a forked child it does nothing, and leaves the parent's file alone.
class Recorder {
 public:
  /// Takes the number of entries from MUSTER_TRACE_ENTRIES and the launcher's name of the job from
  /// TORCHELASTIC_RUN_ID; null where that is 0. A trace that cannot be kept is a warning in the log
  /// and null too: it must not stop a job. A number that is none is an error.
  static Result<std::shared_ptr<Recorder>> from_environment(const std::string& job, int rank,
                                                            int world_size);
  static Result<std::shared_ptr<Recorder>> create(const RecorderOptions& options);
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  /// A group that calls are made on; `ranks` are job ranks, `rank` this one's place among them.
  std::uint16_t add_group(std::string_view name, std::span<const int> ranks, int rank);

  Ticket begin(std::uint16_t group, const RecordedCall& call, TimePoint now) noexcept {
    Ticket ticket;
    begin(group, call, now, ticket);
    return ticket;
  }
  /// The same into a ticket that is there: what is copied just after it was written takes longer
  /// than to write it.
  void begin(std::uint16_t group, const RecordedCall& call, TimePoint now, Ticket& ticket) noexcept;
  void end(const Ticket& ticket, TimePoint now) noexcept { settle(ticket, State::completed, now); }
  /// Also after `end`. Not on the fast path: keeps the text.
  void fail(const Ticket& ticket, std::string_view text, TimePoint now) noexcept;

  /// The job has ended well: the file goes, and with the last one the job's directory. Without it
  /// the file stays.
  void remove();

  const std::string& path() const { return path_; }
  const std::string& directory() const { return directory_; }
  /// Grows with every call that begins or ends.
  std::uint64_t changes() const;

 private:
  Recorder(const RecorderOptions& options, std::uint32_t entries);
  Status open();
  void begin_among_others(std::uint16_t group, const RecordedCall& call, Ticket& ticket) noexcept;
  TraceEntry* claim(std::uint64_t& number) noexcept;
  static void write(TraceEntry& entry, std::uint16_t group, const RecordedCall& call,
                    std::int64_t start_ns) noexcept;
  void write_header(const RecorderOptions& options, std::uint32_t entries);
  void settle(const Ticket& ticket, State state, TimePoint now) noexcept;

  RecorderOptions options_;
  std::uint32_t entry_count_;
  std::string directory_, path_;
  GuardedDescriptor file_;
  ProcessMark mark_;
  // Excludes other threads from the tickets and from claiming entries while one thread makes all
  // calls. Once it is revoked, entries are claimed by their stamps.
  BiasedLock biased_lock_;
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0;
  FileHeader* header_ = nullptr;
  GroupSlot* groups_ = nullptr;
  TraceEntry* entries_ = nullptr;
  std::mutex lock_;  // among writers of the table of groups and of the last failure's text
  std::vector<std::string> group_names_;  // as shown; their number is published last
};

/// A recorded call that ends later, on any thread. If its outcome is not reported, it ends with
/// this object. A copy (made when its request is copied) is empty.
class Mark {
 public:
  Mark() = default;
  Mark(std::shared_ptr<Recorder> recorder, Ticket ticket)
      : recorder_(std::move(recorder)), ticket_(ticket) {}
  Mark(Mark&&) = default;
  Mark(const Mark&) {}
  Mark& operator=(const Mark& other) {
    if (this != &other) end();
    return *this;
  }
  Mark& operator=(Mark&& other) noexcept {
    end();
    recorder_ = std::move(other.recorder_);
    ticket_ = other.ticket_;
    return *this;
  }
  ~Mark() { end(); }

  void end() noexcept {
    if (const auto recorder = std::exchange(recorder_, nullptr))
      recorder->end(ticket_, steady_clock().now());
  }
  void fail(std::string_view text) noexcept {
    if (const auto recorder = std::exchange(recorder_, nullptr))
      recorder->fail(ticket_, text, steady_clock().now());
  }

 private:
  std::shared_ptr<Recorder> recorder_;
  Ticket ticket_;
};

}  // namespace muster::trace
