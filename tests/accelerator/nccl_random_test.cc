// SPDX-License-Identifier: BSD-3-Clause
// Random programs on backend nccl: collectives of two groups, batches, single messages, two streams
// and the abort of a group, on devices with room for as many kernels as they have kinds of calls,
// which is the stand-in's default, and whose memory is used again as soon as it may be.
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/group/group_core.h"
#include "nccl_model.h"
#include "testing/budget.h"
#include "testing/seed.h"

namespace muster::testing {
namespace {

using deferred::on_device;

constexpr auto kAbort = "a step of the program";

/// One step of a program, which every rank has. Messages are made by their two ranks alone.
struct ProgramStep {
  enum class StepKind { reduce, message, batch, abort } kind;
  int group = 0;         // 0 or 1
  bool async = true;     // of a reduction
  int stream = 0;        // of a reduction: 0 or 1
  int from = 0, to = 1;  // the rank that aborts group 1 is `from`
  float value = 0;
  std::int64_t elements = 1;
};

std::vector<ProgramStep> program_of(std::uint64_t seed, int ranks) {
  std::mt19937_64 random(seed);
  const auto draw = [&](int of) { return static_cast<int>(random() % static_cast<unsigned>(of)); };
  std::vector<ProgramStep> steps(static_cast<std::size_t>(5 + draw(15)));
  for (auto& step : steps) {
    step.kind = static_cast<ProgramStep::StepKind>(draw(3));
    step.group = draw(2);
    step.async = draw(2) == 0;
    step.stream = draw(2);
    step.from = draw(ranks);
    step.to = (step.from + 1 + draw(ranks - 1)) % ranks;
    step.value = static_cast<float>(1 + draw(1000));
    step.elements = draw(4) == 0 ? 6000 : 1 + draw(8);
  }
  if (draw(4) != 0) return steps;
  const auto at = static_cast<std::size_t>(draw(static_cast<int>(steps.size())));
  steps[at].kind = ProgramStep::StepKind::abort;
  for (auto i = at; i < steps.size(); ++i) steps[i].group = 0;
  return steps;
}

/// A call that a rank waits for, and the value that its tensor then has.
struct Expected {
  WorkRef work;
  at::Tensor tensor;
  float value;
  int group;
};

class ProgramRank {
 public:
  ProgramRank(int rank, int ranks, std::uint64_t seed)
      : rank_(rank),
        ranks_(ranks),
        random_(seed * 31 + static_cast<std::uint64_t>(rank)),
        groups_{Group(), new_group()} {}

  void play(const std::vector<ProgramStep>& steps) {
    const auto is_abort = [](const ProgramStep& step) {
      return step.kind == ProgramStep::StepKind::abort;
    };
    has_abort_ = std::ranges::any_of(steps, is_abort);
    for (const auto& step : steps) {
      if (step.kind == ProgramStep::StepKind::reduce) {
        if (random_() % 2 == 0) post_messages();
        may_fail(step.group, [&] { reduce(step); });
      } else if (step.kind == ProgramStep::StepKind::batch) {
        post_messages();
        may_fail(step.group, [&] { exchange(step); });
      } else if (is_abort(step)) {
        post_messages();
        if (rank_ == step.from) core_of(groups_[1]).abort(kAbort);
      } else if (rank_ == step.from || rank_ == step.to) {
        waiting_.push_back(step);
      }
    }
    post_messages();
    std::ranges::shuffle(expected_, random_);
    for (const auto& sent : sent_) may_fail(sent.second, [&] { sent.first->wait(); });
    for (const auto& one : expected_)
      may_fail(one.group, [&] {
        if (one.work != nullptr) one.work->wait();
        expect_full(one.group, one.tensor, one.value);
      });
  }
  bool has_abort() const { return has_abort_; }

 private:
  /// The calls of a group that is aborted, even those before, may fail on any rank, by its abort.
  bool is_sure(int group) const { return group == 0 || !has_abort_; }
  void may_fail(int group, const std::function<void()>& calls) const {
    if (is_sure(group)) return calls();
    const auto text = text_of(calls);
    if (!text.empty()) {
      EXPECT_HAS(text, kAbort);
    }
  }
  /// A failure is noted before NCCL is stopped: what has been read before it is right.
  void expect_full(int group, const at::Tensor& tensor, float value) const {
    const auto got = tensor.cpu();
    if (has_failed(group)) return;
    EXPECT_SAME(got, torch::full_like(got, value));
  }
  bool has_failed(int number) const {
    if (is_sure(number)) return false;
    for (const auto& [type, backend] :
         core_of(groups_[static_cast<std::size_t>(number)]).parts().backends)
      if (type == deferred::kType && !backend->state().failure.ok()) return true;
    return false;
  }
  at::Tensor filled(float value, std::int64_t elements) const {
    return on_device(torch::full({elements}, value), rank_);
  }
  const Group& group(const ProgramStep& step) const {
    return groups_[static_cast<std::size_t>(step.group)];
  }
  void reduce(const ProgramStep& step) {
    const auto stream =
        deferred::stream_of(static_cast<c10::DeviceIndex>(rank_), step.stream == 0 ? 0 : 7);
    const c10::StreamGuard on(stream);
    const auto tensor = filled(step.value, step.elements);
    auto work = all_reduce(tensor, {.group = group(step), .async_op = step.async});
    const auto total = step.value * static_cast<float>(ranks_);
    if (work == nullptr) return expect_full(step.group, tensor, total);
    expected_.push_back({std::move(work), tensor, total, step.group});
  }
  /// Everybody with everybody.
  void exchange(const ProgramStep& step) {
    std::vector<P2POp> ops;
    std::vector<Expected> got;
    for (int peer = 0; peer < ranks_; ++peer) {
      if (peer == rank_) continue;
      const auto value = [&](int from, int to) {
        return step.value + static_cast<float>(10 * from + to);
      };
      got.push_back({nullptr, filled(-1, step.elements), value(peer, rank_), step.group});
      ops.push_back({irecv, got.back().tensor, peer, group(step)});
      ops.push_back({isend, filled(value(rank_, peer), step.elements), peer, group(step)});
    }
    std::ranges::shuffle(ops, random_);
    for (const auto& work : batch_isend_irecv(ops)) work->wait();
    expected_.insert(expected_.end(), got.begin(), got.end());
  }
  /// The messages that this rank has put off, in their order.
  void post_messages() {
    for (const auto& step : std::exchange(waiting_, {}))
      may_fail(step.group, [&] {
        const auto tensor = filled(rank_ == step.from ? step.value : -1, step.elements);
        if (rank_ == step.from)
          sent_.emplace_back(isend(tensor, {.dst = step.to, .group = group(step)}), step.group);
        else
          expected_.push_back({irecv(tensor, {.src = step.from, .group = group(step)}), tensor,
                               step.value, step.group});
      });
  }

  const int rank_, ranks_;
  std::mt19937_64 random_;
  const std::vector<Group> groups_;
  bool has_abort_ = false;
  std::vector<ProgramStep> waiting_;
  std::vector<std::pair<WorkRef, int>> sent_;  // and their groups
  std::vector<Expected> expected_;
};

// spec: A3 E1 E5 collectives of several groups, batches and messages in any order on several
// streams neither hang nor read memory that is used again; U2 a group that is aborted holds up no
// other
TEST(NcclRandom, ProgramsEndRight) {
  use_standin();
  deferred::reuses_memory = true;
  const int programs = long_tests() ? 10'000 : 40;
  for (int i = 0; i < programs && !::testing::Test::HasFailure(); ++i) {
    const auto seed = test_seed() + static_cast<std::uint64_t>(i);
    SCOPED_TRACE("seed " + std::to_string(seed));
    const int ranks = 2 + static_cast<int>(seed % 3);
    const auto steps = program_of(seed, ranks);
    on_nccl_ranks(ranks, [&](int rank) {
      const auto has_abort = [&] {
        ProgramRank program(rank, ranks, seed);
        program.play(steps);
        return program.has_abort();
      }();
      if (!has_abort) return;
      text_of([] { destroy_process_group(); });
      const auto store = std::make_shared<HashStore>();  // for the helper's own destroy
      init_process_group({.world_size = 1, .rank = 0, .store = store});
    });
  }
  deferred::reuses_memory = false;
}

}  // namespace
}  // namespace muster::testing
