// SPDX-License-Identifier: BSD-3-Clause
/// A job's nodes and the service that they meet at, in one thread on a virtual clock: nodes come,
/// die, fall silent, stand still, come back and fail; one seed decides when. The service is the
/// table that the agent of node 0 serves (`core/store/server/lease_table.h`); the nodes are
/// `JobView` and `next_epoch` as the launcher uses them. Workers are a number of commits, which all
/// members of an epoch have once they have met; or each node has its part of the last commit and a
/// copy of its neighbour's, in memory of its launcher. For tests.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/store/server/lease_table.h"
#include "jobs/membership/job_view.h"
#include "jobs/membership/next_epoch.h"

namespace muster::membership::testing {

struct SimNodeOptions {
  std::uint64_t seed = 1;
  EpochOptions epochs;
  Duration ttl = std::chrono::milliseconds(2500);
  Duration min_delay = std::chrono::microseconds(100);  ///< of a message, one way
  Duration max_delay = std::chrono::milliseconds(20);
  Duration meeting = std::chrono::milliseconds(300);  ///< until the members have the state
  Duration step = std::chrono::milliseconds(250);     ///< from commit to commit
  bool divided = false;  ///< the state has a part for each node (ShardedState)
};

class SimMembership {
 public:
  explicit SimMembership(const SimNodeOptions& options);

  /// A launcher starts on `host`; its number.
  int start(const std::string& host);
  /// Its process ends: the service sees it at once.
  void kill(int node);
  /// Nothing reaches it and nothing comes from it until `heal`; the service lets go after the ttl.
  void cut_off(int node);
  void heal(int node);
  /// Its launcher stands still (SIGSTOP) until `go_on`, which finds what has come meanwhile. Its
  /// workers train on.
  void stop(int node);
  void go_on(int node);
  /// The service hears nothing and says nothing until `answer_again`, while leases run out; what
  /// was asked meanwhile is answered then.
  void silence_service() { silent_ = true; }
  void answer_again();
  /// The workers of the two cannot reach each other until `mend_link`: a group that has both fails,
  /// or does not form.
  void cut_link(int one, int other);
  void mend_link(int one, int other);
  /// One of its workers fails, or all end well, if it is in an epoch.
  void fail(int node);
  /// So that the launcher has none of its memory: a part is gone, and it says so.
  void lose_memory(int node);
  void succeed(int node);

  /// Lets everything happen that is due within `time`.
  void run(Duration time);
  /// The next thing that happens, if it is due before `end`. False: none is.
  bool step(TimePoint end);
  TimePoint now() const { return now_; }

  /// A commit of a divided state.
  struct Commit {
    std::int64_t epoch = 0, number = 0;
    std::size_t parts = 0;
    friend auto operator<=>(const Commit&, const Commit&) = default;
  };
  struct Node {
    int number = 0;
    std::string host;
    std::string name;
    bool alive = true;
    bool cut_off = false;
    bool stopped = false;
    std::vector<std::function<void()>> behind{};  ///< what happens when it goes on
    std::int64_t lease = 0;
    JobView view;
    NodeReport report;
    std::int64_t running = 0;  ///< the epoch whose workers it runs; 0: none
    int slot = -1;             ///< there
    std::int64_t commits = 0;  ///< that its workers have in memory
    Commit held{};             ///< of which its launcher has these parts
    std::set<std::size_t> parts{};
    Commit had{};       ///< the newest that its workers have, if the state is not divided
    Commit kept{};      ///< so, of workers that lost their seat: its launcher has it
    TimePoint heard{};  ///< when it asked what the service answered last, and
    TimePoint back{};   ///< when it was in its place again, or the service, after a silence
    TimePoint asked_again = TimePoint::max();
    std::uint64_t life = 0;  ///< counts its holds: what was sent in an earlier one is void
  };
  const std::map<int, Node>& nodes() const { return nodes_; }
  /// All epochs committed, in order.
  const std::vector<Epoch>& epochs() const { return epochs_; }
  std::int64_t refused_commits() const { return refused_commits_; }
  /// The newest commit of the job, and all that an epoch began without though processes that live
  /// had them.
  std::int64_t committed() const { return committed_; }
  std::int64_t lost_commits() const { return lost_commits_; }
  /// Nodes and slots that all views and decisions have looked at since the last call, without the
  /// records of new epochs, which name every member.
  std::size_t take_looked_at() { return std::exchange(looked_at_, 0); }
  /// Broken promises, in words.
  const std::vector<std::string>& complaints() const { return complaints_; }

 private:
  struct Event {
    TimePoint at;
    std::uint64_t order;
    std::function<void()> body;
    bool operator<(const Event& other) const {
      return std::tie(other.at, other.order) < std::tie(at, order);
    }
  };
  void at(TimePoint when, std::function<void()> body);
  /// After the delay of a message, if both ends can still hear each other.
  void send(int node, std::function<void(Node&)> body);
  void by(int node, std::function<void()> body);
  Duration delay();
  void join(Node& node);
  void take_place_again(Node& node);
  void renew(Node& node);
  void watch(Node& node);
  void take(Node& node, const Update& update);
  void follow(Node& node);
  void lose_workers(Node& node);
  void end_workers(Node& node);
  std::vector<Node*> workers_of(const Epoch& epoch);
  void meet(std::int64_t epoch);
  Commit newest_of(const std::vector<const Node*>& nodes) const;
  void count_loss(const Commit& restored);
  void hold_commit(const std::vector<Node*>& members, std::int64_t epoch);
  bool fails(const std::vector<Node*>& members, std::int64_t epoch);
  void train(std::int64_t epoch);
  void tell_state(Node& node, std::int64_t epoch);
  void consider(Node& node);
  void tell(Node& node);
  TimePoint returning(const Node& node) const;
  void ask(const store::Request& request, std::function<void(store::Reply)> answer);
  void serve(store::Answers& answers);
  void check(const Epoch& epoch);
  Update understand(const store::Reply& reply) const;

  const SimNodeOptions options_;
  std::mt19937_64 random_;
  TimePoint now_{std::chrono::hours(1)};
  std::uint64_t order_ = 0;
  std::priority_queue<Event> events_;
  store::LeaseTable service_;
  store::Ticket next_ticket_ = 1;
  std::map<store::Ticket, std::function<void(store::Reply)>> asked_;
  std::map<int, store::Ticket> staying_;
  bool silent_ = false;                         // the service
  std::vector<std::function<void()>> unheard_;  // questions, and answers, of its silence
  std::map<int, Node> nodes_;
  int next_node_ = 0;
  std::vector<Epoch> epochs_;
  std::int64_t refused_commits_ = 0;
  std::int64_t committed_ = 0, lost_commits_ = 0;
  std::int64_t began_ = 0;   // the epoch in which the state was lost last
  std::int64_t met_ = 0;     // the newest epoch whose members have met
  std::int64_t failed_ = 0;  // the newest epoch whose group has failed
  std::set<std::pair<int, int>> cut_links_;
  std::size_t looked_at_ = 0;
  std::vector<std::string> complaints_;
};

}  // namespace muster::membership::testing
