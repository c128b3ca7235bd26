// SPDX-License-Identifier: BSD-3-Clause
// Proves every algorithm over links for every number of ranks to 64 and for some to 4,096: each
// rank ends with exactly the contributions that it should have, nothing is sent before it is
// available, arrives twice or is left over, and no rank waits forever. The proof itself is tested:
// plans with one change fail it.
#include "lab/model/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "core/collective/testing/host_layouts.h"
#include "core/collective/testing/plan_proof.h"
#include "testing/budget.h"
#include "testing/seed.h"

namespace muster::collective::plan {
namespace {

constexpr int kMostRanks = testing::kSanitized ? 512 : 4096;

struct Kind {
  Op op;
  Algorithm algorithm;
  std::string text(int size, int root, const std::vector<int>& hosts = {}) const {
    return std::string(info(op).name) + " by " + std::string(name_of(algorithm)) + " on " +
           hosts_text(size, hosts) + ", root " + std::to_string(root);
  }
  /// Hosts that make a difference: all ways to put few ranks on several hosts; for more, hosts of
  /// the same size, and some that are drawn.
  std::vector<std::vector<int>> layouts(int size, std::mt19937_64& random) const {
    if (algorithm != Algorithm::hosts) return {{}};
    std::vector<std::vector<int>> found;
    if (size <= 7) {
      found = all_hosts(size);
      if (size > 1) found.erase(found.begin());  // one host
      return found;
    }
    for (int each = 1; each < size; ++each)
      if (size % each == 0) found.push_back(even_hosts(size, each));
    auto drawn = draw_hosts(size, random);
    if (drawn.size() > 1) found.push_back(std::move(drawn));
    return found;
  }
};

std::vector<Kind> all_kinds() {
  std::vector<Kind> kinds;
  for (int op = 0; op < kCollectives; ++op) {
    for (int algorithm = 0; algorithm < kAlgorithms; ++algorithm) {
      const Kind kind{static_cast<Op>(op), static_cast<Algorithm>(algorithm)};
      if (Schedule::exists(kind.op, kind.algorithm)) kinds.push_back(kind);
    }
  }
  return kinds;
}

/// Whether the number of messages per rank grows with the number of ranks.
bool meets_all(const Kind& kind) {
  return kind.algorithm == Algorithm::ring || kind.algorithm == Algorithm::slices ||
         kind.algorithm == Algorithm::hosts || kind.op == Op::all_to_all ||
         (kind.op == Op::all_gather && kind.algorithm == Algorithm::direct);
}

std::string prove_kind(const Kind& kind, int size, int root, const std::vector<int>& hosts) {
  return prove(kind.op, size, root, [&](int rank) {
    return Schedule(kind.op, kind.algorithm, rank, size, root, hosts);
  });
}

TEST(Schedule, ThereIsOneForEveryAlgorithmOverLinks) {
  for (int op = 0; op < kCollectives; ++op) {
    for (const Algorithm algorithm : algorithms_of(Medium::network, static_cast<Op>(op)))
      EXPECT_TRUE(Schedule::exists(static_cast<Op>(op), algorithm))
          << info(static_cast<Op>(op)).name;
  }
  EXPECT_FALSE(Schedule::exists(Op::broadcast, Algorithm::bruck));
  EXPECT_EQ(all_kinds().size(), 22u);
}

TEST(Schedule, EveryRankEndsWithWhatItShouldForEverySizeTo64) {
  std::mt19937_64 random(testing::test_seed());
  const auto [first, step] = testing::stride_of_cases();
  for (const Kind& kind : all_kinds()) {
    for (int size = 1; size <= 64; size += size < 16 ? 1 : step) {
      if (size == 16) size += first;
      const bool rooted = info(kind.op).rooted;
      for (int root = 0; root<(rooted ? size : 1); root += size> 16 && root > 0 ? 7 : 1) {
        for (const auto& hosts : kind.layouts(size, random))
          ASSERT_EQ(prove_kind(kind, size, root, hosts), "") << kind.text(size, root, hosts);
      }
    }
  }
}

// Only a long run has time for patterns in which every rank meets every other at 4,096 ranks.
TEST(Schedule, AndForSomeSizesTo4096) {
  std::mt19937_64 random(testing::test_seed());
  const auto [first, step] = testing::stride_of_cases();
  int drawn = 0;
  for (const Kind& kind : all_kinds()) {
    if (drawn++ % step != first) continue;
    const bool sums_of_slices =
        kind.op == Op::all_reduce &&
        kind.algorithm == Algorithm::ring;  // time grows with the cube of the ranks
    const int most = sums_of_slices                              ? 200
                     : !meets_all(kind) || testing::long_tests() ? kMostRanks
                                                                 : 300;
    const std::vector<int> sizes{
        most, 65 + static_cast<int>(random() % static_cast<std::uint64_t>(most - 65))};
    for (const int size : sizes) {
      const int root =
          info(kind.op).rooted ? static_cast<int>(random() % static_cast<std::uint64_t>(size)) : 0;
      const auto layouts = kind.layouts(size, random);
      const auto& hosts = layouts[random() % layouts.size()];
      ASSERT_EQ(prove_kind(kind, size, root, hosts), "")
          << kind.text(size, root, hosts) << ", MUSTER_TEST_SEED=" << testing::test_seed();
    }
  }
}

enum class Change {
  step_left_out,
  sends_left_out,
  receives_left_out,
  other_target,
  other_source,
  other_payload,
  sent_twice
};
constexpr Change kChanges[] = {
    Change::step_left_out, Change::sends_left_out, Change::receives_left_out, Change::other_target,
    Change::other_source,  Change::other_payload,  Change::sent_twice};

/// A schedule with one error.
class Mutant {
 public:
  Mutant(Schedule schedule, int size, Change change, int step)
      : schedule_(schedule), size_(size), change_(change), at_(step) {}

  int slices() const { return schedule_.slices(); }
  int steps() const { return schedule_.steps(); }
  int sends(int step) const {
    if (step != at_) return schedule_.sends(step);
    if (change_ == Change::step_left_out || change_ == Change::sends_left_out) return 0;
    return schedule_.sends(step) + (change_ == Change::sent_twice ? 1 : 0);
  }
  PlannedTransfer send(int step, int index) const {
    PlannedTransfer out = schedule_.send(step, std::min(index, schedule_.sends(step) - 1));
    if (step != at_ || index != 0) return out;
    if (change_ == Change::other_target) out.peer = (out.peer + 1) % size_;
    if (change_ == Change::other_payload) alter(out.payload);
    return out;
  }
  int receives(int step) const {
    return step == at_ && (change_ == Change::step_left_out || change_ == Change::receives_left_out)
               ? 0
               : schedule_.receives(step);
  }
  PlannedTransfer receive(int step, int index) const {
    PlannedTransfer in = schedule_.receive(step, index);
    if (step == at_ && index == 0 && change_ == Change::other_source)
      in.peer = (in.peer + 1) % size_;
    return in;
  }

 private:
  void alter(Payload& payload) const {
    payload.first = (payload.first + 1) % size_;
    payload.slice = (payload.slice + 1) % size_;
    if (payload.kind == Payload::Kind::whole) payload.kind = Payload::Kind::block;
  }
  Schedule schedule_;
  int size_;
  Change change_;
  int at_;
};

/// Whether the change has any effect.
bool applies(const Schedule& schedule, int step, Change change) {
  const bool sends = schedule.sends(step) > 0, receives = schedule.receives(step) > 0;
  switch (change) {
    case Change::step_left_out: return sends || receives;
    case Change::receives_left_out:
    case Change::other_source: return receives;
    default: return sends;
  }
}

TEST(Proof, FindsEveryPlanThatIsWrongOnOneRank) {
  std::mt19937_64 random(testing::test_seed());
  int mutants = 0;
  for (const Kind& kind : all_kinds()) {
    for (const int size : {3, 4, 7, 8, 12, 13}) {
      const int root =
          info(kind.op).rooted ? static_cast<int>(random() % static_cast<std::uint64_t>(size)) : 0;
      const auto layouts = kind.layouts(size, random);
      const auto& hosts = layouts[random() % layouts.size()];
      for (int rank = 0; rank < size; ++rank) {
        const Schedule schedule(kind.op, kind.algorithm, rank, size, root, hosts);
        for (int step = 0; step < schedule.steps(); ++step) {
          for (const Change change : kChanges) {
            if (!applies(schedule, step, change)) continue;
            const auto plans = [&](int each) {
              const Schedule right(kind.op, kind.algorithm, each, size, root, hosts);
              return Mutant(right, size, change, each == rank ? step : -1);
            };
            ++mutants;
            ASSERT_NE(prove(kind.op, size, root, plans), "")
                << kind.text(size, root, hosts) << " passes with change "
                << static_cast<int>(change) << " on rank " << rank << " in step " << step;
          }
        }
      }
    }
  }
  EXPECT_GT(mutants, 1000);
}

TEST(Proof, FindsAStepThatAllRanksLeaveOut) {
  for (const Kind& kind : all_kinds()) {
    for (const int size : {2, 5, 8}) {
      const auto hosts = kind.algorithm == Algorithm::hosts ? even_hosts(size, size > 3 ? 3 : 1)
                                                            : std::vector<int>();
      for (int step = 0; step < Schedule(kind.op, kind.algorithm, 0, size, 0, hosts).steps();
           ++step) {
        const auto plans = [&](int rank) {
          const Schedule right(kind.op, kind.algorithm, rank, size, 0, hosts);
          return Mutant(right, size, Change::step_left_out, step);
        };
        bool matters = false;
        for (int rank = 0; rank < size; ++rank)
          matters = matters || applies(Schedule(kind.op, kind.algorithm, rank, size, 0, hosts),
                                       step, Change::step_left_out);
        if (!matters) continue;
        ASSERT_NE(prove(kind.op, size, 0, plans), "")
            << kind.text(size, 0) << " passes without step " << step;
      }
    }
  }
}

}  // namespace
}  // namespace muster::collective::plan
