// SPDX-License-Identifier: BSD-3-Clause
// Calls of groups over a long way, on in-memory channels: what is on the wire, and the same bits as
// over a short one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/collective/links/link_group.h"
#include "core/collective/select/selection.h"
#include "core/collective/testing/memory_channel.h"
#include "testing/seed.h"

namespace muster::collective {
namespace {

constexpr std::size_t kMiB = 1024 * 1024;

/// A call of all ranks on random numbers, `per_host` ranks on each host. `bytes`: of the tensor, or
/// of each piece.
class LongWayCall {
 public:
  LongWayCall(Op op, Algorithm algorithm, int hosts, int per_host, std::size_t bytes)
      : op_(op), algorithm_(algorithm), size_(hosts * per_host), per_host_(per_host) {
    std::mt19937_64 random(testing::test_seed());
    const auto ranks = static_cast<std::size_t>(size_);
    in_.resize(ranks);
    for (auto& each : in_) {
      each.resize(bytes * (info(op).lists_input ? ranks : 1));
      // Without infinities and NaNs.
      for (std::size_t at = 0; at < each.size(); at += sizeof(std::uint64_t)) {
        const std::uint64_t word = random() & 0x3f3f3f3f3f3f3f3f;
        std::memcpy(each.data() + at, &word, std::min(sizeof word, each.size() - at));
      }
    }
  }
  LongWayCall& of(DType dtype, Reduce reduce) {
    dtype_ = dtype;
    reduce_ = reduce;
    return *this;
  }

  /// In which a ring goes through the ranks.
  LongWayCall& in(const std::vector<std::uint8_t>& order) {
    order_ = order;
    return *this;
  }

  /// The outputs of all ranks, by a group whose longest link needs so many connections.
  std::vector<std::byte> over(std::uint64_t strands) {
    Selection selection(
        Medium::network, size_,
        {.first_ranks = even_hosts(size_, per_host_), .strands = strands, .order = order_});
    selection.force(op_, algorithm_);
    wires_ = Wires();
    std::vector<std::vector<std::byte>> in = in_, out(in_.size());
    std::vector<Args> args(in_.size());
    std::vector<std::unique_ptr<MemoryChannel>> channels;
    std::vector<std::unique_ptr<LinkGroup>> groups;
    std::vector<Task<Status>> tasks;
    const transport::Fingerprint call{1};
    for (std::size_t rank = 0; rank < in.size(); ++rank) {
      prepare(args[rank], rank, in[rank], out[rank]);
      channels.push_back(std::make_unique<MemoryChannel>(wires_, static_cast<int>(rank), size_));
      groups.push_back(std::make_unique<LinkGroup>(*channels.back(), selection));
      tasks.push_back(groups.back()->run(args[rank], call));
    }
    std::vector<bool> done(in.size());
    for (int pass = 0; pass < 10'000 && std::ranges::count(done, true) < size_; ++pass)
      for (std::size_t rank = 0; rank < in.size(); ++rank)
        done[rank] = done[rank] || tasks[rank].step();
    EXPECT_EQ(std::ranges::count(done, true), size_) << "it does not end";
    std::vector<std::byte> all;
    for (const Args& each : args)
      for (const MutableBytes output : each.outputs)
        all.insert(all.end(), output.begin(), output.end());
    return all;
  }

  /// Sender and receiver of each message of the last call.
  std::set<std::pair<int, int>> ways() const {
    std::set<std::pair<int, int>> found;
    for (const auto& [way, sizes] : wires_.sent) found.insert(way);
    return found;
  }
  /// Between how many pairs one posted a receive before it sent to the other.
  std::size_t received_first() const { return wires_.received_first.size(); }
  /// How many messages went from one rank to another, at most.
  std::size_t most_on_a_way() const {
    std::size_t most = 0;
    for (const auto& [way, sizes] : wires_.sent) most = std::max(most, sizes.size());
    return most;
  }
  /// The longest of these messages.
  std::size_t longest() const {
    std::size_t most = 0;
    for (const auto& [way, sizes] : wires_.sent)
      for (const std::size_t each : sizes) most = std::max(most, each);
    return most;
  }

 private:
  void prepare(Args& args, std::size_t rank, std::vector<std::byte>& in,
               std::vector<std::byte>& out) const {
    const std::size_t ranks = in_.size();
    args.op = op_;
    args.dtype = dtype_;
    args.reduce = reduce_;
    args.factor = 0.5 + static_cast<double>(rank);
    args.root = info(op_).rooted ? 0 : -1;
    if (op_ == Op::broadcast) {
      args.outputs = {in};
      return;
    }
    const std::size_t each = in.size() / (info(op_).lists_input ? ranks : 1);
    for (std::size_t begin = 0; begin < in.size(); begin += each)
      args.inputs.push_back(std::span(in).subspan(begin, each));
    if (op_ == Op::reduce && rank > 0) return;
    out.resize(each * (info(op_).lists_output ? ranks : 1));
    for (std::size_t begin = 0; begin < out.size(); begin += each)
      args.outputs.push_back(std::span(out).subspan(begin, each));
  }

  const Op op_;
  const Algorithm algorithm_;
  const int size_, per_host_;
  DType dtype_ = DType::float32;
  Reduce reduce_ = Reduce::sum;
  std::vector<std::uint8_t> order_;
  std::vector<std::vector<std::byte>> in_;
  Wires wires_;
};

// spec: X4.connections a long way changes no bit of a result
TEST(LongWay, HasTheSameBits) {
  for (const Op op :
       {Op::all_reduce, Op::reduce, Op::reduce_scatter, Op::all_gather, Op::broadcast}) {
    for (const Algorithm algorithm : algorithms_of(Medium::network, op)) {
      for (const DType dtype : {DType::bfloat16, DType::float32}) {
        for (const Reduce reduce : {Reduce::sum, Reduce::avg, Reduce::premul_sum}) {
          if (!info(op).reduces && reduce != Reduce::sum) continue;
          LongWayCall call(op, algorithm, 2, 2, 1'400'012);  // a chunk of it goes by request
          call.of(dtype, reduce);
          ASSERT_TRUE(call.over(10) == call.over(1))
              << info(op).name << " by " << name_of(algorithm) << ", " << name_of(reduce) << " of "
              << name_of(dtype);
        }
      }
    }
  }
}

// spec: X4.connections over a long way a member has on the wire what that takes, and not more
TEST(LongWay, HasLongMessages) {
  const std::vector<std::tuple<Op, Algorithm, int>> calls{
      {Op::all_reduce, Algorithm::slices, 1},     {Op::all_reduce, Algorithm::hosts, 2},
      {Op::reduce_scatter, Algorithm::slices, 1}, {Op::reduce_scatter, Algorithm::hosts, 2},
      {Op::all_gather, Algorithm::hosts, 2},      {Op::broadcast, Algorithm::tree, 1},
      {Op::reduce, Algorithm::direct, 1}};
  for (const auto& [op, algorithm, per_host] : calls) {
    SCOPED_TRACE(std::string(info(op).name) + " by " + std::string(name_of(algorithm)));
    const bool by_piece = info(op).lists_input || info(op).lists_output;
    const std::size_t bytes = by_piece ? 2 * kMiB : 4 * kMiB * static_cast<std::size_t>(per_host);
    LongWayCall call(op, algorithm, 2, per_host, bytes);
    call.over(1);
    EXPECT_LE(call.longest(), fixed::kFragmentBytes);
    call.over(10);
    EXPECT_GE(call.longest(), kMiB / 2) << "it moves in four rounds";
    if (per_host > 1) continue;
    // Two strands: 8 MiB. A direct reduce has two chunks in flight, all others four.
    LongWayCall large(op, algorithm, 2, per_host, (by_piece ? 12 : 24) * kMiB);
    large.over(2);
    EXPECT_LE(large.longest(), op == Op::reduce ? 4 * kMiB : 2 * kMiB);
  }
}

// Large messages go by request, as in LinkGroup.ExchangesPostTheirSendsFirst.
TEST(LongWay, ExchangesPostTheirSendsFirst) {
  for (const Op op : {Op::all_reduce, Op::reduce_scatter}) {
    LongWayCall call(op, Algorithm::slices, 3, 1, 4 * kMiB);
    call.over(10);
    EXPECT_EQ(call.received_first(), 0u) << info(op).name;
  }
}

// spec: X4.connections what a way has room for is sent at once: nothing is left for a message more
TEST(LongWay, LeavesNoRestForAnotherRoundTrip) {
  const std::vector<std::tuple<Op, Algorithm, std::size_t>> calls{
      {Op::all_reduce, Algorithm::slices, 8},  // sums and results
      {Op::reduce_scatter, Algorithm::slices, 4},
      {Op::broadcast, Algorithm::tree, 4},
      {Op::reduce, Algorithm::direct, 2}};
  for (const auto& [op, algorithm, most] : calls) {
    SCOPED_TRACE(std::string(info(op).name));
    LongWayCall call(op, algorithm, 2, 1, 4 * kMiB + 54);  // no fourth and no half is whole
    call.of(DType::bfloat16, Reduce::sum).over(10);
    EXPECT_LE(call.most_on_a_way(), most);
  }
}

// spec: X4.order a ring and a chain go in the order that the links make fastest, with the same bits
TEST(LongWay, RingsGoInTheOrderOfTheGroup) {
  const std::vector<std::uint8_t> order{0, 2, 4, 5, 3, 1};
  for (const auto& [op, algorithm] :
       {std::pair(Op::all_gather, Algorithm::ring), std::pair(Op::broadcast, Algorithm::chain)}) {
    SCOPED_TRACE(std::string(info(op).name));
    LongWayCall call(op, algorithm, static_cast<int>(order.size()), 1, 100'003);
    const auto expected = call.over(1);
    EXPECT_TRUE(call.ways().contains(std::pair(0, 1)));
    EXPECT_TRUE(call.in(order).over(5) == expected);
    std::set<std::pair<int, int>> ring;
    for (std::size_t place = 0; place < order.size(); ++place)
      ring.emplace(order[place], order[(place + 1) % order.size()]);
    if (op == Op::broadcast) ring.erase({1, 0});  // to the root
    EXPECT_EQ(call.ways(), ring);
  }
}

TEST(LongWay, IsNotAsLongAsAPeerMaySay) {
  const Selection selection(Medium::network, 2, {.first_ranks = {}, .strands = ~std::uint64_t{0}});
  EXPECT_EQ(selection.in_flight(), kMostStrands * fixed::kStrandWindow);
  EXPECT_EQ(Selection(Medium::network, 2, {.first_ranks = {}, .strands = 1}).in_flight(), 0u);
  EXPECT_EQ(Selection(Medium::network, 2, {.first_ranks = {}, .strands = 0}).in_flight(), 0u);
}

}  // namespace
}  // namespace muster::collective
