// Reductions for ranks numbered host by host (`plan::HostsPlan`). Within a host, every member sends
// each other member its part of that member's lane. The sums go from host to host. The results of
// an all_reduce go back the same way, and to all ranks of each host. All of it is pipelined in
// chunks: the last host completes the first chunk while the first host sums the next ones.
//
// The bits are those of every other algorithm: a sum that leaves a host is the sum of all ranks so
// far, in rank order, without rounding. Sums of 16-bit floats travel as float32.
#include <algorithm>

#include "muster/collective/kernels.h"
#include "muster/collective/link_group.h"
#include "muster/collective/plan/hosts_plan.h"

namespace muster::collective {

namespace {

std::size_t as_index(int index) { return static_cast<std::size_t>(index); }

/// How the elements of a reduction are divided into lanes, runs and chunks. Chunk t of a lane is a
/// part of its run t / (chunks per run).
class HostChunks {
 public:
  HostChunks(const plan::HostsPlan& plan, const Args& args)
      : args_(args),
        plan_(plan),
        width_(size_of(args.dtype)),
        listed_(args.op == Op::reduce_scatter),
        to_all_(args.op == Op::all_reduce) {
    std::size_t longest = 1;
    for (int place = 0; place < plan_.per_host; ++place) {
      for (int run = 0; run < runs(); ++run) longest = std::max(longest, whole(place, run).count);
    }
    const std::size_t lane = longest * width_ * as_index(runs());
    elements_ = std::min(longest, plan::HostsPlan::chunk_bytes(lane, plan_.hosts()) / width_);
    of_run_ = plan::chunks_in(longest, elements_);
  }

  std::size_t width() const { return width_; }
  /// Every member has its own slice (reduce_scatter).
  bool listed() const { return listed_; }
  bool to_all() const { return to_all_; }
  /// The maximum number of elements in a chunk.
  std::size_t elements() const { return elements_; }
  /// Number of chunks in a lane.
  std::size_t total() const { return of_run_ * as_index(runs()); }

  int run_of(std::size_t t) const { return static_cast<int>(t / of_run_); }
  std::size_t count(int place, std::size_t t) const { return chunk(place, t).count; }
  /// Always true for the first chunk of a run, so that calls are compared even if it is empty.
  bool exchanged(int place, std::size_t t) const { return t % of_run_ == 0 || count(place, t) > 0; }
  ConstBytes input(int place, std::size_t t) const {
    const plan::Slice part = chunk(place, t);
    return args_.inputs[listed_ ? as_index(plan_.rank_of(run_of(t), place)) : 0].subspan(
        part.begin * width_, part.count * width_);
  }
  MutableBytes output(int place, std::size_t t) const {
    const plan::Slice part = chunk(place, t);
    return args_.outputs[0].subspan(part.begin * width_, part.count * width_);
  }
  /// The rank that receives the result of this member's lane from the last host; for an all_reduce
  /// all members do.
  int target(std::size_t t) const {
    return listed_ ? plan_.rank_of(run_of(t), plan_.place()) : args_.root;
  }

 private:
  // A lane is one run of the tensor. For reduce_scatter it is one run per host, for the members at
  // its place.
  int runs() const { return listed_ ? plan_.hosts() : 1; }
  plan::Slice whole(int place, int run) const {
    if (listed_) return {0, args_.inputs[as_index(plan_.rank_of(run, place))].size() / width_};
    return plan::slice_of(args_.inputs[0].size() / width_, plan_.per_host, place);
  }
  // In elements of the input.
  plan::Slice chunk(int place, std::size_t t) const {
    const plan::Slice run = whole(place, run_of(t));
    const plan::Slice part = plan::chunk_of(run.count, elements_, t % of_run_);
    return {run.begin + part.begin, part.count};
  }

  const Args& args_;
  const plan::HostsPlan plan_;
  const std::size_t width_;
  const bool listed_;
  const bool to_all_;
  std::size_t elements_ = 0;
  std::size_t of_run_ = 0;  // chunks per run
};

/// Memory for chunks in flight: kDeep buffers for each neighbour's parts, as many for products
/// before they are sent, kDeep for incoming sums, kDeep for outgoing ones, and two more to compute
/// wide sums in.
class HostScratch {
 public:
  static constexpr std::size_t kDeep = fixed::kReduceDepth;

  HostScratch(int per_host, bool scaled, bool wide, std::size_t buffer_bytes, std::size_t sum_bytes)
      : per_host_(per_host),
        buffers_(kDeep * as_index(per_host) * (scaled ? 2 : 1)),
        sums_(2 * kDeep + (wide ? 2 : 0)),
        buffer_bytes_(round_up(buffer_bytes)),
        sum_bytes_(round_up(sum_bytes)) {}

  std::size_t bytes() const { return buffers_ * buffer_bytes_ + sums_ * sum_bytes_; }
  void set_memory(std::byte* memory) { memory_ = memory; }

  std::byte* arrival(int place, std::size_t t) const {
    return memory_ + buffer_bytes_ * (kDeep * as_index(place) + t % kDeep);
  }
  std::byte* departure(int place, std::size_t t) const { return arrival(per_host_ + place, t); }
  std::byte* incoming_sum(std::size_t t) const { return sum(t % kDeep); }
  std::byte* outgoing_sum(std::size_t t) const { return sum(kDeep + t % kDeep); }
  float* wide_sum() const { return reinterpret_cast<float*>(sum(2 * kDeep)); }
  float* wide_part() const { return reinterpret_cast<float*>(sum(2 * kDeep + 1)); }

 private:
  static std::size_t round_up(std::size_t bytes) { return (bytes + 63) / 64 * 64; }
  std::byte* sum(std::size_t number) const {
    return memory_ + buffers_ * buffer_bytes_ + number * sum_bytes_;
  }

  const int per_host_;
  const std::size_t buffers_;
  const std::size_t sums_;
  const std::size_t buffer_bytes_;
  const std::size_t sum_bytes_;
  std::byte* memory_ = nullptr;
};

bool sums_are_wide(DType dtype) { return dtype == DType::float16 || dtype == DType::bfloat16; }

}  // namespace

class LinkGroup::HostReduction {
 public:
  HostReduction(LinkGroup& group, const Args& args)
      : outstanding_(group.outstanding_),
        args_(args),
        plan_{group.rank_, group.size_, group.selection_.ranks_per_host()},
        wide_(sums_are_wide(args.dtype)),
        scaled_(args.reduce == Reduce::premul_sum),
        chunks_(plan_, args),
        scratch_(plan_.per_host, scaled_, wide_, chunks_.elements() * chunks_.width(),
                 chunks_.elements() * sum_width()),
        inputs_(as_index(plan_.per_host) + 1) {
    scratch_.set_memory(group.scratch(scratch_.bytes()));
  }

  /// Does everything that is possible now. Returns whether anything was.
  bool advance() {
    bool moved = false;
    while (outstanding_.ok() &&
           (send_parts() || sum_chunk() || post_result_receives() || forward_results()))
      moved = true;
    return moved;
  }
  bool done() const { return summed_ == chunks_.total() && forwarded_ == chunks_.total(); }

 private:
  // Several slots of each kind: chunk t uses slot + t % kDeep, or t % kFar.
  static constexpr std::size_t kDeep = HostScratch::kDeep, kFar = fixed::kForwardDepth;
  enum SlotKind : int {
    kParts = 0,
    kDepartures = 2,
    kSums = 4,
    kOut = 6,
    kResults = 8,
    kNear = 12,
    kBack = 16
  };
  enum ReducePart : std::uint64_t { kPart, kSum, kResult };
  static_assert(kBack + kFar <= OutstandingTransfers::kSlots);

  static int slot(SlotKind first, std::size_t chunk) {
    return static_cast<int>(first) + static_cast<int>(chunk % (first < kResults ? kDeep : kFar));
  }
  std::size_t sum_width() const { return wide_ ? sizeof(float) : chunks_.width(); }

  /// Sends the neighbours their parts of the next chunk, and posts receives for this member's lane.
  bool send_parts() {
    const std::size_t t = sent_;
    if (t == chunks_.total() || t == summed_ + kDeep || !outstanding_.done(slot(kDepartures, t)))
      return false;
    const int own = plan_.place();
    const std::size_t elements = chunks_.count(own, t);
    for (int place = 0; place < plan_.per_host && chunks_.exchanged(own, t); ++place) {
      if (place != own)
        outstanding_.receive(slot(kParts, t), plan_.neighbour(place), kPart,
                             {scratch_.arrival(place, t), elements * chunks_.width()});
    }
    if (plan_.previous() >= 0 && chunks_.exchanged(own, t))
      outstanding_.receive(slot(kSums, t), plan_.previous(), kSum,
                           {scratch_.incoming_sum(t), elements * sum_width()});
    for (int place = 0; place < plan_.per_host; ++place) {
      if (place == own || !chunks_.exchanged(place, t)) continue;
      ConstBytes part = chunks_.input(place, t);
      if (scaled_) {
        contribute(scratch_.departure(place, t), part, args_);
        part = {scratch_.departure(place, t), part.size()};
      }
      outstanding_.send(slot(kDepartures, t), plan_.neighbour(place), kPart, part);
    }
    ++sent_;
    return true;
  }

  /// Adds this host's parts to the next chunk of this member's lane, and sends the sum on.
  bool sum_chunk() {
    const std::size_t t = summed_;
    if (t == sent_ || !outstanding_.done(slot(kParts, t)) || !outstanding_.done(slot(kSums, t)) ||
        !outstanding_.done(slot(kOut, t)) || !outstanding_.ok())
      return false;
    if (chunks_.exchanged(plan_.place(), t)) {
      if (plan_.next() >= 0) {
        add_parts(t, scratch_.outgoing_sum(t));
        outstanding_.send(
            slot(kOut, t), plan_.next(), kSum,
            {scratch_.outgoing_sum(t), chunks_.count(plan_.place(), t) * sum_width()});
      } else {
        finish_chunk(t);
      }
    }
    ++summed_;
    return true;
  }

  void finish_chunk(std::size_t t) {
    const MutableBytes mine = chunks_.to_all() || chunks_.target(t) == plan_.rank
                                  ? chunks_.output(plan_.place(), t)
                                  : MutableBytes();
    const std::size_t bytes = chunks_.count(plan_.place(), t) * chunks_.width();
    std::byte* result = mine.data() != nullptr ? mine.data() : scratch_.outgoing_sum(t);
    std::byte* sum = wide_ ? reinterpret_cast<std::byte*>(scratch_.wide_sum()) : result;
    add_parts(t, sum);
    const std::size_t elements = chunks_.count(plan_.place(), t);
    const DType dtype = wide_ ? DType::float32 : args_.dtype;
    if (args_.reduce == Reduce::avg) finish_average(sum, elements, dtype, plan_.size);
    if (wide_) narrow(result, scratch_.wide_sum(), elements, args_.dtype);
    if (result == scratch_.outgoing_sum(t) && bytes > 0)
      outstanding_.send(slot(kOut, t), chunks_.target(t), kResult, {result, bytes});
  }

  /// Adds the sum from the previous host, then this host's members in order.
  void add_parts(std::size_t t, std::byte* to) {
    std::size_t number = 0;
    if (plan_.previous() >= 0) inputs_[number++] = scratch_.incoming_sum(t);
    for (int place = 0; place < plan_.per_host; ++place) {
      const std::byte* part = scratch_.arrival(place, t);
      if (place == plan_.place()) {
        const ConstBytes mine = chunks_.input(place, t);
        if (scaled_) {
          contribute(scratch_.arrival(place, t), mine, args_);
        } else {
          part = mine.data();
        }
      }
      inputs_[number++] = part;
    }
    const std::size_t elements = chunks_.count(plan_.place(), t);
    if (!wide_)
      return reduce_many(to, {inputs_.data(), number}, elements, args_.dtype, args_.reduce);
    const std::byte* sum = nullptr;
    for (std::size_t i = 0; i < number; ++i) {
      const bool is_wide = i == 0 && plan_.previous() >= 0;
      if (sum == nullptr && !is_wide) {
        widen(reinterpret_cast<float*>(to), inputs_[i], elements, args_.dtype);
        sum = to;
      } else if (sum == nullptr) {
        sum = inputs_[i];
      } else {
        widen(scratch_.wide_part(), inputs_[i], elements, args_.dtype);
        const std::byte* two[] = {sum, reinterpret_cast<const std::byte*>(scratch_.wide_part())};
        reduce_many(to, two, elements, DType::float32, args_.reduce);
        sum = to;
      }
    }
  }

  /// Posts receives for the results of the next chunk of this member's output. Results from the
  /// neighbours' lanes only block the chunk kFar later; a shorter distance would deadlock
  /// neighbours that wait for each other before sending.
  bool post_result_receives() {
    const std::size_t t = expected_;
    if (t == chunks_.total() || t == forwarded_ + kFar || !outstanding_.done(slot(kNear, t)) ||
        !outstanding_.ok())
      return false;
    const int last = plan_.hosts() - 1;
    const auto await = [&](SlotKind first, int from, int place) {
      const MutableBytes to =
          chunks_.count(place, t) > 0 ? chunks_.output(place, t) : MutableBytes();
      if (!to.empty()) outstanding_.receive(slot(first, t), from, kResult, to);
    };
    if (chunks_.to_all()) {
      if (plan_.next() >= 0) await(kResults, plan_.next(), plan_.place());
      for (int place = 0; place < plan_.per_host; ++place) {
        if (place != plan_.place()) await(kNear, plan_.neighbour(place), place);
      }
    } else if (chunks_.listed()) {
      if (plan_.host() != last && chunks_.run_of(t) == plan_.host())
        await(kResults, plan_.rank_of(last, plan_.place()), plan_.place());
    } else if (plan_.rank == args_.root) {
      for (int place = 0; place < plan_.per_host; ++place) {
        if (plan_.rank_of(last, place) != plan_.rank)
          await(kResults, plan_.rank_of(last, place), place);
      }
    }
    ++expected_;
    return true;
  }

  /// Sends the next chunk of an all_reduce's result to the previous host and to the neighbours.
  bool forward_results() {
    const std::size_t t = forwarded_;
    if (t == expected_ || (chunks_.to_all() && plan_.next() < 0 && t == summed_)) return false;
    if (!outstanding_.done(slot(kResults, t)) || !outstanding_.done(slot(kBack, t)) ||
        !outstanding_.ok())
      return false;
    if (chunks_.to_all() && chunks_.count(plan_.place(), t) > 0) {
      const MutableBytes result = chunks_.output(plan_.place(), t);
      if (plan_.previous() >= 0)
        outstanding_.send(slot(kBack, t), plan_.previous(), kResult, result);
      for (int place = 0; place < plan_.per_host; ++place) {
        if (place != plan_.place())
          outstanding_.send(slot(kBack, t), plan_.neighbour(place), kResult, result);
      }
    }
    ++forwarded_;
    return true;
  }

  OutstandingTransfers& outstanding_;
  const Args& args_;
  const plan::HostsPlan plan_;
  const bool wide_;    // sums are float32
  const bool scaled_;  // premul_sum: members send the product
  const HostChunks chunks_;
  HostScratch scratch_;
  std::vector<const std::byte*> inputs_;
  std::size_t sent_ = 0, summed_ = 0, expected_ = 0, forwarded_ = 0;  // numbers of chunks
};

Task<Status> LinkGroup::reduce_by_hosts(const Args& args) {
  HostReduction job(*this, args);
  while (outstanding_.ok() && !job.done()) {
    co_await until([&] { return job.advance() || !outstanding_.ok(); });
  }
  Status status = co_await finish();
  drop_large_scratch();
  co_return status;
}

}  // namespace muster::collective
