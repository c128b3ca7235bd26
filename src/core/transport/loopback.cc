// SPDX-License-Identifier: BSD-3-Clause
/// Ranks that are threads of one process: streams in memory, or through the rings of a region in
/// ordinary memory.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

#include "core/base/process/fork_guard.h"
#include "core/shm/region_memory.h"
#include "core/transport/byte_stream.h"
#include "core/transport/factory.h"
#include "core/tunables/tunables.h"
#include "core/wait/topology.h"

namespace muster::transport {
namespace {

constexpr std::size_t kPipeBytes = fixed::kFragmentBytes;
constexpr std::size_t kSegmentBytes = std::size_t{1} << 32;  // limit: address space
constexpr auto kExchangeLimit = std::chrono::seconds(120);   // limit: patience

/// One direction of a stream between two threads.
class Pipe {
 public:
  /// Takes what fits; true in `wake` where the reader had nothing before.
  std::size_t write(std::span<const ConstBytes> pieces) {
    const std::lock_guard lock(mutex_);
    std::size_t total = 0;
    for (const ConstBytes piece : pieces) {
      const std::size_t take = std::min(piece.size(), kPipeBytes - held_);
      put(piece.first(take));
      total += take;
      if (take < piece.size()) {
        writer_waits_ = true;
        break;
      }
    }
    return total;
  }
  /// Sets `room_wanted` where the writer waits for the room that was made.
  std::size_t read(std::span<const MutableBytes> pieces, bool& room_wanted) {
    const std::lock_guard lock(mutex_);
    std::size_t total = 0;
    for (const MutableBytes piece : pieces) {
      const std::size_t take = std::min(piece.size(), held_);
      get(piece.first(take));
      total += take;
    }
    room_wanted = total > 0 && std::exchange(writer_waits_, false);
    return total;
  }

 private:
  void put(ConstBytes bytes) {
    const std::size_t at = (first_ + held_) % kPipeBytes;
    const std::size_t before_end = std::min(bytes.size(), kPipeBytes - at);
    if (before_end > 0) std::memcpy(memory_.get() + at, bytes.data(), before_end);
    if (bytes.size() > before_end)
      std::memcpy(memory_.get(), bytes.data() + before_end, bytes.size() - before_end);
    held_ += bytes.size();
  }
  void get(MutableBytes bytes) {
    const std::size_t before_end = std::min(bytes.size(), kPipeBytes - first_);
    if (before_end > 0) std::memcpy(bytes.data(), memory_.get() + first_, before_end);
    if (bytes.size() > before_end)
      std::memcpy(bytes.data() + before_end, memory_.get(), bytes.size() - before_end);
    first_ = (first_ + bytes.size()) % kPipeBytes;
    held_ -= bytes.size();
  }

  std::mutex mutex_;
  std::unique_ptr<std::byte[]> memory_{new std::byte[kPipeBytes]};
  std::size_t first_ = 0;
  std::size_t held_ = 0;
  bool writer_waits_ = false;
};

/// The state that both sides of a stream share.
struct Joint {
  Pipe pipes[2];
  std::atomic<bool> closed[2] = {false, false};  ///< by that side
  std::atomic<bool> killed[2] = {false, false};
};

class LoopbackStream final : public ByteStream {
 public:
  LoopbackStream(std::shared_ptr<Joint> joint, int side, int peer, shm::Mailbox& peers_mailbox,
                 std::shared_ptr<void> owner)
      : joint_(std::move(joint)),
        side_(side),
        peer_(peer),
        peers_mailbox_(peers_mailbox),
        owner_(std::move(owner)) {}
  ~LoopbackStream() override {
    joint_->closed[side_].store(true, std::memory_order_release);
    peers_mailbox_.wake();
  }

  Result<std::size_t> write(std::span<const ConstBytes> pieces) override {
    if (joint_->killed[side_].load() || joint_->killed[1 - side_].load() ||
        joint_->closed[1 - side_].load())
      return ended();
    const std::size_t written = joint_->pipes[side_].write(pieces);
    if (written > 0) peers_mailbox_.wake();
    return written;
  }
  Result<std::size_t> read(std::span<const MutableBytes> pieces) override {
    if (joint_->killed[side_].load()) return ended();
    // Looked at first: what was written before the end is then there.
    const bool over = joint_->closed[1 - side_].load(std::memory_order_acquire) ||
                      joint_->killed[1 - side_].load();
    bool room_wanted = false;
    const std::size_t got = joint_->pipes[1 - side_].read(pieces, room_wanted);
    if (room_wanted) peers_mailbox_.wake();
    if (got == 0 && over) return ended();
    return got;
  }
  int descriptor() const override { return -1; }
  const char* kind() const override { return "loopback"; }

 private:
  Status ended() const {
    return Status(Code::closed, "the stream to rank " + std::to_string(peer_) + " has ended");
  }

  std::shared_ptr<Joint> joint_;
  int side_;
  int peer_;
  shm::Mailbox& peers_mailbox_;
  std::shared_ptr<void> owner_;
};

/// A ring stream that ends when one of its sides is killed.
class RegionStream final : public ByteStream {
 public:
  RegionStream(std::unique_ptr<ByteStream> inner, std::shared_ptr<Joint> joint, int side, int peer)
      : inner_(std::move(inner)), joint_(std::move(joint)), side_(side), peer_(peer) {}
  Result<std::size_t> write(std::span<const ConstBytes> pieces) override {
    if (joint_->killed[0].load() || joint_->killed[1].load()) return ended();
    return inner_->write(pieces);
  }
  Result<std::size_t> read(std::span<const MutableBytes> pieces) override {
    if (joint_->killed[side_].load()) return ended();
    const bool over = joint_->killed[1 - side_].load();
    Result<std::size_t> got = inner_->read(pieces);
    if (got && *got == 0 && over) return ended();
    return got;
  }
  std::array<ConstBytes, 2> look() override {
    return joint_->killed[side_].load() ? std::array<ConstBytes, 2>{} : inner_->look();
  }
  void drop(std::size_t bytes) override { inner_->drop(bytes); }
  int descriptor() const override { return inner_->descriptor(); }
  const char* kind() const override { return "loopback"; }  // the rings are of this process alone

 private:
  Status ended() const {
    return Status(Code::closed, "the stream to rank " + std::to_string(peer_) + " has ended");
  }

  std::unique_ptr<ByteStream> inner_;
  std::shared_ptr<Joint> joint_;
  int side_;
  int peer_;
};

class Hub final : public LoopbackHub, public std::enable_shared_from_this<Hub> {
 public:
  Hub(int world_size, bool with_region, int cores)
      : cores_(cores), seats_(static_cast<std::size_t>(world_size)) {
    if (with_region) make_region();
  }

  std::unique_ptr<Connector> connector(int rank) override;
  void kill(int rank) override;
  std::vector<std::string> exchange(const std::string& round, int rank,
                                    const std::string& mine) override;

  int world_size() const { return static_cast<int>(seats_.size()); }
  int cores() const { return cores_; }
  /// A dead rank writes nothing any more: a killed rank gets a mailbox that no other rank sees.
  shm::Mailbox& mailbox_of(int rank) {
    return region_memory_ && !seat(rank).killed.load()
               ? views_[static_cast<std::size_t>(rank)]->mailbox(rank)
               : seat(rank).mailbox;
  }
  shm::HostRegion* region_of(int rank) {
    return region_memory_ ? views_[static_cast<std::size_t>(rank)].get() : nullptr;
  }
  void connect(int from, int to);
  void accepted(int from, int to, const std::shared_ptr<std::unique_ptr<ByteStream>>& stream);
  void leave(int rank);
  /// The events for `rank` since the last call.
  std::vector<std::function<void(ConnectorEvents&)>> news_of(int rank);

 private:
  using News = std::function<void(ConnectorEvents&)>;
  struct LoopbackEnd {
    std::shared_ptr<Joint> joint;
    int side = 0;
  };
  struct LoopbackSeat {
    shm::Mailbox mailbox;
    std::atomic<bool> has_news{false};
    std::vector<News> news;
    std::map<int, LoopbackEnd> ends;  // by peer
    std::vector<int> asked_by;        // whose streams are among the news
    std::atomic<bool> killed{false};
    bool left = false;
  };
  struct ExchangeRound {
    std::vector<std::string> texts;
    int came = 0;
  };

  void make_region();
  LoopbackSeat& seat(int rank) { return seats_[static_cast<std::size_t>(rank)]; }
  void tell(int rank, News news);
  std::unique_ptr<ByteStream> side_of(const std::shared_ptr<Joint>& joint, int side, int me,
                                      int peer);

  const int cores_;  // of all ranks together, as they are told
  // Guards the seats' lists, `rounds_` and `anybody_killed_`. A rank's events are called without
  // it.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<LoopbackSeat> seats_;
  std::map<std::string, ExchangeRound> rounds_;
  bool anybody_killed_ = false;
  std::shared_ptr<void> region_memory_;
  std::vector<std::unique_ptr<shm::HostRegion>> views_;
};

class LoopbackConnector final : public Connector {
 public:
  LoopbackConnector(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}
  ~LoopbackConnector() override {
    if (!mark_.forked())
      hub_->leave(rank_);  // in a forked child the rank is the parent's, and the hub's lock may be
                           // held for ever
  }

  Result<std::string> own_address(TimePoint) override { return std::string("loopback"); }
  Result<std::string> meet(std::span<const std::string>, TimePoint) override {
    return std::string("loopback");
  }
  Status settle(std::span<const std::string> verdicts, ConnectorEvents& events) override {
    for (const std::string& verdict : verdicts) {
      if (verdict != "loopback")
        return Status(Code::aborted, "a rank was killed while the ranks met");
    }
    events_ = &events;
    return {};
  }
  std::vector<int> hosts() const override {
    return std::vector<int>(static_cast<std::size_t>(hub_->world_size()), 0);
  }
  shm::HostRegion* region() override { return hub_->region_of(rank_); }
  shm::Mailbox& mailbox() override { return hub_->mailbox_of(rank_); }
  void connect(int peer, TimePoint) override { hub_->connect(rank_, peer); }
  bool poll(TimePoint) override {
    if (events_ == nullptr) return false;
    const auto news = hub_->news_of(rank_);
    for (const auto& tell : news) tell(*events_);
    return !news.empty();
  }
  int descriptor() const override { return -1; }
  TimePoint next_timer() const override { return TimePoint::max(); }
  int cores() const override { return hub_->cores(); }

 private:
  const ProcessMark mark_;
  std::shared_ptr<Hub> hub_;
  int rank_;
  ConnectorEvents* events_ = nullptr;
};

// ---- the hub

std::unique_ptr<Connector> Hub::connector(int rank) {
  return std::make_unique<LoopbackConnector>(shared_from_this(), rank);
}

void Hub::make_region() {
  shm::RegionShape shape;
  for (int r = 0; r < world_size(); ++r) shape.ranks.push_back(r);
  shape.segment_bytes = kSegmentBytes;
  const std::size_t bytes = shm::region_bytes(shape);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return;  // then without one
  std::shared_ptr<void> owner(memory, [bytes](void* mapped) { munmap(mapped, bytes); });
  shm::lay_out_region(static_cast<std::byte*>(memory), shape);
  for (int r = 0; r < world_size(); ++r) {
    auto view = shm::open_region(static_cast<std::byte*>(memory), shape, r, owner);
    if (!view) return views_.clear();
    views_.push_back(std::move(*view));
  }
  region_memory_ = std::move(owner);
}

void Hub::tell(int rank, News news) {
  seat(rank).news.push_back(std::move(news));
  seat(rank).has_news.store(true, std::memory_order_release);
}

std::vector<Hub::News> Hub::news_of(int rank) {
  LoopbackSeat& mine = seat(rank);
  if (!mine.has_news.load(std::memory_order_acquire)) return {};
  const std::lock_guard lock(mutex_);
  mine.has_news.store(false, std::memory_order_relaxed);
  return std::exchange(mine.news, {});
}

std::unique_ptr<ByteStream> Hub::side_of(const std::shared_ptr<Joint>& joint, int side, int me,
                                         int peer) {
  if (shm::HostRegion* region = region_of(me))
    return std::make_unique<RegionStream>(open_shared_stream(*region, peer), joint, side, peer);
  return std::make_unique<LoopbackStream>(joint, side, peer, mailbox_of(peer), shared_from_this());
}

void Hub::connect(int from, int to) {
  {
    const std::lock_guard lock(mutex_);
    if (seat(from).ends.contains(to)) return;  // both asked; the stream is on its way
    if (seat(from).killed.load() || seat(to).killed.load() || seat(to).left) {
      Status cause(Code::network, "rank " + std::to_string(to) + " is not there any more");
      tell(from, [to, cause](ConnectorEvents& events) { events.on_connect_failed(to, cause); });
    } else {
      auto joint = std::make_shared<Joint>();
      seat(from).ends[to] = {joint, 0};
      seat(to).ends[from] = {joint, 1};
      seat(to).asked_by.push_back(from);
      auto mine = std::make_shared<std::unique_ptr<ByteStream>>(side_of(joint, 0, from, to));
      auto theirs = std::make_shared<std::unique_ptr<ByteStream>>(side_of(joint, 1, to, from));
      // As with an accepted socket: the asker has its side once the other has taken its own, so
      // that a stream never stands to a rank that leaves without having seen it.
      tell(to, [this, from, to, mine, theirs](ConnectorEvents& events) {
        events.on_stream(from, std::move(*theirs));
        accepted(from, to, mine);
      });
    }
  }
  mailbox_of(from).wake();
  mailbox_of(to).wake();
}

void Hub::accepted(int from, int to, const std::shared_ptr<std::unique_ptr<ByteStream>>& stream) {
  {
    const std::lock_guard lock(mutex_);
    std::erase(seat(to).asked_by, from);
    if (seat(from).left) return;
    tell(from, [to, stream](ConnectorEvents& events) { events.on_stream(to, std::move(*stream)); });
  }
  mailbox_of(from).wake();
}

void Hub::leave(int rank) {
  std::vector<News> dropped;  // streams among them end outside the lock
  const std::lock_guard lock(mutex_);
  seat(rank).left = true;
  dropped = std::exchange(seat(rank).news, {});
  for (const int asker : std::exchange(seat(rank).asked_by, {})) {
    seat(asker).ends.erase(rank);
    const Status cause(Code::network, "rank " + std::to_string(rank) + " is not there any more");
    tell(asker, [rank, cause](ConnectorEvents& events) { events.on_connect_failed(rank, cause); });
  }
}

void Hub::kill(int rank) {
  {
    const std::lock_guard lock(mutex_);
    LoopbackSeat& dead = seat(rank);
    if (dead.killed.load()) return;
    anybody_killed_ = true;
    dead.killed.store(true);
    for (auto& [peer, end] : dead.ends) end.joint->killed[end.side].store(true);
    const Status evidence(Code::peer_failed, "rank " + std::to_string(rank) + " was killed",
                          {rank});
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer != rank)
        tell(peer, [rank, evidence](ConnectorEvents& events) { events.on_death(rank, evidence); });
    }
    changed_.notify_all();
  }
  for (int peer = 0; peer < world_size(); ++peer) mailbox_of(peer).wake();
}

std::vector<std::string> Hub::exchange(const std::string& round, int rank,
                                       const std::string& mine) {
  std::unique_lock lock(mutex_);
  ExchangeRound& here = rounds_[round];
  here.texts.resize(seats_.size());
  here.texts[static_cast<std::size_t>(rank)] = mine;
  ++here.came;
  changed_.notify_all();
  changed_.wait_for(lock, kExchangeLimit,
                    [&] { return here.came >= world_size() || anybody_killed_; });
  return here.texts;
}

}  // namespace

std::shared_ptr<LoopbackHub> make_loopback_hub(int world_size, bool with_region, int cores) {
  return std::make_shared<Hub>(world_size, with_region, cores > 0 ? cores : usable_cores());
}

}  // namespace muster::transport
