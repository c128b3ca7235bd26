// The protocol of the shared region as a model, explored in every interleaving of its accesses to shared memory.
//
// Two models, with rings of two so that every buffer is reused within a few calls. `Lines`: control lines, run-ahead, late looks
// (`RegionMember::room_for_line`, `see`, `publish`). `Buffers`: windows, results and counters (`pull`, `reduce_shares`). In each state that
// can be reached: nobody writes what somebody else reads; what is read is what was meant; somebody can go on until all are done.
// Removing any one wait from a model makes its test fail; the tests at the end check that for the waits that are easiest to forget.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_set>
#include <vector>

#include "muster/collective/region_segment.h"
#include "muster/testing/budget.h"

namespace muster::collective::region {
namespace {

struct Hash {
  template <class State>
  std::size_t operator()(const State& state) const {
    if constexpr (std::has_unique_object_representations_v<State>) {
      return std::hash<std::string_view>()({reinterpret_cast<const char*>(&state), sizeof state});
    } else {
      return std::hash<std::string_view>()({reinterpret_cast<const char*>(state.data()), state.size() * sizeof state[0]});
    }
  }
};

/// Visits every state that `next` reaches from `first`; "" or what is wrong. `next` appends the successors, or returns what is wrong.
template <class State, class Next>
std::string explore(const State& first, Next next, std::size_t* visited = nullptr) {
  std::unordered_set<State, Hash> known{first};
  std::vector<State> open{first};
  std::vector<State> successors;
  while (!open.empty()) {
    const State state = open.back();
    open.pop_back();
    successors.clear();
    if (std::string wrong = next(state, successors); !wrong.empty()) return wrong;
    for (const State& successor : successors) {
      if (known.insert(successor).second) open.push_back(successor);
    }
  }
  if (visited != nullptr) *visited = known.size();
  return "";
}

// ---- Lines ----

constexpr int kMembers = 3;
constexpr int kRing = 2;

// What a call needs of the others' lines: those of all, of one root (who needs none), or, at the root, of all (others none).
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
    std::array<std::uint8_t, kRing> sequence{};  // what readers look at first
    std::array<std::uint8_t, kRing> payload{};   // the call whose payload stands there; 255: being written
    std::array<std::uint8_t, kRing> told{};      // Line::seen
    std::uint8_t seen = 0;                       // Progress::seen
    auto operator<=>(const Shared&) const = default;
  };
  struct Local {
    Stage stage = Stage::room;
    std::uint8_t call = 1;
    std::array<std::uint8_t, kMembers> next{1, 1, 1};
    std::array<std::uint8_t, kMembers> known{};
    std::array<std::uint8_t, kMembers> read{};  // ghost: last call whose payload was read or was not needed
    auto operator<=>(const Local&) const = default;
  };
  std::array<Shared, kMembers> shared;
  std::array<Local, kMembers> local;
  auto operator<=>(const LineState&) const = default;
};

struct LineRules {
  bool word = true;       // a waiting member brings Progress::seen up to date
  bool others = true;     // room waits for what others have seen
  bool published = true;  // who has published this call has found room
};

class LineModel {
 public:
  LineModel(std::vector<ModelCall> calls, LineRules rules = {}) : calls_(std::move(calls)), rules_(rules) {}

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
  static const LineState::Local& at(const LineState& state, int member) { return state.local[static_cast<std::size_t>(member)]; }
  static std::size_t slot(int call) { return static_cast<std::size_t>(call % kRing); }

  // One look at the next line of `other`, up to `limit`; false where there is nothing new.
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
      if (other != member) seen = std::min<int>(seen, at(state, member).next[static_cast<std::size_t>(other)] - 1);
    }
    return static_cast<std::uint8_t>(seen);
  }

  // Every access to shared memory is a step of its own; those that change nothing are left out.
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
          add([&](LineState& next, auto& local, auto&) { local.known[o] = std::max(local.known[o], next.shared[o].seen); });
          if (rules_.published && state.shared[o].sequence[slot(call)] == call && mine.known[o] + kRing < call) {
            add([&](LineState&, auto& local, auto&) { local.known[o] = static_cast<std::uint8_t>(call - kRing); });
          }
          if (call > kRing && (mine.next[o] + kRing <= call || (rules_.others && mine.known[o] + kRing < call))) room = false;
        }
        if (room) {
          add([](LineState&, auto& local, auto&) { local.stage = Stage::payload; });
        } else if (rules_.word) {
          add([&](LineState& next, auto&, auto& shared) { shared.seen = std::max(shared.seen, seen_by(next, member, call - 1)); });
        }
        return "";
      }
      case Stage::payload: {
        // Overwriting: every member must have looked at what stood here, and must have read it if it needed it.
        for (int other = 0; other < kMembers && call > kRing; ++other) {
          if (other == member) continue;
          const auto& reader = at(state, other);
          const int old = call - kRing;
          if (reader.next[index] <= old)
            return "line " + std::to_string(old) + " is overwritten before it was looked at: " + describe(state);
          if (calls_[static_cast<std::size_t>(old - 1)].reads(other, member) && reader.read[index] < old) {
            return "line " + std::to_string(old) + " is overwritten before it was read: " + describe(state);
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
          if (other == member || !calls_[static_cast<std::size_t>(call - 1)].reads(member, other)) continue;
          complete = complete && mine.read[o] == call;
          if (mine.next[o] <= call) {
            add([&](LineState& next, auto&, auto&) { look(next, member, other, call); });
          } else if (mine.read[o] != call) {
            if (state.shared[o].payload[slot(call)] != call) return "read another call's payload: " + describe(state);
            add([&](LineState&, auto& local, auto&) { local.read[o] = static_cast<std::uint8_t>(call); });
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
      text += "member " + std::to_string(member) + " in call " + std::to_string(mine.call) + " stage " +
              std::to_string(static_cast<int>(mine.stage)) + ", next";
      for (auto next : mine.next) text += " " + std::to_string(next);
      text += ", known";
      for (auto known : mine.known) text += " " + std::to_string(known);
      text += ", told " + std::to_string(state.shared[static_cast<std::size_t>(member)].seen) + "; ";
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

// The model itself has no threads: sanitizers look at one program.
constexpr std::size_t kStride = testing::kSanitized ? 6 : 3;

TEST(RegionModel, LinesAreReusedOnlyWhenAllHaveDoneWithThem) {
  std::size_t states = 0;
  for (std::size_t number = 0; number < kLinePrograms.size(); number += testing::whole_matrices() ? 1 : kStride) {
    auto program = kLinePrograms[number];
    if (!testing::whole_matrices()) program.resize(3);  // the first reuse; four calls have some millions of states
    std::size_t visited = 0;
    EXPECT_EQ(explore(LineState{}, LineModel(program), &visited), "");
    states += visited;
  }
  EXPECT_GT(states, 1000u);  // the model moves at all
}

// ---- Buffers ----

// A member is a list of steps; each touches shared memory once. Counters never fall, so a state is how far each member has come.
struct Step {
  enum class Kind { raise, wait, begin_write, end_write, begin_read, end_read } kind;
  int counter = 0;  // raise, wait: which of `owner`'s counters
  int owner = 0;
  Position position = 0;
  int buffer = 0;  // begin_*, end_*: of `owner`
  int tag = 0;     // what is written, what must be read
};

enum ModelCounter { kLine, kFilled, kReduced, kDrained, kModelCounters };
constexpr int kModelWindows = 2;
// Buffers of a member: two windows, two results, the input in the arena, the output in the arena by shares.
constexpr int kFirstResult = kModelWindows, kArenaInput = 2 * kModelWindows, kArenaOutput = kArenaInput + 1;
constexpr int kBuffers = kArenaOutput + 3;

class BufferModel {
 public:
  // How far each member has come, then what stands in each buffer.
  using State = std::vector<std::int16_t>;

  explicit BufferModel(std::vector<std::vector<Step>> programs) : programs_(std::move(programs)) {
    for (const auto& program : programs_) {
      std::array<Position, kModelCounters> counters{};
      counters_.push_back({counters});
      for (const Step& step : program) {
        if (step.kind == Step::Kind::raise) counters[static_cast<std::size_t>(step.counter)] = step.position;
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
          !reached(counters_[owner][at(state, owner)][static_cast<std::size_t>(step.counter)], step.position)) {
        continue;
      }
      State next = state;
      ++next[member];
      std::int16_t& content = next[programs_.size() + owner * kBuffers + static_cast<std::size_t>(step.buffer)];
      if (std::string wrong = check(next, member, step, content); !wrong.empty()) return wrong;
      if (step.kind == Step::Kind::end_write) content = static_cast<std::int16_t>(step.tag);
      out.push_back(std::move(next));
    }
    return out.empty() && !all_done ? "nobody can go on" : "";
  }

 private:
  static std::size_t at(const State& state, std::size_t member) { return static_cast<std::size_t>(state[member]); }

  // Nobody else is inside the same buffer where one of the two writes; what is read is what was meant.
  std::string check(const State& state, std::size_t member, const Step& step, std::int16_t content) const {
    if (step.kind != Step::Kind::begin_write && step.kind != Step::Kind::begin_read) return "";
    const bool writes = step.kind == Step::Kind::begin_write;
    for (std::size_t other = 0; other < programs_.size(); ++other) {
      if (other == member || at(state, other) == 0) continue;
      const Step& now = programs_[other][at(state, other) - 1];
      const bool inside = now.kind == Step::Kind::begin_write || now.kind == Step::Kind::begin_read;
      if (inside && now.owner == step.owner && now.buffer == step.buffer && (writes || now.kind == Step::Kind::begin_write)) {
        return "two members are in buffer " + std::to_string(step.buffer) + " of " + std::to_string(step.owner) + " at once";
      }
    }
    if (!writes && content != step.tag) return "read " + std::to_string(content) + " for " + std::to_string(step.tag);
    return "";
  }

  std::vector<std::vector<Step>> programs_;
  std::vector<std::vector<std::array<Position, kModelCounters>>> counters_;  // of each member after each of its steps
};

// Writes down what a member does, as `pull` and `reduce_shares` do it. It follows the others' cursors too, which lines tell in truth.
class Script {
 public:
  Script(int me, int members, std::vector<Step>& out, bool forgets) : me_(me), members_(members), out_(out), forgets_(forgets) {}

  // All members give `steps` windows to all; `arena`: the members whose input is read where it is.
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

  // In rounds: fill one ahead, reduce my share, hand it on; `arena`: the members whose buffer, in place, lies in the arena.
  void all_reduce(std::uint64_t call, int rounds, unsigned arena) {
    const auto in_arena = [&](int member) { return (arena >> member & 1) != 0; };
    const auto offers = [&](int member) { return (arena | 1u << member) != (1u << members_) - 1; };
    const auto first_window = windows_;
    const auto first_result = results_;
    if (in_arena(me_)) {
      for (int share = 0; share < members_; ++share) write(me_, kArenaOutput + share, tag(call, me_, 0));  // the caller
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
          // A share in the arena is one buffer here for all rounds: only the first finds the input in it.
          if (!in_arena(other)) {
            read(other, (first_window[index(other)] + turn) % kModelWindows, tag(call, other, turn));
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
          if (other != me_ && in_arena(other)) write(other, kArenaOutput + me_, tag(call, me_, 100 + turn));
        }
        raise(kReduced, turn + 1 < rounds ? after(call, turn) : end_of(call));
      }
      if (!in_arena(me_) && turn > 0) {
        for (int step = 1; step < members_; ++step) {
          const int other = (me_ + step) % members_;
          wait(other, kReduced, after(call, turn - 1));
          read(other, kFirstResult + (first_result[index(other)] + turn - 1) % kModelWindows, tag(call, other, 100 + turn - 1));
        }
        raise(kDrained, turn < rounds ? after(call, turn - 1) : end_of(call));
      }
    }
    wait_all(kReduced, end_of(call));
    // The caller looks at its output, then may do with it what it likes.
    for (int other = 0; other < members_; ++other) {
      if (other != me_ && in_arena(me_)) read(me_, kArenaOutput + other, tag(call, other, 100 + rounds - 1));
      if (other != me_ && !in_arena(other)) windows_[index(other)] += rounds;
      if (other != me_ && offers(other)) results_[index(other)] += rounds;
    }
    for (int window = 0; window < kModelWindows; ++window) free_[index(window)] = {};
  }

  // The same with a root that wants the result and takes the shares of all whose input is private. They give and are done; so only the root
  // finds out whether others reduce, and then fills its first window, late.
  void reduce(std::uint64_t call, int rounds, int root, unsigned arena) {
    const auto in_arena = [&](int member) { return (arena >> member & 1) != 0; };
    const bool at_root = me_ == root, root_gives = !in_arena(root) && arena != 0;
    const auto first_window = windows_;
    const auto first_result = results_;
    for (int other = 0; other < members_; ++other) {
      if (other != me_ && !in_arena(other) && (other != root || root_gives)) windows_[index(other)] += rounds;
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
      for (int share = 0; share < members_; ++share) write(me_, kArenaOutput + share, tag(call, me_, 0));  // the caller
      raise(kDrained, end_of(call));
    } else {
      wait_free(windows_[index(me_)] % kModelWindows);  // whether or not the root is to fill it
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
          if (other != me_ && !in_arena(other) && (turn > 0 || late)) wait(other, kFilled, after(call, turn));
        }
        const bool offers = !at_root && !in_arena(root);
        const int result = kFirstResult + results_[index(me_)] % kModelWindows;
        if (offers) wait_free(result);
        for (int other = 0; other < members_; ++other) {
          if (other == me_) continue;
          if (!in_arena(other)) {
            read(other, (first_window[index(other)] + turn) % kModelWindows, tag(call, other, turn));
            continue;
          }
          for (int share = 0; turn == 0 && share < members_; ++share) {
            if (share == me_ || (at_root && !in_arena(share))) read(other, kArenaOutput + share, tag(call, other, 0));
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
          read(other, kFirstResult + (first_result[index(other)] + turn - 1) % kModelWindows, tag(call, other, 100 + turn - 1));
        }
        raise(kDrained, turn < rounds ? after(call, turn - 1) : end_of(call));
      }
    }
    wait_all(kReduced, end_of(call));
    for (int other = 0; other < members_; ++other) {
      if (other != me_ && at_root && in_arena(me_) && in_arena(other)) read(me_, kArenaOutput + other, tag(call, other, 100 + rounds - 1));
    }
    for (int window = 0; window < kModelWindows; ++window) free_[index(window)] = {};
  }
  void forget_late() { forgets_late_ = true; }

 private:
  static std::size_t index(int member) { return static_cast<std::size_t>(member); }
  static int tag(std::uint64_t call, int member, int step) { return static_cast<int>(call) * 1000 + member * 300 + step; }
  static Position after(std::uint64_t call, int step) { return position(call, static_cast<std::uint64_t>(step) + 1); }

  void raise(int counter, Position position) { out_.push_back({Step::Kind::raise, counter, me_, position}); }
  void wait(int owner, int counter, Position position) { out_.push_back({Step::Kind::wait, counter, owner, position}); }
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
    int reader = -1;  // the only one; -1: all
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

std::string explore_program(int members, const Program& program, int forgetful = -1, std::size_t* visited = nullptr) {
  std::vector<std::vector<Step>> programs(static_cast<std::size_t>(members));
  for (int member = 0; member < members; ++member) {
    Script script(member, members, programs[static_cast<std::size_t>(member)], member == forgetful);
    program(script);
  }
  const BufferModel model(std::move(programs));
  return explore(model.first(), model, visited);
}

const auto kGathers = [](unsigned arena) {
  return [arena](Script& script) {
    script.all_gather(1, 3, 0);
    script.all_gather(2, 1, arena);
    script.all_gather(3, 2, 0);
  };
};
const auto kReduces = [](unsigned arena) {
  return [arena](Script& script) {
    script.all_reduce(1, 3, arena);
    script.all_gather(2, 1, 0);
    script.all_reduce(3, 1, 0);
  };
};

TEST(RegionModel, WindowsAndArenaBuffersAreReusedOnlyWhenAllHaveRead) {
  for (unsigned arena = 0; arena < 4; ++arena) {
    std::size_t visited = 0;
    EXPECT_EQ(explore_program(2, kGathers(arena), -1, &visited), "") << arena;
    EXPECT_EQ(explore_program(2, kReduces(arena), -1, &visited), "") << arena;
    EXPECT_GT(visited, 100u);
  }
  for (unsigned arena = 0; arena < 8; ++arena) {
    EXPECT_EQ(explore_program(3, [&](Script& script) { script.all_gather(1, 3, arena), script.all_gather(2, 2, 0); }), "") << arena;
    EXPECT_EQ(explore_program(3, [&](Script& script) { script.all_reduce(1, 3, arena), script.all_gather(2, 1, 0); }), "") << arena;
  }
}

const auto kReducesToRoot = [](unsigned arena, int root, bool forgetful = false) {
  return [=](Script& script) {
    if (forgetful) script.forget_late();
    script.reduce(1, 3, root, arena);
    script.all_gather(2, 1, 0);
    script.reduce(3, 3, 1, 0);
    script.reduce(4, 1, 0, arena);
  };
};

TEST(RegionModel, ARootMayReduceEverything) {
  for (unsigned arena = 0; arena < 4; ++arena) {
    for (const int root : {0, 1}) EXPECT_EQ(explore_program(2, kReducesToRoot(arena, root)), "") << arena;
  }
  for (unsigned arena = 0; arena < 8; ++arena) {
    EXPECT_EQ(explore_program(3, [&](Script& script) { script.reduce(1, 3, 1, arena), script.all_gather(2, 1, 0); }), "") << arena;
    EXPECT_EQ(explore_program(3, [&](Script& script) { script.reduce(1, 2, 0, 0), script.reduce(2, 2, 2, arena); }), "") << arena;
  }
}

// ---- The models see what they are for ----

TEST(RegionModel, FindsAForgottenWait) {
  LineRules forgetful;
  forgetful.others = false;
  EXPECT_NE(explore(LineState{}, LineModel(kLinePrograms[1], forgetful)), "");
  EXPECT_NE(explore_program(2, kGathers(0), 0), "");
  EXPECT_NE(explore_program(2, kGathers(1), 0), "");
  EXPECT_NE(explore_program(2, kReduces(0), 0), "");
  EXPECT_NE(explore_program(2, kReducesToRoot(0, 1), 0), "");
  EXPECT_NE(explore_program(2, kReducesToRoot(2, 0, true)), "") << "the root's first window is not there with its line";
}

TEST(RegionModel, FindsADeadlockWithoutTheWordOfWaitingMembers) {
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
