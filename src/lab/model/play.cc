// SPDX-License-Identifier: BSD-3-Clause
#include "lab/model/play.h"

#include <algorithm>
#include <cstdint>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "lab/model/payload_share.h"
#include "lab/model/schedule.h"

namespace muster::collective::plan {
namespace {

/// The steps to which a rank's messages belong. Those from one peer arrive in their order.
class ExpectedMessages {
 public:
  explicit ExpectedMessages(const Schedule& schedule) {
    std::vector<std::pair<int, int>> all;  // peer, step
    for (int step = 0; step < schedule.steps(); ++step) {
      left_.push_back(schedule.receives(step));
      for (int i = 0; i < left_.back(); ++i) all.emplace_back(schedule.receive(step, i).peer, step);
    }
    std::ranges::stable_sort(all, {}, &std::pair<int, int>::first);
    for (const auto& [peer, step] : all) {
      if (peers_.empty() || peers_.back() != peer) {
        peers_.push_back(peer);
        next_.push_back(steps_.size());
      }
      steps_.push_back(step);
    }
  }
  void take(int peer) {
    const auto place = std::ranges::lower_bound(peers_, peer) - peers_.begin();
    --left_[static_cast<std::size_t>(steps_[next_[static_cast<std::size_t>(place)]++])];
  }
  bool has_all(int step) const { return left_[static_cast<std::size_t>(step)] == 0; }

 private:
  std::vector<int> peers_;
  std::vector<std::size_t> next_;  // by peer: into steps_
  std::vector<int> steps_, left_;
};

struct PlayedRank {
  explicit PlayedRank(const Schedule& given) : schedule(given), expected(given) {}
  Schedule schedule;
  ExpectedMessages expected;
  int step = 0, sent = 0;
  bool sends = false;              // its next message is an event
  double free = 0, near_free = 0;  // from then on; within the host
  double work = 0, near_work = 0;
};

struct PlayedHost {
  double out_free = 0, in_free = 0;
  double out_work = 0, in_work = 0;
};

class PlayedRound {
 public:
  PlayedRound(Op op, Algorithm algorithm, double bytes, const Machine& machine, Crew crew)
      : op_(op),
        bytes_(bytes),
        machine_(machine),
        crew_(crew),
        first_ranks_(even_hosts(crew.ranks, crew.ranks_per_host)),
        hosts_(static_cast<std::size_t>(host_of(crew.ranks - 1) + 1)) {
    for (int rank = 0; rank < crew.ranks; ++rank)
      ranks_.emplace_back(Schedule(op, algorithm, rank, crew.ranks, 0, first_ranks_));
  }

  /// Until the last rank has done its part.
  double seconds() {
    for (int rank = 0; rank < crew_.ranks; ++rank) proceed(rank, 0);
    while (!events_.empty()) {
      const PlayedEvent event = events_.top();
      events_.pop();
      switch (event.kind) {
        case PlayedKind::send: send(event.rank, event.time); break;
        case PlayedKind::reaches: receive(event); break;
        case PlayedKind::arrived: take(event); break;
      }
    }
    return end_;
  }
  /// The most that one rank or network had to do.
  double busiest() const {
    double most = 0;
    for (const PlayedRank& rank : ranks_) most = std::max({most, rank.work, rank.near_work});
    for (const PlayedHost& host : hosts_) most = std::max({most, host.out_work, host.in_work});
    return most;
  }

 private:
  enum class PlayedKind {
    send,
    reaches,  // the first byte reaches the receiver
    arrived   // the last byte is there
  };
  struct PlayedEvent {
    double time;
    std::uint64_t number;  // equal times in the order in which they were found
    PlayedKind kind;
    int rank;
    int from = -1;
    double bytes = 0;
    bool added = false;
    bool operator<(const PlayedEvent& other) const {  // the queue has the largest on top
      return std::tie(time, number) > std::tie(other.time, other.number);
    }
  };

  int host_of(int rank) const { return rank / crew_.ranks_per_host; }
  PlayedRank& rank_at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  PlayedHost& host_at(int rank) { return hosts_[static_cast<std::size_t>(host_of(rank))]; }
  void add(PlayedEvent event) {
    event.number = events_made_++;
    events_.push(event);
  }

  /// Goes on to the next message that the rank sends, unless it waits for others first.
  void proceed(int number, double now) {
    PlayedRank& rank = rank_at(number);
    end_ = std::max(end_, rank.free);
    while (!rank.sends && rank.step < rank.schedule.steps()) {
      if (rank.sent < rank.schedule.sends(rank.step)) {
        rank.sends = true;
        add({std::max(now, rank.free), 0, PlayedKind::send, number});
      } else if (rank.expected.has_all(rank.step)) {
        ++rank.step;
        rank.sent = 0;
      } else {
        return;
      }
    }
  }

  void send(int number, double now) {
    PlayedRank& rank = rank_at(number);
    rank.sends = false;
    const PlannedTransfer out = rank.schedule.send(rank.step, rank.sent++);
    rank.free = std::max(rank.free, now) + machine_.overhead;
    rank.work += machine_.overhead;
    const double bytes = bytes_ * share_of(op_, out.payload, crew_.ranks, rank.schedule.slices());
    double leaves = rank.free, latency = machine_.host_latency;
    if (host_of(number) != host_of(out.peer)) {
      PlayedHost& host = host_at(number);
      const double takes = bytes / machine_.bandwidth;
      leaves = std::max(leaves, host.out_free);
      latency = machine_.latency;
      host.out_free = leaves + takes;
      host.out_work += takes;
    }
    add({leaves + latency, 0, PlayedKind::reaches, out.peer, number, bytes,
         is_added(op_, out.payload)});
    proceed(number, rank.free);
  }

  void receive(PlayedEvent event) {
    const bool near = host_of(event.rank) == host_of(event.from);
    PlayedRank& rank = rank_at(event.rank);
    PlayedHost& host = host_at(event.rank);
    const double takes = event.bytes / (near ? machine_.host_bandwidth : machine_.bandwidth);
    double& free = near ? rank.near_free : host.in_free;
    free = std::max(free, event.time) + takes;
    (near ? rank.near_work : host.in_work) += takes;
    event.time = free;
    event.kind = PlayedKind::arrived;
    add(event);
  }

  void take(const PlayedEvent& event) {
    PlayedRank& rank = rank_at(event.rank);
    const double takes = machine_.overhead + (event.added ? event.bytes / machine_.reduction : 0);
    rank.free = std::max(rank.free, event.time) + takes;
    rank.work += takes;
    rank.expected.take(event.from);
    proceed(event.rank, rank.free);
  }

  const Op op_;
  const double bytes_;
  const Machine machine_;
  const Crew crew_;
  const std::vector<int> first_ranks_;  // the schedules do not own them
  std::vector<PlayedHost> hosts_;
  std::vector<PlayedRank> ranks_;
  std::priority_queue<PlayedEvent> events_;
  std::uint64_t events_made_ = 0;
  double end_ = 0;
};

}  // namespace

double play(Op op, Algorithm algorithm, double bytes, const Machine& machine, Crew crew) {
  if (crew.ranks < 2) return 0;
  const double rounds = rounds_of(op, algorithm, bytes, crew);
  PlayedRound round(op, algorithm, bytes / rounds, machine, crew);
  const double first = round.seconds();
  return first + (rounds - 1) * round.busiest();
}

}  // namespace muster::collective::plan
