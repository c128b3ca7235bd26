/// One member's side of the protocol on a group's segment. Private to `region_*.cc`.
///
/// The calls of a group are numbered from 1 without gaps. In each, a member publishes one control
/// line and looks at the lines of those it reads from. It may run ahead: where nothing is read from
/// a member its line is looked at later, at the latest before the ring of lines comes round
/// (`open`). Data too large for the line or its slot passes through the windows, or is read where
/// it is in the arena.
///
/// What has come counts, also after the channel has failed: a member that has published its line
/// fails only where something that it needs of the call is not there. So where one has returned
/// with data of all, all do, whatever that one does to the group next: what it gave stands in the
/// segment as it was, since no call follows; what it gave where it is has been read, since it
/// waited for all readers; and what others give where it is they leave to their readers while those
/// get on (`come_to_rest`).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "muster/base/status.h"
#include "muster/base/task.h"
#include "muster/collective/call.h"
#include "muster/collective/communicator.h"
#include "muster/collective/region_group.h"
#include "muster/shm/segment_layout.h"
#include "muster/shm/arena.h"
#include "muster/shm/host_region.h"
#include "muster/transport/channel.h"

namespace muster::collective::region {

/// Finds out whether memory lies in the arena that peers can map: the process's own, another one in
/// tests.
using ArenaOf = shm::Arena* (*)();

/// Where those run that a member waits for.
enum class Missing : std::uint8_t { nobody, elsewhere, here };

/// `here`: on its own processor, as far as is known.
template <class IsMissing, class IsElsewhere>
Missing missing_among(int first, int last, IsMissing is_missing, IsElsewhere is_elsewhere) {
  Missing found = Missing::nobody;
  for (int member = first; member < last; ++member) {
    if (!is_missing(member)) continue;
    if (!is_elsewhere(member)) return Missing::here;
    found = Missing::elsewhere;
  }
  return found;
}

class RegionMember final : public RegionGroup {
 public:
  RegionMember(shm::HostRegion& region, std::uint64_t segment, transport::Channel& channel,
               const Selection& selection, ArenaOf arena);

  Task<Status> run(const Args& args, const transport::Fingerprint& call) override;
  bool express(const Args& args, const transport::Fingerprint& call, Meanwhile& meanwhile) override;
  bool patient() const override { return patient_; }
  bool attend(Task<Status>& task, TimePoint deadline) override;
  std::vector<int> awaited() const override;
  transport::Fingerprint heard(int member) const override;
  /// For tests: as if the calls up to `sequence` had been made, by all members, without windows.
  /// All earlier calls have ended everywhere.
  void count_from(std::uint64_t sequence);

 private:
  // What a member gives in the call under way, as its line says.
  struct Source {
    Place place = Place::nothing;
    const std::byte* data = nullptr;  // but for windows and memory of its process
    std::size_t bytes = 0;
    std::size_t column = 0;  // where this member's part of its windows starts
    std::size_t first_window = 0;
    std::uint64_t address = 0;  // of memory of its process
    bool lent = false;          // in its arena: I hand it back
  };
  // Who gives and who takes in a call whose data only moves towards its readers.
  struct Flow {
    bool gives = false;
    bool lists = false;       // a slice for each member
    bool combines = false;    // the readers reduce what they take
    bool scaled = false;      // premul_sum: what is given is the product
    int reader = -1;          // the only one; -1: everybody else
    bool hands_back = false;  // I hand back what I read where it is staged
    bool far = false;         // what all take together is more than the caches hold
    int first = 0, last = 0;  // takes from members [first, last)
    std::size_t chunk = 0;
    std::size_t steps = 0;  // of the windows given
    std::size_t takes = 0;  // steps of what is taken
  };
  // What follows from a call's outline.
  struct Sketch {
    Flow flow;
    bool small = false;  // all that this member gives fits beside its line
  };
  // A window or result buffer whose last use others may not have finished with.
  struct Use {
    Position until = 0;
    Counter counter = Counter::drained;
    int reader = -1;
    bool pending = false;
  };
  struct Wait {
    enum class For : std::uint8_t { nothing, room, lines, counter } what = For::nothing;
    Counter counter = Counter::filled;
    int only = -1;
    Position until = 0;
  };
  // Whether the counters of all other members (or of one) have reached a position.
  struct Reached {
    const RegionMember& my;
    Counter counter;
    Position until;
    int only;
    int at = 0;
    bool operator()();
  };
  // Whether my next window is free. Who waits for that looks at what the others call, up to
  // `limit`: who calls something else may never empty it.
  struct Emptied {
    RegionMember& my;
    Reached free;
    std::uint64_t limit;
    bool operator()();
  };
  // `co_await come(there)`, of a call that is published: waits until `there()`, or until the
  // channel has failed, after which it may never be; returns whether it is. What came before the
  // failure is seen: who failed the channel had seen it, or done it.
  template <class There>
  struct Come {
    struct Either {
      Come* wait;
      bool operator()() { return wait->there() || wait->my.failed(); }
    };
    const RegionMember& my;
    There there;
    until<Either> either{Either{this}};

    Come(const RegionMember& waits, There awaited) : my(waits), there(std::move(awaited)) {}
    Come(const Come&) = delete;
    bool await_ready() { return either.await_ready(); }
    template <class Promise>
    void await_suspend(std::coroutine_handle<Promise> self) {
      either.await_suspend(self);
    }
    bool await_resume() {
      either.await_resume();
      return there();
    }
  };

  // region_member.cc: the protocol.
  std::size_t size() const { return layout_.members; }
  int group_size() const { return static_cast<int>(layout_.members); }
  Line& line(int member, std::uint64_t sequence) const {
    return *reinterpret_cast<Line*>(base_ + layout_.line(member, sequence));
  }
  Line& my_line() const { return line(rank_, sequence_); }
  Progress& progress(int member) const;
  std::byte* slot(int member) const { return base_ + layout_.slot(member, sequence_); }
  std::byte* window(int member, std::size_t number) const {
    return base_ + layout_.window(member, number);
  }
  std::byte* result(int member, std::size_t number) const {
    return base_ + layout_.result(member, number);
  }
  Position counter(int member, Counter counter) const;
  void advance(Counter counter, Position position);
  bool failed() const { return channel_.failed(); }
  std::string who(int member) const;
  std::string what(const Args& args) const;

  Task<Status> run_call(const Args& args, const transport::Fingerprint& call);
  void begin_call(std::uint64_t sequence) {
    sequence_ = sequence;
    if (sequence % kRefreshEvery == 0) [[unlikely]]
      refresh();
  }
  void refresh();
  bool room_for_line();
  void publish(const transport::Fingerprint& call);
  bool see(int member, std::uint64_t limit);
  bool see_all(std::uint64_t limit);
  bool compare(int member, const Line& line);
  bool compare_by_rules(int member, const transport::Fingerprint& theirs,
                        const transport::Fingerprint& mine);
  bool others_send_barriers() const;
  void wake_others();
  Reached until_reached(Counter counter, Position until, int only = -1);
  Reached until_free(const Use& use);
  Emptied until_emptied(std::uint64_t limit) {
    return {*this, until_free(window_uses_[next_window_ % kWindows]), limit};
  }
  template <class There>
  Come<There> come(There there) const {
    return Come<There>(*this, std::move(there));
  }
  bool has_begun(int member) const;
  bool is_behind(int member) const;
  bool someone_gave_up(std::uint64_t sequence) const;
  void give_up();
  bool quiet(Counter done, int only = -1) const;
  void quarantine(const Args& args) noexcept;
  void quarantine(ConstBytes memory, Counter done, int only);
  Task<> come_to_rest(Counter done, int only = -1);
  bool pause_due(std::size_t bytes);
  /// Gives the thread away once.
  static auto pause() {
    return until([asked = 0]() mutable { return asked++ > 0; });
  }
  std::optional<std::uint64_t> arena_offset(ConstBytes memory) const;
  std::optional<std::uint64_t> writable_offset(ConstBytes memory) const;
  bool arena_ready(int member) {
    return region_.arena_ready(local_[static_cast<std::size_t>(member)]);
  }
  std::byte* arena_of(int member, std::uint64_t offset, std::size_t bytes) {
    return region_.arena_at(local_[static_cast<std::size_t>(member)], offset, bytes);
  }
  Status cannot_map(int member, std::uint64_t bytes) const;
  Status cannot_read(int member, std::uint64_t bytes) const;
  void offer_to_read();
  /// Whether every reader reduces such an all_reduce or reduce for itself; else each member reduces
  /// its share.
  bool one_shot(Op op, std::size_t bytes) const {
    return selection_.choose(op, bytes) == Algorithm::one_shot;
  }
  Status refuse(Status cause);
  Task<Status> refuse_late(Status cause);

  // region_pull.cc: every reader takes what it needs from the givers.
  Task<Status> pull(const Args& args, const transport::Fingerprint& call);
  void line_up(const Flow& flow);
  void place(const Args& args, Flow& flow);
  Flow flow_of(const Args& args) const;
  std::size_t relayed_chunk(const Args& args, const Flow& flow) const;
  bool several_hand_back(Op op, std::size_t written) const;
  bool leaves_early(Op op, std::size_t given) const;
  bool hands_back(const Args& args, const Flow& flow) const;
  ConstBytes given(const Args& args, const Flow& flow, int reader) const;
  // Where what `source` gives goes, or is reduced into.
  static MutableBytes taken(const Args& args, int source) {
    const std::size_t index = info(args.op).lists_output ? static_cast<std::size_t>(source) : 0;
    return index < args.outputs.size() ? args.outputs[index] : MutableBytes();
  }
  bool read_once(const Args& args, const Flow& flow) const;
  bool all_can_read();
  bool readable(ConstBytes memory);
  void put(const Args& args, const Flow& flow, std::byte* to, ConstBytes from) const;
  void place_input(const Args& args, Flow& flow);
  void place_slices(const Args& args, Flow& flow);
  void place_row(const Args& args, const Flow& flow);
  static std::size_t chunk_from(const Source& from, const Flow& flow);
  static std::size_t part(const Source& from, const Flow& flow, std::size_t step);
  Status take(const Args& args, const Flow& flow, int source, std::size_t step, std::size_t bytes);
  void fill_window(const Args& args, const Flow& flow, std::size_t step);
  bool available(const Flow& flow, int source, std::size_t step);
  bool mapped(const Flow& flow, int source);
  Status resolve(const Args& args, const Flow& flow, int source);
  const std::byte* chunk_of(const Source& source, const Flow& flow, int member,
                            std::size_t step) const;
  bool combine(const Args& args, const Flow& flow, std::size_t step);
  void reduce_inputs(const Args& args, bool hands_back, std::byte* to, std::size_t bytes);
  void copy_own(const Args& args, const Flow& flow);

  // region_express.cc: what the caller's thread does at once: small calls without a task, and the
  // first moment of larger ones.
  void fetch_ahead(const Flow& flow) const;
  void reach_further(const Flow& flow) const;
  bool is_small(const Args& args) const;
  class Moment;
  bool await_room();
  void say_where();
  bool is_elsewhere(int member) const;
  bool see_sources(const Flow& flow, bool& at_once);
  bool find_at_once(const Args& args, const Flow& flow, int source);
  void take_at_once(const Args& args, const Flow& flow);

  // region_reduce.cc: each member reduces its share and hands the result to all, or to the root,
  // which may reduce for others.
  struct Reduction;
  Task<Status> reduce_shares(const Args& args, const transport::Fingerprint& call);
  bool all_mapped(const Reduction& job);
  Status meet(Reduction& job);
  void fill_input(const Reduction& job, std::size_t round);
  int reducer(const Reduction& job, int member) const;
  void settle(Reduction& job);
  bool reduce_round(const Reduction& job, std::size_t round);
  bool reduce_share(const Reduction& job, std::size_t round, Share share, std::byte* buffer);
  void copy_result(const Reduction& job, int member, std::size_t round);

  shm::HostRegion& region_;
  transport::Channel& channel_;
  const Selection selection_;
  const ArenaOf find_arena_;
  const int rank_;
  const Layout layout_;
  std::byte* const base_;
  const bool patient_;      // this thread may wait: the other ranks are not its own fibers
  const int per_core_;      // ranks of the host for each core, rounded up
  const bool spins_;        // one: every rank has a core
  const bool two_cores_;    // at most, for all ranks of the host
  std::vector<int> local_;  // members' positions in the region
  std::vector<shm::Mailbox*> others_;
  bool barriers_ =
      false;  // whoever of them sleeps sends barriers, so that publishing needs no fence

  std::uint64_t sequence_ = 0;                 // of the call under way, or of the last one
  std::vector<std::uint64_t> next_;            // next line to look at, for each member
  std::vector<std::uint64_t> known_seen_;      // what each member is known to have seen
  std::vector<transport::Fingerprint> heard_;  // the latest call seen of each member
  std::uint64_t known_by_all_ = 0;  // all members have seen these, and I have seen theirs
  std::array<transport::Fingerprint, kMostSlots> calls_{};  // mine, for late comparison
  std::size_t next_window_ = 0;  // cursors through my windows and results
  std::size_t next_result_ = 0;
  std::array<Use, kWindows> window_uses_{};
  std::array<Use, kWindows> result_uses_{};
  Recall<Sketch> recall_;
  std::vector<Source> sources_;
  std::vector<int> left_;  // sources of a step that have not been read
  std::vector<const std::byte*> inputs_;
  std::vector<std::byte*> outputs_;  // peers' outputs in the arena, in a reduction
  bool outputs_shared_ = false;      // peers may be storing into my output
  bool inputs_lent_ = false;         // peers may be handing back what they read of my inputs
  bool borrows_ = false;             // and I do that with theirs
  bool read_by_all_ = false;         // everybody can copy from my memory
  bool read_in_place_ = false;       // this call reads peers' memory where it is
  std::uint32_t core_ = 0;           // what my progress says
  bool published_ = false;           // `express` has published the call under way
  bool waited_ = false;     // `express` has waited in vain, for the others' lines or for room
  bool disagreed_ = false;  // somebody made another call: nothing can be read any more
  std::size_t moved_ = 0;   // since this task last gave its thread away
  Wait wait_;
};

}  // namespace muster::collective::region
