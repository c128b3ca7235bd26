// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/creation/survivors.h"

#include <algorithm>
#include <cstring>
#include <deque>

#include "core/collective/call.h"
#include "core/collective/control.h"
#include "core/collective/op.h"
#include "core/security/secret.h"

namespace muster::collective {

SurvivorViews::SurvivorViews(int self, std::vector<bool> out, std::uint32_t attempt)
    : self_(self), view_{attempt, std::move(out)}, received_(view_.out.size()) {}

bool SurvivorViews::take_changed() { return std::exchange(changed_, false); }

void SurvivorViews::start_over() {
  ++view_.attempt;
  changed_ = true;
}

void SurvivorViews::grow(const SurvivorView& other) {
  SurvivorView joined = view_;
  joined.attempt = std::max(joined.attempt, other.attempt);
  for (std::size_t i = 0; i < joined.out.size(); ++i) joined.out[i] = joined.out[i] || other.out[i];
  if (joined == view_) return;
  view_ = std::move(joined);
  changed_ = true;
}

void SurvivorViews::heard(int member, const SurvivorView& theirs) {
  received_[static_cast<std::size_t>(member)] = theirs;
  grow(theirs);
}

void SurvivorViews::gone(int member) {
  SurvivorView known = view_;
  known.out[static_cast<std::size_t>(member)] = true;
  grow(known);
}

bool SurvivorViews::decided() const { return !changed_ && !excluded() && awaited().empty(); }

std::vector<int> SurvivorViews::awaited() const {
  std::vector<int> members;
  for (std::size_t i = 0; i < received_.size(); ++i) {
    const auto member = static_cast<int>(i);
    if (member != self_ && includes(member) && received_[i] != view_) members.push_back(member);
  }
  return members;
}

namespace {

/// How often a member checks which ranks the fabric has found dead.
constexpr auto kCheckInterval = std::chrono::milliseconds(50);  // limit: delay of an error
/// When a member first asks the silent members again; each later interval is twice as long.
constexpr auto kFirstRetry = std::chrono::milliseconds(250);  // limit: delay of an error

std::uint64_t tag_of(const Lineage& lineage) {
  ByteWriter key;
  key.put_text("survivors of").put_text(lineage.name);
  for (const int member : lineage.members) key.put(static_cast<std::int32_t>(member));
  const auto hash = short_hash(key.view());
  std::uint64_t number;
  std::memcpy(&number, hash.data(), sizeof number);
  return number | kFirstReservedTag;
}

/// `asks_reply`: the receiver must send its view even if it has sent it before. (A member that
/// succeeds stops listening, and loses views that arrive then.)
std::string encode(const SurvivorViews::SurvivorView& view, bool asks_reply) {
  ByteWriter out;
  out.put(view.attempt).put(static_cast<std::uint8_t>(asks_reply));
  for (std::size_t i = 0; i < view.out.size(); i += 8) {
    std::uint8_t bits = 0;
    for (std::size_t bit = 0; bit < 8 && i + bit < view.out.size(); ++bit) {
      if (view.out[i + bit]) bits = static_cast<std::uint8_t>(bits | (1u << bit));
    }
    out.put(bits);
  }
  return out.take();
}

constexpr std::size_t kHead = sizeof(std::uint32_t) + 1;
bool asks_reply(const std::string& bytes) { return bytes[kHead - 1] != 0; }

SurvivorViews::SurvivorView decode(const std::string& bytes, std::size_t members) {
  SurvivorViews::SurvivorView view;
  std::memcpy(&view.attempt, bytes.data(), sizeof view.attempt);
  for (std::size_t i = 0; i < members; ++i) {
    const auto byte = static_cast<unsigned char>(bytes[kHead + i / 8]);
    view.out.push_back(((byte >> (i % 8)) & 1) != 0);
  }
  return view;
}

/// Sends and receives views over the fabric.
class ViewExchange {
 public:
  ViewExchange(transport::Fabric& fabric, const Lineage& lineage, SurvivorViews& views)
      : fabric_(fabric),
        channel_(fabric.agreements()),
        lineage_(lineage),
        tag_(tag_of(lineage)),
        views_(views),
        receives_(lineage.members.size()),
        inboxes_(lineage.members.size(), encode(views.view(), false)) {
    header_.op = static_cast<std::uint8_t>(Op::send);
  }
  ~ViewExchange() {
    for (auto& receive : receives_) {
      if (receive != nullptr) channel_.cancel(receive);
    }
    for (auto& sent : sent_) channel_.cancel(sent.transfer);
    const auto all_done = [this] {
      const auto over = [](const transport::TransferRef& transfer) {
        return transfer == nullptr || transfer->done();
      };
      return std::all_of(receives_.begin(), receives_.end(), over) &&
             std::all_of(sent_.begin(), sent_.end(),
                         [&](const OutgoingReport& sent) { return over(sent.transfer); });
    };
    if (!fabric_.wait(all_done, fabric_.clock().now() + std::chrono::seconds(1))) {
      // Leaks memory that the fabric may still write to.
      new auto(std::move(inboxes_));
      new auto(std::move(sent_));
    }
  }

  Status decide(TimePoint deadline) {
    Duration retry_interval = kFirstRetry;
    TimePoint retry_at = fabric_.clock().now() + retry_interval;
    while (true) {
      process_views();
      if (channel_.failed()) return channel_.failure();  // the others have excluded this rank
      if (views_.excluded()) {
        return Status(Code::peer_failed,
                      "the other members have excluded rank " + std::to_string(fabric_.rank()) +
                          " from the shrunk group; it cannot continue with them",
                      {fabric_.rank()});
      }
      if (views_.take_changed()) {
        send_to_all();
        continue;
      }
      if (views_.decided() && all_sent()) return {};
      const TimePoint now = fabric_.clock().now();
      if (now >= deadline) return timeout_error();
      check_for_deaths();
      if (now >= retry_at) {
        for (const int member : views_.awaited()) send_view(member, true);
        retry_interval *= 2;
        retry_at = now + retry_interval;
      }
      fabric_.wait([this] { return has_news(); },
                   std::min<TimePoint>(deadline, now + kCheckInterval));
    }
  }

  /// For the creation of the decided group: whether another attempt has begun meanwhile.
  Status superseded(const SurvivorViews::SurvivorView& decided) {
    process_views();
    if (channel_.failed()) return channel_.failure();
    if (views_.view() == decided) return {};
    return Status(Code::aborted, "the survivors have begun another attempt");
  }

 private:
  struct OutgoingReport {
    int member;
    std::unique_ptr<std::string> bytes;
    transport::TransferRef transfer;
  };

  int job_rank(int member) const { return lineage_.members[static_cast<std::size_t>(member)]; }
  bool is_self(int member) const { return job_rank(member) == fabric_.rank(); }

  void send_view(int member, bool asks_reply) {
    auto bytes = std::make_unique<std::string>(encode(views_.view(), asks_reply));
    auto transfer =
        channel_.send(job_rank(member), tag_, std::as_bytes(std::span(*bytes)), header_);
    sent_.push_back({member, std::move(bytes), std::move(transfer)});
  }
  void send_to_all() {
    for (int member = 0; member < static_cast<int>(receives_.size()); ++member) {
      if (!is_self(member) && views_.includes(member)) send_view(member, false);
    }
  }

  // Processes received views and posts new receives.
  void process_views() {
    if (channel_.failed()) return;
    for (int member = 0; member < static_cast<int>(receives_.size()); ++member) {
      auto& receive = receives_[static_cast<std::size_t>(member)];
      auto& inbox = inboxes_[static_cast<std::size_t>(member)];
      while (!is_self(member) && views_.includes(member)) {
        if (receive == nullptr)
          receive = channel_.receive(job_rank(member), tag_,
                                     std::as_writable_bytes(std::span(inbox)), header_);
        if (!receive->done()) break;
        if (receive->status().ok()) {
          views_.heard(member, decode(inbox, receives_.size()));
          if (asks_reply(inbox) && views_.includes(member)) send_view(member, false);
        } else if (channel_.failed()) {
          return;
        } else {
          views_.gone(member);
        }
        receive = nullptr;
      }
    }
    std::erase_if(sent_, [](const OutgoingReport& sent) { return sent.transfer->done(); });
  }

  // Whether a view can be processed, or the last note has been sent. Views from excluded members
  // are ignored.
  bool has_news() const {
    if (channel_.failed() || (views_.decided() && all_sent())) return true;
    for (int member = 0; member < static_cast<int>(receives_.size()); ++member) {
      const auto& receive = receives_[static_cast<std::size_t>(member)];
      if (receive != nullptr && receive->done() && views_.includes(member)) return true;
    }
    return false;
  }
  // A member must not stop before its views are sent: no other member forwards them.
  bool all_sent() const {
    return std::all_of(sent_.begin(), sent_.end(), [this](const OutgoingReport& sent) {
      return sent.transfer->done() || !views_.includes(sent.member);
    });
  }
  void check_for_deaths() {
    for (int member = 0; member < static_cast<int>(receives_.size()); ++member) {
      if (!is_self(member) && views_.includes(member) && !fabric_.death_of(job_rank(member)).ok())
        views_.gone(member);
    }
  }

  Status timeout_error() const {
    std::vector<int> missing;
    for (const int member : views_.awaited()) missing.push_back(job_rank(member));
    return Status(Code::timed_out,
                  describe_ranks(missing) +
                      " did not call it within the timeout although alive; every survivor must "
                      "shrink the group",
                  missing);
  }

  transport::Fabric& fabric_;
  transport::Channel& channel_;
  const Lineage& lineage_;
  const std::uint64_t tag_;
  SurvivorViews& views_;
  transport::Fingerprint header_;
  std::vector<transport::TransferRef> receives_;
  std::vector<std::string> inboxes_;
  std::deque<OutgoingReport> sent_;
};

Result<int> own_position(const Lineage& lineage, int rank) {
  const auto at = std::find(lineage.members.begin(), lineage.members.end(), rank);
  if (at == lineage.members.end())
    return Status(Code::invalid_argument,
                  "rank " + std::to_string(rank) + " is not a member of the group that it shrinks");
  return static_cast<int>(at - lineage.members.begin());
}

Status exclude_ranks(Lineage& lineage, const std::vector<int>& exclude) {
  for (const int rank : exclude) {
    const auto position = own_position(lineage, rank);
    if (!position.ok())
      return Status(Code::invalid_argument,
                    "rank " + std::to_string(rank) +
                        " is to be left out of a group that it is not a member of");
    lineage.out[static_cast<std::size_t>(*position)] = true;
  }
  return {};
}

}  // namespace

Result<Shrunk> shrink(std::shared_ptr<transport::Fabric> fabric, Lineage lineage,
                      const std::vector<int>& exclude, const CommunicatorOptions& options) {
  const std::string what = "shrinking group '" + lineage.name + "'";
  const TimePoint deadline = deadline_after(fabric->clock(), options.timeout);
  lineage.out.resize(lineage.members.size());
  const auto self = own_position(lineage, fabric->rank());
  if (!self.ok()) return self.status().with_context(what);
  if (Status valid = exclude_ranks(lineage, exclude); !valid) return valid.with_context(what);
  if (lineage.out[static_cast<std::size_t>(*self)])
    return Status(Code::invalid_argument, "rank " + std::to_string(fabric->rank()) +
                                              " is to be left out and must not call it")
        .with_context(what);
  SurvivorViews views(*self, lineage.out, lineage.attempts + 1);
  const Lineage origin = lineage;
  ViewExchange exchange(*fabric, origin, views);
  while (true) {
    const Status decided = exchange.decide(deadline);
    const SurvivorViews::SurvivorView view = views.view();
    lineage.out = view.out;
    lineage.attempts = view.attempt;
    if (!decided) return decided.with_context(what);
    CommunicatorOptions creation = options;
    std::vector<int> survivors;
    for (std::size_t i = 0; i < lineage.members.size(); ++i) {
      if (!lineage.out[i]) survivors.push_back(lineage.members[i]);
    }
    creation.terms = "attempt " + std::to_string(lineage.attempts) + " of " + what;
    creation.timeout = deadline - fabric->clock().now();
    creation.give_up = [&] { return exchange.superseded(view); };
    auto created = Communicator::create(fabric, std::move(survivors), std::move(creation));
    if (created.ok()) return Shrunk{std::move(*created), std::move(lineage)};
    // A member has died or aborted meanwhile: the next attempt excludes it. Retrying does not help
    // with any other failure.
    const Code code = created.status().code();
    const bool again = code == Code::peer_failed || code == Code::closed || code == Code::aborted ||
                       code == Code::refused;
    if (!again || fabric->clock().now() >= deadline) return created.status().with_context(what);
    if (views.view() == view) views.start_over();
  }
}

}  // namespace muster::collective
