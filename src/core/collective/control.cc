// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/control.h"

#include <algorithm>

#include "core/collective/call.h"
#include "core/collective/op.h"

namespace muster::collective {
namespace {

constexpr std::uint64_t kControlTag = kFirstReservedTag;

/// Notes kept per member for calls that have not begun here: only refused calls can be more than
/// one ahead.
constexpr std::size_t kKeptNotes = 64;  // limit: memory

/// Equal for calls that agree.
std::uint64_t add_to(std::uint64_t history, const transport::Fingerprint& call) {
  const bool refused = (call.flags & kRefused) != 0;
  const auto mix = [&](std::uint64_t word) {
    history = (history ^ word) * 0x9e3779b97f4a7c15u;
    history ^= history >> 29;
  };
  mix(refused ? 1
              : 2 | call.op << 2 | call.dtype << 10 | call.reduce << 18 |
                    std::uint64_t{call.flags} >> kEncodingShift << 26 |
                    std::uint64_t{static_cast<std::uint32_t>(call.root)} << 32);
  if (refused) return history;
  mix(call.count);
  mix(call.digest);
  return history;
}

std::string numbered(const transport::Fingerprint& call) {
  if (call.sequence == 0) return "none";
  return fingerprint_rules().describe(call) + " as number " + std::to_string(call.sequence);
}

}  // namespace

Control::~Control() {
  cancel();
  if (!quiesced() &&
      !group_.fabric->wait([this] { return quiesced(); }, group_.now() + kCancelLimit)) {
    static_cast<void>(inbox_.release());  // the fabric may still write to it
  }
  for (Sent& sent : sent_) {
    if (!sent.transfer->done())
      static_cast<void>(sent.note.release());  // the fabric may still read it
  }
}

void Control::listen() {
  inbox_ = std::make_unique<Note>();
  post();
}

void Control::post() {
  transport::Fingerprint note;
  note.op = static_cast<std::uint8_t>(Op::send);
  receive_ = group_.channel->receive(transport::kAnyMember, kControlTag,
                                     std::as_writable_bytes(std::span(inbox_.get(), 1)), note);
}

void Control::send(int member, const Note& note) {
  transport::Fingerprint header;
  header.op = static_cast<std::uint8_t>(Op::send);
  auto copy = std::make_unique<Note>(note);
  auto transfer =
      group_.channel->send(member, kControlTag, std::as_bytes(std::span(copy.get(), 1)), header);
  sent_.push_back({std::move(copy), std::move(transfer)});
}

bool Control::all_sent() {
  while (!sent_.empty() && sent_.front().transfer->done()) sent_.pop_front();
  return sent_.empty();
}

void Control::poll() {
  all_sent();
  while (!stopped_ && news()) {
    if (!receive_->status().ok()) {  // the channel has failed; members send no note of a wrong size
      stopped_ = true;
      return;
    }
    const int member = receive_->source();
    const Note note = *inbox_;
    post();
    handle(member, note);
  }
}

void Control::handle(int member, const Note& note) {
  switch (note.kind) {
    case NoteKind::waiting:
      if ((note.call.flags & kRefused) != 0 && refusals_.size() < kKeptNotes)
        ++refusals_[note.call.sequence];
      if (note.call.sequence <= latest_.sequence) {
        compare(member, note.call);
      } else if (closing_) {
        fail_skipped(group_.rank(), latest_, note.call);
      } else if (waiting_.size() < kKeptNotes * static_cast<std::size_t>(group_.size())) {
        waiting_.emplace_back(member, note.call);
      }
      return;
    case NoteKind::closing:
      record_report(member, {note.call, note.history, note.last});
      if (!closing_ && note.call.sequence < latest_.sequence)
        fail_skipped(member, note.call, latest_);
      return;
    case NoteKind::released: released_ = true; return;
    case NoteKind::left: return on_left(member, note);
  }
}

/// The member has destroyed the group. Collectives that it has not made fail here; messages that it
/// has sent can still be received.
void Control::on_left(int member, const Note& note) {
  record_report(member, {note.call, note.history, note.last});
  const int rank = group_.job_rank_of(member);
  if (!closing_ && note.call.sequence < latest_.sequence) fail_skipped(member, note.call, latest_);
  group_.channel->leave(member, Status(Code::closed,
                                       "rank " + std::to_string(rank) + " has destroyed " +
                                           group_.text() + "; nothing more comes from it there",
                                       {rank}));
  if (member == 0) released_ = first_left_ = true;
}

// Allocated at the end of a group, because it takes hundreds of bytes per member.
void Control::record_report(int member, const ClosingReport& report) {
  if (reports_.empty()) reports_.resize(static_cast<std::size_t>(group_.size()));
  reports_[static_cast<std::size_t>(member)] = report;
}

void Control::begin(const transport::Fingerprint& call) {
  transport::copy_words(latest_, call);
  transport::copy_words(recent_[call.sequence % recent_.size()], call);
  history_ = add_to(history_, call);
  if (!waiting_.empty()) {
    for (const auto& [member, theirs] : waiting_) {
      if (theirs.sequence == call.sequence) compare(member, theirs);
    }
    std::erase_if(waiting_,
                  [&](const auto& known) { return known.second.sequence <= call.sequence; });
  }
  for (int member = 0; member < static_cast<int>(reports_.size()); ++member) {
    const auto& last = reports_[static_cast<std::size_t>(member)];
    if (last && last->call.sequence < call.sequence) return fail_skipped(member, last->call, call);
  }
}

void Control::compare(int member, const transport::Fingerprint& theirs) {
  const transport::Fingerprint& mine = recent_[theirs.sequence % recent_.size()];
  if (mine.sequence != theirs.sequence || fingerprint_rules().agree(mine, theirs) ||
      group_.channel->failed())
    return;
  const int other = group_.job_rank_of(member);
  group_.channel->fail(
      Status(Code::mismatch,
             "the members of " + group_.text() + " made different calls as number " +
                 std::to_string(mine.sequence) + ": rank " + std::to_string(group_.job_rank()) +
                 " " + fingerprint_rules().describe(mine) + ", rank " + std::to_string(other) +
                 " " + fingerprint_rules().describe(theirs) +
                 "; every member must make the same calls in the same order",
             {std::min(group_.job_rank(), other), std::max(group_.job_rank(), other)}));
}

void Control::fail_skipped(int member, const transport::Fingerprint& last,
                           const transport::Fingerprint& mine) {
  if (group_.channel->failed()) return;
  const int culprit = group_.job_rank_of(member);
  group_.channel->fail(Status(
      Code::mismatch,
      "rank " + std::to_string(culprit) + " closes " + group_.text() + " after " +
          std::to_string(last.sequence) + (last.sequence == 1 ? " call" : " calls") +
          " (the last: " + numbered(last) + ") while another member is in " + numbered(mine) +
          ": rank " + std::to_string(culprit) + " skipped a call, or destroyed the group too early",
      {culprit}));
}

void Control::report_waiting(int member, const transport::Fingerprint& call) {
  send(member, {NoteKind::waiting, call});
}

bool Control::all_refused(std::uint64_t sequence) {
  const auto heard = refusals_.find(sequence);
  if (heard == refusals_.end() || heard->second < group_.size() - 1) return false;
  refusals_.erase(refusals_.begin(), std::next(heard));
  return true;
}

void Control::report_refused() {
  for (int member = 0; member < group_.size(); ++member) {
    if (member != group_.rank()) report_waiting(member, latest_);
  }
}

Control::ClosingReport Control::closing_report() const {
  ClosingReport report{latest_, history_, {}};
  for (std::uint64_t i = 0; i < kLastCalls && i < latest_.sequence; ++i) {
    const std::uint64_t sequence = latest_.sequence - i;
    report.last[sequence % kLastCalls] = recent_[sequence % recent_.size()];
  }
  return report;
}

void Control::report_closing() {
  closing_ = true;
  const ClosingReport report = closing_report();
  record_report(group_.rank(), report);
  for (const auto& known : waiting_) {
    if (known.second.sequence > latest_.sequence)
      return fail_skipped(group_.rank(), latest_, known.second);
  }
  if (group_.rank() != 0) send(0, {NoteKind::closing, latest_, report.history, report.last});
}

std::vector<int> Control::not_closing() const {
  std::vector<int> ranks;
  for (std::size_t member = 0; member < static_cast<std::size_t>(group_.size()); ++member) {
    if (reports_.empty() || !reports_[member])
      ranks.push_back(group_.job_rank_of(static_cast<int>(member)));
  }
  return ranks;
}

Status Control::compare_reports() const {
  const auto made = [](const auto& last) { return last ? last->call.sequence : 0; };
  const auto most =
      std::max_element(reports_.begin(), reports_.end(),
                       [&](const auto& a, const auto& b) { return made(a) < made(b); });
  std::vector<int> fewer;
  std::string calls;
  for (std::size_t member = 0; member < reports_.size(); ++member) {
    const auto& last = reports_[member];
    if (!last || made(last) == made(*most)) continue;
    fewer.push_back(group_.job_rank_of(static_cast<int>(member)));
    calls += "rank " + std::to_string(fewer.back()) + " made " + std::to_string(made(last)) +
             " (the last: " + numbered(last->call) + "), ";
  }
  if (fewer.empty()) return compare_histories();
  const int whole = group_.job_rank_of(static_cast<int>(most - reports_.begin()));
  return Status(Code::mismatch,
                "the members of " + group_.text() + " close it after different numbers of calls: " +
                    calls + "rank " + std::to_string(whole) + " made " +
                    std::to_string(made(*most)) + " (the last: " + numbered((*most)->call) + "); " +
                    describe_ranks(fewer) + " skipped a call",
                fewer);
}

// All members made the same number of calls. A member may still have returned from a call before
// the notice of another's different call arrived.
Status Control::compare_histories() const {
  for (std::size_t member = 1; member < reports_.size(); ++member) {
    if (!reports_[member] || reports_[member]->history == reports_[0]->history) continue;
    const int first = group_.job_rank_of(0), other = group_.job_rank_of(static_cast<int>(member));
    std::string calls;
    for (std::uint64_t i = std::min<std::uint64_t>(kLastCalls, latest_.sequence);
         i > 0 && calls.empty(); --i) {
      const std::uint64_t at = (latest_.sequence - i + 1) % kLastCalls;
      const auto &ours = reports_[0]->last[at], &theirs = reports_[member]->last[at];
      if (fingerprint_rules().agree(ours, theirs)) continue;
      calls = "rank " + std::to_string(first) + " called " + numbered(ours) + " while rank " +
              std::to_string(other) + " called " + numbered(theirs);
    }
    if (calls.empty())
      calls = "ranks " + std::to_string(first) + " and " + std::to_string(other) +
              " differ in a call before the last " + std::to_string(kLastCalls) + " of " +
              std::to_string(latest_.sequence);
    return Status(Code::mismatch,
                  "the members of " + group_.text() + " made different calls: " + calls +
                      "; every member must make the same calls in the same order",
                  {std::min(first, other), std::max(first, other)});
  }
  return {};
}

void Control::release_all() {
  for (int member = 1; member < group_.size(); ++member)
    send(member, {NoteKind::released, latest_});
}

void Control::report_left() {
  const ClosingReport report = closing_report();
  for (int member = 0; member < group_.size(); ++member) {
    if (member != group_.rank())
      send(member, {NoteKind::left, report.call, report.history, report.last});
  }
}

void Control::cancel() {
  stopped_ = true;
  if (receive_ != nullptr && !receive_->done()) group_.channel->cancel(receive_);
}

}  // namespace muster::collective
