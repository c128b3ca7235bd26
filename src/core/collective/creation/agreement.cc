// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/creation/group_creation.h"

#include <algorithm>
#include <cstring>

#include "core/collective/call.h"
#include "core/collective/control.h"
#include "core/collective/op.h"
#include "core/security/secret.h"

namespace muster::collective {
namespace {

/// How often a waiting member checks for deaths and for `give_up`.
constexpr auto kCheckInterval =
    std::chrono::milliseconds(50);  // limit: delay until a cancelled creation is noticed

enum class AgreementKind : std::uint32_t { ready = 1, settled, failed };

/// The first member's reason, in `word` of a `failed` note.
constexpr std::uint64_t kLate = 0;
constexpr std::uint64_t kLost = 1;

struct AgreementNote {
  AgreementKind kind = AgreementKind::ready;
  std::uint32_t id = 0;
  std::uint64_t word = 0;
  std::uint32_t missing = 0;  // number of missing (or lost) ranks in `ranks`
  std::int32_t ranks[13] = {};
  GroupDescriptor descriptor = {};  // set in a `settled` note
  LinkReport links = {};            // set in a `ready` note
  char text[240] = {};              // of a `failed` note for kLost: the beginning of the cause
};
static_assert(sizeof(AgreementNote) == 72 + sizeof(GroupDescriptor) + sizeof(LinkReport) + 240);

// Only messages of this group's creation match this tag.
std::uint64_t tag_of(std::vector<int> members, const std::string& name, std::uint64_t use) {
  std::sort(members.begin(), members.end());
  ByteWriter key;
  for (int member : members) key.put(static_cast<std::int32_t>(member));
  key.put(use).put_text(name);
  const auto hash = short_hash(key.view());
  std::uint64_t number;
  std::memcpy(&number, hash.data(), sizeof number);
  return number | kFirstReservedTag;
}

class AgreementProtocol {
 public:
  AgreementProtocol(transport::Fabric& fabric, const std::vector<int>& members, std::uint64_t tag,
                    TimePoint deadline, const std::function<Status()>& give_up,
                    const std::function<LinkReport()>& links)
      : fabric_(fabric),
        channel_(fabric.agreements()),
        members_(members),
        tag_(tag),
        deadline_(deadline),
        give_up_(give_up),
        links_(links),
        notes_(members.size()) {
    header_.op = static_cast<std::uint8_t>(Op::send);
  }

  // The first member sends nothing before all have reported. Its message is then final, because
  // the id is its own.
  Result<Agreement> lead(const std::function<Result<GroupDescriptor>()>& describe_group,
                         const std::function<void(const GroupDescriptor&)>& release) {
    if (Status heard = collect(AgreementKind::ready); !heard) return heard;
    auto channel = fabric_.open(fabric_.next_channel_id(), members_);
    if (!channel.ok()) return abandon(channel.status());
    auto descriptor = describe_group();
    if (!descriptor.ok()) return abandon(descriptor.status());
    std::vector<LinkReport> reports{own_links()};
    for (std::size_t i = 1; i < notes_.size(); ++i) reports.push_back(notes_[i].links);
    descriptor->strands = most_strands(reports);
    descriptor->order = order_by_rates(reports);
    AgreementNote settled{AgreementKind::settled, (*channel)->id()};
    settled.descriptor = *descriptor;
    bool some_know = false;
    if (Status sent = send_to_all(settled, some_know); !sent) {
      if (!some_know && release) release(*descriptor);
      if (some_know) (*channel)->fail(sent);
      return abandon(std::move(sent));
    }
    return Agreement{std::move(*channel), *descriptor};
  }

  Result<Agreement> follow() {
    AgreementNote ready{AgreementKind::ready};
    ready.links = own_links();
    const Status sent = send_in_time(members_[0], ready);
    // If the first member has ended, it may have sent the reason before.
    if (!sent && sent.code() != Code::closed) return sent;
    if (Status heard = collect(AgreementKind::settled); !heard) return heard;
    if (!sent) return sent;
    auto channel = fabric_.open(notes_[0].id, members_);
    if (!channel.ok()) return channel.status();
    return Agreement{std::move(*channel), notes_[0].descriptor};
  }

 private:
  bool leads() const { return fabric_.rank() == members_[0]; }
  LinkReport own_links() const { return links_ ? links_() : LinkReport(); }

  // Receives one note from each member (on the first member) or from the first member (on the
  // others) into `notes_`.
  Status collect(AgreementKind expected) {
    std::vector<transport::TransferRef> receives(members_.size());
    for (std::size_t i = 0; i < members_.size(); ++i) {
      if ((i == 0) == leads()) continue;
      receives[i] = channel_.receive(members_[i], tag_,
                                     std::as_writable_bytes(std::span(&notes_[i], 1)), header_);
    }
    const auto is_done = [&] {
      bool all = true;
      for (const auto& receive : receives) {
        if (receive == nullptr) continue;
        if (!receive->done()) {
          all = false;
        } else if (!receive->status().ok()) {
          return true;
        }
      }
      return all;
    };
    TimePoint limit = deadline_;
    if (!leads() && limit < TimePoint::max() - kVerdictGrace) limit += kVerdictGrace;
    const auto waited = wait(is_done, limit);
    Status status = waited.ok() ? Status() : waited.status();
    std::vector<int> missing;
    bool all_done = true;
    for (std::size_t i = 0; i < members_.size(); ++i) {
      if (receives[i] == nullptr) continue;
      if (!receives[i]->done()) {
        missing.push_back(members_[i]);
        channel_.cancel(receives[i]);
        all_done = all_done && receives[i]->done();
      } else if (status.ok() && !receives[i]->status().ok()) {
        status = receives[i]->status();
      }
    }
    const auto ended = [&] {
      return std::all_of(receives.begin(), receives.end(),
                         [](const auto& r) { return r == nullptr || r->done(); });
    };
    if (!all_done) fabric_.wait(ended, fabric_.clock().now() + kCancelLimit);
    if (!status.ok()) return abandon(std::move(status));
    if (!*waited) return timeout_error(expected, std::move(missing));
    if (!leads() && notes_[0].kind == AgreementKind::failed) return verdict(notes_[0]);
    return status;
  }

  // Waits until `is_done` holds (true) or the limit passes (false). Returns a failure if the
  // creation cannot succeed any more.
  Result<bool> wait(const std::function<bool()>& is_done, TimePoint limit) {
    for (TimePoint now = fabric_.clock().now();; now = fabric_.clock().now()) {
      const TimePoint next_check = limit - now > kCheckInterval ? now + kCheckInterval : limit;
      if (fabric_.wait(is_done, next_check)) return true;
      if (next_check == limit) return false;
      for (const int member : members_) {
        if (Status death = fabric_.death_of(member); !death.ok()) return death;
      }
      if (give_up_) {
        if (Status failure = give_up_(); !failure.ok()) return failure;
      }
    }
  }

  // On the first member: notifies the others, which wait for it alone.
  Status abandon(Status why) {
    if (!leads()) return why;
    AgreementNote failed{AgreementKind::failed};
    failed.word = kLost;
    for (int rank : why.ranks()) {
      if (failed.missing < std::size(failed.ranks)) failed.ranks[failed.missing++] = rank;
    }
    why.message().copy(failed.text, sizeof failed.text - 1);
    for (std::size_t i = 1; i < members_.size(); ++i) {
      const auto& ranks = why.ranks();
      if (std::find(ranks.begin(), ranks.end(), members_[i]) == ranks.end())
        static_cast<void>(send(members_[i], failed));
    }
    return why;
  }

  Status timeout_error(AgreementKind expected, std::vector<int> missing) {
    std::sort(missing.begin(), missing.end());
    if (leads()) {
      AgreementNote failed{AgreementKind::failed};
      failed.word = kLate;
      for (int rank : missing) {
        if (failed.missing < std::size(failed.ranks)) failed.ranks[failed.missing++] = rank;
      }
      for (std::size_t i = 1; i < members_.size(); ++i) {
        if (!std::binary_search(missing.begin(), missing.end(), members_[i]))
          static_cast<void>(send(members_[i], failed));
      }
    }
    const char* what = expected == AgreementKind::ready ? " did not call it" : " did not answer";
    return Status(Code::timed_out,
                  describe_ranks(missing) + what +
                      " within the timeout; every member must make the group, in the same order "
                      "and with the same ranks and name",
                  missing);
  }

  Status verdict(const AgreementNote& note) {
    std::vector<int> missing(
        note.ranks, note.ranks + std::min<std::size_t>(note.missing, std::size(note.ranks)));
    if (note.word == kLost) {
      for (const int rank : missing) {
        if (Status death = fabric_.death_of(rank); !death.ok()) return death;
      }
      return Status(missing.empty() ? Code::aborted : Code::peer_failed,
                    "rank " + std::to_string(members_[0]) + " cancelled it" +
                        (missing.empty()
                             ? ""
                             : " because " + describe_ranks(missing) + " can no longer take part") +
                        ": " + std::string(note.text, ::strnlen(note.text, sizeof note.text)),
                    missing);
    }
    return Status(Code::timed_out,
                  describe_ranks(missing) +
                      " did not call it within the timeout, as reported by rank " +
                      std::to_string(members_[0]) +
                      "; every member must make the group, in the same order and with the same "
                      "ranks and name",
                  missing);
  }

  Status send_to_all(const AgreementNote& note, bool& some_know) {
    for (std::size_t i = 1; i < members_.size(); ++i) {
      Status sent = send_in_time(members_[i], note);
      // A note that was not sent in time may still arrive.
      some_know = some_know || sent.ok() || sent.code() == Code::timed_out;
      if (!sent) return sent;
    }
    return {};
  }

  Status send_in_time(int rank, const AgreementNote& note) {
    const auto sent = send(rank, note);
    if (!sent.ok()) return sent.status();
    return *sent ? Status() : timeout_error(AgreementKind::settled, {rank});
  }

  // Whether the note was sent before the deadline.
  Result<bool> send(int rank, const AgreementNote& note) {
    auto copy = std::make_unique<AgreementNote>(note);
    const auto transfer =
        channel_.send(rank, tag_, std::as_bytes(std::span(copy.get(), 1)), header_);
    const auto is_done = [&] { return transfer->done(); };
    const auto waited = wait(is_done, deadline_);
    if (waited.ok() && *waited) {
      if (!transfer->status().ok()) return transfer->status();
      return true;
    }
    channel_.cancel(transfer);
    if (!fabric_.wait(is_done, fabric_.clock().now() + kCancelLimit))
      static_cast<void>(copy.release());
    return waited;
  }

  transport::Fabric& fabric_;
  transport::Channel& channel_;
  const std::vector<int>& members_;
  const std::uint64_t tag_;
  const TimePoint deadline_;
  const std::function<Status()>& give_up_;
  const std::function<LinkReport()>& links_;
  transport::Fingerprint header_;
  std::vector<AgreementNote> notes_;
};

}  // namespace

Result<Agreement> agree(transport::Fabric& fabric, const std::vector<int>& members,
                        const std::string& name, std::uint64_t use, TimePoint deadline,
                        const std::function<Result<GroupDescriptor>()>& describe_group,
                        const std::function<void(const GroupDescriptor&)>& release,
                        const std::function<Status()>& give_up,
                        const std::function<LinkReport()>& links) {
  AgreementProtocol protocol(fabric, members, tag_of(members, name, use), deadline, give_up, links);
  return fabric.rank() == members[0] ? protocol.lead(describe_group, release) : protocol.follow();
}

}  // namespace muster::collective
