// SPDX-License-Identifier: BSD-3-Clause
// Runs the engine over links on in-memory channels, with one thread for all ranks. For many numbers
// of ranks and for sizes that do and do not divide, every algorithm must give the right result and
// send exactly what its schedule says. (Larger calls may use several messages for one, and direct
// reduces send ready-to-receive messages.) So whatever is proven about schedules holds for the
// engine.
#include "core/collective/links/link_group.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <tuple>
#include <vector>

#include "core/collective/testing/host_layouts.h"
#include "core/collective/testing/memory_channel.h"
#include "lab/model/schedule.h"
#include "testing/budget.h"
#include "testing/direct_reduction.h"
#include "testing/seed.h"

namespace muster::collective {
namespace {

using Values = std::vector<std::int64_t>;
constexpr std::size_t kWidth = sizeof(std::int64_t);
std::size_t at(int index) { return static_cast<std::size_t>(index); }

/// Element `i` that `rank` sends to `to`.
std::int64_t given(int rank, int to, std::size_t i) {
  return 1'000'003LL * (rank + 1) + 1009LL * to + static_cast<std::int64_t>(i);
}

/// One call of all ranks.
class Play {
 public:
  Play(Op op, Algorithm algorithm, int size, std::vector<int> hosts, int root, std::size_t count,
       bool uneven)
      : op_(op),
        algorithm_(algorithm),
        size_(size),
        hosts_(std::move(hosts)),
        root_(root),
        gap_(root == size / 2 && root > 0 ? 1 : 0),
        count_(count),
        uneven_(uneven),
        in_(at(size)),
        out_(at(size)),
        args_(at(size)) {}

  /// Returns an error text, or "".
  std::string run() {
    Selection selection(Medium::network, size_, {.first_ranks = hosts_});
    selection.force(op_, algorithm_);
    std::vector<std::unique_ptr<MemoryChannel>> channels;
    std::vector<std::unique_ptr<LinkGroup>> groups;
    std::vector<Task<Status>> tasks;
    for (int rank = 0; rank < size_; ++rank) {
      prepare(rank);
      channels.push_back(std::make_unique<MemoryChannel>(wires_, rank, size_));
      groups.push_back(std::make_unique<LinkGroup>(*channels.back(), selection));
      tasks.push_back(groups.back()->run(args_[at(rank)], call_));
    }
    std::size_t over = 0;
    std::vector<bool> done(at(size_));
    for (int pass = 0; over < tasks.size(); ++pass) {
      if (pass > 4 * size_ + 1000) return "it does not end";
      for (std::size_t rank = 0; rank < tasks.size(); ++rank) {
        if (done[rank] || !tasks[rank].step()) continue;
        done[rank] = true;
        ++over;
        if (const Status status = tasks[rank].result(); !status.ok()) return status.message();
      }
    }
    for (int rank = 0; rank < size_; ++rank) {
      if (!right(rank)) return "rank " + std::to_string(rank) + " has something else";
    }
    const bool in_chunks = algorithm_ == Algorithm::slices || algorithm_ == Algorithm::hosts;
    const std::size_t most = in_chunks ? kOneChunk : fixed::kEagerBytes / kWidth;
    return count_ <= most ? sent_as_told() : std::string();
  }
  /// After `run`: the sizes of the messages between two ranks, in order.
  const std::vector<std::size_t>& sent(int from, int to) { return wires_.sent[{from, to}]; }
  /// After `run`: how many of these, without empty ones, were sent before the receiver had posted a
  /// receive.
  std::size_t uncalled(int from, int to) { return wires_.uncalled[{from, to}]; }
  /// After `run`: how many receives from `from` were posted when `to` last sent it an empty
  /// message.
  std::size_t called(int from, int to) { return wires_.called[{from, to}]; }
  bool received_first(int rank, int peer) { return wires_.received_first.contains({rank, peer}); }
  /// With more elements, a reduction's slices may use several messages.
  static constexpr std::size_t kOneChunk = fixed::kHostChunk / kWidth;

 private:
  // Number of elements that `from` sends to `to`.
  std::size_t elements(int from, int to) const {
    if (!uneven_) return count_;
    const int pick = op_ == Op::all_gather       ? from
                     : op_ == Op::reduce_scatter ? to
                                                 : 3 * from + 5 * to;
    return count_ * at(pick % 3) / 2;
  }

  void prepare(int rank) {
    Args& args = args_[at(rank)];
    args.op = op_;
    args.dtype = DType::int64;
    args.root = info(op_).rooted ? root_ : -1;
    if (op_ == Op::barrier) return;
    const bool reads = op_ == Op::scatter || op_ == Op::broadcast ? rank == root_ : true;
    const bool writes = op_ == Op::gather || op_ == Op::reduce ? rank == root_ : true;
    const auto room = [this](Values& values, const auto& sizes) {
      std::size_t all = 0;
      for (const std::size_t each : sizes) all += each + gap_;
      values.assign(all, -1);
    };
    std::vector<std::size_t> ins, outs;
    for (int other = 0; reads && other < (info(op_).lists_input ? size_ : 1); ++other)
      ins.push_back(elements(rank, info(op_).lists_input ? other : rank));
    for (int other = 0; writes && other < (info(op_).lists_output ? size_ : 1); ++other)
      outs.push_back(elements(info(op_).lists_output ? other : rank, rank));
    room(in_[at(rank)], ins);
    room(out_[at(rank)], outs);
    std::size_t begin = 0;
    for (std::size_t slice = 0; slice < ins.size(); ++slice) {
      const int to = info(op_).lists_input ? static_cast<int>(slice) : 0;
      for (std::size_t i = 0; i < ins[slice]; ++i) in_[at(rank)][begin + i] = given(rank, to, i);
      args.inputs.push_back(std::as_bytes(std::span(in_[at(rank)]).subspan(begin, ins[slice])));
      begin += ins[slice] + gap_;
    }
    begin = 0;
    for (const std::size_t each : outs) {
      args.outputs.push_back(
          std::as_writable_bytes(std::span(out_[at(rank)]).subspan(begin, each)));
      begin += each + gap_;
    }
    if (op_ == Op::broadcast) {
      if (rank == root_) out_[at(rank)] = in_[at(rank)];
      args.inputs.clear();
    }
  }

  std::int64_t expected(int rank, int slice, std::size_t i) const {
    switch (op_) {
      case Op::broadcast: return given(root_, 0, i);
      case Op::scatter: return given(root_, rank, i);
      case Op::all_gather:
      case Op::gather: return given(slice, 0, i);
      case Op::all_to_all: return given(slice, rank, i);
      default: break;
    }
    std::int64_t sum = 0;
    for (int from = 0; from < size_; ++from)
      sum += given(from, op_ == Op::reduce_scatter ? rank : 0, i);
    return sum;
  }

  bool right(int rank) const {
    std::size_t begin = 0;
    const Args& args = args_[at(rank)];
    for (std::size_t slice = 0; slice < args.outputs.size(); ++slice) {
      const std::size_t length = args.outputs[slice].size() / kWidth;
      for (std::size_t i = 0; i < length; ++i) {
        if (out_[at(rank)][begin + i] != expected(rank, static_cast<int>(slice), i)) return false;
      }
      begin += length;
      for (std::size_t i = 0; i < gap_ && op_ != Op::broadcast; ++i) {
        if (out_[at(rank)][begin++] != -1) return false;
      }
    }
    return true;
  }

  std::size_t bytes_of(const plan::Payload& payload, int slices, int from, int to) const {
    std::size_t elements_in = 0;
    switch (payload.kind) {
      case plan::Payload::Kind::token: break;
      case plan::Payload::Kind::whole: elements_in = count_; break;
      case plan::Payload::Kind::block:
        for (int i = 0; i < payload.count; ++i)
          elements_in += elements(plan::wrap(payload.first + i, size_), to);
        break;
      case plan::Payload::Kind::pieces:
        for (int i = 0; i < payload.count; ++i)
          elements_in += elements(from, plan::wrap(payload.first + i, size_));
        break;
      case plan::Payload::Kind::piece:
        elements_in =
            info(op_).lists_input ? elements(from, to) : plan::slice_of(count_, size_, to).count;
        break;
      default:
        elements_in = info(op_).lists_input ? elements(from, payload.slice)
                                            : plan::slice_of(count_, slices, payload.slice).count;
        break;
    }
    return elements_in * kWidth;
  }

  /// Compares the messages of each pair of ranks, in order. Empty results of an
  /// all_reduce need not be sent.
  std::string sent_as_told() {
    std::map<std::pair<int, int>, std::vector<std::size_t>> told;
    for (int rank = 0; rank < size_; ++rank) {
      const plan::Schedule schedule(op_, algorithm_, rank, size_, root_, hosts_);
      for (int step = 0; step < schedule.steps(); ++step) {
        for (int i = 0; i < schedule.sends(step); ++i) {
          const plan::PlannedTransfer out = schedule.send(step, i);
          const std::size_t bytes = bytes_of(out.payload, schedule.slices(), rank, out.peer);
          if (bytes > 0 || out.payload.kind != plan::Payload::Kind::result || op_ != Op::all_reduce)
            told[{rank, out.peer}].push_back(bytes);
        }
      }
    }
    if (told == wires_.sent) return {};
    for (const auto& [pair, sizes] : told) {
      if (wires_.sent[pair] == sizes) continue;
      return "rank " + std::to_string(pair.first) + " sends rank " + std::to_string(pair.second) +
             " other messages than its schedule says";
    }
    return "a rank sends what its schedule does not say";
  }

  const Op op_;
  const Algorithm algorithm_;
  const int size_;
  const std::vector<int> hosts_;  // their first ranks
  const int root_;
  const std::size_t gap_;  // between slices; contiguous ones may travel as one message
  const std::size_t count_;
  const bool uneven_;
  Wires wires_;
  std::vector<Values> in_, out_;
  std::vector<Args> args_;
  transport::Fingerprint call_{1};
};

/// The concatenated outputs of one algorithm's reduction of random bits on all ranks (a reduce uses
/// several chunks).
class BitsOf {
 public:
  BitsOf(Op op, DType dtype, Reduce reduce, std::size_t bytes, int size, std::vector<int> hosts,
         bool in_place)
      : op_(op),
        dtype_(dtype),
        reduce_(reduce),
        bytes_(bytes),
        size_(size),
        hosts_(std::move(hosts)),
        in_place_(in_place) {}
  /// Sizes per part: for a reduce, one with several chunks and one that uses ready-to-receive.
  static std::vector<std::size_t> sizes(Op op) {
    if (op == Op::reduce) return {600'011, 100'003};
    return {op == Op::reduce_scatter ? 41'000u : 83'003u};
  }

  std::vector<std::byte> by(Algorithm algorithm) const {
    Selection selection(Medium::network, size_, {.first_ranks = hosts_});
    selection.force(op_, algorithm);
    Wires wires;
    std::vector<std::unique_ptr<MemoryChannel>> channels;
    std::vector<std::unique_ptr<LinkGroup>> groups;
    std::vector<Task<Status>> tasks;
    std::vector<std::vector<std::byte>> in(at(size_)), out(at(size_));
    std::vector<Args> args(at(size_));
    const transport::Fingerprint call{1};
    std::mt19937_64 random(testing::test_seed());
    for (int rank = 0; rank < size_; ++rank) {
      prepare(args[at(rank)], rank, in[at(rank)], out[at(rank)], random);
      EXPECT_EQ(selection.choose(op_, selected_bytes(args[at(rank)], size_)), algorithm);
      channels.push_back(std::make_unique<MemoryChannel>(wires, rank, size_));
      groups.push_back(std::make_unique<LinkGroup>(*channels.back(), selection));
      tasks.push_back(groups.back()->run(args[at(rank)], call));
    }
    std::vector<bool> done(at(size_));
    for (int pass = 0;
         pass < 10'000 && !std::all_of(done.begin(), done.end(), [](bool is) { return is; });
         ++pass) {
      for (int rank = 0; rank < size_; ++rank)
        done[at(rank)] = done[at(rank)] || tasks[at(rank)].step();
    }
    for (int rank = 0; rank < size_; ++rank) {
      EXPECT_TRUE(done[at(rank)]) << "it does not end";
      if (!done[at(rank)]) return {};
    }
    return outputs_of(args);
  }

  /// Computed in one place: the sums of each host's ranks in rank order, then their sum.
  std::vector<std::byte> in_one_place() const {
    std::vector<std::vector<std::byte>> in(at(size_)), out(at(size_));
    std::vector<Args> args(at(size_));
    std::mt19937_64 random(testing::test_seed());
    for (int rank = 0; rank < size_; ++rank)
      prepare(args[at(rank)], rank, in[at(rank)], out[at(rank)], random);
    const auto inputs = in;  // an output may be an input
    std::vector<double> factors;
    for (const Args& each : args) factors.push_back(each.factor);
    for (int rank = 0; rank < size_; ++rank) {
      for (const MutableBytes output : args[at(rank)].outputs) {
        const std::size_t begin = op_ == Op::reduce_scatter ? at(rank) * output.size() : 0;
        std::vector<ConstBytes> parts;
        for (const auto& each : inputs)
          parts.push_back(ConstBytes(each).subspan(begin, output.size()));
        testing::reduce_by_hosts(output, parts, factors, dtype_, reduce_, hosts_);
      }
    }
    return outputs_of(args);
  }

 private:
  static std::vector<std::byte> outputs_of(const std::vector<Args>& args) {
    std::vector<std::byte> all;
    for (const Args& each : args) {
      for (const MutableBytes output : each.outputs)
        all.insert(all.end(), output.begin(), output.end());
    }
    return all;
  }
  void prepare(Args& args, int rank, std::vector<std::byte>& in, std::vector<std::byte>& out,
               std::mt19937_64& random) const {
    const bool lists = op_ == Op::reduce_scatter;
    const std::size_t width = size_of(dtype_), each = bytes_ / width * width;
    in.resize(each * at(lists ? size_ : 1));
    for (std::size_t i = 0; i < in.size(); i += sizeof(std::uint64_t)) {
      const std::uint64_t word = random();
      std::memcpy(in.data() + i, &word, std::min(sizeof(word), in.size() - i));
    }
    // Clears the high exponent bits of each number, and of both of a complex one: no type has
    // infinities or NaNs then. Which of two NaNs a sum keeps is not defined.
    const std::size_t number = is_complex(dtype_) ? width / 2 : width;
    for (std::size_t i = number - 1; i < in.size(); i += number) in[i] &= std::byte{0x3f};
    args.op = op_;
    args.dtype = dtype_;
    args.reduce = reduce_;
    args.factor = 0.5 + rank;
    args.root = op_ == Op::reduce ? size_ / 2 : -1;
    for (std::size_t begin = 0; begin < in.size(); begin += each)
      args.inputs.push_back(std::span(in).subspan(begin, each));
    if (op_ == Op::reduce && rank != args.root) return;
    out.resize(each);
    args.outputs = {in_place_ ? std::span(in).subspan(lists ? at(rank) * each : 0, each)
                              : std::span(out)};
  }

  const Op op_;
  const DType dtype_;
  const Reduce reduce_;
  const std::size_t bytes_;
  const int size_;
  const std::vector<int> hosts_;  // their first ranks
  const bool in_place_;
};

// spec: F15 16-bit floats accumulate in float32 and round once, and once more on each host where
// hosts send each other sums; F19 PREMUL_SUM and AVG
TEST(LinkGroup, SumsAreInRankOrderAndByHostsInTheOrderOfHosts) {
  std::vector<DType> dtypes{DType::boolean, DType::float16, DType::complex128};
  if (!testing::kSanitized)
    dtypes.insert(dtypes.end(), {DType::int8, DType::int32, DType::bfloat16, DType::float32});
  const auto [first, step] = testing::stride_of_cases();
  int drawn = 0;
  for (const DType dtype : dtypes) {
    for (int reduce = 0; reduce < kReduces; ++reduce) {
      if (!reduce_supports(static_cast<Reduce>(reduce), dtype)) continue;
      for (const Op op : {Op::all_reduce, Op::reduce, Op::reduce_scatter}) {
        const bool in_place = (reduce + static_cast<int>(op)) % 2 == 0,
                   many = static_cast<int>(dtype) % 2 == 0;
        const int size = many ? 12 : 6;
        // Each operation on each layout in turn.
        const int layout = (drawn + drawn / 3) % 3;
        const auto hosts = layout == 0 ? even_hosts(size, size / 3)
                           : layout == 1
                               ? hosts_of(many ? std::vector{5, 1, 4, 2} : std::vector{1, 3, 2})
                               : hosts_of(many ? std::vector{1, 11} : std::vector{4, 1, 1});
        if (drawn++ % step != first) continue;
        for (const std::size_t bytes : BitsOf::sizes(op)) {
          const BitsOf bits(op, dtype, static_cast<Reduce>(reduce), bytes, size, hosts, in_place);
          const auto in_rank_order = bits.by(Algorithm::slices);
          for (const Algorithm other : algorithms_of(Medium::network, op)) {
            const auto expected = other == Algorithm::hosts ? bits.in_one_place() : in_rank_order;
            ASSERT_TRUE(bits.by(other) == expected)
                << info(op).name << " by " << name_of(other) << ", "
                << name_of(static_cast<Reduce>(reduce)) << " of " << bytes << " bytes of "
                << name_of(dtype) << " on " << hosts_text(size, hosts)
                << (in_place ? ", in place" : "");
          }
        }
      }
    }
  }
}

// A root that reduces alone needs bounded memory, whatever the size.
TEST(LinkGroup, ADirectReduceComesInChunks) {
  for (const int size : {2, 5, 17}) {
    const std::size_t chunk = plan::direct_chunk_bytes(size), rest = 40;
    for (const int root : {0, size - 1}) {
      Play play(Op::reduce, Algorithm::direct, size, {}, root,
                (4 * chunk + rest) / sizeof(std::int64_t), false);
      ASSERT_EQ(play.run(), "") << size << " ranks, root " << root;
      for (int rank = 0; rank < size; ++rank) {
        EXPECT_EQ(play.sent(root, rank), std::vector<std::size_t>());
        if (rank == root) continue;
        EXPECT_EQ(play.sent(rank, root),
                  (std::vector<std::size_t>{chunk, chunk, chunk, chunk, rest}));
      }
    }
  }
}

// Data of at most two eager messages is sent in two messages; with more than two members, only
// after the root's ready-to-receive.
TEST(LinkGroup, ADirectReduceOfTwoEagerMessagesUsesReadyToReceive) {
  const std::size_t half = fixed::kEagerBytes;
  for (const int size : {2, 3, 5}) {
    for (const std::size_t bytes : {half, half + 8, 2 * half, 2 * half + 8}) {
      Play play(Op::reduce, Algorithm::direct, size, {}, 1, bytes / sizeof(std::int64_t), false);
      ASSERT_EQ(play.run(), "") << size << " ranks, " << bytes << " bytes";
      const bool uses_rtr = size > 2 && bytes > half && bytes <= 2 * half;
      for (int rank = 0; rank < size; ++rank) {
        if (rank == 1) continue;
        // Rank 0 runs before the root.
        EXPECT_EQ(play.uncalled(rank, 1), rank == 0 && !uses_rtr ? play.sent(0, 1).size() : 0u)
            << size << " ranks, " << bytes << " bytes";
        EXPECT_EQ(play.called(rank, 1), uses_rtr ? 2u : 0u)
            << size << " ranks, " << bytes << " bytes";
        EXPECT_EQ(play.sent(1, rank), std::vector<std::size_t>(uses_rtr ? 1 : 0))
            << size << " ranks, " << bytes << " bytes";
        EXPECT_EQ(play.sent(rank, 1), uses_rtr ? (std::vector<std::size_t>{half, bytes - half})
                                               : std::vector<std::size_t>{bytes});
      }
    }
  }
}

// If two ranks have a message for each other, the request for a large one must not come behind the
// answer that lets the other side fill the wire.
TEST(LinkGroup, ExchangesPostTheirSendsFirst) {
  const std::vector<std::tuple<Op, Algorithm, int>> exchanges{
      {Op::all_reduce, Algorithm::bruck, 2},  {Op::all_gather, Algorithm::bruck, 2},
      {Op::all_gather, Algorithm::direct, 2}, {Op::all_gather, Algorithm::direct, 5},
      {Op::all_to_all, Algorithm::direct, 2}, {Op::all_to_all, Algorithm::direct, 8}};
  for (const auto& [op, algorithm, size] : exchanges) {
    Play play(op, algorithm, size, {}, 0, 64, false);
    ASSERT_EQ(play.run(), "") << info(op).name;
    for (int rank = 0; rank < size; ++rank)
      for (int peer = 0; peer < size; ++peer)
        EXPECT_FALSE(play.received_first(rank, peer))
            << info(op).name << " by " << name_of(algorithm) << ": " << rank << " of " << size
            << ", towards " << peer;
  }
}

/// The bytes that must leave a host of `ranks` of `size` ranks, on several hosts. `all`: bytes of
/// all pieces together. Pieces are of the same size.
std::size_t bytes_away(Op op, std::size_t all, int ranks, bool with_root, int size, int hosts) {
  const std::size_t own = all * at(ranks) / at(size), others = at(hosts - 1);
  switch (op) {
    case Op::reduce_scatter: return all - own;
    case Op::all_gather: return own * others;
    case Op::reduce: return with_root && hosts == 2 ? all - own : all;
    default: return all - own + own * others;
  }
}

TEST(LinkGroup, ByHostsEachByteLeavesAHostOnceForEachThatNeedsIt) {
  for (const auto& ranks_on :
       std::vector<std::vector<int>>{{3, 2}, {1, 4}, {4, 4, 2}, {2, 2}, {1, 1, 5, 1}}) {
    const int size = std::accumulate(ranks_on.begin(), ranks_on.end(), 0),
              hosts = static_cast<int>(ranks_on.size());
    const auto first_ranks = hosts_of(ranks_on);
    for (const Op op : {Op::all_reduce, Op::reduce, Op::reduce_scatter, Op::all_gather}) {
      const std::size_t piece = 12, count = info(op).lists_input || info(op).lists_output
                                                ? piece
                                                : piece * at(size);
      Play play(op, Algorithm::hosts, size, first_ranks, 0, count, false);
      ASSERT_EQ(play.run(), "") << info(op).name << " on " << hosts_text(size, first_ranks);
      for (int host = 0; host < hosts; ++host) {
        const int first = first_ranks[at(host)], after = first + ranks_on[at(host)];
        std::size_t sent = 0;
        for (int from = first; from < after; ++from) {
          for (int to = 0; to < size; ++to) {
            for (const std::size_t bytes : play.sent(from, to))
              sent += to < first || to >= after ? bytes : 0;
          }
        }
        EXPECT_EQ(sent, bytes_away(op, piece * kWidth * at(size), ranks_on[at(host)], host == 0,
                                   size, hosts))
            << info(op).name << " on " << hosts_text(size, first_ranks) << ", host " << host;
      }
    }
  }
}

// If there are more than two hosts, that of the root owns nothing: its network carries every byte
// once in each direction.
TEST(LinkGroup, TheRootsHostOfAReduceCarriesEveryByteOnce) {
  constexpr std::size_t kCount = 120;
  for (const auto& ranks_on :
       std::vector<std::vector<int>>{{1, 1, 1, 1}, {2, 2, 2}, {1, 4, 2}, {3, 1, 1}}) {
    const int size = std::accumulate(ranks_on.begin(), ranks_on.end(), 0);
    const auto first_ranks = hosts_of(ranks_on);
    for (int root = 0; root < size; ++root) {
      Play play(Op::reduce, size == 4 ? Algorithm::slices : Algorithm::hosts, size, first_ranks,
                root, kCount, false);
      ASSERT_EQ(play.run(), "") << hosts_text(size, first_ranks) << ", root " << root;
      const plan::HostsPlan plan(root, size, first_ranks);
      std::size_t sent = 0, received = 0;
      for (int from = 0; from < size; ++from) {
        for (int to = 0; to < size; ++to) {
          const bool leaves = plan.host_of(from) == plan.host(),
                     arrives = plan.host_of(to) == plan.host();
          if (leaves == arrives) continue;
          for (const std::size_t bytes : play.sent(from, to)) (leaves ? sent : received) += bytes;
        }
      }
      EXPECT_EQ(sent, kCount * kWidth) << hosts_text(size, first_ranks) << ", root " << root;
      EXPECT_EQ(received, kCount * kWidth) << hosts_text(size, first_ranks) << ", root " << root;
    }
  }
}

/// The hosts that an algorithm can go by: of the same size (but the last), all ways to put few
/// ranks on hosts, some that are drawn.
std::vector<std::vector<int>> layouts_for(Op op, Algorithm algorithm, int size) {
  if (algorithm != Algorithm::hosts) return {{}};
  std::mt19937_64 random(testing::test_seed());
  std::vector<std::vector<int>> found;
  if (size <= 5) {
    found = all_hosts(size);
  } else {
    for (int each = 1; each < size; ++each)
      if (size % each == 0 || each == 3) found.push_back(even_hosts(size, each));
    for (int i = 0; i < 3; ++i) found.push_back(draw_hosts(size, random));
  }
  // `hosts` does not apply to one host, or to hosts of one rank unless a broadcast is forwarded.
  std::erase_if(found, [&](const auto& hosts) {
    const bool shared = GroupPlacement{.first_ranks = hosts}.shares_hosts(size);
    return !shared && (op != Op::broadcast || hosts.size() <= 2);
  });
  return found;
}

// spec: F2 F3 F4 F5 F7 F8 F9 F11 F13 uneven and empty slices, every root, every algorithm over
// links
TEST(LinkGroup, SendsWhatTheSchedulesSay) {
  std::vector<int> sizes{1, 2, 3, 4, 5, 8, 12, 13, 17};
  const auto [first, step] = testing::stride_of_cases();
  int drawn = 0;
  if (testing::long_tests()) {
    sizes.resize(64);
    std::iota(sizes.begin(), sizes.end(), 1);
  }
  for (int number = 0; number < kCollectives; ++number) {
    const auto op = static_cast<Op>(number);
    const bool by_piece = info(op).lists_input || info(op).lists_output;
    for (const Algorithm algorithm : algorithms_of(Medium::network, op)) {
      for (const int size : sizes) {
        // More chunks of each piece than are in flight.
        const std::size_t many = (by_piece ? 6 : 4 * at(size)) * Play::kOneChunk + 5;
        for (const auto& hosts : layouts_for(op, algorithm, size)) {
          for (const int root : {0, size / 2, size - 1}) {
            if (root > 0 && !info(op).rooted) continue;
            for (const std::size_t count :
                 {std::size_t{0}, std::size_t{1}, at(size), at(3 * size + 2), many}) {
              const int most = info(op).reduces ? 8 : algorithm == Algorithm::hosts ? 5 : 0;
              if (count > Play::kOneChunk && size > most) continue;
              for (const bool uneven : {false, true}) {
                if (uneven && info(op).size_rule != SizeRule::free) continue;
                if (drawn++ % step != first) continue;
                ASSERT_EQ(Play(op, algorithm, size, hosts, root, count, uneven).run(), "")
                    << info(op).name << " by " << name_of(algorithm) << " on "
                    << hosts_text(size, hosts) << ", root " << root << ", " << count << " elements"
                    << (uneven ? ", uneven" : "");
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace muster::collective
