// Reductions of members that stand host by host (`plan::HostsPlan`). Within a host every member
// sends each of the others its part of that one's lane; the sums go from host to host; what an
// all_reduce has summed goes back the same way, and to all of each host. All of that in chunks, one
// behind the other: the last host finishes the first while the first host sums the next ones.
//
// The bits are those of every other algorithm: a sum that leaves a host is that of all ranks so
// far, in their order, with nothing rounded. Of 16-bit floats it travels as float32.
#include <algorithm>

#include "muster/collective/kernels.h"
#include "muster/collective/link_group.h"
#include "muster/collective/plan/hosts_plan.h"

namespace muster::collective {

class LinkGroup::HostReduction {
 public:
  HostReduction(LinkGroup& group, const Args& args)
      : flight_(group.flight_),
        args_(args),
        plan_{group.rank_, group.size_, group.selection_.ranks_per_host()},
        width_(size_of(args.dtype)),
        wide_(args.dtype == DType::float16 || args.dtype == DType::bfloat16),
        scaled_(args.reduce == Reduce::premul_sum),
        listed_(args.op == Op::reduce_scatter),
        to_all_(args.op == Op::all_reduce) {
    std::size_t longest = 1;
    for (int place = 0; place < plan_.per_host; ++place) {
      for (int run = 0; run < runs(); ++run) longest = std::max(longest, whole(place, run).count);
    }
    const std::size_t lane = longest * width_ * static_cast<std::size_t>(runs());
    chunk_elements_ = std::min(longest, plan::HostsPlan::chunk_bytes(lane, plan_.hosts()) / width_);
    chunks_ = plan::chunks_in(longest, chunk_elements_);
    total_ = chunks_ * static_cast<std::size_t>(runs());
    slot_bytes_ = round_up(chunk_elements_ * width_);
    sum_bytes_ = round_up(chunk_elements_ * sum_width());
    inputs_.resize(static_cast<std::size_t>(plan_.per_host) + 1);
    memory_ = group.scratch(memory_bytes());
  }

  /// Does all that can be done now; whether that was anything.
  bool go_on() {
    bool moved = false;
    while (flight_.ok() && (send_parts() || sum_chunk() || expect_results() || pass_on()))
      moved = true;
    return moved;
  }
  bool over() const { return summed_ == total_ && passed_ == total_; }

 private:
  // Of each kind several: chunk t uses lane + t % kDeep, or t % kFar.
  static constexpr std::size_t kDeep = 2, kFar = 4;
  enum Lane : int {
    kParts = 0,
    kDepartures = 2,
    kSums = 4,
    kOut = 6,
    kResults = 8,
    kNear = 12,
    kBack = 16
  };
  enum Tag : std::uint64_t { kPart, kSum, kResult };
  static_assert(kBack + kFar <= Flight::kLanes);

  static int lane(Lane first, std::size_t chunk) {
    return static_cast<int>(first) + static_cast<int>(chunk % (first < kResults ? kDeep : kFar));
  }
  static std::size_t round_up(std::size_t bytes) { return (bytes + 63) / 64 * 64; }
  static std::size_t at(int index) { return static_cast<std::size_t>(index); }
  std::size_t sum_width() const { return wide_ ? sizeof(float) : width_; }

  // A lane is one run of the tensor; in a reduce_scatter as many as there are hosts, of the members
  // at its place.
  int runs() const { return listed_ ? plan_.hosts() : 1; }
  int run_of(std::size_t t) const { return static_cast<int>(t / chunks_); }
  plan::Slice whole(int place, int run) const {
    if (listed_) return {0, args_.inputs[at(plan_.rank_of(run, place))].size() / width_};
    return plan::slice_of(args_.inputs[0].size() / width_, plan_.per_host, place);
  }
  // In elements of its input.
  plan::Slice chunk(int place, std::size_t t) const {
    const plan::Slice run = whole(place, run_of(t));
    const plan::Slice part = plan::chunk_of(run.count, chunk_elements_, t % chunks_);
    return {run.begin + part.begin, part.count};
  }
  std::size_t count(int place, std::size_t t) const { return chunk(place, t).count; }
  // The first of a run always, so that calls are compared even where it is empty.
  bool exchanged(int place, std::size_t t) const { return t % chunks_ == 0 || count(place, t) > 0; }
  ConstBytes input(int place, std::size_t t) const {
    const plan::Slice part = chunk(place, t);
    return args_.inputs[listed_ ? at(plan_.rank_of(run_of(t), place)) : 0].subspan(
        part.begin * width_, part.count * width_);
  }
  MutableBytes output(int place, std::size_t t) const {
    const plan::Slice part = chunk(place, t);
    return args_.outputs[0].subspan(part.begin * width_, part.count * width_);
  }
  // Who gets the result of this member's lane from the last host, which all members do of an
  // all_reduce.
  int target(std::size_t t) const {
    return listed_ ? plan_.rank_of(run_of(t), plan_.place()) : args_.root;
  }

  // Two slots for every neighbour's parts, as many for products before they leave, two sums that
  // come, two that go, and where sums are wide two more to make them in.
  std::size_t slots() const { return kDeep * at(plan_.per_host) * (scaled_ ? 2 : 1); }
  std::size_t memory_bytes() const {
    return slots() * slot_bytes_ + (2 * kDeep + (wide_ ? 2 : 0)) * sum_bytes_;
  }
  std::byte* arrival(int place, std::size_t t) const {
    return memory_ + slot_bytes_ * (kDeep * at(place) + t % kDeep);
  }
  std::byte* departure(int place, std::size_t t) const {
    return arrival(plan_.per_host + place, t);
  }
  std::byte* sums(std::size_t number) const {
    return memory_ + slots() * slot_bytes_ + number * sum_bytes_;
  }
  std::byte* sum_before(std::size_t t) const { return sums(t % kDeep); }
  std::byte* going(std::size_t t) const { return sums(kDeep + t % kDeep); }
  float* wide_sum() const { return reinterpret_cast<float*>(sums(2 * kDeep)); }
  float* wide_part() const { return reinterpret_cast<float*>(sums(2 * kDeep + 1)); }

  /// Sends the neighbours their parts of the next chunk, and awaits those of this member's lane.
  bool send_parts() {
    const std::size_t t = sent_;
    if (t == total_ || t == summed_ + kDeep || !flight_.done(lane(kDepartures, t))) return false;
    const int own = plan_.place();
    const std::size_t elements = count(own, t);
    for (int place = 0; place < plan_.per_host && exchanged(own, t); ++place) {
      if (place != own)
        flight_.receive(lane(kParts, t), plan_.neighbour(place), kPart,
                        {arrival(place, t), elements * width_});
    }
    if (plan_.previous() >= 0 && exchanged(own, t))
      flight_.receive(lane(kSums, t), plan_.previous(), kSum,
                      {sum_before(t), elements * sum_width()});
    for (int place = 0; place < plan_.per_host; ++place) {
      if (place == own || !exchanged(place, t)) continue;
      ConstBytes part = input(place, t);
      if (scaled_) {
        contribute(departure(place, t), part, args_);
        part = {departure(place, t), part.size()};
      }
      flight_.send(lane(kDepartures, t), plan_.neighbour(place), kPart, part);
    }
    ++sent_;
    return true;
  }

  /// Adds what this host gives to the next chunk of this member's lane, and sends the sum on.
  bool sum_chunk() {
    const std::size_t t = summed_;
    if (t == sent_ || !flight_.done(lane(kParts, t)) || !flight_.done(lane(kSums, t)) ||
        !flight_.done(lane(kOut, t)) || !flight_.ok())
      return false;
    if (exchanged(plan_.place(), t)) {
      if (plan_.next() >= 0) {
        add_up(t, going(t));
        flight_.send(lane(kOut, t), plan_.next(), kSum,
                     {going(t), count(plan_.place(), t) * sum_width()});
      } else {
        finish_chunk(t);
      }
    }
    ++summed_;
    return true;
  }

  void finish_chunk(std::size_t t) {
    const MutableBytes mine =
        to_all_ || target(t) == plan_.rank ? output(plan_.place(), t) : MutableBytes();
    const std::size_t bytes = count(plan_.place(), t) * width_;
    std::byte* result = mine.data() != nullptr ? mine.data() : going(t);
    std::byte* sum = wide_ ? reinterpret_cast<std::byte*>(wide_sum()) : result;
    add_up(t, sum);
    const std::size_t elements = count(plan_.place(), t);
    const DType dtype = wide_ ? DType::float32 : args_.dtype;
    if (args_.reduce == Reduce::avg) finish_average(sum, elements, dtype, plan_.size);
    if (wide_) narrow(result, wide_sum(), elements, args_.dtype);
    if (result == going(t) && bytes > 0)
      flight_.send(lane(kOut, t), target(t), kResult, {result, bytes});
  }

  /// What has come from the host before, then this host's members in their order.
  void add_up(std::size_t t, std::byte* to) {
    std::size_t number = 0;
    if (plan_.previous() >= 0) inputs_[number++] = sum_before(t);
    for (int place = 0; place < plan_.per_host; ++place) {
      const std::byte* part = arrival(place, t);
      if (place == plan_.place()) {
        const ConstBytes mine = input(place, t);
        if (scaled_) {
          contribute(arrival(place, t), mine, args_);
        } else {
          part = mine.data();
        }
      }
      inputs_[number++] = part;
    }
    const std::size_t elements = count(plan_.place(), t);
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
        widen(wide_part(), inputs_[i], elements, args_.dtype);
        const std::byte* two[] = {sum, reinterpret_cast<const std::byte*>(wide_part())};
        reduce_many(to, two, elements, DType::float32, args_.reduce);
        sum = to;
      }
    }
  }

  /// Awaits the results of the next chunk that come to this member's output. Those of the
  /// neighbours' lanes hold up nothing but those that come kFar later: neighbours that waited for
  /// each other before they send would wait for ever.
  bool expect_results() {
    const std::size_t t = expected_;
    if (t == total_ || t == passed_ + kFar || !flight_.done(lane(kNear, t)) || !flight_.ok())
      return false;
    const int last = plan_.hosts() - 1;
    const auto await = [&](Lane first, int from, int place) {
      const MutableBytes to = count(place, t) > 0 ? output(place, t) : MutableBytes();
      if (!to.empty()) flight_.receive(lane(first, t), from, kResult, to);
    };
    if (to_all_) {
      if (plan_.next() >= 0) await(kResults, plan_.next(), plan_.place());
      for (int place = 0; place < plan_.per_host; ++place) {
        if (place != plan_.place()) await(kNear, plan_.neighbour(place), place);
      }
    } else if (listed_) {
      if (plan_.host() != last && run_of(t) == plan_.host())
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

  /// Sends the next chunk of an all_reduce's result back, and to the neighbours.
  bool pass_on() {
    const std::size_t t = passed_;
    if (t == expected_ || (to_all_ && plan_.next() < 0 && t == summed_)) return false;
    if (!flight_.done(lane(kResults, t)) || !flight_.done(lane(kBack, t)) || !flight_.ok())
      return false;
    if (to_all_ && count(plan_.place(), t) > 0) {
      const MutableBytes result = output(plan_.place(), t);
      if (plan_.previous() >= 0) flight_.send(lane(kBack, t), plan_.previous(), kResult, result);
      for (int place = 0; place < plan_.per_host; ++place) {
        if (place != plan_.place())
          flight_.send(lane(kBack, t), plan_.neighbour(place), kResult, result);
      }
    }
    ++passed_;
    return true;
  }

  Flight& flight_;
  const Args& args_;
  const plan::HostsPlan plan_;
  const std::size_t width_;
  const bool wide_;    // sums are float32
  const bool scaled_;  // premul_sum: what is given is the product
  const bool listed_;  // everybody has a slice of its own
  const bool to_all_;
  std::size_t chunk_elements_ = 0;
  std::size_t chunks_ = 0;  // of a run
  std::size_t total_ = 0;   // of a lane
  std::size_t slot_bytes_ = 0, sum_bytes_ = 0;
  std::byte* memory_ = nullptr;
  std::vector<const std::byte*> inputs_;
  std::size_t sent_ = 0, summed_ = 0, expected_ = 0, passed_ = 0;  // chunks
};

Task<Status> LinkGroup::reduce_by_hosts(const Args& args) {
  HostReduction job(*this, args);
  while (flight_.ok() && !job.over()) {
    co_await until([&] { return job.go_on() || !flight_.ok(); });
  }
  Status status = co_await finish();
  drop_large_scratch();
  co_return status;
}

}  // namespace muster::collective
