// SPDX-License-Identifier: BSD-3-Clause
// Model of the control lines of the shared region, with members running ahead and polling late
// (`ControlLines::has_room`, `poll`, `publish`), explored in every interleaving of its accesses to
// shared memory.
//
// Rings of two, so that every line is reused within a few calls. In every reachable state: no
// member writes what another one reads, every read returns the intended data, and some member can
// continue until all are done. Removing any one wait makes the test fail; the tests at the end
// check that for the waits that are easiest to forget.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/collective/testing/region_model.h"
#include "core/shm/segment_layout.h"
#include "testing/budget.h"

namespace muster::collective::region {
namespace {

constexpr int kMembers = 3;
constexpr int kRing = 2;

// The lines that a call needs: those of all members, that of one root (which needs none), or, on
// the root, those of all (others need none).
struct ModelCall {
  enum class Needs { all, from_root, at_root } needs = Needs::all;
  int root = 0;
  bool reads(int member, int other) const {
    if (member == other) return false;
    switch (needs) {
      case Needs::all: return true;
      case Needs::from_root: return other == root;
      case Needs::at_root: return member == root;
    }
    return false;
  }
};

enum class Stage : std::uint8_t { room, payload, sequence, read, done };

struct LineState {
  struct Shared {
    std::array<std::uint8_t, kRing> sequence{};  // polled by readers
    std::array<std::uint8_t, kRing>
        payload{};                           // the call whose payload is there; 255: being written
    std::array<std::uint8_t, kRing> told{};  // Line::seen
    std::uint8_t seen = 0;                   // Progress::seen
    auto operator<=>(const Shared&) const = default;
  };
  struct Local {
    Stage stage = Stage::room;
    std::uint8_t call = 1;
    std::array<std::uint8_t, kMembers> next{1, 1, 1};
    std::array<std::uint8_t, kMembers> known{};
    std::array<std::uint8_t, kMembers>
        read{};  // ghost: last call whose payload was read or was not needed
    auto operator<=>(const Local&) const = default;
  };
  std::array<Shared, kMembers> shared;
  std::array<Local, kMembers> local;
  auto operator<=>(const LineState&) const = default;
};

struct LineRules {
  bool word = true;       // a waiting member updates Progress::seen
  bool others = true;     // room waits for what the others have seen
  bool published = true;  // a member that has published this call has found room
};

class LineModel {
 public:
  LineModel(std::vector<ModelCall> calls, LineRules rules = {})
      : calls_(std::move(calls)), rules_(rules) {}

  std::string operator()(const LineState& state, std::vector<LineState>& out) const {
    bool all_done = true;
    for (int member = 0; member < kMembers; ++member) {
      all_done = all_done && at(state, member).stage == Stage::done;
      if (std::string wrong = step(state, member, out); !wrong.empty()) return wrong;
    }
    if (out.empty() && !all_done) return "nobody can go on: " + describe(state);
    return "";
  }

 private:
  static const LineState::Local& at(const LineState& state, int member) {
    return state.local[static_cast<std::size_t>(member)];
  }
  static std::size_t slot(int call) { return static_cast<std::size_t>(call % kRing); }

  // One poll of the next line of `other`, up to `limit`; false if there is nothing new.
  bool look(LineState& state, int member, int other, int limit) const {
    auto& mine = state.local[static_cast<std::size_t>(member)];
    auto& next = mine.next[static_cast<std::size_t>(other)];
    const auto& theirs = state.shared[static_cast<std::size_t>(other)];
    if (next > limit || theirs.sequence[slot(next)] != next) return false;
    auto& known = mine.known[static_cast<std::size_t>(other)];
    known = std::max(known, theirs.told[slot(next)]);
    ++next;
    return true;
  }

  std::uint8_t seen_by(const LineState& state, int member, int limit) const {
    int seen = limit;
    for (int other = 0; other < kMembers; ++other) {
      if (other != member)
        seen = std::min<int>(seen, at(state, member).next[static_cast<std::size_t>(other)] - 1);
    }
    return static_cast<std::uint8_t>(seen);
  }

  // Every access to shared memory is one step; steps without an effect are omitted.
  std::string step(const LineState& state, int member, std::vector<LineState>& out) const {
    const auto index = static_cast<std::size_t>(member);
    const auto& mine = at(state, member);
    const auto add = [&](auto change) {
      LineState next = state;
      change(next, next.local[index], next.shared[index]);
      if (next != state) out.push_back(next);
    };
    const int call = mine.call;
    switch (mine.stage) {
      case Stage::room: {
        bool room = true;
        for (int other = 0; other < kMembers; ++other) {
          if (other == member) continue;
          const auto o = static_cast<std::size_t>(other);
          add([&](LineState& next, auto&, auto&) { look(next, member, other, call - 1); });
          add([&](LineState& next, auto& local, auto&) {
            local.known[o] = std::max(local.known[o], next.shared[o].seen);
          });
          if (rules_.published && state.shared[o].sequence[slot(call)] == call &&
              mine.known[o] + kRing < call) {
            add([&](LineState&, auto& local, auto&) {
              local.known[o] = static_cast<std::uint8_t>(call - kRing);
            });
          }
          if (call > kRing &&
              (mine.next[o] + kRing <= call || (rules_.others && mine.known[o] + kRing < call)))
            room = false;
        }
        if (room) {
          add([](LineState&, auto& local, auto&) { local.stage = Stage::payload; });
        } else if (rules_.word) {
          add([&](LineState& next, auto&, auto& shared) {
            shared.seen = std::max(shared.seen, seen_by(next, member, call - 1));
          });
        }
        return "";
      }
      case Stage::payload: {
        // Overwriting: every member must have polled the old line, and must have read its payload
        // if it needed it.
        for (int other = 0; other < kMembers && call > kRing; ++other) {
          if (other == member) continue;
          const auto& reader = at(state, other);
          const int old = call - kRing;
          if (reader.next[index] <= old)
            return "line " + std::to_string(old) +
                   " is overwritten before it was looked at: " + describe(state);
          if (calls_[static_cast<std::size_t>(old - 1)].reads(other, member) &&
              reader.read[index] < old) {
            return "line " + std::to_string(old) +
                   " is overwritten before it was read: " + describe(state);
          }
        }
        add([&](LineState& next, auto& local, auto& shared) {
          shared.payload[slot(call)] = static_cast<std::uint8_t>(call);
          shared.told[slot(call)] = seen_by(next, member, call - 1);
          local.stage = Stage::sequence;
        });
        return "";
      }
      case Stage::sequence:
        add([&](LineState&, auto& local, auto& shared) {
          shared.sequence[slot(call)] = static_cast<std::uint8_t>(call);
          local.stage = Stage::read;
        });
        return "";
      case Stage::read: {
        bool complete = true;
        for (int other = 0; other < kMembers; ++other) {
          const auto o = static_cast<std::size_t>(other);
          if (other == member || !calls_[static_cast<std::size_t>(call - 1)].reads(member, other))
            continue;
          complete = complete && mine.read[o] == call;
          if (mine.next[o] <= call) {
            add([&](LineState& next, auto&, auto&) { look(next, member, other, call); });
          } else if (mine.read[o] != call) {
            if (state.shared[o].payload[slot(call)] != call)
              return "read another call's payload: " + describe(state);
            add([&](LineState&, auto& local, auto&) {
              local.read[o] = static_cast<std::uint8_t>(call);
            });
          }
        }
        if (!complete) return "";
        add([&](LineState&, auto& local, auto&) {
          if (local.call == calls_.size()) {
            local.stage = Stage::done;
          } else {
            ++local.call;
            local.stage = Stage::room;
          }
        });
        return "";
      }
      case Stage::done: return "";
    }
    return "";
  }

  std::string describe(const LineState& state) const {
    std::string text;
    for (int member = 0; member < kMembers; ++member) {
      const auto& mine = at(state, member);
      text += "member " + std::to_string(member) + " in call " + std::to_string(mine.call) +
              " stage " + std::to_string(static_cast<int>(mine.stage)) + ", next";
      for (auto next : mine.next) text += " " + std::to_string(next);
      text += ", known";
      for (auto known : mine.known) text += " " + std::to_string(known);
      text +=
          ", told " + std::to_string(state.shared[static_cast<std::size_t>(member)].seen) + "; ";
    }
    return text;
  }

  std::vector<ModelCall> calls_;
  LineRules rules_;
};

using Needs = ModelCall::Needs;
const std::vector<std::vector<ModelCall>> kLinePrograms{
    {{Needs::all}, {Needs::all}, {Needs::all}, {Needs::all}},
    {{Needs::from_root, 0}, {Needs::from_root, 0}, {Needs::from_root, 0}, {Needs::from_root, 0}},
    {{Needs::at_root, 0}, {Needs::at_root, 0}, {Needs::at_root, 0}, {Needs::at_root, 0}},
    {{Needs::from_root, 0}, {Needs::from_root, 1}, {Needs::at_root, 2}, {Needs::from_root, 0}},
    {{Needs::from_root, 0}, {Needs::all}, {Needs::from_root, 1}, {Needs::all}},
    {{Needs::at_root, 1}, {Needs::from_root, 0}, {Needs::all}, {Needs::at_root, 0}},
};

// The model has no threads: under sanitizers one program is enough.
constexpr std::size_t kStride = testing::kSanitized ? 6 : 3;

TEST(RegionLinesModel, LinesAreReusedOnlyAfterAllHaveReadThem) {
  std::size_t states = 0;
  for (std::size_t number = 0; number < kLinePrograms.size();
       number += testing::whole_matrices() ? 1 : kStride) {
    auto program = kLinePrograms[number];
    if (!testing::whole_matrices())
      program.resize(3);  // the first reuse; four calls have millions of states
    std::size_t visited = 0;
    EXPECT_EQ(explore(LineState{}, LineModel(program), &visited), "");
    states += visited;
  }
  EXPECT_GT(states, 1000u);  // the model moves at all
}

TEST(RegionLinesModel, FindsAForgottenWait) {
  LineRules forgetful;
  forgetful.others = false;
  EXPECT_NE(explore(LineState{}, LineModel(kLinePrograms[1], forgetful)), "");
}

TEST(RegionLinesModel, FindsADeadlockWithoutTheWordOfWaitingMembers) {
  bool stuck = false;
  for (const auto& program : kLinePrograms) {
    LineRules silent;
    silent.word = false;
    stuck = stuck || explore(LineState{}, LineModel(program, silent)).starts_with("nobody");
  }
  EXPECT_TRUE(stuck);
}

}  // namespace
}  // namespace muster::collective::region
