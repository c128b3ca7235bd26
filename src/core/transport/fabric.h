// SPDX-License-Identifier: BSD-3-Clause
/// One rank's connections to its job, shared by all its groups.
///
/// Links open when first used, one per peer. All link state is guarded by one lock that is held for
/// one poll pass and never while waiting. A waiting thread polls (`wait`). While no thread waits,
/// the watcher thread sleeps in epoll on listener, sockets, pidfds and timers, answers heartbeats
/// and forwards causes of failure. An idle fabric uses no CPU.
///
/// `transport/` has streams (tcp, shm, loopback) and the connectors that make them, private behind
/// `factory.h`; the message protocol over any stream (`link_protocol.h`: bytes in, bytes out);
/// channels. Test it alone: `ctest -R transport`, in a build with -DMUSTER_ALL_TESTS=ON or a
/// sanitizer.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/net/link_figures.h"
#include "core/transport/channel/channel.h"
#include "core/transport/connect/connector.h"
#include "core/transport/link/send_batch.h"
#include "muster/clock.h"
#include "muster/key_value_store.h"
#include "muster/status.h"

namespace muster::transport {

/// The default of `FabricOptions::heartbeat_limit`.
inline constexpr Duration kHeartbeatLimit = std::chrono::seconds(10);  // limit: a user's choice

/// A rank that others wait for, or that this rank watches, and that does not answer.
struct Silence {
  int rank = 0;
  TimePoint since{};  ///< when it was last heard
  enum class Step : std::uint8_t {
    suspected,  ///< it has been silent for up to 3 s
    over,       ///< it has answered again
    verdict,    ///< it counts as failed
  } step = Step::suspected;
};

struct FabricOptions {
  int rank = 0;
  int world_size = 1;
  Duration timeout =
      std::chrono::minutes(30);           ///< for create, and at most for one connection later
  TimePoint deadline = TimePoint::max();  ///< for create too, where it comes earlier
  /// A rank that is silent for this long has failed; zero: never. A rank of this host fails only
  /// once the kernel says that its process has ended or is stopped, and then within 3 s.
  Duration heartbeat_limit = kHeartbeatLimit;
  /// Told of silent ranks, under the engine's lock: it must be fast and use nothing of the fabric.
  std::function<void(const Silence&)> on_silence = {};
  const Clock* clock = &steady_clock();
  const FingerprintRules* rules =
      nullptr;  ///< must outlive the fabric; null: only equality, described in numbers
  /// False for simulated ranks: no watcher thread; the owner calls `poll`.
  bool threads = true;
  /// For simulated ranks (`threads` false): `wait` calls it instead of pausing or sleeping, with
  /// the time of its next timer or deadline; it returns when that has come, the mailbox was woken
  /// or bytes have arrived. Empty: the thread really waits.
  std::function<void(TimePoint until)> idle;
};

/// Publishes this rank's text under `round` and returns all ranks' texts, in rank order. Blocks.
using Exchange = std::function<Result<std::vector<std::string>>(const std::string& round,
                                                                const std::string& mine)>;
/// An exchange over a store: keys under `prefix`, one all_gather request each, all of them before
/// the deadline.
Exchange exchange_over(std::shared_ptr<store::Store> store, std::string prefix, int rank,
                       int world_size, TimePoint deadline);

/// Counters of what a rank has sent since its fabric was created.
struct Traffic {
  std::uint64_t messages =
      0;  ///< messages to other ranks; a large one counts once, with its request
  std::uint64_t writes =
      0;  ///< writes by which all data was sent: one system call each if the link is a socket
};

class Fabric {
 public:
  /// Meets the other ranks. Every rank calls it with the same world size; blocks until all have met
  /// or the timeout passes.
  static Result<std::unique_ptr<Fabric>> create(const FabricOptions& options,
                                                std::unique_ptr<Connector> connector,
                                                const Exchange& exchange);
  /// Sends a close frame to every peer (so that they see an end, not a death), flushes for at most
  /// a second, joins the watcher.
  virtual ~Fabric() = default;

  /// Does what the destructor does, for a rank that has closed its groups and still holds some. Its
  /// process may end at any moment, and a peer that reads late must not take that for a death.
  /// Calls fail afterwards. The first call counts. Thread-safe.
  virtual void leave() {}
  /// Marks that this rank will end without having closed its groups. When the destructor runs,
  /// calls that need this rank fail at once with that reason; all others continue. `after`: what
  /// had gone wrong in the process, for those errors. Thread-safe, does not block.
  virtual void leave_unclosed([[maybe_unused]] const std::string& after = {}) {}
  /// This rank has failed: every channel here fails, and every rank is told "rank 2 failed: <why>".
  /// `earlier`: the ranks whose failure led to this one, if any; they are then at fault. The first
  /// call counts, and no close frame follows. Blocks for at most a second. Thread-safe.
  virtual void fail_rank([[maybe_unused]] const std::string& why,
                         [[maybe_unused]] const std::vector<int>& earlier) {}

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual const Clock& clock() const = 0;
  /// Host number of every rank.
  virtual std::span<const int> hosts() const = 0;
  /// How many cores the ranks of this host can keep busy together: the union of the cores that they
  /// may run on, hardware threads of one core counted once, limited by the control groups. Equal on
  /// all ranks of a host.
  virtual int cores() const { return usable_cores(); }
  /// How many connections to this rank's listeners did not prove the job's secret. Thread-safe.
  virtual std::uint64_t refusals() const { return 0; }
  /// Reads those of the links over sockets, by the rank at their other end: a system call each.
  /// Thread-safe.
  virtual std::map<int, LinkFigures> link_figures() const { return {}; }
  /// Null if no memory is shared on this host.
  virtual shm::HostRegion* region() = 0;

  /// Channel 0, made by create: all ranks.
  virtual Channel& bootstrap() = 0;
  /// The channel of all ranks on which groups are negotiated, made by create. It survives the death
  /// of ranks: only transfers that wait for a dead rank fail, at once, so that survivors can still
  /// agree.
  virtual Channel& agreements() = 0;
  /// A channel with an id that the members have agreed on. Code::invalid_argument if this rank
  /// already uses it. Local; opens no connection. Messages that arrived earlier are kept in it.
  virtual Result<std::shared_ptr<Channel>> open(std::uint32_t id, std::vector<int> members) = 0;
  /// An id for a new channel that no rank has allocated before and this one has not used; a
  /// different one each time. 0 once all are used up.
  virtual std::uint32_t next_channel_id() const = 0;

  /// One pass: connector, links. Never blocks. Returns whether there was progress. Thread-safe; a
  /// second thread returns at once.
  virtual bool poll() = 0;
  /// Spins for some microseconds until a message from `rank` arrives, and returns whether one has.
  /// Returns false at once unless `rank` shares this host's region and every rank of the host has a
  /// core. Polling one ring takes a twentieth of the time of `poll`. After false, call `wait`.
  /// Thread-safe.
  virtual bool spin_for_peer([[maybe_unused]] int rank) { return false; }
  /// Reads what has arrived from `rank` in the region, and polls nothing else. Thread-safe, never
  /// blocks.
  virtual void poll_peer([[maybe_unused]] int rank) {}
  /// Returns true once `done()` holds, false at the deadline. Drives links meanwhile: pauses or
  /// yields, then sleeps on the mailbox. `done` may report progress (`note_progress`,
  /// core/wait/spin_wait.h), which delays the sleep. `done` is called often and without any lock.
  /// It may advance work of its own and must be fast.
  virtual bool wait(const std::function<bool()>& done, TimePoint deadline) = 0;
  /// Wakes this rank's sleeping threads, because a condition they wait for has changed within the
  /// process.
  virtual void wake() = 0;
  /// While the result lives, small messages that this thread sends share writes.
  [[nodiscard]] SendBatch batch_sends() { return SendBatch(*this); }

  /// Why `rank` is lost, or success while it is not.
  virtual Status death_of(int rank) const = 0;
  /// Why nothing more comes from `rank`: it is lost, or it has left. Success while it is there.
  virtual Status gone(int rank) const { return death_of(rank); }
  /// Declares a rank lost on evidence from outside the fabric: every channel that has it as a
  /// member fails, and every rank is notified.
  virtual void declare_dead(int rank, Status evidence) = 0;
  /// False for simulated ranks (`FabricOptions::threads`); upper layers must then not start threads
  /// for it either.
  virtual bool threads() const { return true; }

  /// An object that an upper layer keeps once per fabric (the collectives: their progress thread
  /// and count of groups). Created on first use and destroyed after the fabric, so its destructor
  /// must not use the fabric. Thread-safe.
  struct Companion {
    virtual ~Companion() = default;
  };
  std::shared_ptr<Companion> companion(const std::function<std::shared_ptr<Companion>()>& make) {
    const std::lock_guard guard(companion_lock_);
    if (!companion_) companion_ = make();
    return companion_;
  }

  virtual Traffic traffic() const { return {}; }

  /// Suspends failure detection by heartbeats (while a debugger holds a rank); calls nest.
  virtual void suspend_heartbeats(bool on) = 0;

 private:
  friend class SendBatch;
  /// Writes the buffered messages of the links; does nothing for a fabric that does not batch.
  virtual void write_batches() {}

  std::mutex companion_lock_;
  std::shared_ptr<Companion> companion_;
};

}  // namespace muster::transport
