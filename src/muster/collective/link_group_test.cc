// What the engine does over links, on channels of memory, one thread for all ranks: every algorithm, for many numbers of ranks and sizes
// that divide and do not, gives what it should and sends exactly what its schedule says. So what is proven of schedules holds for the
// engine.
#include "muster/collective/link_group.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <tuple>
#include <vector>

#include "muster/collective/plan/schedule.h"
#include "muster/testing/seed.h"

namespace muster::collective {
namespace {

using Values = std::vector<std::int64_t>;
constexpr std::size_t kWidth = sizeof(std::int64_t);
std::size_t at(int index) { return static_cast<std::size_t>(index); }

class MemoryTransfer final : public transport::Transfer {
 public:
  MemoryTransfer(MutableBytes to, int peer) : to_(to) { peer_ = peer; }
  void finish(ConstBytes data) {
    if (data.size() != to_.size())
      status_ = Status(Code::mismatch, std::to_string(data.size()) + " bytes came for " + std::to_string(to_.size()));
    if (status_.ok()) std::copy(data.begin(), data.end(), to_.begin());
    done_.store(true);
  }

 private:
  MutableBytes to_;
};

/// What has been sent and not been received, what is awaited, and a list of all.
struct Wires {
  using Place = std::tuple<int, int, std::uint64_t>;  // from, to, tag
  std::map<Place, std::deque<std::vector<std::byte>>> messages;
  std::map<Place, std::deque<std::shared_ptr<MemoryTransfer>>> receives;
  std::map<std::pair<int, int>, std::vector<std::size_t>> sent;  // sizes, by (from, to)
};

class MemoryChannel final : public transport::Channel {
 public:
  MemoryChannel(Wires& wires, int rank, int size) : wires_(wires), rank_(rank), members_(at(size)) {
    std::iota(members_.begin(), members_.end(), 0);
  }
  std::uint32_t id() const override { return 1; }
  std::span<const int> members() const override { return members_; }
  int rank() const override { return rank_; }
  transport::Fabric& fabric() override { std::abort(); }
  transport::TransferRef send(int member, std::uint64_t tag, ConstBytes data, const transport::Fingerprint&) override {
    auto done = std::make_shared<MemoryTransfer>(MutableBytes(), member);
    done->finish({});
    wires_.sent[{rank_, member}].push_back(data.size());
    auto& awaited = wires_.receives[{rank_, member, tag}];
    if (awaited.empty()) {
      wires_.messages[{rank_, member, tag}].emplace_back(data.begin(), data.end());
    } else {
      awaited.front()->finish(data);
      awaited.pop_front();
    }
    return done;
  }
  transport::TransferRef receive(int member, std::uint64_t tag, MutableBytes data, const transport::Fingerprint&, bool) override {
    auto transfer = std::make_shared<MemoryTransfer>(data, member);
    auto& come = wires_.messages[{member, rank_, tag}];
    if (come.empty()) {
      wires_.receives[{member, rank_, tag}].push_back(transfer);
    } else {
      transfer->finish(come.front());
      come.pop_front();
    }
    return transfer;
  }
  void cancel(const transport::TransferRef&) override {}
  void begin(const transport::Fingerprint&) override {}
  void compare(int, const transport::Fingerprint&) override {}
  Status failure() const override { return {}; }
  void fail(Status cause) override { ADD_FAILURE() << cause.message(); }
  std::vector<int> awaited() const override { return {}; }

 private:
  Wires& wires_;
  const int rank_;
  std::vector<int> members_;
};

/// Element `i` of what `rank` gives to `to`.
std::int64_t given(int rank, int to, std::size_t i) { return 1'000'003LL * (rank + 1) + 1009LL * to + static_cast<std::int64_t>(i); }

/// One call of all ranks.
class Play {
 public:
  Play(Op op, Algorithm algorithm, int size, int per_host, int root, std::size_t count, bool uneven)
      : op_(op),
        algorithm_(algorithm),
        size_(size),
        per_host_(per_host),
        root_(root),
        count_(count),
        uneven_(uneven),
        in_(at(size)),
        out_(at(size)),
        args_(at(size)) {}

  /// What is wrong, or nothing.
  std::string run() {
    Selection selection(Ground::links, size_, per_host_);
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
    return count_ <= kOneChunk ? sent_as_told() : std::string();
  }
  /// Elements that pass in one message; more go in several, of which schedules do not tell.
  static constexpr std::size_t kOneChunk = plan::kReduceChunkBytes / kWidth;

 private:
  // Elements that `from` gives to `to`.
  std::size_t elements(int from, int to) const {
    if (!uneven_) return count_;
    const int pick = op_ == Op::all_gather ? from : op_ == Op::reduce_scatter ? to : 3 * from + 5 * to;
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
    const auto room = [](Values& values, const auto& sizes) {
      std::size_t all = 0;
      for (const std::size_t each : sizes) all += each;
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
      begin += ins[slice];
    }
    begin = 0;
    for (const std::size_t each : outs) {
      args.outputs.push_back(std::as_writable_bytes(std::span(out_[at(rank)]).subspan(begin, each)));
      begin += each;
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
    for (int from = 0; from < size_; ++from) sum += given(from, op_ == Op::reduce_scatter ? rank : 0, i);
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
    }
    return true;
  }

  std::size_t bytes_of(const plan::Cargo& cargo, int slices, int from, int to) const {
    std::size_t elements_in = 0;
    switch (cargo.kind) {
      case plan::Cargo::Kind::token: break;
      case plan::Cargo::Kind::whole: elements_in = count_; break;
      case plan::Cargo::Kind::block:
        for (int i = 0; i < cargo.count; ++i) elements_in += elements(plan::wrap(cargo.first + i, size_), to);
        break;
      case plan::Cargo::Kind::piece:
        elements_in = info(op_).lists_input ? elements(from, to) : plan::slice_of(count_, size_, to).count;
        break;
      default: elements_in = info(op_).lists_input ? elements(from, cargo.slice) : plan::slice_of(count_, slices, cargo.slice).count; break;
    }
    return elements_in * kWidth;
  }

  /// Between each pair of ranks, in order. Empty results need not be sent.
  std::string sent_as_told() {
    std::map<std::pair<int, int>, std::vector<std::size_t>> told;
    for (int rank = 0; rank < size_; ++rank) {
      const plan::Schedule schedule(op_, algorithm_, rank, size_, root_, per_host_);
      for (int step = 0; step < schedule.steps(); ++step) {
        for (int i = 0; i < schedule.sends(step); ++i) {
          const plan::Transfer out = schedule.send(step, i);
          const std::size_t bytes = bytes_of(out.cargo, schedule.slices(), rank, out.peer);
          if (bytes > 0 || out.cargo.kind != plan::Cargo::Kind::result) told[{rank, out.peer}].push_back(bytes);
        }
      }
    }
    if (told == wires_.sent) return {};
    for (const auto& [pair, sizes] : told) {
      if (wires_.sent[pair] == sizes) continue;
      return "rank " + std::to_string(pair.first) + " sends rank " + std::to_string(pair.second) + " other messages than its schedule says";
    }
    return "a rank sends what its schedule does not say";
  }

  const Op op_;
  const Algorithm algorithm_;
  const int size_, per_host_, root_;
  const std::size_t count_;
  const bool uneven_;
  Wires wires_;
  std::vector<Values> in_, out_;
  std::vector<Args> args_;
  transport::Fingerprint call_{1};
};

// spec: F2 F3 F4 F5 F7 F8 F9 F11 F13 uneven and empty slices, every root, every algorithm over links
TEST(LinkGroup, DoesWhatTheSchedulesSay) {
  std::vector<int> sizes{1, 2, 3, 4, 5, 8, 12, 13, 17};
  if (testing::long_tests()) {
    sizes.resize(64);
    std::iota(sizes.begin(), sizes.end(), 1);
  }
  for (int number = 0; number < kCollectives; ++number) {
    const auto op = static_cast<Op>(number);
    for (const Algorithm algorithm : algorithms_of(Ground::links, op)) {
      for (const int size : sizes) {
        for (int per_host = 1; per_host <= size; ++per_host) {
          // One host, or hosts of one rank, are not for it.
          const bool by_hosts = algorithm == Algorithm::hosts;
          if (by_hosts ? size % per_host != 0 || per_host == 1 || per_host == size : per_host > 1) continue;
          for (const int root : {0, size / 2, size - 1}) {
            if (root > 0 && !info(op).rooted) continue;
            for (const std::size_t count : {std::size_t{0}, std::size_t{1}, at(size), at(3 * size + 2), 6 * Play::kOneChunk + 5}) {
              if (count > Play::kOneChunk && (!by_hosts || size > 8)) continue;
              for (const bool uneven : {false, true}) {
                if (uneven && info(op).size_rule != SizeRule::free) continue;
                ASSERT_EQ(Play(op, algorithm, size, per_host, root, count, uneven).run(), "")
                    << info(op).name << " by " << name_of(algorithm) << " on " << size << " ranks, " << per_host << " on a host, root "
                    << root << ", " << count << " elements" << (uneven ? ", uneven" : "");
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
