/// The inside of a fabric: links, channels, passes over them, and what is known of failures.
/// Private to `transport/`.
///
/// Everything stands under one lock (`Entry`), held for a pass or a call and never while waiting.
/// Nothing here calls user code. `engine.cc`: life, channels and passes. `engine_wait.cc`: waiting.
/// `engine_failure.cc`: deaths, suspicion, spreading the word, heartbeats.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "muster/base/fork_guard.h"
#include "muster/transport/channel_state.h"
#include "muster/transport/fabric.h"
#include "muster/transport/link.h"
#include "muster/transport/ready_set.h"

namespace muster::transport {

class Watcher;

/// A mutex that pollers give way on: who takes it in earnest is not starved by threads that try in
/// a loop.
class PassLock {
 public:
  void lock() {
    if (mutex_.try_lock()) return;
    wanting_.fetch_add(1, std::memory_order_relaxed);
    mutex_.lock();
    wanting_.fetch_sub(1, std::memory_order_relaxed);
  }
  bool try_lock() { return wanting_.load(std::memory_order_relaxed) == 0 && mutex_.try_lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
  std::atomic<int> wanting_{0};
};

class Engine final : public ConnectorEvents {
 public:
  Engine(const FabricOptions& options, std::unique_ptr<Connector> connector);
  ~Engine() override;

  Status meet(const Exchange& exchange);
  /// After meet: links, bootstrap channel, watcher thread.
  Status start(Fabric& fabric);
  /// Fails what is still under way, says goodbye, flushes, stops the watcher.
  void shut_down();
  void leave_unclosed();
  void fail_rank(const std::string& why, const std::vector<int>& earlier);

  /// In a forked child everything here is the parent's: nothing may be sent, and the lock may be
  /// held for ever.
  bool forked() const { return mark_.forked(); }

  /// Holds the lock; at its end what was queued is written, and sleepers are woken where something
  /// was completed. In a forked child it does neither.
  class Entry {
   public:
    explicit Entry(Engine& engine) : engine_(engine), held_(!engine.forked()) {
      if (held_) engine_.lock_.lock();
    }
    ~Entry() {
      if (held_) engine_.leave_entry();
    }
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

   private:
    Engine& engine_;
    const bool held_;
  };

  bool poll(bool in_earnest) {
    TimePoint now;
    return look(in_earnest, now) == Looked::moved;
  }
  bool wait(const std::function<bool()>& done, TimePoint deadline);
  bool await_briefly(int rank);
  void take_in(int rank);
  void wake() { connector_->mailbox().wake(); }
  /// All that threads have gathered: theirs and what others' stretches still hold.
  void write_gathered();
  Result<std::shared_ptr<Channel>> open(std::shared_ptr<Engine> self, std::uint32_t id,
                                        std::vector<int> members);
  std::uint32_t next_channel_id();
  Status death_of(int rank);
  Status why_gone(int rank);
  void declare_dead(int rank, Status evidence);
  void suspend_heartbeats(bool on);
  Traffic traffic();

  const FabricOptions& options() const { return options_; }
  const Clock& clock() const { return *options_.clock; }
  Fabric& fabric() { return *fabric_; }
  Connector& connector() { return *connector_; }
  ChannelState& bootstrap() { return *bootstrap_; }
  ChannelState& agreements() { return *agreements_; }
  std::span<const int> hosts() const { return hosts_; }
  int rank() const { return options_.rank; }
  int world_size() const { return options_.world_size; }
  const FingerprintRules* rules() const { return options_.rules; }

  // For channels and links, under the lock.
  /// The channel of an id that a frame named: made if it may still be opened; null if it is over. A
  /// failure: nobody may name so many.
  Result<ChannelState*> channel_for(std::uint32_t id);
  /// Asks for the stream where there is none.
  Link& link_to(int rank);
  Link* find_link(int rank) { return links_[static_cast<std::size_t>(rank)].get(); }
  /// What the link has to write is written when the lock is given back.
  void mark_dirty(Link& link);
  /// Into the link's buffer, where this thread sends together and the link has nothing else to
  /// write; says how many bytes it took, header included: all or none.
  std::size_t gather(Link& link, const FrameHeader& header, ConstBytes payload);
  /// A message has been taken although nothing else was looked at. After some of those there has to
  /// be a pass: what others send must not wait for the watcher.
  void taken_without_a_pass() { ++taken_since_pass_; }
  bool owes_a_pass() const { return taken_since_pass_ >= kTakenWithoutAPass; }
  /// Of what has just come: exact where it matters whether that was after a failure, else when the
  /// last pass began.
  TimePoint time_of_news() const { return cause_.ok() ? pass_time_ : clock().now(); }
  void note_completion() { completed_ = true; }
  void count_message() { ++traffic_.messages; }
  void count_write() { ++traffic_.writes; }
  /// When the pass under way began, which is near enough for whatever comes in it.
  TimePoint pass_time() const { return pass_time_; }
  /// Why nothing can come from or go to `rank` any more; success while it can.
  const Status& gone(int rank) const { return gone_[static_cast<std::size_t>(rank)]; }
  const Status& death_locked(int rank) const { return deaths_[static_cast<std::size_t>(rank)]; }
  /// A death seen of a rank that nobody needed then: now somebody does.
  void now_needed(int rank);
  /// Fails the channel and tells its members, but not `source`, who told us.
  void fail_channel(ChannelState& channel, const Status& cause, int source = -1);
  void on_rank_failure(int source, int rank, const Status& cause, bool says_so_itself);
  void on_goodbye(Link& link, bool unclosed);
  void posted_from(int rank, int change) { posted_from_[static_cast<std::size_t>(rank)] += change; }

  // ConnectorEvents.
  void on_stream(int peer, std::unique_ptr<ByteStream> stream) override;
  void on_connect_failed(int peer, Status cause) override;
  void on_death(int peer, Status evidence) override;

  // For the watcher.
  /// One pass and what is due; then when it wants to be called again.
  TimePoint watch_pass();
  /// Arms it: from here on every link's news must reach it. False where it was armed.
  bool tell_watcher(std::atomic<bool>& armed);
  bool pollers_active() const { return active_pollers_.load(std::memory_order_relaxed) > 0; }
  std::uint64_t polls() const { return polls_.load(std::memory_order_relaxed); }

 private:
  friend class Entry;
  friend class ActivePoller;
  struct Suspect {
    TimePoint judge_at;
    Status evidence;
  };
  /// A failure that was told, kept for streams that come up later.
  struct News {
    std::vector<int> members;  // who ought to know
    FrameHeader header;
    std::string record;
  };

  enum class Looked : std::uint8_t {
    busy,  ///< another thread looks
    idle,
    moved,
  };
  /// One pass; `now` is when it began. In earnest: after the one of another thread, and at the
  /// descriptors too.
  Looked look(bool in_earnest, TimePoint& now);
  void leave_entry();
  bool pass();
  bool poll_connector(TimePoint now);
  bool poll_ready();
  bool poll_plain();
  bool read_plain(Link& link);
  bool poll_few();
  void flush_dirty(TimePoint now);
  bool service_read(Link& link);
  void stream_ended(Link& link, Status why);
  void close_stream(Link& link);
  void update_interest(Link& link);
  void set_aside();
  void take_back();
  void retire(std::uint32_t id);
  bool quiet();
  void say_goodbye();
  void flush_at_the_end();
  /// Whether what is waited for has got on (`take_headway`), if not to its end.
  bool sleep_until_news(TimePoint deadline, const std::function<bool()>& done, bool& finished);
  TimePoint next_wake() const;
  bool looks_at_plain() const;
  bool watcher_oversleeps();

  // engine_failure.cc
  void declare_dead_locked(int rank, const Status& evidence);
  void on_own_failure(int source, int rank, const Status& cause);
  void end_own_failure(int rank);
  void blame(int rank, const Status& evidence);
  void suspect(int rank, Duration hold, Status evidence);
  void suspect_left(int rank);
  void leave(int rank);
  bool left_unclosed(int rank);
  Status own_failure(const std::string& why, const std::vector<int>& earlier) const;
  void tell(std::span<const int> members, const FrameHeader& header, const std::string& record,
            int source);
  void spread(std::span<const int> members, const FrameHeader& header, std::string record,
              int source);
  void spread_failure(const ChannelState& channel, const Status& cause, int source);
  void tell_old_news(Link& link);
  void note_cause(const Status& cause);
  std::optional<Status> explanation(int rank) const;
  bool needed(int rank) const;
  /// What a local rank says of itself in its mailbox (`Mailbox::aborted`, `troubled`); `unknown`
  /// where it has none in the region.
  enum class Word : std::uint8_t { unknown, working, troubled, left, left_unclosed };
  Word word_of(int rank);
  void duties(TimePoint now);
  void judge_suspects(TimePoint now);
  void beat(TimePoint now);
  void beat_links(TimePoint now, bool judge);
  void beat_mailboxes(TimePoint now, bool judge);
  void watch_ring();
  int ring_neighbour(int step) const;
  bool in_region(int rank) const { return local_position_[static_cast<std::size_t>(rank)] >= 0; }
  void schedule(TimePoint at) { next_duty_ = std::min(next_duty_, at); }

  const FabricOptions options_;
  Fabric* fabric_ = nullptr;
  ProcessMark mark_;
  std::unique_ptr<Connector> connector_;
  std::vector<int> hosts_;
  shm::HostRegion* region_ = nullptr;
  std::vector<int> local_position_;  // of every rank in the region; -1: not there
  bool may_spin_ = false;            // every local rank has a core
  int ranks_per_core_ = 1;           // of this host, rounded up

  PassLock lock_;
  std::unique_ptr<ReadySet> ready_;  // null without threads
  std::vector<std::unique_ptr<Link>> links_;
  std::vector<Link*> plain_;            // up, without a descriptor
  std::vector<Link*> with_descriptor_;  // up
  bool aside_ = false;                  // they are not in ready_: so few are read in every pass
  std::vector<Link*> dirty_;
  std::vector<Link*>
      holding_;  // gathered messages that nobody has asked to be written yet; perhaps written since
  TimePoint connector_timer_ = TimePoint::min();
  TimePoint pass_time_{};
  std::uint64_t passes_ = 0;
  static constexpr int kTakenWithoutAPass = 128;
  int taken_since_pass_ = 0;
  Traffic traffic_;
  bool completed_ = false;
  bool closing_ = false;
  bool unclosed_ = false;     // the goodbye says that the groups were not closed
  bool own_failure_ = false;  // all have been told that this rank has failed: no goodbye

  std::unordered_map<std::uint32_t, std::shared_ptr<ChannelState>> channels_;
  std::size_t unopened_ = 0;
  std::map<std::uint32_t, std::uint32_t> used_ids_;  // runs: first -> last
  std::uint32_t given_ids_ = 0;  // how many of the ids that are this rank's to give
  std::shared_ptr<ChannelState> bootstrap_;
  static constexpr std::uint32_t kAgreements = ~std::uint32_t{0};
  std::shared_ptr<ChannelState> agreements_;  ///< survives deaths

  // What is known of the ranks.
  std::vector<Status> gone_;    // dead, or left in good order
  std::vector<Status> deaths_;  // dead only
  std::vector<int> posted_from_;
  std::map<int, Suspect> suspects_;
  std::map<int, Status> unneeded_deaths_;
  std::deque<News> news_;
  Status cause_;  // the latest failure heard of
  TimePoint cause_at_ = TimePoint::min();

  // Heartbeats.
  Duration interval_{};
  TimePoint next_duty_ = TimePoint::min();
  TimePoint next_beat_ = TimePoint::max();
  TimePoint last_beat_{};
  int watched_local_ = -1;
  std::uint64_t watched_value_ = 0;
  TimePoint watched_since_{};
  int suspended_ = 0;

  // Waiting.
  std::atomic<int> active_pollers_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<std::uint64_t> polls_{0};
  std::uint64_t polls_watched_ = 0;         // as of the watcher's last look
  TimePoint last_news_ = TimePoint::min();  // of the watcher's looks that found something moved, or
                                            // that somebody had polled
  TimePoint watcher_wakes_ = TimePoint::min();  // when it will look again by itself
  bool watcher_knows_plain_ =
      false;  // and whether it does so because of links without a descriptor
  std::unique_ptr<Watcher> watcher_;
};

}  // namespace muster::transport
