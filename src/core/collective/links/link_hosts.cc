// SPDX-License-Identifier: BSD-3-Clause
// Collectives of ranks numbered host by host (`plan::HostsPlan`), in rounds, each of one chunk of
// every rank's piece. A round passes through stages, and every stage works on a round of its own,
// so that the wires between hosts carry data while the ranks of a host add and copy:
//
//   parts     to each rank of the host, for the pieces that it handles   all_reduce, reduce,
//   sums      of the host, to the owners on the other hosts                reduce_scatter
//   own       piece of a rank, now complete, to its handlers elsewhere   all_reduce, all_gather,
//   spread    of the handled pieces to the ranks of the host               broadcast
//
// In a broadcast the owners get their pieces from the root. The result of a reduce goes from the
// owners to the root, whose host may own none, as in a broadcast (`plan::hosts_plan_of`).
//
// Sums are in rank order within a host, then in the order of hosts. Sums of 16-bit floats are
// rounded once on each host, and once in the end.
//
// Nothing happens within a host of one rank. With one rank on every host the ranks send each other
// their parts, and every rank sums what it owns in rank order.
#include <algorithm>

#include "core/collective/kernels/kernels.h"
#include "core/collective/links/link_group.h"
#include "core/collective/plan/hosts_plan.h"

namespace muster::collective {

namespace {

std::size_t as_index(int index) { return static_cast<std::size_t>(index); }

/// The pieces of the data that each rank owns, and the chunk of each that moves in a round.
class HostPieces {
 public:
  HostPieces(const plan::HostsPlan& plan, const Args& args, std::size_t in_flight)
      : args_(args), plan_(plan), width_(size_of(args.dtype)) {
    std::size_t longest = 1;
    for (int number = 0; number < plan_.pieces(); ++number)
      longest = std::max(longest, piece(plan_.owner_of(number)).count);
    const std::size_t chunk = plan_.chunk_bytes(longest * width_, in_flight) / width_;
    elements_ = std::min(longest, std::max<std::size_t>(1, chunk));
    rounds_ = plan::chunks_in(longest, elements_);
  }

  std::size_t rounds() const { return rounds_; }
  /// Bytes of the longest chunk.
  std::size_t chunk_bytes() const { return elements_ * width_; }
  std::size_t count(int owner, std::size_t t) const { return chunk(owner, t).count; }
  std::size_t bytes(int owner, std::size_t t) const { return count(owner, t) * width_; }
  /// A chunk that is empty is sent in the first round only, so that calls are compared.
  bool exchanged(int owner, std::size_t t) const { return t == 0 || count(owner, t) > 0; }
  ConstBytes input(int owner, std::size_t t) const {
    const bool listed = info(args_.op).lists_input;
    return part_of(args_.inputs[listed ? as_index(owner) : 0], owner, t);
  }
  MutableBytes output(int owner, std::size_t t) const {
    const bool listed = info(args_.op).lists_output;
    return part_of(args_.outputs[listed ? as_index(owner) : 0], owner, t);
  }

 private:
  // In elements. Listed pieces begin at 0, in memory of their own.
  plan::Slice piece(int owner) const {
    if (args_.op == Op::reduce_scatter) return {0, args_.inputs[as_index(owner)].size() / width_};
    if (args_.op == Op::all_gather) return {0, args_.outputs[as_index(owner)].size() / width_};
    const ConstBytes whole = args_.op == Op::broadcast ? args_.outputs[0] : args_.inputs[0];
    return plan::slice_of(whole.size() / width_, plan_.pieces(), plan_.piece_of(owner));
  }
  plan::Slice chunk(int owner, std::size_t t) const {
    const plan::Slice whole = piece(owner);
    const plan::Slice part = plan::chunk_of(whole.count, elements_, t);
    return {whole.begin + part.begin, part.count};
  }
  template <class Bytes>
  Bytes part_of(const Bytes& whole, int owner, std::size_t t) const {
    const plan::Slice part = chunk(owner, t);
    return whole.subspan(part.begin * width_, part.count * width_);
  }

  const Args& args_;
  const plan::HostsPlan plan_;
  const std::size_t width_;
  std::size_t elements_ = 0;  // of the longest chunk
  std::size_t rounds_ = 0;
};

/// Memory for the rounds in flight. For each of kDeep rounds, within the host: a part from each
/// neighbour for each piece that this rank handles, and as many products before they are sent. For
/// each of kFar rounds, on the wire: a sum from each host and one for each handled piece, and a
/// result that this rank does not keep. A host of one rank may send its input.
class HostScratch {
 public:
  static constexpr std::size_t kDeep = fixed::kReduceDepth, kFar = fixed::kForwardDepth;

  HostScratch(const plan::HostsPlan& plan, bool scaled, bool sends_input, std::size_t chunk_bytes)
      : handled_(as_index(plan.handled_by(0))),  // no rank of this host handles more
        in_round_(as_index(plan.ranks_here()) * handled_),
        hosts_(as_index(plan.hosts())),
        parts_(plan.ranks_here() == 1 ? 0 : kDeep * in_round_ * (scaled ? 2 : 1)),
        sums_(hosts_ + (sends_input ? 0 : handled_)),
        buffer_bytes_((chunk_bytes + 63) / 64 * 64) {}

  std::size_t bytes() const { return (parts_ + kFar * (sums_ + 1)) * buffer_bytes_; }
  void set_memory(std::byte* memory) { memory_ = memory; }

  /// The part of the rank at `place` for the `index`-th piece that this rank handles.
  std::byte* arrival(int place, int index, std::size_t t) const {
    return buffer(t % kDeep * in_round_ + as_index(place) * handled_ + as_index(index));
  }
  /// This rank's part for the `index`-th piece that the rank at `place` handles.
  std::byte* departure(int place, int index, std::size_t t) const {
    return arrival(place, index, t) + kDeep * in_round_ * buffer_bytes_;
  }
  std::byte* sum_from(int host, std::size_t t) const {
    return buffer(parts_ + t % kFar * sums_ + as_index(host));
  }
  std::byte* sum_for(int index, std::size_t t) const {
    return sum_from(0, t) + (hosts_ + as_index(index)) * buffer_bytes_;
  }
  std::byte* passing(std::size_t t) const { return buffer(parts_ + kFar * sums_ + t % kFar); }

 private:
  std::byte* buffer(std::size_t number) const { return memory_ + number * buffer_bytes_; }

  // In buffers.
  const std::size_t handled_, in_round_, hosts_;
  const std::size_t parts_;
  const std::size_t sums_;  // of a round: from each host, and for each handled piece
  const std::size_t buffer_bytes_;
  std::byte* memory_ = nullptr;
};

}  // namespace

class LinkGroup::HostRounds {
 public:
  HostRounds(LinkGroup& group, const Args& args, std::span<const int> first_ranks)
      : outstanding_(group.outstanding_),
        args_(args),
        plan_(plan::hosts_plan_of(args.op, group.rank_, group.size_, first_ranks, args.root)),
        reduces_(info(args.op).reduces),
        to_all_(!reduces_ || args.op == Op::all_reduce),
        scaled_(args.reduce == Reduce::premul_sum && reduces_),
        most_on_a_host_(plan_.most_on_a_host()),
        sends_input_(plan_.ranks_here() == 1 && !scaled_ &&
                     (!averages_twice() || most_on_a_host_ == 1)),
        pieces_(plan_, args, group.selection_.in_flight()),
        by_request_(pieces_.chunk_bytes() > fixed::kEagerBytes),
        scratch_(plan_, scaled_, sends_input_, pieces_.chunk_bytes()),
        inputs_(as_index(std::max(plan_.ranks_here(), plan_.hosts()))) {
    if (reduces_) scratch_.set_memory(group.scratch(scratch_.bytes()));
    if (args.op == Op::all_gather) copy(args.outputs[as_index(plan_.rank)], args.inputs[0]);
  }

  /// Does everything that is possible now. Returns whether anything was.
  bool advance() {
    bool moved = false;
    while (outstanding_.ok() && ((reduces_ && (send_parts() || (by_request_ && send_sums()) ||
                                               await_sums() || send_sums() || reduce_own())) ||
                                 post_receives() || send_own() || spread()))
      moved = true;
    return moved;
  }
  bool done() const { return spread_ == pieces_.rounds(); }

 private:
  static constexpr std::size_t kDeep = HostScratch::kDeep, kFar = HostScratch::kFar;
  // Several slots of each kind: round t uses slot + t % kDeep, or t % kFar. A broadcast sums
  // nothing.
  enum PartSlots { kParts = 0, kDepartures = 2 };
  enum PieceSlots {
    kFromRoot = 0,
    kSums = 4,
    kOut = 8,
    kOwn = 12,
    kFromPeers = 16,
    kFromNeighbours = 20,
    kSpread = 24
  };
  enum HostMessage : std::uint64_t { kPart, kSum, kComplete };
  static_assert(kSpread + kFar <= OutstandingTransfers::kSlots);

  static int slot(PartSlots first, std::size_t t) { return first + static_cast<int>(t % kDeep); }
  static int slot(PieceSlots first, std::size_t t) { return first + static_cast<int>(t % kFar); }
  bool is_root() const { return plan_.rank == args_.root; }
  bool owns_a_piece() const { return plan_.owns(plan_.host()); }

  template <class Use>
  void for_neighbours(Use use) const {
    for (int place = 0; place < plan_.ranks_here(); ++place)
      if (place != plan_.place()) use(place);
  }
  /// For the rank that handles this rank's piece on each other host. From the next host on, so that
  /// not all hosts send to the same one at first.
  template <class Use>
  void for_handlers(Use use) const {
    for (int step = 1; step < plan_.hosts(); ++step) {
      const int host = plan::wrap(plan_.host() + step, plan_.hosts());
      use(plan_.handler(host, plan_.rank), host);
    }
  }
  /// For the pieces of other hosts that this rank handles: owner and index, in the same order.
  template <class Use>
  void for_handled_elsewhere(Use use) const {
    const int own = plan_.own_index(), all = plan_.handled();
    for (int step = 1; step <= plan_.handled_elsewhere(); ++step) {
      const int index = plan::wrap(own + step, all);
      use(plan_.handled(index), index);
    }
  }
  /// For all pieces that the rank at `place` on this host handles: owner and index.
  template <class Use>
  void for_handled_by(int place, Use use) const {
    const int all = plan_.handled_by(place);
    for (int index = 0; index < all; ++index) use(plan_.handled_by(place, index), index);
  }

  /// Sends the neighbours their parts of the next round, and posts the receives of this rank's.
  bool send_parts() {
    const std::size_t t = sent_;
    if (t == pieces_.rounds() || t == summed_ + kDeep || !outstanding_.done(slot(kDepartures, t)))
      return false;
    for_neighbours([&](int place) {
      for_handled_by(plan_.place(), [&](int owner, int index) {
        if (pieces_.exchanged(owner, t))
          outstanding_.receive(slot(kParts, t), plan_.neighbour(place), kPart,
                               {scratch_.arrival(place, index, t), pieces_.bytes(owner, t)});
      });
    });
    for_neighbours([&](int place) {
      for_handled_by(place, [&](int owner, int index) {
        if (!pieces_.exchanged(owner, t)) return;
        ConstBytes part = pieces_.input(owner, t);
        if (scaled_) {
          contribute(scratch_.departure(place, index, t), part, args_);
          part = {scratch_.departure(place, index, t), part.size()};
        }
        outstanding_.send(slot(kDepartures, t), plan_.neighbour(place), kPart, part);
      });
    });
    ++sent_;
    return true;
  }

  /// Posts the receives of the other hosts' sums of the next round.
  bool await_sums() {
    const std::size_t t = awaited_;
    if (t == pieces_.rounds() || t == reduced_ + kFar) return false;
    ++awaited_;
    if (!owns_a_piece()) return true;
    for_handlers([&](int handler, int host) {
      if (pieces_.exchanged(plan_.rank, t))
        outstanding_.receive(slot(kSums, t), handler, kSum,
                             {scratch_.sum_from(host, t), pieces_.bytes(plan_.rank, t)});
    });
    return true;
  }

  /// Sums the next round's parts of this host, and sends the other hosts theirs.
  bool send_sums() {
    const std::size_t t = summed_;
    if (t == sent_ || t == (by_request_ ? reduced_ + kFar : awaited_) ||
        !outstanding_.done(slot(kParts, t)) || !outstanding_.done(slot(kOut, t)) ||
        !outstanding_.ok())
      return false;
    // Behind the sums of many rounds the results would reach the root of a reduce late.
    if (args_.op == Op::reduce && t == owned_ + kDeep) return false;
    for_handled_elsewhere([&](int owner, int index) {
      if (!pieces_.exchanged(owner, t)) return;
      const std::byte* const sum = sum_parts(index, t, scratch_.sum_for(index, t));
      outstanding_.send(slot(kOut, t), owner, kSum, {sum, pieces_.bytes(owner, t)});
    });
    if (owns_a_piece() && pieces_.exchanged(plan_.rank, t))
      sum_parts(plan_.own_index(), t, scratch_.sum_from(plan_.host(), t));
    ++summed_;
    return true;
  }

  /// This host's sum of the `index`-th piece that this rank handles, in `memory` or where it is
  /// already.
  const std::byte* sum_parts(int index, std::size_t t, std::byte* memory) {
    const int owner = plan_.handled(index);
    const ConstBytes mine = pieces_.input(owner, t);
    if (sends_input_) return mine.data();
    if (plan_.ranks_here() == 1 && scaled_) {
      contribute(memory, mine, args_);
      return memory;
    }
    for_neighbours(
        [&](int place) { inputs_[as_index(place)] = scratch_.arrival(place, index, t); });
    const std::byte*& own = inputs_[as_index(plan_.place())];
    own = mine.data();
    if (scaled_) {
      std::byte* const product = scratch_.arrival(plan_.place(), index, t);
      contribute(product, mine, args_);
      own = product;
    }
    reduce(memory, plan_.ranks_here(), pieces_.count(owner, t), most_on_a_host_);
    return memory;
  }

  /// Sums the hosts' sums of this rank's own chunk. At most kFar results wait in temporary memory
  /// to be sent.
  bool reduce_own() {
    const std::size_t t = reduced_;
    if (t == summed_ || t == awaited_ || t == owned_ + kFar || !outstanding_.done(slot(kSums, t)) ||
        !outstanding_.done(slot(kOwn, t)) || !outstanding_.ok())
      return false;
    ++reduced_;
    if (!owns_a_piece()) return true;
    const std::size_t count = pieces_.count(plan_.rank, t);
    for (int host = 0; host < plan_.hosts(); ++host)
      inputs_[as_index(host)] = scratch_.sum_from(host, t);
    if (sends_input_) inputs_[as_index(plan_.host())] = pieces_.input(plan_.rank, t).data();
    reduce(own(t).data(), plan_.hosts(), count, plan_.size / most_on_a_host_);
    if (args_.reduce == Reduce::avg && !averages_twice())
      finish_average(own(t).data(), count, args_.dtype, plan_.size);
    return true;
  }

  /// Reduces the first `number` inputs. `divisor`: for sums that are divided here.
  void reduce(std::byte* to, int number, std::size_t count, double divisor) {
    const std::span<const std::byte* const> inputs{inputs_.data(), as_index(number)};
    if (averages_twice())
      reduce_complete(to, inputs, count, args_.dtype, args_.reduce, divisor);
    else
      reduce_many(to, inputs, count, args_.dtype, args_.reduce);
  }
  /// A sum of 16-bit floats might overflow: all hosts divide theirs by the number of ranks on the
  /// largest host, and the sum of these is divided by the rest. Other types are divided once.
  bool averages_twice() const {
    return args_.reduce == Reduce::avg &&
           (args_.dtype == DType::float16 || args_.dtype == DType::bfloat16);
  }

  /// This rank's own chunk of the result.
  MutableBytes own(std::size_t t) const {
    if (args_.op == Op::reduce && !is_root())
      return {scratch_.passing(t), pieces_.bytes(plan_.rank, t)};
    return pieces_.output(plan_.rank, t);
  }

  /// Whether a complete chunk is sent. The sums of an all_reduce have compared the calls already.
  bool is_sent(int owner, std::size_t t) const {
    return args_.op == Op::all_reduce ? pieces_.count(owner, t) > 0 : pieces_.exchanged(owner, t);
  }
  void await(PieceSlots kind, std::size_t t, int from, int owner) {
    if (is_sent(owner, t))
      outstanding_.receive(slot(kind, t), from, kComplete, pieces_.output(owner, t));
  }
  void pass_on(PieceSlots kind, std::size_t t, int to, int owner, ConstBytes data) {
    if (is_sent(owner, t)) outstanding_.send(slot(kind, t), to, kComplete, data);
  }

  /// Posts the receives of the next round's complete pieces. Those from neighbours block only
  /// rounds kFar later. Otherwise neighbours that wait for each other before sending would
  /// deadlock.
  bool post_receives() {
    const std::size_t t = expected_;
    if (t == pieces_.rounds() || t == spread_ + kFar ||
        !outstanding_.done(slot(kFromNeighbours, t)) || !outstanding_.ok())
      return false;
    if (args_.op == Op::reduce && is_root()) {
      for_owners([&](int owner) {
        if (owner != plan_.rank) await(kFromPeers, t, owner, owner);
      });
    } else if (to_all_ && owns_a_piece()) {
      if (args_.op == Op::broadcast) await(kFromRoot, t, args_.root, plan_.rank);
      for_handled_elsewhere([&](int owner, int) { await(kFromPeers, t, owner, owner); });
      for_neighbours([&](int place) {
        for_handled_by(place, [&](int owner, int) {
          await(kFromNeighbours, t, plan_.neighbour(place), owner);
        });
      });
    } else if (to_all_ && !is_root()) {
      for_owners([&](int owner) { await(kFromRoot, t, args_.root, owner); });
    }
    ++expected_;
    return true;
  }
  template <class Use>
  void for_owners(Use use) const {
    for (int piece = 0; piece < plan_.pieces(); ++piece) use(plan_.owner_of(piece));
  }

  /// Sends this rank's own chunk of the next round to where it is needed beyond this host; the root
  /// of a broadcast sends the owners theirs.
  bool send_own() {
    const std::size_t t = owned_;
    if (t == expected_ || (reduces_ && t == reduced_) ||
        (args_.op == Op::broadcast && !outstanding_.done(slot(kFromRoot, t))) ||
        !outstanding_.done(slot(kOwn, t)) || !outstanding_.ok())
      return false;
    if (args_.op == Op::reduce && owns_a_piece() && !is_root()) {
      pass_on(kOwn, t, args_.root, plan_.rank, own(t));
    } else if (args_.op == Op::broadcast && is_root()) {
      for_owners([&](int owner) { pass_on(kOwn, t, owner, owner, pieces_.output(owner, t)); });
    } else if (to_all_ && owns_a_piece()) {
      for_handlers([&](int handler, int host) {
        if (plan_.owns(host)) pass_on(kOwn, t, handler, plan_.rank, own(t));
      });
    }
    ++owned_;
    return true;
  }

  /// Sends the neighbours the handled pieces of the next round; the root of a broadcast all pieces.
  bool spread() {
    const std::size_t t = spread_;
    if (t == owned_ || !outstanding_.done(slot(kFromPeers, t)) ||
        !outstanding_.done(slot(kSpread, t)) || !outstanding_.ok())
      return false;
    for_neighbours([&](int place) {
      const int to = plan_.neighbour(place);
      const auto send = [&](int owner, int = 0) {
        pass_on(kSpread, t, to, owner, pieces_.output(owner, t));
      };
      if (args_.op == Op::broadcast && is_root()) {
        for_owners(send);
      } else if (to_all_ && owns_a_piece()) {
        for_handled_by(plan_.place(), send);
      }
    });
    ++spread_;
    return true;
  }

  OutstandingTransfers& outstanding_;
  const Args& args_;
  const plan::HostsPlan plan_;
  const bool reduces_;
  const bool to_all_;  // every rank ends with every piece
  const bool scaled_;  // premul_sum: ranks send the product
  const double most_on_a_host_;
  const bool sends_input_;  // the only rank of its host: the host's sums
  const HostPieces pieces_;
  /// Over a long way. The sums that hosts exchange then go as in `all_gather_direct`: sends first.
  const bool by_request_;
  HostScratch scratch_;
  std::vector<const std::byte*> inputs_;
  // Numbers of rounds.
  std::size_t sent_ = 0, awaited_ = 0, summed_ = 0, reduced_ = 0, expected_ = 0, owned_ = 0,
              spread_ = 0;
};

Task<Status> LinkGroup::run_by_hosts(const Args& args, std::span<const int> first_ranks) {
  HostRounds job(*this, args, first_ranks);
  while (outstanding_.ok() && !job.done()) {
    co_await until([&] { return job.advance() || !outstanding_.ok(); });
  }
  Status status = co_await finish();
  drop_large_scratch();
  co_return status;
}

}  // namespace muster::collective
