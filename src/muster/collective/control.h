/// Notes between the members of a group beside their collectives: what a member waits in, and the
/// comparison at the end.
///
/// Messages of a collective carry its fingerprint, so most disagreements show by themselves. What
/// does not: two members that both wait for the other (each thinks that the other is the root), and
/// a member that skipped a call and leaves. So a member that has waited for a while tells those it
/// waits for what it is in, and a member that leaves tells the first one how many calls it has
/// made.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "muster/base/status.h"
#include "muster/collective/driver.h"
#include "muster/transport/fingerprint.h"

namespace muster::collective {

/// Tags from here up are not for users.
inline constexpr std::uint64_t kFirstReservedTag = std::uint64_t{1} << 62;

/// Not thread-safe: used under the communicator's drive lock.
class Control {
 public:
  explicit Control(const GroupContext& group) : group_(group) {}
  ~Control();

  /// From now on notes are taken. Not for groups of one.
  void listen();
  bool news() const { return receive_ != nullptr && !stopped_ && receive_->done(); }
  /// Takes the notes that have come; fails the channel where they show a disagreement.
  void poll();
  /// This member's next call: remembered for later comparisons and held against the notes that came
  /// before it.
  void begin(const transport::Fingerprint& call);
  /// The call that began last; sequence 0 where there is none.
  const transport::Fingerprint& latest() const { return latest_; }

  /// Tells all others that `latest()` was refused here: they may be waiting for it.
  void tell_refused();
  /// Tells a member that this one waits for it in `call`.
  void tell_waiting(int member, const transport::Fingerprint& call);
  /// Tells the first member that this one leaves after `latest()`.
  void tell_leaving();
  /// The first member: who has not told yet (job ranks).
  std::vector<int> not_leaving() const;
  /// The first member, once all have told that ever will: success if these have made the same
  /// calls, else who skipped some.
  Status compare_leaving() const;
  /// The first member lets all others go.
  void tell_released();
  bool released() const { return released_; }
  bool all_sent();
  /// Stops listening; `quiet` once nothing of it is under way.
  void cancel();
  bool quiet() const { return receive_ == nullptr || receive_->done(); }

 private:
  enum class Kind : std::uint64_t { waiting = 1, leaving, released };
  static constexpr std::size_t kTold = 8;
  using Told = std::array<transport::Fingerprint, kTold>;
  struct Note {
    Kind kind;
    transport::Fingerprint call;
    std::uint64_t history = 0;  // of all calls made; with `leaving`
    Told last = {};             // the latest calls, by sequence; with `leaving`
  };
  static_assert(sizeof(Note) == 48 + 32 * kTold);
  struct Left {
    transport::Fingerprint call;
    std::uint64_t history = 0;
    Told last = {};
  };
  struct Sent {
    std::unique_ptr<Note> note;
    transport::TransferRef transfer;
  };

  void post();
  void send(int member, const Note& note);
  Left leaving_note() const;
  Status compare_histories() const;
  void take(int member, const Note& note);
  void note_left(int member, const Left& left);
  void compare(int member, const transport::Fingerprint& theirs);
  void fail_skipped(int member, const transport::Fingerprint& last,
                    const transport::Fingerprint& mine);

  const GroupContext& group_;
  transport::Fingerprint latest_;
  std::array<transport::Fingerprint, 256>
      recent_{};  // by sequence; members are never further apart than a region's ring of lines
  std::vector<std::pair<int, transport::Fingerprint>>
      waiting_;                            // members' calls that have not begun here
  std::vector<std::optional<Left>> left_;  // of every member, once one has told; before that none
  std::uint64_t history_ = 0;
  bool leaving_ = false;
  bool released_ = false;
  bool stopped_ = false;
  std::unique_ptr<Note> inbox_;
  transport::TransferRef receive_;
  std::deque<Sent> sent_;
};

}  // namespace muster::collective
