// SPDX-License-Identifier: BSD-3-Clause
// Replicas join others that train on.
#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "core/base/hash.h"
#include "core/base/log/log.h"
#include "core/group/errors.h"
#include "muster/debug.h"
#include "muster/init.h"
#include "muster/point_to_point.h"
#include "train/ddp/same_modules.h"
#include "train/local_sgd/alike_senders.h"
#include "train/local_sgd/replica_admission.h"
#include "train/local_sgd/replica_fragment.h"

namespace muster::parallel {
namespace {

constexpr std::int64_t kTag = 0x6a6f696e;  // not one that users give to messages of theirs
constexpr std::int64_t kMostBehind = 64;   // limit: memory, of parts that wait to be sent
constexpr std::int64_t kNotSaved = -1;     // in the place of an optimizer's bytes
constexpr std::int64_t kKindBits = 7;

/// A member says one of these of an admission in each meeting, in the lowest bits.
enum OfJoiners : std::int64_t {
  kNone,       // it knows of none
  kAnnounced,  // it may begin; the other bits say whom it is about
  kBehind,     // the joiners lack some event
  kCurrent,    // they have all
  kFailed,
};

/// Numbers in the header of an event. Up to kTextBytes they are the same from all senders.
enum HeaderWord : std::int64_t {
  kKind,
  kMeetings,
  kTokens,
  kStateHash,
  kFragment,
  kSenders,
  kTextBytes,
  kSteps,  // by the clock, each makes a number of its own
  kOptimizerBytes,
  kOptimizerHash,
  kHeaderWords,
};

/// An event is one of these.
enum EventKind : std::int64_t { kSnapshot, kMeeting, kEntry };

std::int64_t word(const at::Tensor& words, std::int64_t number) {
  return words[number].item<std::int64_t>();
}

at::Tensor tensor_of(const std::vector<int>& ranks) {
  return at::tensor(std::vector<std::int64_t>(ranks.begin(), ranks.end()), at::kLong);
}

at::Tensor bytes_of(const std::string& text) {
  at::Tensor bytes = at::empty({std::ssize(text)}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

bool is_done(const WorkRef& work) { return work == nullptr || work->is_completed(); }

/// Why a completed call has failed; empty: it has not.
std::string failure_of(const WorkRef& work) {
  if (work == nullptr || work->is_success()) return {};
  try {
    work->wait();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

std::string text_of(const std::vector<int>& members, const Group& group) {
  std::vector<int> ranks;
  for (const int member : members) ranks.push_back(group->global_rank_of(member));
  return (ranks.size() == 1 ? "rank " : "ranks ") + group::list(ranks);
}

}  // namespace

void end_admission(const Group& wider, const std::string& why) {
  try {
    if (wider != default_group()) abort_process_group(wider, why);
  } catch (const std::exception&) {  // the job is over, so the others know
  }
}

void ReplicaMeetings::admit(const Group& wider) {
  const auto refuse = [this](const std::string& why) {
    group::invalid(schedule_.name + ": admit(): " + why);
  };
  if (admission_) refuse("an admission goes on; wait until is_admitting() is false");
  if (!wider || !wider->is_member())
    refuse("this rank is not a member of the group; give one of those that meet and the new ones");
  if (wider == default_group())
    refuse("the default group would fail with the admission; make a group of all by new_group()");
  if (schedule_.delay > 0 && schedule_.delay >= schedule_.sync_every / std::ssize(fragments_))
    refuse("with a delay of " + std::to_string(schedule_.delay) + " and " +
           std::to_string(fragments_.size()) + " fragments every " +
           std::to_string(schedule_.sync_every) +
           " steps, meetings overlap; choose a delay of less than sync_every / fragments, or let "
           "them join by set_group()");
  auto admission = std::make_unique<Admission>();
  admission->wider = wider;
  const std::vector<int>&meeting = schedule_.group->ranks(), &all = wider->ranks();
  for (const int rank : meeting) {
    if (std::ranges::find(all, rank) == all.end())
      refuse("rank " + std::to_string(rank) + " meets, and is not a member of the group");
    admission->senders.push_back(wider->group_rank_of(rank));
  }
  for (const int rank : all)
    if (std::ranges::find(meeting, rank) == meeting.end())
      admission->joiners.push_back(wider->group_rank_of(rank));
  if (admission->joiners.empty()) refuse("all members of the group meet already");
  admission->expected.resize(admission->joiners.size());
  admission->answers.resize(admission->joiners.size());
  // `wider` may have failed already, with one that joins: that shows at the next meeting.
  admission_ = std::move(admission);
}

void ReplicaMeetings::fail_admission(const std::string& why) {
  if (admission_ && admission_->failure.empty()) admission_->failure = why;
}

/// Ends the group of those that join, so that no rank waits there and no message is left. Those
/// that train go on as they were.
void ReplicaMeetings::drop_admission() {
  if (!admission_) return;
  const auto admission = std::move(admission_);
  const std::string why =
      schedule_.name + ": " + text_of(admission->joiners, admission->wider) +
      " could not be admitted, and the others go on without: " +
      (admission->failure.empty() ? "it has failed on another rank" : admission->failure);
  log(LogLevel::warning, why);
  end_admission(admission->wider, why);
}

/// Sees which messages have come and gone. Never blocks.
void ReplicaMeetings::look_at_joiners() {
  if (!admission_) return;
  Admission& admission = *admission_;
  if (const Status failure = admission.wider->failure(); !failure.ok())
    fail_admission(failure.message());
  if (admission.comparison && admission.comparison->is_completed()) send_snapshot();
  std::erase_if(admission.sent, [&](const WorkRef& work) {
    if (!is_done(work)) return false;
    if (const std::string why = failure_of(work); !why.empty()) fail_admission(why);
    return true;
  });
  for (std::size_t joiner = 0; joiner < admission.joiners.size(); ++joiner) {
    auto& expected = admission.expected[joiner];
    while (!expected.empty() && is_done(expected.front().work)) {
      if (const std::string why = failure_of(expected.front().work); !why.empty())
        fail_admission(why);
      ++admission.answers[joiner];
      expected.pop_front();
    }
  }
}

std::int64_t ReplicaMeetings::word_for_others() {
  look_at_joiners();
  if (!admission_) return kNone;
  const Admission& admission = *admission_;
  const std::int64_t missing = admission.events - std::ranges::min(admission.answers);
  if (missing > kMostBehind)
    fail_admission("the slowest is " + std::to_string(missing) + " meetings behind");
  if (!admission.failure.empty()) return kFailed;
  if (admission.sends) return admission.events == 0 || missing > 0 ? kBehind : kCurrent;
  const std::vector<int>& ranks = admission.wider->ranks();
  const std::uint64_t hash =
      hash_of({reinterpret_cast<const char*>(ranks.data()), ranks.size() * sizeof(ranks[0])});
  return static_cast<std::int64_t>((hash & ~static_cast<std::uint64_t>(kKindBits)) | kAnnounced);
}

/// If they cannot be copied, the admission has failed, not the meeting.
std::vector<at::Tensor> ReplicaMeetings::parts_for_joiners(const Fragment& fragment) {
  if (!admission_ || !admission_->sends) return {};
  try {
    std::vector<at::Tensor> averages;
    for (const auto& part : fragment.parts) averages.push_back(part.average);
    return parts_to_send(admission_->wider, admission_->senders, averages);
  } catch (const std::exception& error) {
    fail_admission(std::string("an average cannot be copied: ") + error.what());
    return {};
  }
}

/// After a meeting, when all is as it leaves it. The words of all members, the same on each of
/// them, decide; not what this one has seen meanwhile.
void ReplicaMeetings::tell_joiners(Fragment& fragment, const std::vector<at::Tensor>& parts) {
  std::vector<std::int64_t> words;
  if (const at::Tensor all = std::exchange(fragment.words, at::Tensor()); all.defined())
    for (std::int64_t member = 0; member < all.numel(); ++member)
      words.push_back(word(all, member));
  const auto is = [](std::int64_t kind) {
    return [kind](std::int64_t each) { return (each & kKindBits) == kind; };
  };
  if (words.empty() || std::ranges::any_of(words, is(kFailed))) return drop_admission();
  Admission& admission = *admission_;
  if (!admission.sends) {
    if (!std::ranges::all_of(words, is(kAnnounced))) return;  // not all have called admit()
    if (std::ranges::count(words, words[0]) == std::ssize(words)) return take_snapshot();
    fail_admission("the members have given admit() different groups");
    drop_admission();
    throw DistError(
        schedule_.name + ": admit() was given groups of different ranks by the members, here of " +
            group::list(admission.wider->ranks()) + "; the meeting counts, and nothing is admitted",
        Code::mismatch);
  }
  const bool enters = std::ranges::all_of(words, is(kCurrent));
  if (admission.comparison) send_snapshot();
  send_to_joiners(enters ? kEntry : kMeeting, &fragment - fragments_.data(), parts);
  expect_answers();
  if (!enters) return;
  if (!admission.failure.empty())  // the new ones lack an event, and the others would wait for them
    end_admission(admission.wider, schedule_.name + ": " + admission.failure);
  schedule_.group = admission.wider;
  admission_.reset();
}

at::Tensor ReplicaMeetings::header_of(std::int64_t kind, std::int64_t fragment) const {
  at::Tensor header = at::zeros({kHeaderWords}, at::kLong);
  header[kKind] = kind;
  header[kMeetings] = meetings_;
  header[kSteps] = steps_;
  header[kTokens] = tokens_;
  header[kStateHash] = hash_of_state();
  header[kFragment] = fragment;
  header[kSenders] = static_cast<std::int64_t>(admission_->senders.size());
  return header;
}

/// This member's messages of a snapshot, with copies of its part of the outer state.
std::vector<at::Tensor> ReplicaMeetings::snapshot_messages() const {
  const std::string text = schedule_.name + "\n" + described();
  at::Tensor header = header_of(kSnapshot, -1);
  header[kTextBytes] = std::ssize(text);
  std::vector<at::Tensor> messages{header, tensor_of(admission_->senders)};
  if (schedule_.group->rank() == 0) {
    std::vector<std::int64_t> revisions;
    for (const Fragment& fragment : fragments_) revisions.push_back(fragment.revision);
    messages.push_back(bytes_of(text));
    messages.push_back(at::tensor(revisions, at::kLong));
  }
  std::ranges::copy(parts_to_send(admission_->wider, admission_->senders, outer_),
                    std::back_inserter(messages));
  return messages;
}

/// Makes a snapshot. The outer optimizers' bytes may differ where their state does not; those that
/// do are not sent. A member that has failed takes part in the comparison: the others make it.
void ReplicaMeetings::take_snapshot() {
  Admission& admission = *admission_;
  admission.sends = true;
  at::Tensor mine = at::tensor({kNotSaved, std::int64_t{0}}, at::kLong);
  try {
    admission.snapshot = snapshot_messages();
    if (shares_optimizer_) {
      admission.optimizer = save_();
      mine =
          at::tensor({admission.optimizer.numel(), hash_of_bits(admission.optimizer)}, at::kLong);
    }
  } catch (const std::exception& error) {
    fail_admission(std::string("its state cannot be copied: ") + error.what());
  }
  if (!shares_optimizer_) return send_snapshot();
  admission.optimizers = at::empty({schedule_.group->size(), 2}, at::kLong);
  admission.comparison = all_gather_into_tensor(admission.optimizers, mine,
                                                {.group = schedule_.group, .async_op = true});
}

/// At the latest in the next meeting, when all members have gathered what they had to.
void ReplicaMeetings::send_snapshot() {
  Admission& admission = *admission_;
  auto messages = std::exchange(admission.snapshot, {});
  try {
    if (const WorkRef comparison = std::exchange(admission.comparison, nullptr)) {
      comparison->wait();
      const at::Tensor all = admission.optimizers, mine = all[schedule_.group->rank()];
      if (all.select(1, 0).min().item<std::int64_t>() == kNotSaved)
        throw DistError("a member could not copy its state", Code::invalid_argument);
      messages[0][kOptimizerBytes] = mine[0];
      messages[0][kOptimizerHash] = mine[1];
      std::vector<int> senders;
      for (std::size_t i = 0; i < admission.senders.size(); ++i)
        if (torch::equal(all[static_cast<std::int64_t>(i)], all[0]))
          senders.push_back(admission.senders[i]);
      if (torch::equal(mine, all[0]))
        std::ranges::copy(parts_to_send(admission.wider, senders, {admission.optimizer}),
                          std::back_inserter(messages));
      admission.optimizer.reset();
    }
    if (admission.failure.empty())
      admission.sent = start_sending(admission.wider, admission.joiners, messages, kTag);
  } catch (const std::exception& error) {
    fail_admission(error.what());
  }
  expect_answers();
}

void ReplicaMeetings::send_to_joiners(std::int64_t kind, std::int64_t fragment,
                                      const std::vector<at::Tensor>& body) {
  Admission& admission = *admission_;
  if (!admission.failure.empty()) return;  // what came before may be missing
  try {
    std::vector<at::Tensor> messages{header_of(kind, fragment), tensor_of(admission.senders)};
    std::ranges::copy(body, std::back_inserter(messages));
    std::ranges::copy(start_sending(admission.wider, admission.joiners, messages, kTag),
                      std::back_inserter(admission.sent));
  } catch (const std::exception& error) {
    fail_admission(error.what());
  }
}

/// Each joiner answers each event once, so no receive is left over.
void ReplicaMeetings::expect_answers() {
  Admission& admission = *admission_;
  ++admission.events;
  if (!admission.failure.empty()) return;
  try {
    for (std::size_t joiner = 0; joiner < admission.joiners.size(); ++joiner) {
      const at::Tensor meetings = at::empty({}, at::kLong);
      admission.expected[joiner].push_back(
          {meetings,
           irecv(meetings,
                 {.group = admission.wider, .tag = kTag, .group_src = admission.joiners[joiner]})});
    }
  } catch (const std::exception& error) {
    fail_admission(error.what());
  }
}

void ReplicaMeetings::enter() {
  if (!schedule_.joins) return;
  const at::NoGradGuard no_grad;
  admission_ = std::make_unique<Admission>();
  admission_->wider = schedule_.group;
  try {
    receive_snapshot();
    while (!follow_meeting()) {
    }
    for (std::size_t number = 0; number < outer_.size(); ++number) take_outer(number, 0);
  } catch (const std::exception& error) {  // also in its entry, after which the others wait for it
    admission_.reset();
    end_admission(schedule_.group, error.what());
    throw;
  }
  admission_.reset();
  schedule_.joins = false;
  set_next_meeting();
}

/// The next event's, from all senders. Gives that of the first.
at::Tensor ReplicaMeetings::receive_headers() {
  Admission& admission = *admission_;
  const Group& group = schedule_.group;
  std::vector<int>& senders = admission.senders;
  const auto receive = [&](std::optional<int> from) {
    const at::Tensor header = at::empty({kHeaderWords}, at::kLong);
    const int source =
        group->group_rank_of(recv(header, {.group = group, .tag = kTag, .group_src = from}));
    const at::Tensor list = at::empty({word(header, kSenders)}, at::kLong);
    recv(list, {.group = group, .tag = kTag, .group_src = source});
    if (senders.empty())  // the first that says anything
      for (std::int64_t i = 0; i < list.numel(); ++i)
        senders.push_back(static_cast<int>(word(list, i)));
    return std::pair(source, header);
  };
  std::optional<std::pair<int, at::Tensor>> first;
  if (senders.empty()) first = receive({});
  admission.headers.clear();
  for (const int sender : senders)
    admission.headers.push_back(first && first->first == sender ? first->second
                                                                : receive(sender).second);
  const at::Tensor& ours = admission.headers.front();
  for (std::size_t i = 0; i < senders.size(); ++i) {
    const at::Tensor& theirs = admission.headers[i];
    if (!torch::equal(theirs.narrow(0, 0, kTextBytes + 1), ours.narrow(0, 0, kTextBytes + 1)))
      throw DistError(schedule_.name + ": " + text_of({senders[i]}, group) +
                          " sends another outer state, after " +
                          std::to_string(word(theirs, kMeetings)) + " meetings, than " +
                          text_of({senders[0]}, group) + ", after " +
                          std::to_string(word(ours, kMeetings)),
                      Code::mismatch, {group->global_rank_of(senders[i])});
  }
  return ours;
}

/// Throws if this replica, having done as the event says, has another state than the others.
void ReplicaMeetings::require_state_of(const at::Tensor& header) const {
  if (meetings_ == word(header, kMeetings) && hash_of_state() == word(header, kStateHash)) return;
  throw DistError(schedule_.name + ": after " + std::to_string(word(header, kMeetings)) +
                      " meetings this new replica has another outer state than the others: its "
                      "outer optimizer has made something else of the same averages",
                  Code::mismatch, {schedule_.group->global_rank_of(schedule_.group->rank())});
}

void ReplicaMeetings::receive_snapshot() {
  const Group& group = schedule_.group;
  const at::Tensor header = receive_headers();
  const std::vector<int>& senders = admission_->senders;
  const int first = senders.front(), me = group->rank();
  const RecvOptions from_first{.group = group, .tag = kTag, .group_src = first};
  const at::Tensor bytes = at::empty({word(header, kTextBytes)}, at::kByte);
  recv(bytes, from_first);
  const std::string theirs(static_cast<const char*>(bytes.const_data_ptr()),
                           static_cast<std::size_t>(bytes.numel()));
  const std::string ours = schedule_.name + "\n" + described();
  if (ours != theirs)
    throw DistError(
        schedule_.name + ": this new replica has other options or parameters: " +
            first_difference(theirs, group->global_rank_of(first), ours, group->global_rank_of(me)),
        Code::mismatch, {group->global_rank_of(me)});
  const at::Tensor revisions = at::empty({std::ssize(fragments_)}, at::kLong);
  recv(revisions, from_first);
  send_alike(group, senders, {me}, outer_, kTag);
  if (shares_optimizer_) {
    std::vector<int> alike;
    const auto described_by = [this](std::size_t i) {
      return admission_->headers[i].narrow(0, kOptimizerBytes, 2);
    };
    for (std::size_t i = 0; i < senders.size(); ++i)
      if (torch::equal(described_by(i), described_by(0))) alike.push_back(senders[i]);
    const at::Tensor optimizer = at::empty({word(header, kOptimizerBytes)}, at::kByte);
    send_alike(group, alike, {me}, {optimizer}, kTag);
    load_(optimizer);
  }
  steps_ = word(header, kSteps);
  meetings_ = word(header, kMeetings);
  tokens_ = word(header, kTokens);
  for (std::size_t f = 0; f < fragments_.size(); ++f)
    fragments_[f].revision = word(revisions, static_cast<std::int64_t>(f));
  require_state_of(header);
  answer(meetings_);
}

/// Does what the others did in the next meeting. Whether this replica takes part from there on.
bool ReplicaMeetings::follow_meeting() {
  const at::Tensor header = receive_headers();
  Fragment& fragment = fragments_.at(static_cast<std::size_t>(word(header, kFragment)));
  std::vector<at::Tensor> averages;
  for (auto& part : fragment.parts) {
    part.average = at::empty({part.elements}, outer_[part.numbers.front()].options());
    averages.push_back(part.average);
  }
  send_alike(schedule_.group, admission_->senders, {schedule_.group->rank()}, averages, kTag);
  update(fragment);
  for (auto& part : fragment.parts) part.average.reset();
  ++fragment.revision;
  ++meetings_;
  steps_ = word(header, kSteps);
  tokens_ = word(header, kTokens);
  require_state_of(header);
  answer(meetings_);
  return word(header, kKind) == kEntry;
}

void ReplicaMeetings::answer(std::int64_t meetings) {
  start_sending(schedule_.group, admission_->senders, {at::full({}, meetings, at::kLong)}, kTag);
}

}  // namespace muster::parallel
