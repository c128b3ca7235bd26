// SPDX-License-Identifier: BSD-3-Clause
/// The messages between a launcher and a worker that stays through the epochs of its job
/// (`--elastic=keep`), over a pair of sockets. A worker that reads the end of its socket has lost
/// its launcher. `core/base/process/launcher_socket.h` has the worker's end.
///
/// Memory files travel there too: a worker gives its launcher descriptors of the memory that has to
/// outlive it, and the worker that takes its place gets them back.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/descriptor.h"
#include "jobs/launch/node/rank_assignment.h"
#include "muster/status.h"

namespace muster::launch {

/// Set in a spare process, which has no rank before the notice of its first epoch.
inline constexpr const char* kSpareVariable = "MUSTER_SPARE";

enum class WorkerNoticeKind : std::uint8_t {
  epoch,     ///< the job goes on in another epoch, in which the worker has these ranks
  leave,     ///< the node is to be given up: leave after the next commit
  memories,  ///< what workers before have given their launcher; nothing else in it
  hand_over  ///< the job goes on without this node: give the last commit, and be ended
};

struct WorkerNotice {
  WorkerNoticeKind kind = WorkerNoticeKind::epoch;
  std::int64_t epoch = 0;
  int restarts = 0;
  WorkerRanks ranks{};
  std::string agent_store{};  ///< HOST:PORT of the launcher's store that serves the epoch
  std::string master_addr{};
  std::uint16_t master_port = 0;
  /// The newest commit that the launcher has heard of from workers of any epoch; 0: none.
  std::int64_t committed = 0;
  std::int64_t state_in = 0;  ///< as membership::Epoch::state_in
  std::string reason{};       ///< for people: "node 0 (host-a): rank 3 (...) was ended by SIGKILL"
};

struct WorkerChannel {
  Descriptor launcher, worker;
};
Result<WorkerChannel> make_worker_channel();

/// For the launcher. Waits for nothing. False: the worker is gone, or its socket is full (EAGAIN),
/// as it has not read what it was told before. A long reason is cut off.
bool tell_worker(int descriptor, const WorkerNotice& notice);
/// For the launcher, before the worker's first epoch. Nothing is sent if there are none.
/// Code::exhausted: they cannot be sent. Code::closed: the worker has ended.
Status tell_memories(int descriptor, std::span<const Descriptor> memories);

/// The group of an epoch has failed, as one of its workers sees it.
struct GroupTrouble {
  std::int64_t epoch = 0;
  std::vector<int> blamed{};  ///< ranks that it could not reach, or heard to be at fault
  std::string text{};         ///< for people
  friend bool operator==(const GroupTrouble&, const GroupTrouble&) = default;
};

/// The job's state in a worker's memory.
struct HeldState {
  std::int64_t epoch = 0;  ///< the newest one in which the worker got it; 0: it has none
  bool divided = false;    ///< each rank has a part
  friend bool operator==(const HeldState&, const HeldState&) = default;
};

struct WorkerWords {
  bool trained = false;                   ///< it has called `tell_trained`
  std::optional<GroupTrouble> trouble{};  ///< its last one
  /// Descriptors from its latest `give_memories`, if any.
  std::optional<std::vector<Descriptor>> memories{};
  bool memories_missed = false;  ///< its last ones did not come: too many files are open here
  /// Its newest commit that it told of, since `lost` if it said that; 0: none.
  std::int64_t committed = 0;
  /// At least so many commits were made, of which no rank of its epoch has more than the first
  /// `kept`; 0: not said. If both are the same nobody knows whether there were more.
  std::int64_t lost = 0, kept = 0;
  /// The answer to `hand_over`: its last commit in a memory file, or nothing.
  std::optional<std::vector<Descriptor>> handed_over{};
  std::int64_t ending = 0;  ///< the epoch in which it said that it ends; 0: not said
  HeldState state{};        ///< as it said last, since `lost` if it said that
  bool at_end = false;      ///< it will say nothing more
};
/// For the launcher: the worker's words since the last call, also if it has ended since. Call it
/// whenever the socket is readable: descriptors in it count as open files of the user.
WorkerWords take_words(int descriptor);

/// For the worker. Blocks until a notice has come. Code::closed if the launcher has ended.
/// `memories` are filled by a notice of that kind.
Result<WorkerNotice> read_worker_notice(int descriptor, std::vector<Descriptor>& memories);
/// For the worker: true if `read_worker_notice` would not block: a notice is there, or the launcher
/// has ended.
bool has_worker_notice(int descriptor);
/// For the worker: all ranks have come to the end of training, so no death is to be repaired. Waits
/// up to 60 s for a launcher that is busy.
void tell_trained(int descriptor);
/// For the worker: it has made commit `number`. Waits for nothing; a launcher that is busy may miss
/// it. Tell it at most some ten times in a second: each call wakes the launcher.
void tell_committed(int descriptor, std::int64_t number);
/// For the worker: its memory holds the job's state, of so many commits. Waits as `tell_trained`
/// does.
void tell_state(int descriptor, const HeldState& state, std::int64_t commits);
/// For the worker: of at least `commits` commits no rank has more than the first `kept`. Waits as
/// `tell_trained` does.
void tell_lost(int descriptor, std::int64_t commits, std::int64_t kept);
/// For the worker: it cannot go on in this epoch, and waits for the next. Waits as `tell_trained`
/// does. At most `kMostBlamed` ranks are told, and a long text is cut off.
void tell_trouble(int descriptor, const GroupTrouble& trouble);
inline constexpr std::size_t kMostBlamed = 1024;  // limit: ranks of one message
/// For the worker: an exception leaves `run`, so this process is about to end. Waits for nothing; a
/// launcher that is busy may miss it.
void tell_ending(int descriptor, std::int64_t epoch);
/// For the worker: from now on the launcher holds these memory files in place of those that it held
/// for this worker's place. At most `kMostMemories`. Waits up to 60 s for a launcher that is busy,
/// then Code::timed_out. Code::exhausted: it cannot hold them. Code::closed: it has ended.
Status give_memories(int descriptor, std::span<const int> memories);
/// For the worker: its answer to WorkerNoticeKind::hand_over. `memory`: -1 if it has none to give.
/// Waits as `give_memories` does.
Status hand_over(int descriptor, int memory);
inline constexpr std::size_t kMostMemories = 250;  // limit: descriptors of one message

}  // namespace muster::launch
