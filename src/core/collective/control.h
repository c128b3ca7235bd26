// SPDX-License-Identifier: BSD-3-Clause
/// Notes between the members of a group, separate from their collectives: which call a member waits
/// in, and the comparison at the end.
///
/// Messages of a collective carry its fingerprint, so most disagreements are detected there. Two
/// are not: members that wait for each other because each takes the other for the root, and a
/// member that skips a call and closes. So a member that has waited for 100 ms tells the awaited
/// members which call it is in, and a closing member tells the first one how many calls it has
/// made.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/collective/call_record.h"
#include "core/collective/queue/driver.h"
#include "core/transport/channel/fingerprint.h"
#include "muster/status.h"

namespace muster::collective {

/// How long a transfer that was cancelled may take to end before its memory is kept for ever.
inline constexpr auto kCancelLimit = std::chrono::seconds(1);  // limit: a fabric that stands still

/// Tags from here on are reserved.
inline constexpr std::uint64_t kFirstReservedTag = std::uint64_t{1} << 62;

/// When one call that waits tells the awaited members which call it is.
class Reminders {
 public:
  /// Whether a note is due, which then counts as sent.
  bool due(TimePoint begun, TimePoint now) {
    if (sent_ >= kMost || now - begun < kFirst * (std::int64_t{1} << (2 * sent_))) return false;
    ++sent_;
    return true;
  }

 private:
  static constexpr auto kFirst = std::chrono::milliseconds(100);  // limit: delay of a diagnosis
  static constexpr int kMost = 5;                                 // limit: number of notes
  int sent_ = 0;
};

/// Not thread-safe: used under the communicator's drive lock.
class Control {
 public:
  explicit Control(const GroupContext& group) : group_(group) {}
  ~Control();

  /// Starts receiving notes. Not for groups of one.
  void listen();
  bool news() const { return receive_ != nullptr && !stopped_ && receive_->done(); }
  /// Processes received notes. Fails the channel if they show a disagreement.
  void poll();
  /// Records this member's next call for later comparison, and compares it with notes that arrived
  /// before it.
  void begin(const transport::Fingerprint& call);
  /// The latest call; sequence 0 if there is none.
  const transport::Fingerprint& latest() const { return latest_; }

  /// Tells all others, which may be waiting for it, that `latest()` was refused here.
  void report_refused();
  /// Whether every other member has reported that it was refused call `sequence` too. Once.
  bool all_refused(std::uint64_t sequence);
  /// Tells a member that this one waits for it in `call`.
  void report_waiting(int member, const transport::Fingerprint& call);
  /// Tells the first member that this one closes after `latest()`.
  void report_closing();
  /// On the first member: the members that have not reported yet (job ranks).
  std::vector<int> not_closing() const;
  /// Compares the reports that have come: success if their members have made the same calls,
  /// otherwise an error that names those that skipped some.
  Status compare_reports() const;
  /// The first member releases all others.
  void release_all();
  /// Tells all others that this member has waited for them in vain and uses the group no more.
  void report_left();
  /// Whether the first member has done so: nobody will compare this member's calls but itself.
  bool first_left() const { return first_left_; }
  bool released() const { return released_; }
  bool all_sent();
  /// Stops receiving; `quiesced` once no receive is outstanding.
  void cancel();
  bool quiesced() const { return receive_ == nullptr || receive_->done(); }

 private:
  enum class NoteKind : std::uint64_t { waiting = 1, closing, released, left };
  static constexpr std::size_t kLastCalls = 8;
  using LastCalls = std::array<transport::Fingerprint, kLastCalls>;
  struct Note {
    NoteKind kind;
    transport::Fingerprint call;
    std::uint64_t history = 0;  // digest of all calls; with `closing` and `left`
    LastCalls last = {};        // the latest calls, by sequence; with `closing` and `left`
  };
  static_assert(sizeof(Note) == 48 + 32 * kLastCalls);
  struct ClosingReport {
    transport::Fingerprint call;
    std::uint64_t history = 0;
    LastCalls last = {};
  };
  struct Sent {
    std::unique_ptr<Note> note;
    transport::TransferRef transfer;
  };

  void post();
  void send(int member, const Note& note);
  ClosingReport closing_report() const;
  Status compare_histories() const;
  void handle(int member, const Note& note);
  void on_left(int member, const Note& note);
  void record_report(int member, const ClosingReport& report);
  void compare(int member, const transport::Fingerprint& theirs);
  void fail_skipped(int member, const transport::Fingerprint& last,
                    const transport::Fingerprint& mine);

  const GroupContext& group_;
  transport::Fingerprint latest_;
  // By sequence; members are never further apart than a region's ring of lines.
  std::array<transport::Fingerprint, 256> recent_{};
  // Members' calls that have not begun here.
  std::vector<std::pair<int, transport::Fingerprint>> waiting_;
  std::map<std::uint64_t, int> refusals_;  // members that were refused a call, by sequence
  std::vector<std::optional<ClosingReport>> reports_;  // per member; empty until the first note
  std::uint64_t history_ = 0;
  bool closing_ = false;
  bool released_ = false;
  bool first_left_ = false;
  bool stopped_ = false;
  std::unique_ptr<Note> inbox_;
  transport::TransferRef receive_;
  std::deque<Sent> sent_;
};

/// A call that its caller's thread has started under the drive lock, before it is in the queue.
struct StartingCall {
  /// `control` null: calls are not compared later (for tests of single parts).
  explicit StartingCall(CallRecord& given, Control* later = nullptr)
      : record(given), control(later) {}

  /// Sets the call and its number.
  void assign(const transport::Fingerprint& call, std::uint64_t number) {
    transport::copy_words(fingerprint, call);
    fingerprint.sequence = number;
  }
  /// Records the call for later comparison. Must precede any message of it, since the receivers may
  /// already have reported the calls that they are in.
  void remember() noexcept {
    if (remembered) return;
    remembered = true;
    if (control != nullptr) control->begin(fingerprint);
  }
  /// The other members can see the call now.
  void on_started() noexcept {
    remember();
    record.on_started(fingerprint.sequence);
  }

  CallRecord& record;
  Control* const control;
  transport::Fingerprint fingerprint;
  bool remembered = false;
};

}  // namespace muster::collective
