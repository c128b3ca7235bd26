#include "muster/collective/region/region_member.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <exception>

#include "muster/base/exception_status.h"
#include "muster/base/host_barrier.h"
#include "muster/base/log.h"
#include "muster/collective/alone.h"
#include "muster/transport/core_sharing.h"
#include "muster/transport/fabric.h"

namespace muster::collective {

using region::RegionMember;

std::size_t RegionGroup::segment_bytes(int members) { return region::Layout(members).total; }

std::unique_ptr<RegionGroup> RegionGroup::attach(shm::HostRegion& region, std::uint64_t segment,
                                                 transport::Channel& channel,
                                                 const Selection& selection) {
  return std::make_unique<RegionMember>(region, segment, channel, selection, &shm::Arena::if_made);
}

namespace region {
namespace {

// After a failure a member waits this long for the next sign of peers that may be storing into its
// output, or reading its input; they look at every window.
constexpr Duration kQuietLimit = std::chrono::milliseconds(50);
// A task that has moved this much gives its thread away once, so that its owner can look after
// other things.
constexpr std::size_t kPauseBytes = 8 * 1024 * 1024;

std::byte* aligned(std::byte* memory) {
  return reinterpret_cast<std::byte*>(
      align_up(reinterpret_cast<std::uintptr_t>(memory), alignof(Line)));
}

// What a call is stands in a line as in a fingerprint: it goes to and fro in words, which the bytes
// of it are quicker to read as.
constexpr std::size_t kKind = offsetof(transport::Fingerprint, op), kLineKind = offsetof(Line, op);
constexpr std::size_t kKindBytes = sizeof(transport::Fingerprint) - kKind;
static_assert(
    offsetof(Line, dtype) - kLineKind == offsetof(transport::Fingerprint, dtype) - kKind &&
    offsetof(Line, reduce) - kLineKind == offsetof(transport::Fingerprint, reduce) - kKind &&
    offsetof(Line, flags) - kLineKind == offsetof(transport::Fingerprint, flags) - kKind &&
    offsetof(Line, root) - kLineKind == offsetof(transport::Fingerprint, root) - kKind &&
    offsetof(Line, count) - kLineKind == offsetof(transport::Fingerprint, count) - kKind &&
    offsetof(Line, digest) - kLineKind == offsetof(transport::Fingerprint, digest) - kKind);

template <class T>
const std::byte* bytes_at(const T& object, std::size_t at) {
  return reinterpret_cast<const std::byte*>(&object) + at;
}
template <class T>
std::byte* bytes_at(T& object, std::size_t at) {
  return reinterpret_cast<std::byte*>(&object) + at;
}

/// Peers that may be in the middle of a store into this process's memory, for its arena to ask,
/// this member gone or not.
class Storing {
 public:
  explicit Storing(std::shared_ptr<void> region) : region_(std::move(region)) {}
  void add(const Progress& peer, Counter done, Position end,
           std::shared_ptr<shm::ProcessEnd> process) {
    peers_.push_back({&peer, done, end, std::move(process)});
  }
  bool operator()() {
    std::erase_if(peers_, [](const Peer& peer) {
      return reached(peer.progress->counters[static_cast<int>(peer.done)].load(
                         std::memory_order_acquire),
                     peer.end) ||
             peer.progress->gave_up.load(std::memory_order_acquire) != 0 ||
             (peer.process != nullptr && peer.process->seen());
    });
    return !peers_.empty();
  }

 private:
  struct Peer {
    const Progress* progress;
    Counter done;
    Position end;
    std::shared_ptr<shm::ProcessEnd> process;
  };
  std::shared_ptr<void>
      region_;  // where `progress` stands; of a group that failed no segment is given back
  std::vector<Peer> peers_;
};

// Orders reads of memory that is not the protocol's (a peer's own) before a look at the peer's
// `gave_up`.
void fence_reads() {
#if !defined(__SANITIZE_THREAD__)
  std::atomic_thread_fence(std::memory_order_acquire);
#endif
}

}  // namespace

RegionMember::RegionMember(shm::HostRegion& region, std::uint64_t segment,
                           transport::Channel& channel, const Selection& selection, ArenaOf arena)
    : region_(region),
      channel_(channel),
      selection_(selection),
      find_arena_(arena),
      rank_(channel.rank()),
      layout_(channel.size()),
      base_(aligned(region.at(segment))),
      patient_(channel.fabric().threads()),
      per_core_(transport::ranks_per_core(region.ranks().size(), channel.fabric().cores())),
      spins_(per_core_ == 1),
      two_cores_(channel.fabric().cores() <= 2),
      next_(layout_.members, 1),
      known_seen_(layout_.members, 0),
      heard_(layout_.members),
      sources_(layout_.members),
      inputs_(layout_.members),
      outputs_(layout_.members) {
  const auto ranks = region.ranks();
  for (int member : channel.members()) {
    local_.push_back(
        static_cast<int>(std::find(ranks.begin(), ranks.end(), member) - ranks.begin()));
    if (local_.size() != static_cast<std::size_t>(rank_) + 1)
      others_.push_back(&region.mailbox(local_.back()));
  }
}

Progress& RegionMember::progress(int member) const {
  return *reinterpret_cast<Progress*>(base_ + layout_.progress(member));
}

Position RegionMember::counter(int member, Counter counter) const {
  return progress(member).counters[static_cast<int>(counter)].load(std::memory_order_acquire);
}

void RegionMember::advance(Counter counter, Position position) {
  progress(rank_).counters[static_cast<int>(counter)].store(position, std::memory_order_release);
}

std::string RegionMember::who(int member) const {
  return "rank " + std::to_string(channel_.members()[static_cast<std::size_t>(member)]);
}

std::string RegionMember::what(const Args& args) const {
  return std::string(info(args.op).name) + " number " + std::to_string(sequence_);
}

Task<Status> RegionMember::run(const Args& args, const transport::Fingerprint& call) {
  if (failed() && (!published_ || disagreed_)) co_return channel_.failure();
  if (call.sequence != sequence_ + (published_ ? 0 : 1)) {
    co_return refuse(Status(Code::internal, "call " + std::to_string(call.sequence) +
                                                " was started on a shared region after call " +
                                                std::to_string(sequence_)));
  }
  if (!published_) begin_call(call.sequence);
  outputs_shared_ = false;
  read_in_place_ = false;
  borrows_ = false;
  if (!published_) inputs_lent_ = false;
  // Tells the others also where this task is destroyed before its end.
  struct Guard {
    RegionMember* member;
    const Args& args;
    ~Guard() {
      if (member == nullptr) return;
      member->wait_.what = Wait::For::nothing;
      member->give_up();
      member->quarantine(args);
    }
  } guard{this, args};

  Status status;
  try {
    status = co_await run_call(args, call);
  } catch (...) {  // its frame may not have been had
    status = status_of_exception();
  }
  wait_.what = Wait::For::nothing;
  if (status) {
    guard.member = nullptr;
    co_return status;
  }
  // What was thrown, nobody else knows yet.
  if (!failed())
    status = refuse(Status(status.code(),
                           who(rank_) + " failed in " + what(args) + ": " + status.message(),
                           {channel_.members()[static_cast<std::size_t>(rank_)]}));
  give_up();
  if (outputs_shared_) static_cast<void>(co_await come_to_rest(Counter::reduced));
  if (inputs_lent_) static_cast<void>(co_await come_to_rest(Counter::drained));
  co_return status;
}

Task<Status> RegionMember::run_call(const Args& args, const transport::Fingerprint& call) {
  if (size() == 1) {
    run_alone(args);
    co_return Status();
  }
  bool shares = false;
  if (!published_) {
    wait_ = {Wait::For::room, Counter::filled, -1, 0};
    co_await until([&] { return failed() || room_for_line(); });
    if (failed()) co_return channel_.failure();
    calls_[sequence_ % kMostSlots] = call;

    if ((call.flags & kRefused) != 0) {  // only the line: who reads it sees why nothing follows
      my_line().place = Place::nothing;
      my_line().bytes = 0;
      publish(call);
      co_return Status();
    }
    shares = (args.op == Op::all_reduce || args.op == Op::reduce) &&
             !one_shot(args.op, args.inputs[0].size());
  }
  Status status;
  if (shares) {
    status = co_await reduce_shares(args, call);
  } else {
    status = co_await pull(args, call);
  }
  if (!status || !read_in_place_) co_return status;
  // A member that failed in this call may have given its memory away while it was read here. The
  // cause is on its way.
  fence_reads();
  if (!someone_gave_up(sequence_)) co_return status;
  co_await until([&] { return failed(); });
  co_return channel_.failure();
}

// What I count has passed all earlier calls. Windows that were used before the ring of lines has
// come round are free: all members have done with those calls.
void RegionMember::refresh() {
  const Position now = position(sequence_, 0);
  for (const Counter each : {Counter::filled, Counter::reduced, Counter::drained})
    advance(each, now);
  for (auto* uses : {&window_uses_, &result_uses_})
    for (Use& use : *uses)
      use.pending = use.pending && now - use.until <= position(layout_.slots + 1, 0);
}

void RegionMember::count_from(std::uint64_t sequence) {
  sequence_ = known_by_all_ = sequence;
  std::ranges::fill(next_, sequence + 1);
  std::ranges::fill(known_seen_, sequence);
}

// Whether my line of as many calls ago as there are lines may be overwritten: every member has done
// with it, and I with theirs of that call.
bool RegionMember::room_for_line() {
  if (sequence_ <= known_by_all_ + layout_.slots) return true;
  see_all(sequence_ - 1);
  std::uint64_t by_all = sequence_;
  for (int member = 0; member < group_size(); ++member) {
    if (member == rank_) continue;
    const auto index = static_cast<std::size_t>(member);
    std::uint64_t& known = known_seen_[index];
    if (known + layout_.slots < sequence_)
      known = std::max(known, progress(member).seen.load(std::memory_order_acquire));
    // Who has published a line for this very call has found this room before.
    if (known + layout_.slots < sequence_ && has_begun(member)) known = sequence_ - layout_.slots;
    by_all = std::min({by_all, known, next_[index] - 1});
  }
  known_by_all_ = std::max(known_by_all_, by_all);
  if (sequence_ <= known_by_all_ + layout_.slots) return true;
  // The others may be waiting for me in the same way.
  std::uint64_t mine = sequence_ - 1;
  for (int member = 0; member < group_size(); ++member) {
    if (member != rank_) mine = std::min(mine, next_[static_cast<std::size_t>(member)] - 1);
  }
  std::atomic<std::uint64_t>& seen = progress(rank_).seen;
  if (seen.load(std::memory_order_relaxed) < mine) {
    seen.store(mine, std::memory_order_release);
    wake_others();
  }
  return false;
}

void RegionMember::publish(const transport::Fingerprint& call) {
  // A look takes the line from who writes it: at the lines of those that it does not read from it
  // looks in batches, often enough that nobody waits for its word.
  std::uint64_t seen = sequence_ - 1;
  for (int member = 0; member < group_size(); ++member) {
    if (member == rank_) continue;
    const std::uint64_t& next = next_[static_cast<std::size_t>(member)];
    if (next + layout_.slots / 8 <= sequence_) see(member, sequence_ - 1);
    seen = std::min(seen, next - 1);
  }
  Line& mine = my_line();
  mine.seen = seen;
  copy_words<kKindBytes / 8>(bytes_at(mine, kLineKind), bytes_at(call, kKind));
  mine.sequence.store(sequence_, std::memory_order_release);
  wake_others();
}

// Looks at `member`'s lines up to `limit`; true once it has seen that one. Of the call under way
// the payload still has to be read: nothing says so to the member before my next line.
bool RegionMember::see(int member, std::uint64_t limit) {
  const auto index = static_cast<std::size_t>(member);
  while (next_[index] <= limit) {
    const std::uint64_t sequence = next_[index];
    const Line& theirs = line(member, sequence);
    if (theirs.sequence.load(std::memory_order_acquire) != sequence || !compare(member, theirs))
      return false;
    known_seen_[index] = std::max(known_seen_[index], theirs.seen);
    next_[index] = sequence + 1;
  }
  return true;
}

bool RegionMember::see_all(std::uint64_t limit) {
  bool all = true;
  for (int member = 0; member < group_size(); ++member) {
    if (member != rank_) all = see(member, limit) && all;
  }
  return all;
}

// Whether the calls agree; once two did not, none is compared any more.
bool RegionMember::compare(int member, const Line& line) {
  if (disagreed_) return false;
  const std::uint64_t sequence = next_[static_cast<std::size_t>(member)];
  transport::Fingerprint& theirs = heard_[static_cast<std::size_t>(member)];
  theirs.sequence = sequence;
  std::memcpy(bytes_at(theirs, kKind), bytes_at(line, kLineKind), kKindBytes);
  const transport::Fingerprint& mine = calls_[sequence % kMostSlots];
  if (std::memcmp(bytes_at(line, kLineKind), bytes_at(mine, kKind), kKindBytes) == 0) [[likely]]
    return true;
  return compare_by_rules(member, theirs, mine);
}

bool RegionMember::compare_by_rules(int member, const transport::Fingerprint& theirs,
                                    const transport::Fingerprint& mine) {
  if (fingerprint_rules().agree(theirs, mine)) return true;
  const std::uint64_t sequence = mine.sequence;
  disagreed_ = true;
  channel_.begin(mine);  // a call that took the express way has not told it yet
  channel_.compare(member, theirs);
  if (failed()) return false;
  // The channel no longer knew the call.
  channel_.fail(Status(Code::mismatch,
                       "members call different operations under number " +
                           std::to_string(sequence) + ": " + who(rank_) + " calls " +
                           fingerprint_rules().describe(mine) + ", " + who(member) + " calls " +
                           fingerprint_rules().describe(theirs) +
                           "; every member must make the same calls in the same order",
                       {channel_.members()[static_cast<std::size_t>(rank_)],
                        channel_.members()[static_cast<std::size_t>(member)]}));
  return false;
}

bool RegionMember::others_send_barriers() const {
  return takes_host_barriers() &&
         std::all_of(others_.begin(), others_.end(), [](const shm::Mailbox* mailbox) {
           return mailbox->sends_barriers.load(std::memory_order_relaxed) != 0;
         });
}

void RegionMember::wake_others() {
#if defined(__SANITIZE_THREAD__)
  for (shm::Mailbox* mailbox : others_) mailbox->wake();
#else
  // One fence for all, if any: what was published stands before the look for sleepers (see
  // Mailbox::wake).
  if (barriers_ || (barriers_ = others_send_barriers())) {
    meet_host_barrier();
  } else {
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  for (shm::Mailbox* mailbox : others_) mailbox->wake_announced();
#endif
}

bool RegionMember::Reached::operator()() {
  const int begin = only < 0 ? 0 : only;
  const int end = only < 0 ? my.group_size() : only + 1;
  for (at = std::max(at, begin); at < end; ++at) {
    if (at != my.rank_ && !reached(my.counter(at, counter), until)) return false;
  }
  return true;
}

RegionMember::Reached RegionMember::until_reached(Counter counter, Position until, int only) {
  wait_ = {Wait::For::counter, counter, only, until};
  return {*this, counter, until, only};
}

RegionMember::Reached RegionMember::until_free(const Use& use) {
  if (use.pending) return until_reached(use.counter, use.until, use.reader);
  return {*this, use.counter, 0, rank_};  // nobody's
}

bool RegionMember::Emptied::operator()() {
  if (free()) return true;
  my.see_all(limit);
  return false;
}

bool RegionMember::someone_gave_up(std::uint64_t sequence) const {
  for (int member = 0; member < group_size(); ++member) {
    if (member == rank_) continue;
    const std::uint64_t at = progress(member).gave_up.load(std::memory_order_acquire);
    if (at != 0 && at <= sequence) return true;
  }
  return false;
}

// My call ends in failure: whoever read my memory must not trust it, whoever stores into it must
// stop.
void RegionMember::give_up() {
  std::atomic<std::uint64_t>& mine = progress(rank_).gave_up;
  if (mine.load(std::memory_order_relaxed) != 0) return;
  mine.store(sequence_, std::memory_order_release);
  send_host_barrier();  // others may publish without a fence
  wake_others();
}

// Whether no peer (or not this one) stores into my output (`reduced`), or reads my input and hands
// it back (`drained`) any more: each has finished its part, has given up, is dead, or has not begun
// (and then sees my word before it begins: publish and give_up both have a full fence between their
// store and what they look at next, or give_up sends one to all; a reader sees it after it has
// read).
bool RegionMember::quiet(Counter done, int only) const {
  for (int member = 0; member < group_size(); ++member) {
    if (member == rank_ || (only >= 0 && member != only)) continue;
    if (!has_begun(member)) continue;
    if (reached(counter(member, done), end_of(sequence_))) continue;
    if (progress(member).gave_up.load(std::memory_order_acquire) != 0) continue;
    if (!channel_.fabric().death_of(channel_.members()[static_cast<std::size_t>(member)]).ok())
      continue;
    return false;
  }
  return true;
}

// After a failure: gives peers that have begun the call time to finish while they get on.
Task<> RegionMember::come_to_rest(Counter done, int only) {
  const Clock& clock = channel_.fabric().clock();
  const auto progress = [&] {
    Position all = 0;
    for (int member = 0; member < group_size(); ++member) all += counter(member, done);
    return all;
  };
  Position seen = progress();
  TimePoint limit = clock.now() + kQuietLimit;
  co_await until([&] {
    if (const Position now = progress(); now != seen) {
      seen = now;
      limit = clock.now() + kQuietLimit;
    }
    return quiet(done, only) || clock.now() >= limit;
  });
  co_return Status();
}

// My call has failed, and I have said so. Who is stopped in the middle of a store, or so slow,
// finishes it when it goes on: until then the memory gets no other use.
void RegionMember::quarantine(const Args& args) noexcept try {
  if (outputs_shared_) quarantine(args.outputs[0], Counter::reduced, -1);
  if (!inputs_lent_) return;
  const auto* const table = reinterpret_cast<const Slice*>(slot(rank_));
  for (int reader = 0; reader < group_size(); ++reader) {
    if (table[reader].lent)
      quarantine(args.inputs[static_cast<std::size_t>(reader)], Counter::drained, reader);
  }
} catch (const std::exception& error) {
  log(LogLevel::error,
      std::string("memory that a failed call has lent cannot be kept out of use: ") + error.what());
}

// Unlike `quiet` takes nobody for dead whose process is there: it may only have been stopped.
void RegionMember::quarantine(ConstBytes memory, Counter done, int only) {
  shm::Arena* const arena = find_arena_();
  if (arena == nullptr) return;
  Storing storing(region_.memory());
  for (int member = 0; member < group_size(); ++member) {
    if (member == rank_ || (only >= 0 && member != only) || !has_begun(member)) continue;
    storing.add(progress(member), done, end_of(sequence_),
                region_.process_of(local_[static_cast<std::size_t>(member)]));
  }
  if (storing()) arena->quarantine(memory.data(), memory.size(), std::move(storing));
}

// True now and then: the task should give its thread away once. Wakes its own mailbox, since nobody
// else will.
bool RegionMember::pause_due(std::size_t bytes) {
  moved_ += bytes;
  if (moved_ < kPauseBytes) return false;
  moved_ = 0;
  region_.mailbox(local_[static_cast<std::size_t>(rank_)]).wake();
  return true;
}

std::optional<std::uint64_t> RegionMember::arena_offset(ConstBytes memory) const {
  const shm::Arena* arena = memory.empty() ? nullptr : find_arena_();
  return arena == nullptr ? std::nullopt : arena->offset_of(memory.data(), memory.size());
}

// The same for memory that peers may store into.
std::optional<std::uint64_t> RegionMember::writable_offset(ConstBytes memory) const {
  const shm::Arena* arena = memory.empty() ? nullptr : find_arena_();
  return arena == nullptr || arena->is_read_only() ? std::nullopt
                                                   : arena->offset_of(memory.data(), memory.size());
}

Status RegionMember::cannot_map(int member, std::uint64_t bytes) const {
  return Status(Code::exhausted,
                who(rank_) + " cannot map the arena of " + who(member) + ", where " +
                    std::to_string(bytes) + " bytes of this call stand; look at " +
                    "the limits of address space, mappings and descriptors (ulimit -v, "
                    "vm.max_map_count, ulimit -n)",
                {channel_.members()[static_cast<std::size_t>(rank_)]});
}

Status RegionMember::cannot_read(int member, std::uint64_t bytes) const {
  return Status(Code::peer_failed,
                who(rank_) + " cannot read " + std::to_string(bytes) +
                    " bytes of this call in the memory of " + who(member) +
                    ": that process has gone, has given the memory back in the middle of the call, "
                    "or lets nobody read it any more",
                {channel_.members()[static_cast<std::size_t>(member)]});
}

// Finds out once whether I can copy from everybody's memory, and tells.
void RegionMember::offer_to_read() {
  std::atomic<std::uint32_t>& mine = progress(rank_).reads;
  if (mine.load(std::memory_order_relaxed) != 0) return;
  for (int member = 0; member < group_size(); ++member) {
    if (member != rank_ && !region_.can_read(local_[static_cast<std::size_t>(member)])) return;
  }
  mine.store(1, std::memory_order_release);
}

Status RegionMember::refuse(Status cause) {
  channel_.fail(cause);
  return failed() ? channel_.failure() : cause;
}

transport::Fingerprint RegionMember::heard(int member) const {
  return heard_[static_cast<std::size_t>(member)];
}

// Fails the channel, unless a better cause comes: who cannot be reached may be dead, and who has
// given up says why, or else the call's deadline ends this.
Task<Status> RegionMember::refuse_late(Status cause) {
  const Clock& clock = channel_.fabric().clock();
  const TimePoint limit = clock.now() + kQuietLimit;
  co_await until([&] { return failed() || (clock.now() >= limit && !someone_gave_up(sequence_)); });
  co_return refuse(std::move(cause));
}

bool RegionMember::has_begun(int member) const {
  return line(member, sequence_).sequence.load(std::memory_order_acquire) == sequence_;
}

// Whether this member has not done yet what the running task waits for, if only of another one.
// (Who does not take part in it never does.)
bool RegionMember::is_behind(int member) const {
  if (member == rank_) return false;
  const auto index = static_cast<std::size_t>(member);
  switch (wait_.what) {
    case Wait::For::nothing: return false;
    case Wait::For::room:
      return std::min(known_seen_[index], next_[index] - 1) + layout_.slots < sequence_;
    case Wait::For::lines: return !has_begun(member);
    case Wait::For::counter: return !reached(counter(member, wait_.counter), wait_.until);
  }
  return false;
}

std::vector<int> RegionMember::awaited() const {
  std::vector<int> late;    // have not begun this call
  std::vector<int> waited;  // have not come as far as this task needs
  for (int member = 0; member < group_size(); ++member) {
    if ((wait_.only >= 0 && wait_.only != member) || !is_behind(member)) continue;
    waited.push_back(channel_.members()[static_cast<std::size_t>(member)]);
    if (!has_begun(member)) late.push_back(waited.back());
  }
  return late.empty() ? waited : late;
}

}  // namespace region
}  // namespace muster::collective
