/// One rank's connections to its job, shared by all its groups.
///
/// Links open when first used, one per peer. All link state stands under one lock that guards one
/// poll pass and is never held while waiting. Whoever waits polls (`wait`); while nobody does, the
/// watcher thread sleeps in epoll on listener, sockets, pidfds and timers, answers heartbeats and
/// passes on causes of failure. An idle fabric uses no CPU.
///
/// What lives in `transport/`: streams (tcp, shm, loopback) and the connectors that make them,
/// private behind `factory.h`; the message protocol over any stream (`link_protocol.h`: bytes in,
/// bytes out); channels. May include base/, store/ and shm/. Test it alone: `ctest -R transport`.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "muster/clock.h"
#include "muster/key_value_store.h"
#include "muster/status.h"
#include "muster/transport/channel.h"
#include "muster/transport/connector.h"
#include "muster/transport/send_batch.h"

namespace muster::transport {

struct FabricOptions {
  int rank = 0;
  int world_size = 1;
  Duration timeout =
      std::chrono::minutes(30);           ///< for create, and at most for one connection later
  TimePoint deadline = TimePoint::max();  ///< for create too, where it comes earlier
  /// A peer whose watcher says nothing for this long counts as failed; zero: never.
  Duration heartbeat_limit = std::chrono::milliseconds(2500);  // limit: a user's choice
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

/// Publishes this rank's text under `round` and returns everybody's, in rank order. Blocks.
using Exchange = std::function<Result<std::vector<std::string>>(const std::string& round,
                                                                const std::string& mine)>;
/// An exchange over a store: keys under `prefix`, one all_gather request each, all of them before
/// the deadline.
Exchange exchange_over(std::shared_ptr<store::Store> store, std::string prefix, int rank,
                       int world_size, TimePoint deadline);

/// What a rank has handed to its links since its fabric was made.
struct Traffic {
  std::uint64_t messages =
      0;  ///< of channels, to other ranks: a large one counts once, when it asks
  std::uint64_t writes =
      0;  ///< by which these and all else went out: a system call each where the link is a socket
};

class Fabric {
 public:
  /// Meets the other ranks. Every rank calls it with the same world size; blocks until all have met
  /// or the timeout passes.
  static Result<std::unique_ptr<Fabric>> create(const FabricOptions& options,
                                                std::unique_ptr<Connector> connector,
                                                const Exchange& exchange);
  /// Says goodbye to every peer (so that they see an end, not a death), flushes for at most a
  /// second, joins the watcher.
  virtual ~Fabric() = default;

  /// Says that the destructor ends a rank that has not closed its groups. Calls that need this rank
  /// fail at once with that reason; all others go on. Thread-safe, does not block.
  /// `after`: what had gone wrong in its process, for their errors.
  virtual void leave_unclosed([[maybe_unused]] const std::string& after = {}) {}
  /// This rank has failed: every channel here fails, and every rank is told "rank 2 failed: <why>".
  /// `earlier`: the ranks whose failure led to this one, if any; they are then at fault. The first
  /// call counts, and no goodbye follows. Blocks for at most a second. Thread-safe.
  virtual void fail_rank([[maybe_unused]] const std::string& why,
                         [[maybe_unused]] const std::vector<int>& earlier) {}

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual const Clock& clock() const = 0;
  /// Host number of every rank.
  virtual std::span<const int> hosts() const = 0;
  /// How many cores the ranks of this host can keep busy together: those that any of them may run
  /// on, hardware threads of one core once, as far as the control groups let them. The same to all
  /// ranks of a host.
  virtual int cores() const { return usable_cores(); }
  /// How many connections to this rank's listeners did not prove the job's secret. Thread-safe.
  virtual std::uint64_t refusals() const { return 0; }
  /// Null where nothing is shared on this host.
  virtual shm::HostRegion* region() = 0;

  /// Channel 0, made by create: all ranks.
  virtual Channel& bootstrap() = 0;
  /// All ranks, made by create: where groups are agreed on. It outlives the death of ranks: only
  /// the transfers that wait for a dead rank fail, at once, so that survivors can go on agreeing.
  virtual Channel& agreements() = 0;
  /// A channel with an id that the members have agreed on (none of them may use it already:
  /// Code::invalid_argument). Local; opens nothing. Messages that came for it before are waiting in
  /// it.
  virtual Result<std::shared_ptr<Channel>> open(std::uint32_t id, std::vector<int> members) = 0;
  /// An id for a new channel that no rank has given out before, nor this one used; another one each
  /// time. 0 once all are used up.
  virtual std::uint32_t next_channel_id() const = 0;

  /// One pass: connector, links. Never blocks. Says whether anything moved. Thread-safe; a second
  /// thread returns at once.
  virtual bool poll() = 0;
  /// Spins for some microseconds until something has come from `rank`, and says whether it has.
  /// Only if that stands in this host's region, and every rank of the host has a core: a poll of
  /// the ring takes a twentieth of `poll`. False: to be followed by `wait`. Thread-safe.
  virtual bool spin_for_peer([[maybe_unused]] int rank) { return false; }
  /// Reads what has come from `rank` there, and polls nothing else. Thread-safe, never blocks.
  virtual void poll_peer([[maybe_unused]] int rank) {}
  /// Returns true once `done()` holds, false at the deadline. Drives links meanwhile: pauses or
  /// yields, then sleeps on the mailbox. `done` may say that it has made progress (`note_progress`,
  /// wait/spin_wait.h), which puts the sleep off. `done` is called without any lock, often; it may
  /// advance work of its own and should publish nothing slow.
  virtual bool wait(const std::function<bool()>& done, TimePoint deadline) = 0;
  /// Wakes this rank's sleepers (something that they wait for has changed within the process).
  virtual void wake() = 0;
  /// While the result lives, small messages that this thread sends share writes.
  [[nodiscard]] SendBatch batch_sends() { return SendBatch(*this); }

  /// Why `rank` is lost, or success while it is not.
  virtual Status death_of(int rank) const = 0;
  /// Why nothing more comes from `rank`: it is lost, or it has left. Success while it is there.
  virtual Status gone(int rank) const { return death_of(rank); }
  /// Declares a rank lost (evidence from elsewhere): every channel that has it as a member fails,
  /// and every rank is told.
  virtual void declare_dead(int rank, Status evidence) = 0;
  /// False for simulated ranks (`FabricOptions::threads`): then nobody above may start a thread for
  /// it either.
  virtual bool threads() const { return true; }

  /// What an upper layer keeps once per fabric (the collectives: their progress thread, their count
  /// of groups). Made by the first who asks and dropped after the fabric itself, so it must not
  /// touch the fabric when it goes. Thread-safe.
  struct Companion {
    virtual ~Companion() = default;
  };
  std::shared_ptr<Companion> companion(const std::function<std::shared_ptr<Companion>()>& make) {
    const std::lock_guard guard(companion_lock_);
    if (!companion_) companion_ = make();
    return companion_;
  }

  virtual Traffic traffic() const { return {}; }

  /// Suspends heartbeats' judgement (a debugger holds a rank); counted.
  virtual void suspend_heartbeats(bool on) = 0;

 private:
  friend class SendBatch;
  /// Writes what stands in links' buffers. A fabric that never keeps anything there has nothing to
  /// do.
  virtual void write_batches() {}

  std::mutex companion_lock_;
  std::shared_ptr<Companion> companion_;
};

}  // namespace muster::transport
