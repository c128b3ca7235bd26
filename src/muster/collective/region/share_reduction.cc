// Large all_reduces and reduces: each member reduces its share of every window and hands the result
// to all, or to the root.
//
// An input in the arena is read where it is; a private one passes through its owner's windows, but
// for the share that the owner reduces itself. A result is stored straight into outputs in the
// arena; for private ones it stands in the reducer's result buffer until they have copied it. Every
// mix of the two works, member by member. In place is safe: of a member's memory, only the reducer
// of a share reads that share's input, and it stores the result after that.
//
// A private result has to be handed on, and a reduce's goes to one member only. So where the
// others' cores would gain little, between two members or where members share cores, the root of a
// reduce takes the shares of those with private inputs too. They give and are done.
#include <algorithm>
#include <cstring>

#include "muster/collective/kernels.h"
#include "muster/collective/region/region_member.h"
#include "muster/shm/reclaim_lines.h"

namespace muster::collective::region {

namespace {

// Of members that share cores, beyond that the root's way through all inputs is the longer one.
constexpr std::size_t kMostForRoot = 4 * 1024 * 1024;

/// Bytes of a round where the root reduces for others: they fill some while it reduces one, and all
/// of those stay in the caches.
std::size_t round_for_root(std::size_t members, std::size_t bytes) {
  if (members > 2) return 256 * 1024;
  return std::clamp(align_up(bytes / 16, kCacheLine), std::size_t{32 * 1024},
                    std::size_t{128 * 1024});
}

}  // namespace

struct RegionMember::Reduction {
  const Args& args;
  ConstBytes input;
  std::size_t element = 1;
  std::size_t grain = 1;  // elements in a cache line
  std::size_t count = 0;
  std::size_t window = 0;  // elements
  std::size_t rounds = 0;
  int root = -1;                   // the only one that wants the result; -1: all do
  bool scaled = false;             // premul_sum: my windows hold the product, my own share too
  bool staged = false;             // my input passes through my windows
  bool copies = false;             // I copy results out of the others' buffers
  bool offers = false;             // somebody copies results out of my buffer
  bool hands_back = false;         // what I read of the others' windows
  bool results_come_back = false;  // and of their results
  bool by_root = false;            // the root reduces the shares of members with private inputs
  bool late = false;  // the root fills its first window after its line: only then it knows that
                      // others reduce

  void cut(std::size_t bytes) {
    window = bytes / element;
    rounds = (count + window - 1) / window;
  }
  bool wants(int member) const { return root < 0 || root == member; }
  std::size_t start(std::size_t round) const { return round * window; }
  std::size_t length(std::size_t round) const { return std::min(window, count - start(round)); }
  Share share(std::size_t round, std::size_t members, int member) const {
    return share_of(length(round), members, static_cast<std::size_t>(member), grain);
  }
};

/// Whether all memory of others that I am to read or write can be. All lines have been seen.
bool RegionMember::all_mapped(const Reduction& job) {
  bool all = true;
  for (int member = 0; member < group_size(); ++member) {
    if (member == rank_) continue;
    const Line& theirs = line(member, sequence_);
    const bool arena =
        theirs.place == Place::arena || (job.wants(member) && theirs.output_place == Place::arena);
    all = (!arena || arena_ready(member)) && all;
  }
  return all;
}

/// Reads from the lines, all seen by now, where the others' inputs and outputs stand.
Status RegionMember::meet(Reduction& job) {
  for (int member = 0; member < group_size(); ++member) {
    const auto index = static_cast<std::size_t>(member);
    outputs_[index] = nullptr;
    if (member == rank_) continue;
    const Line& theirs = line(member, sequence_);
    Source& source = sources_[index];
    source = {theirs.place, nullptr, theirs.bytes, 0, theirs.first_window};
    if (source.bytes != job.input.size()) {
      return refuse(
          Status(Code::mismatch,
                 what(job.args) + ": " + who(member) + " gives " + std::to_string(source.bytes) +
                     " bytes, " + who(rank_) + " " + std::to_string(job.input.size()) +
                     "; all members must give the same number",
                 {channel_.members()[index], channel_.members()[static_cast<std::size_t>(rank_)]}));
    }
    if (source.place == Place::arena) {
      read_in_place_ = true;
      source.data = arena_of(member, theirs.input, source.bytes);
      if (source.data == nullptr) return cannot_map(member, source.bytes);
    }
    if (!job.wants(member)) continue;
    if (theirs.output_place == Place::arena) {
      outputs_[index] = arena_of(member, theirs.output, source.bytes);
      if (outputs_[index] == nullptr) return cannot_map(member, source.bytes);
    } else {
      job.offers = true;
    }
  }
  return {};
}

void RegionMember::fill_input(const Reduction& job, std::size_t round) {
  const std::size_t number = next_window_++;
  std::byte* to = window(rank_, number);
  const std::byte* from = job.input.data() + job.start(round) * job.element;
  const std::size_t length = job.length(round);
  if (job.scaled) {
    scale(to, from, length, job.args.dtype, job.args.factor);
  } else if (job.by_root && rank_ != job.root) {
    std::memcpy(to, from, length * job.element);
  } else {
    const Share mine = job.share(round, size(), rank_);
    std::memcpy(to, from, mine.begin * job.element);
    std::memcpy(to + mine.end * job.element, from + mine.end * job.element,
                (length - mine.end) * job.element);
  }
  window_uses_[number % kWindows] = {position(sequence_, round + 1), Counter::reduced, -1, true};
}

/// Who reduces `member`'s share. All lines have been seen.
int RegionMember::reducer(const Reduction& job, int member) const {
  return job.by_root && sources_[static_cast<std::size_t>(member)].place != Place::arena ? job.root
                                                                                         : member;
}

/// Now that all lines have been seen: whether there are other reducers than the root.
void RegionMember::settle(Reduction& job) {
  if (!job.by_root) return;
  const auto others = std::count_if(sources_.begin(), sources_.end(),
                                    [](const Source& each) { return each.place == Place::arena; });
  if (others == group_size()) return job.cut(layout_.window_bytes);  // nobody has filled a window
  job.late = others > 0 && sources_[static_cast<std::size_t>(job.root)].place == Place::window;
  if (rank_ != job.root) return;
  if (job.late) {
    fill_input(job, 0);
    advance(Counter::filled, position(sequence_, 1));
    wake_others();
  } else if (others == 0) {
    job.staged = job.scaled;
    job.copies = false;
    advance(Counter::drained, end_of(sequence_));
  }
}

/// Reduces my shares of a round and hands them on; false where a member gave up on the way, whose
/// memory must be left alone from then on.
bool RegionMember::reduce_round(const Reduction& job, std::size_t round) {
  std::byte* buffer = nullptr;
  if (job.offers) {
    const std::size_t number = next_result_++;
    buffer = result(rank_, number);
    result_uses_[number % kWindows] = {position(sequence_, round + 1), Counter::drained, job.root,
                                       true};
  }
  for (int member = 0; member < group_size(); ++member) {
    if (reducer(job, member) == rank_ &&
        !reduce_share(job, round, job.share(round, size(), member), buffer))
      return false;
  }
  return true;
}

/// Leaves the result in `buffer` too, unless that is null.
bool RegionMember::reduce_share(const Reduction& job, std::size_t round, Share share,
                                std::byte* buffer) {
  const std::size_t first = (job.start(round) + share.begin) * job.element;  // byte of the whole
  const std::size_t bytes = share.count() * job.element;
  for (std::size_t at = 0; at < bytes; at += kBlockBytes) {
    if (someone_gave_up(sequence_)) return false;
    const std::size_t block = std::min(kBlockBytes, bytes - at);
    for (int member = 0; member < group_size(); ++member) {
      const auto index = static_cast<std::size_t>(member);
      const Source& source = sources_[index];
      const bool windowed = member == rank_ ? job.scaled : source.place == Place::window;
      if (windowed) {
        inputs_[index] =
            window(member, source.first_window + round) + share.begin * job.element + at;
      } else {
        inputs_[index] = (member == rank_ ? job.input.data() : source.data) + first + at;
      }
    }
    // The result stands first where it is wanted anyway.
    std::byte* to = nullptr;
    if (job.wants(rank_)) {
      to = job.args.outputs[0].data() + first + at;
    } else if (buffer != nullptr) {
      to = buffer + at;
    } else {
      to = outputs_[static_cast<std::size_t>(job.root)] + first + at;
    }
    reduce_inputs(job.args, job.hands_back, to, block);
    if (buffer != nullptr && to != buffer + at) std::memcpy(buffer + at, to, block);
    for (std::byte* output : outputs_) {
      if (output != nullptr && to != output + first + at)
        std::memcpy(output + first + at, to, block);
    }
  }
  return true;
}

/// Copies `member`'s share of a round from its result buffer into my output.
void RegionMember::copy_result(const Reduction& job, int member, std::size_t round) {
  const Share share = job.share(round, size(), member);
  const std::byte* from = result(member, line(member, sequence_).first_result + round);
  std::byte* const to = job.args.outputs[0].data() + (job.start(round) + share.begin) * job.element;
  if (job.results_come_back) {
    shm::copy_and_hand_back(to, from, share.count() * job.element);
  } else {
    std::memcpy(to, from, share.count() * job.element);
  }
}

Task<Status> RegionMember::reduce_shares(const Args& args, const transport::Fingerprint& call) {
  Reduction job{args, args.inputs[0]};
  job.element = size_of(args.dtype);
  job.grain = kCacheLine / job.element;
  job.count = job.input.size() / job.element;
  job.root = args.op == Op::reduce ? args.root : -1;
  job.by_root =
      job.root >= 0 && (size() == 2 || (per_core_ > 1 && job.input.size() <= kMostForRoot));
  job.cut(job.by_root ? round_for_root(size(), job.input.size()) : layout_.window_bytes);
  job.scaled = args.reduce == Reduce::premul_sum;
  job.hands_back = shm::hands_back();
  job.results_come_back = job.hands_back && (job.root >= 0 || size() == 2 ||
                                             several_hand_back(args.op, size() * job.input.size()));

  Line& mine = my_line();
  const auto input = job.scaled || leaves_early(args.op, job.input.size())
                         ? std::nullopt
                         : arena_offset(job.input);
  const auto output = job.wants(rank_) ? writable_offset(args.outputs[0]) : std::nullopt;
  job.staged = !input;
  job.copies = job.wants(rank_) && !output;
  outputs_shared_ = output.has_value();
  mine.bytes = job.input.size();
  mine.place = input ? Place::arena : Place::window;
  mine.output_place = output ? Place::arena : Place::window;
  mine.input = input.value_or(0);
  mine.output = output.value_or(0);
  mine.first_window = static_cast<std::uint8_t>(next_window_ % kWindows);
  mine.first_result = static_cast<std::uint8_t>(next_result_ % kWindows);
  sources_[static_cast<std::size_t>(rank_)] = {mine.place, nullptr, mine.bytes, 0,
                                               mine.first_window};
  if (job.staged) {  // a root that reduces for all has to fill one too, if it learns that others
                     // reduce (`settle`)
    co_await come(until_emptied(sequence_ - 1));
    if (failed()) co_return channel_.failure();
    if (!job.by_root || job.root != rank_ || job.scaled) fill_input(job, 0);
  }
  const bool reduces = !job.by_root || job.root == rank_ || !job.staged;
  if (!reduces) advance(Counter::reduced, end_of(sequence_));
  if (!job.copies) advance(Counter::drained, end_of(sequence_));
  publish(call);
  for (std::size_t round = 1; !reduces && round < job.rounds; ++round) {
    if (!co_await come(until_emptied(sequence_))) co_return channel_.failure();
    fill_input(job, round);
    advance(Counter::filled, position(sequence_, round + 1));
    wake_others();
    if (pause_due(job.length(round) * job.element)) co_await pause();
  }
  if (!reduces) co_return Status();

  wait_ = {Wait::For::lines, Counter::filled, -1, 0};
  if (!co_await come([&] { return see_all(sequence_); })) co_return channel_.failure();
  if (!co_await come([&] { return all_mapped(job); })) co_return channel_.failure();
  Status met = meet(job);
  if (!met) co_return co_await refuse_late(std::move(met));
  settle(job);

  // Fill one window ahead of what is reduced, reduce one ahead of what is copied: nobody waits for
  // what has only just begun.
  for (std::size_t turn = 0; turn < job.rounds + 1; ++turn) {
    if (job.staged && turn + 1 < job.rounds) {
      if (!co_await come(until_free(window_uses_[next_window_ % kWindows])))
        co_return channel_.failure();
      fill_input(job, turn + 1);
      advance(Counter::filled, position(sequence_, turn + 2));
      wake_others();
    }
    if (turn < job.rounds) {
      for (int member = 0; member < group_size(); ++member) {
        if (turn == 0 && !(job.late && member == job.root)) continue;  // filled before its line
        if (member == rank_ || sources_[static_cast<std::size_t>(member)].place != Place::window)
          continue;
        if (!co_await come(until_reached(Counter::filled, position(sequence_, turn + 1), member)))
          co_return channel_.failure();
      }
      if (job.offers) {
        if (!co_await come(until_free(result_uses_[next_result_ % kWindows])))
          co_return channel_.failure();
      }
      if (!reduce_round(job, turn)) {
        give_up();  // who gave up first waits to hear that I stopped
        co_await until([&] { return failed(); });
        co_return channel_.failure();
      }
      advance(Counter::reduced,
              turn + 1 < job.rounds ? position(sequence_, turn + 1) : end_of(sequence_));
      wake_others();
      if (pause_due(job.length(turn) * job.element)) co_await pause();
    }
    if (job.copies && turn > 0) {
      for (int step = 1; step < group_size(); ++step) {
        const int member = (rank_ + step) % group_size();
        if (reducer(job, member) == rank_) continue;
        if (!co_await come(until_reached(Counter::reduced, position(sequence_, turn), member)))
          co_return channel_.failure();
        copy_result(job, member, turn - 1);
      }
      advance(Counter::drained, turn < job.rounds ? position(sequence_, turn) : end_of(sequence_));
      wake_others();
    }
  }
  if (!co_await come(until_reached(Counter::reduced, end_of(sequence_))))
    co_return channel_.failure();
  for (Use& use : window_uses_) use.pending = false;
  co_return Status();
}

}  // namespace muster::collective::region
