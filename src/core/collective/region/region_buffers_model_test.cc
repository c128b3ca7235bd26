// SPDX-License-Identifier: BSD-3-Clause
// Model of the windows, results and counters of the shared region (`PullTransfer`,
// `ShareReduction`), explored in every interleaving of its accesses to shared memory.
//
// Each member has two windows and two results, so that each is reused within a few calls. In every
// reachable state: no member writes what another one reads, every read returns the intended data,
// and some member can continue until all are done. Removing any one wait makes a test fail; the
// test at the end checks that for the waits that are easiest to forget.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/collective/testing/region_model.h"
#include "core/shm/segment_layout.h"

namespace muster::collective::region {
namespace {

using shm::end_of;
using shm::Position;
using shm::position;
using shm::reached;

// Reading includes reclaiming, which ends before the counter says that the reader is done: only
// readers access the buffer meanwhile. A member is a list of steps, each of which accesses shared
// memory once. Counters never decrease, so a state is the position of each member.
struct Step {
  enum class Kind { raise, wait, begin_write, end_write, begin_read, end_read } kind;
  int counter = 0;  // raise, wait: index of `owner`'s counter
  int owner = 0;
  Position position = 0;
  int buffer = 0;  // begin_*, end_*: buffer of `owner`
  int tag = 0;     // the data written, or to be read
};

enum ModelCounter { kLine, kFilled, kReduced, kDrained, kModelCounters };
constexpr int kModelWindows = 2;
// Buffers of a member: two windows, two results, the input in the arena, and the output in the
// arena, by shares.
constexpr int kFirstResult = kModelWindows, kArenaInput = 2 * kModelWindows,
              kArenaOutput = kArenaInput + 1;
constexpr int kBuffers = kArenaOutput + 3;

class BufferModel {
 public:
  // The position of each member, then the contents of each buffer.
  using State = std::vector<std::int16_t>;

  explicit BufferModel(std::vector<std::vector<Step>> programs) : programs_(std::move(programs)) {
    for (const auto& program : programs_) {
      std::array<Position, kModelCounters> counters{};
      counters_.push_back({counters});
      for (const Step& step : program) {
        if (step.kind == Step::Kind::raise)
          counters[static_cast<std::size_t>(step.counter)] = step.position;
        counters_.back().push_back(counters);
      }
    }
  }
  State first() const { return State(programs_.size() * (1 + kBuffers), 0); }

  std::string operator()(const State& state, std::vector<State>& out) const {
    bool all_done = true;
    for (std::size_t member = 0; member < programs_.size(); ++member) {
      if (at(state, member) == programs_[member].size()) continue;
      all_done = false;
      const Step& step = programs_[member][at(state, member)];
      const auto owner = static_cast<std::size_t>(step.owner);
      if (step.kind == Step::Kind::wait &&
          !reached(counters_[owner][at(state, owner)][static_cast<std::size_t>(step.counter)],
                   step.position)) {
        continue;
      }
      State next = state;
      ++next[member];
      std::int16_t& content =
          next[programs_.size() + owner * kBuffers + static_cast<std::size_t>(step.buffer)];
      if (std::string wrong = check(next, member, step, content); !wrong.empty()) return wrong;
      if (step.kind == Step::Kind::end_write) content = static_cast<std::int16_t>(step.tag);
      out.push_back(std::move(next));
    }
    return out.empty() && !all_done ? "nobody can go on" : "";
  }

 private:
  static std::size_t at(const State& state, std::size_t member) {
    return static_cast<std::size_t>(state[member]);
  }

  // No other member is inside the same buffer if one of the two writes; every read returns the
  // intended data.
  std::string check(const State& state, std::size_t member, const Step& step,
                    std::int16_t content) const {
    if (step.kind != Step::Kind::begin_write && step.kind != Step::Kind::begin_read) return "";
    const bool writes = step.kind == Step::Kind::begin_write;
    for (std::size_t other = 0; other < programs_.size(); ++other) {
      if (other == member || at(state, other) == 0) continue;
      const Step& now = programs_[other][at(state, other) - 1];
      const bool inside = now.kind == Step::Kind::begin_write || now.kind == Step::Kind::begin_read;
      if (inside && now.owner == step.owner && now.buffer == step.buffer &&
          (writes || now.kind == Step::Kind::begin_write)) {
        return "two members are in buffer " + std::to_string(step.buffer) + " of " +
               std::to_string(step.owner) + " at once";
      }
    }
    if (!writes && content != step.tag)
      return "read " + std::to_string(content) + " for " + std::to_string(step.tag);
    return "";
  }

  std::vector<std::vector<Step>> programs_;
  std::vector<std::vector<std::array<Position, kModelCounters>>>
      counters_;  // of each member after each of its steps
};

// Records the steps of a member, as `pull` and `reduce_shares` execute them. It also follows the
// other members' cursors, which lines carry in reality.
class Script {
 public:
  Script(int me, int members, std::vector<Step>& out, bool forgets)
      : me_(me), members_(members), out_(out), forgets_(forgets) {}

  // Every member sends `steps` windows to all. `arena`: bit mask of members whose input is read in
  // place.
  void all_gather(std::uint64_t call, int steps, unsigned arena) {
    const auto in_arena = [&](int member) { return (arena >> member & 1) != 0; };
    const auto first = windows_;
    if (in_arena(me_)) {
      write(me_, kArenaInput, tag(call, me_, 0));  // the caller fills its buffer
    } else {
      fill(call, 0, kDrained);
    }
    raise(kLine, position(call, 0));
    for (int step = 0; step < steps; ++step) {
      if (!in_arena(me_) && step + 1 < steps) {
        fill(call, step + 1, kDrained);
        raise(kFilled, after(call, step + 1));
      }
      for (int other = 0; other < members_; ++other) {
        if (other == me_) continue;
        if (step == 0) wait(other, kLine, position(call, 0));
        if (in_arena(other)) {
          read(other, kArenaInput, tag(call, other, 0));
          continue;
        }
        if (step > 0) wait(other, kFilled, after(call, step));
        read(other, (first[index(other)] + step) % kModelWindows, tag(call, other, step));
      }
      raise(kDrained, step + 1 < steps ? after(call, step) : end_of(call));
    }
    if (in_arena(me_) && !forgets_) wait_all(kDrained, end_of(call));
    for (int other = 0; other < members_; ++other) {
      if (other != me_ && !in_arena(other)) windows_[index(other)] += steps;
    }
  }

  // In rounds: fill one ahead, reduce this member's share, pass it on. `arena`: bit mask of members
  // whose buffer, used in place, is in the arena.
  void all_reduce(std::uint64_t call, int rounds, unsigned arena) {
    const auto in_arena = [&](int member) { return (arena >> member & 1) != 0; };
    const auto offers = [&](int member) { return (arena | 1u << member) != (1u << members_) - 1; };
    const auto first_window = windows_;
    const auto first_result = results_;
    if (in_arena(me_)) {
      for (int share = 0; share < members_; ++share)
        write(me_, kArenaOutput + share, tag(call, me_, 0));  // the caller
      raise(kDrained, end_of(call));
    } else {
      fill(call, 0, kReduced);
    }
    raise(kLine, position(call, 0));
    for (int other = 0; other < members_; ++other) {
      if (other != me_) wait(other, kLine, position(call, 0));
    }
    for (int turn = 0; turn < rounds + 1; ++turn) {
      if (!in_arena(me_) && turn + 1 < rounds) {
        fill(call, turn + 1, kReduced);
        raise(kFilled, after(call, turn + 1));
      }
      if (turn < rounds) {
        const int result = kFirstResult + results_[index(me_)] % kModelWindows;
        for (int other = 0; turn > 0 && other < members_; ++other) {
          if (other != me_ && !in_arena(other)) wait(other, kFilled, after(call, turn));
        }
        if (offers(me_)) wait_free(result);
        for (int other = 0; other < members_; ++other) {
          if (other == me_) continue;
          // A share in the arena is one buffer here for all rounds: only the first round finds the
          // input in it.
          if (!in_arena(other)) {
            read(other, (first_window[index(other)] + turn) % kModelWindows,
                 tag(call, other, turn));
          } else if (turn == 0) {
            read(other, kArenaOutput + me_, tag(call, other, 0));
          }
        }
        if (offers(me_)) {
          write(me_, result, tag(call, me_, 100 + turn));
          free_[index(result)] = {kDrained, after(call, turn)};
          ++results_[index(me_)];
        }
        for (int other = 0; other < members_; ++other) {
          if (other != me_ && in_arena(other))
            write(other, kArenaOutput + me_, tag(call, me_, 100 + turn));
        }
        raise(kReduced, turn + 1 < rounds ? after(call, turn) : end_of(call));
      }
      if (!in_arena(me_) && turn > 0) {
        for (int step = 1; step < members_; ++step) {
          const int other = (me_ + step) % members_;
          wait(other, kReduced, after(call, turn - 1));
          read(other, kFirstResult + (first_result[index(other)] + turn - 1) % kModelWindows,
               tag(call, other, 100 + turn - 1));
        }
        raise(kDrained, turn < rounds ? after(call, turn - 1) : end_of(call));
      }
    }
    wait_all(kReduced, end_of(call));
    // The caller checks its output, and may then overwrite it.
    for (int other = 0; other < members_; ++other) {
      if (other != me_ && in_arena(me_))
        read(me_, kArenaOutput + other, tag(call, other, 100 + rounds - 1));
      if (other != me_ && !in_arena(other)) windows_[index(other)] += rounds;
      if (other != me_ && offers(other)) results_[index(other)] += rounds;
    }
    for (int window = 0; window < kModelWindows; ++window) free_[index(window)] = {};
  }

  // The same with a root that receives the result and reduces the shares of all members with
  // private inputs. Those only stage their input. So only the root finds out whether others reduce,
  // and then fills its first window late.
  void reduce(std::uint64_t call, int rounds, int root, unsigned arena) {
    const auto in_arena = [&](int member) { return (arena >> member & 1) != 0; };
    const bool at_root = me_ == root, root_gives = !in_arena(root) && arena != 0;
    const auto first_window = windows_;
    const auto first_result = results_;
    for (int other = 0; other < members_; ++other) {
      if (other != me_ && !in_arena(other) && (other != root || root_gives))
        windows_[index(other)] += rounds;
      if (other != me_ && in_arena(other) && !in_arena(root)) results_[index(other)] += rounds;
    }
    if (!at_root && !in_arena(me_)) {
      fill(call, 0, kReduced);
      raise(kReduced, end_of(call));
      raise(kDrained, end_of(call));
      raise(kLine, position(call, 0));
      for (int round = 1; round < rounds; ++round) {
        fill(call, round, kReduced);
        raise(kFilled, after(call, round));
      }
      return;
    }
    if (in_arena(me_)) {
      for (int share = 0; share < members_; ++share)
        write(me_, kArenaOutput + share, tag(call, me_, 0));  // the caller
      raise(kDrained, end_of(call));
    } else {
      wait_free(windows_[index(me_)] % kModelWindows);  // whether or not the root will fill it
    }
    raise(kLine, position(call, 0));
    for (int other = 0; other < members_; ++other) {
      if (other != me_) wait(other, kLine, position(call, 0));
    }
    if (at_root && arena == 0) raise(kDrained, end_of(call));
    if (at_root && root_gives) {
      fill(call, 0, kReduced);
      raise(kFilled, after(call, 0));
    }
    for (int turn = 0; turn < rounds + 1; ++turn) {
      if (at_root && root_gives && turn + 1 < rounds) {
        fill(call, turn + 1, kReduced);
        raise(kFilled, after(call, turn + 1));
      }
      if (turn < rounds) {
        for (int other = 0; other < members_; ++other) {
          const bool late = other == root && !forgets_late_;
          if (other != me_ && !in_arena(other) && (turn > 0 || late))
            wait(other, kFilled, after(call, turn));
        }
        const bool offers = !at_root && !in_arena(root);
        const int result = kFirstResult + results_[index(me_)] % kModelWindows;
        if (offers) wait_free(result);
        for (int other = 0; other < members_; ++other) {
          if (other == me_) continue;
          if (!in_arena(other)) {
            read(other, (first_window[index(other)] + turn) % kModelWindows,
                 tag(call, other, turn));
            continue;
          }
          for (int share = 0; turn == 0 && share < members_; ++share) {
            if (share == me_ || (at_root && !in_arena(share)))
              read(other, kArenaOutput + share, tag(call, other, 0));
          }
        }
        if (offers) {
          write(me_, result, tag(call, me_, 100 + turn));
          free_[index(result)] = {kDrained, after(call, turn), root};
          ++results_[index(me_)];
        }
        if (!at_root && in_arena(root)) write(root, kArenaOutput + me_, tag(call, me_, 100 + turn));
        raise(kReduced, turn + 1 < rounds ? after(call, turn) : end_of(call));
      }
      if (at_root && root_gives && turn > 0) {
        for (int other = 0; other < members_; ++other) {
          if (!in_arena(other)) continue;
          wait(other, kReduced, after(call, turn - 1));
          read(other, kFirstResult + (first_result[index(other)] + turn - 1) % kModelWindows,
               tag(call, other, 100 + turn - 1));
        }
        raise(kDrained, turn < rounds ? after(call, turn - 1) : end_of(call));
      }
    }
    wait_all(kReduced, end_of(call));
    for (int other = 0; other < members_; ++other) {
      if (other != me_ && at_root && in_arena(me_) && in_arena(other))
        read(me_, kArenaOutput + other, tag(call, other, 100 + rounds - 1));
    }
    for (int window = 0; window < kModelWindows; ++window) free_[index(window)] = {};
  }
  void forget_late() { forgets_late_ = true; }

 private:
  static std::size_t index(int member) { return static_cast<std::size_t>(member); }
  static int tag(std::uint64_t call, int member, int step) {
    return static_cast<int>(call) * 1000 + member * 300 + step;
  }
  static Position after(std::uint64_t call, int step) {
    return position(call, static_cast<std::uint64_t>(step) + 1);
  }

  void raise(int counter, Position position) {
    out_.push_back({Step::Kind::raise, counter, me_, position});
  }
  void wait(int owner, int counter, Position position) {
    out_.push_back({Step::Kind::wait, counter, owner, position});
  }
  void wait_all(int counter, Position position) {
    for (int other = 0; other < members_; ++other) {
      if (other != me_) wait(other, counter, position);
    }
  }
  void wait_free(int buffer) {
    const Free& use = free_[index(buffer)];
    if (use.position == 0 || forgets_) return;
    if (use.reader < 0) {
      wait_all(use.counter, use.position);
    } else {
      wait(use.reader, use.counter, use.position);
    }
  }
  void fill(std::uint64_t call, int step, int counter) {
    const int buffer = windows_[index(me_)]++ % kModelWindows;
    wait_free(buffer);
    write(me_, buffer, tag(call, me_, step));
    free_[index(buffer)] = {counter, after(call, step)};
  }
  void write(int owner, int buffer, int tag) {
    out_.push_back({Step::Kind::begin_write, 0, owner, 0, buffer, tag});
    out_.push_back({Step::Kind::end_write, 0, owner, 0, buffer, tag});
  }
  void read(int owner, int buffer, int tag) {
    out_.push_back({Step::Kind::begin_read, 0, owner, 0, buffer, tag});
    out_.push_back({Step::Kind::end_read, 0, owner, 0, buffer, tag});
  }

  struct Free {
    int counter = 0;
    Position position = 0;
    int reader = -1;  // the only reader; -1: all
  };
  int me_;
  int members_;
  std::vector<Step>& out_;
  bool forgets_;
  bool forgets_late_ = false;
  std::array<int, 3> windows_{};  // every member's cursor
  std::array<int, 3> results_{};
  std::array<Free, 2 * kModelWindows> free_{};
};

using Program = std::function<void(Script&)>;

std::string explore_program(int members, const Program& program, int forgetful = -1,
                            std::size_t* visited = nullptr) {
  std::vector<std::vector<Step>> programs(static_cast<std::size_t>(members));
  for (int member = 0; member < members; ++member) {
    Script script(member, members, programs[static_cast<std::size_t>(member)], member == forgetful);
    program(script);
  }
  const BufferModel model(std::move(programs));
  return explore(model.first(), model, visited);
}

const auto kProgramOfGathers = [](unsigned arena) {
  return [arena](Script& script) {
    script.all_gather(1, 3, 0);
    script.all_gather(2, 1, arena);
    script.all_gather(3, 2, 0);
  };
};
const auto kProgramOfReduces = [](unsigned arena) {
  return [arena](Script& script) {
    script.all_reduce(1, 3, arena);
    script.all_gather(2, 1, 0);
    script.all_reduce(3, 1, 0);
  };
};

TEST(RegionBuffersModel, WindowsAndArenaBuffersAreReusedOnlyWhenAllHaveRead) {
  for (unsigned arena = 0; arena < 4; ++arena) {
    std::size_t visited = 0;
    EXPECT_EQ(explore_program(2, kProgramOfGathers(arena), -1, &visited), "") << arena;
    EXPECT_EQ(explore_program(2, kProgramOfReduces(arena), -1, &visited), "") << arena;
    EXPECT_GT(visited, 100u);
  }
  for (unsigned arena = 0; arena < 8; ++arena) {
    EXPECT_EQ(
        explore_program(
            3, [&](Script& script) { script.all_gather(1, 3, arena), script.all_gather(2, 2, 0); }),
        "")
        << arena;
    EXPECT_EQ(
        explore_program(
            3, [&](Script& script) { script.all_reduce(1, 3, arena), script.all_gather(2, 1, 0); }),
        "")
        << arena;
  }
}

const auto kProgramOfReducesToRoot = [](unsigned arena, int root, bool forgetful = false) {
  return [=](Script& script) {
    if (forgetful) script.forget_late();
    script.reduce(1, 3, root, arena);
    script.all_gather(2, 1, 0);
    script.reduce(3, 3, 1, 0);
    script.reduce(4, 1, 0, arena);
  };
};

TEST(RegionBuffersModel, ARootMayReduceEverything) {
  for (unsigned arena = 0; arena < 4; ++arena) {
    for (const int root : {0, 1})
      EXPECT_EQ(explore_program(2, kProgramOfReducesToRoot(arena, root)), "") << arena;
  }
  for (unsigned arena = 0; arena < 8; ++arena) {
    EXPECT_EQ(
        explore_program(
            3, [&](Script& script) { script.reduce(1, 3, 1, arena), script.all_gather(2, 1, 0); }),
        "")
        << arena;
    EXPECT_EQ(
        explore_program(
            3, [&](Script& script) { script.reduce(1, 2, 0, 0), script.reduce(2, 2, 2, arena); }),
        "")
        << arena;
  }
}

TEST(RegionBuffersModel, FindsAForgottenWait) {
  EXPECT_NE(explore_program(2, kProgramOfGathers(0), 0), "");
  EXPECT_NE(explore_program(2, kProgramOfGathers(1), 0), "");
  EXPECT_NE(explore_program(2, kProgramOfReduces(0), 0), "");
  EXPECT_NE(explore_program(2, kProgramOfReducesToRoot(0, 1), 0), "");
  EXPECT_NE(explore_program(2, kProgramOfReducesToRoot(2, 0, true)), "")
      << "the root's first window is not there with its line";
}

}  // namespace
}  // namespace muster::collective::region
