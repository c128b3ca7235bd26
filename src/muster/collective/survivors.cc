#include "muster/collective/survivors.h"

#include <algorithm>
#include <cstring>
#include <deque>

#include "muster/base/secret.h"
#include "muster/collective/call.h"
#include "muster/collective/control.h"
#include "muster/collective/op.h"

namespace muster::collective {

SurvivorViews::SurvivorViews(int self, std::vector<bool> out, std::uint32_t attempt)
    : self_(self), view_{attempt, std::move(out)}, told_(view_.out.size()) {}

bool SurvivorViews::take_news() { return std::exchange(news_, false); }

void SurvivorViews::start_over() {
  ++view_.attempt;
  news_ = true;
}

void SurvivorViews::grow(const View& other) {
  View joined = view_;
  joined.attempt = std::max(joined.attempt, other.attempt);
  for (std::size_t i = 0; i < joined.out.size(); ++i) joined.out[i] = joined.out[i] || other.out[i];
  if (joined == view_) return;
  view_ = std::move(joined);
  news_ = true;
}

void SurvivorViews::heard(int member, const View& theirs) {
  told_[static_cast<std::size_t>(member)] = theirs;
  grow(theirs);
}

void SurvivorViews::gone(int member) {
  View known = view_;
  known.out[static_cast<std::size_t>(member)] = true;
  grow(known);
}

bool SurvivorViews::decided() const { return !news_ && !excluded() && awaited().empty(); }

std::vector<int> SurvivorViews::awaited() const {
  std::vector<int> members;
  for (std::size_t i = 0; i < told_.size(); ++i) {
    const auto member = static_cast<int>(i);
    if (member != self_ && counts_in(member) && told_[i] != view_) members.push_back(member);
  }
  return members;
}

namespace {

/// How often a member checks which ranks the fabric has found dead.
constexpr auto kLook = std::chrono::milliseconds(50);  // limit: delay of an error
/// When a member first asks the silent members again; each later interval is twice as long.
constexpr auto kAskAgain = std::chrono::milliseconds(250);  // limit: delay of an error

std::uint64_t tag_of(const Lineage& lineage) {
  ByteWriter key;
  key.put_text("survivors of").put_text(lineage.name);
  for (const int member : lineage.members) key.put(static_cast<std::int32_t>(member));
  const auto hash = short_hash(key.view());
  std::uint64_t number;
  std::memcpy(&number, hash.data(), sizeof number);
  return number | kFirstReservedTag;
}

/// `asks`: the receiver must send its view even if it has sent it before. (A member that succeeds
/// stops listening, and loses views that arrive then.)
std::string encode(const SurvivorViews::View& view, bool asks) {
  ByteWriter out;
  out.put(view.attempt).put(static_cast<std::uint8_t>(asks));
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
bool asks(const std::string& bytes) { return bytes[kHead - 1] != 0; }

SurvivorViews::View decode(const std::string& bytes, std::size_t members) {
  SurvivorViews::View view;
  std::memcpy(&view.attempt, bytes.data(), sizeof view.attempt);
  for (std::size_t i = 0; i < members; ++i) {
    const auto byte = static_cast<unsigned char>(bytes[kHead + i / 8]);
    view.out.push_back(((byte >> (i % 8)) & 1) != 0);
  }
  return view;
}

/// Sends and receives views over the fabric.
class Talk {
 public:
  Talk(transport::Fabric& fabric, const Lineage& lineage, SurvivorViews& views)
      : fabric_(fabric),
        channel_(fabric.agreements()),
        lineage_(lineage),
        tag_(tag_of(lineage)),
        views_(views),
        receives_(lineage.members.size()),
        inboxes_(lineage.members.size(), encode(views.view(), false)) {
    header_.op = static_cast<std::uint8_t>(Op::send);
  }
  ~Talk() {
    for (auto& receive : receives_) {
      if (receive != nullptr) channel_.cancel(receive);
    }
    for (auto& sent : sent_) channel_.cancel(sent.transfer);
    const auto quiet = [this] {
      const auto over = [](const transport::TransferRef& transfer) {
        return transfer == nullptr || transfer->done();
      };
      return std::all_of(receives_.begin(), receives_.end(), over) &&
             std::all_of(sent_.begin(), sent_.end(),
                         [&](const Sent& sent) { return over(sent.transfer); });
    };
    if (!fabric_.wait(quiet, fabric_.clock().now() + std::chrono::seconds(1))) {
      // Leaks memory that the fabric may still write to.
      new auto(std::move(inboxes_));
      new auto(std::move(sent_));
    }
  }

  Status decide(TimePoint deadline) {
    Duration patience = kAskAgain;
    TimePoint ask_at = fabric_.clock().now() + patience;
    while (true) {
      take();
      if (channel_.failed()) return channel_.failure();  // the others have excluded this rank
      if (views_.excluded()) {
        return Status(Code::peer_failed,
                      "the other members have counted rank " + std::to_string(fabric_.rank()) +
                          " out; it cannot go on with them",
                      {fabric_.rank()});
      }
      if (views_.take_news()) {
        tell_all();
        continue;
      }
      if (views_.decided() && all_sent()) return {};
      const TimePoint now = fabric_.clock().now();
      if (now >= deadline) return late();
      look_for_deaths();
      if (now >= ask_at) {
        for (const int member : views_.awaited()) tell(member, true);
        patience *= 2;
        ask_at = now + patience;
      }
      fabric_.wait([this] { return moved(); }, std::min<TimePoint>(deadline, now + kLook));
    }
  }

  /// For the creation of the decided group: whether another attempt has begun meanwhile.
  Status overtaken(const SurvivorViews::View& decided) {
    take();
    if (channel_.failed()) return channel_.failure();
    if (views_.view() == decided) return {};
    return Status(Code::aborted, "the survivors have begun another attempt");
  }

 private:
  struct Sent {
    int member;
    std::unique_ptr<std::string> bytes;
    transport::TransferRef transfer;
  };

  int job_rank(int member) const { return lineage_.members[static_cast<std::size_t>(member)]; }
  bool is_self(int member) const { return job_rank(member) == fabric_.rank(); }

  void tell(int member, bool asking) {
    auto bytes = std::make_unique<std::string>(encode(views_.view(), asking));
    auto transfer =
        channel_.send(job_rank(member), tag_, std::as_bytes(std::span(*bytes)), header_);
    sent_.push_back({member, std::move(bytes), std::move(transfer)});
  }
  void tell_all() {
    for (int member = 0; member < static_cast<int>(receives_.size()); ++member) {
      if (!is_self(member) && views_.counts_in(member)) tell(member, false);
    }
  }

  // Processes received views and posts new receives.
  void take() {
    if (channel_.failed()) return;
    for (int member = 0; member < static_cast<int>(receives_.size()); ++member) {
      auto& receive = receives_[static_cast<std::size_t>(member)];
      auto& inbox = inboxes_[static_cast<std::size_t>(member)];
      while (!is_self(member) && views_.counts_in(member)) {
        if (receive == nullptr)
          receive = channel_.receive(job_rank(member), tag_,
                                     std::as_writable_bytes(std::span(inbox)), header_);
        if (!receive->done()) break;
        if (receive->status().ok()) {
          views_.heard(member, decode(inbox, receives_.size()));
          if (asks(inbox) && views_.counts_in(member)) tell(member, false);
        } else if (channel_.failed()) {
          return;
        } else {
          views_.gone(member);
        }
        receive = nullptr;
      }
    }
    std::erase_if(sent_, [](const Sent& sent) { return sent.transfer->done(); });
  }

  // Whether a view can be processed, or the last note has been sent. Views from excluded members
  // are ignored.
  bool moved() const {
    if (channel_.failed() || (views_.decided() && all_sent())) return true;
    for (int member = 0; member < static_cast<int>(receives_.size()); ++member) {
      const auto& receive = receives_[static_cast<std::size_t>(member)];
      if (receive != nullptr && receive->done() && views_.counts_in(member)) return true;
    }
    return false;
  }
  // Views that this member does not send reach the receiver from no one else.
  bool all_sent() const {
    return std::all_of(sent_.begin(), sent_.end(), [this](const Sent& sent) {
      return sent.transfer->done() || !views_.counts_in(sent.member);
    });
  }
  void look_for_deaths() {
    for (int member = 0; member < static_cast<int>(receives_.size()); ++member) {
      if (!is_self(member) && views_.counts_in(member) && !fabric_.death_of(job_rank(member)).ok())
        views_.gone(member);
    }
  }

  Status late() const {
    std::vector<int> missing;
    for (const int member : views_.awaited()) missing.push_back(job_rank(member));
    return Status(Code::timed_out,
                  describe_ranks(missing) +
                      " did not call it within the timeout, though alive; every survivor must "
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
  std::deque<Sent> sent_;
};

Result<int> own_position(const Lineage& lineage, int rank) {
  const auto at = std::find(lineage.members.begin(), lineage.members.end(), rank);
  if (at == lineage.members.end())
    return Status(Code::invalid_argument,
                  "rank " + std::to_string(rank) + " is not a member of the group that it shrinks");
  return static_cast<int>(at - lineage.members.begin());
}

Status leave_out(Lineage& lineage, const std::vector<int>& exclude) {
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
  if (Status valid = leave_out(lineage, exclude); !valid) return valid.with_context(what);
  if (lineage.out[static_cast<std::size_t>(*self)])
    return Status(Code::invalid_argument, "rank " + std::to_string(fabric->rank()) +
                                              " is to be left out and must not call it")
        .with_context(what);
  SurvivorViews views(*self, lineage.out, lineage.attempts + 1);
  const Lineage origin = lineage;
  Talk talk(*fabric, origin, views);
  while (true) {
    const Status decided = talk.decide(deadline);
    const SurvivorViews::View view = views.view();
    lineage.out = view.out;
    lineage.attempts = view.attempt;
    if (!decided) return decided.with_context(what);
    CommunicatorOptions creation = options;
    std::vector<int> left;
    for (std::size_t i = 0; i < lineage.members.size(); ++i) {
      if (!lineage.out[i]) left.push_back(lineage.members[i]);
    }
    creation.terms = "attempt " + std::to_string(lineage.attempts) + " of " + what;
    creation.timeout = deadline - fabric->clock().now();
    creation.give_up = [&] { return talk.overtaken(view); };
    auto made = Communicator::create(fabric, std::move(left), std::move(creation));
    if (made.ok()) return Shrunk{std::move(*made), std::move(lineage)};
    // A member has died or given up meanwhile: the next attempt excludes it. Retrying does not help
    // with any other failure.
    const Code code = made.status().code();
    const bool again = code == Code::peer_failed || code == Code::closed || code == Code::aborted ||
                       code == Code::refused;
    if (!again || fabric->clock().now() >= deadline) return made.status().with_context(what);
    if (views.view() == view) views.start_over();
  }
}

}  // namespace muster::collective
