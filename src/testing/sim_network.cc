// SPDX-License-Identifier: BSD-3-Clause
#include "testing/sim_network.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>

#include "core/collective/op.h"
#include "core/security/tls_session.h"
#include "core/transport/byte_stream.h"
#include "testing/sim_job.h"

namespace muster::testing {
namespace {

using transport::Connector;

constexpr Duration kJoinTimeout = std::chrono::seconds(20);  // virtual
constexpr std::size_t kSegmentBytes = std::size_t{1} << 28;

/// The network as one rank's connector sees it.
class SimConnector final : public Connector {
 public:
  SimConnector(SimJob& job, int rank) : job_(job), rank_(rank) {}

  Result<std::string> own_address(TimePoint) override { return std::string("sim"); }
  Result<std::string> meet(std::span<const std::string>, TimePoint) override {
    return std::string("sim");
  }
  Status settle(std::span<const std::string>, ConnectorEvents& events) override {
    job_.process(rank_).events = &events;
    return {};
  }
  ~SimConnector() override { job_.process(rank_).events = nullptr; }

  std::vector<int> hosts() const override { return job_.host_numbers(); }
  int cores() const override { return 2; }  // whatever this machine has
  HostRegion* region() override { return job_.region_of(rank_); }
  Mailbox& mailbox() override { return *job_.process(rank_).mailbox; }
  void connect(int peer, TimePoint) override { job_.request_stream(rank_, peer); }
  bool poll(TimePoint now) override {
    auto& news = job_.process(rank_).news;
    bool any = false;
    while (!news.empty() && news.front().first <= now && job_.process(rank_).events != nullptr) {
      auto tell = std::move(news.front().second);
      news.pop_front();
      tell();
      any = true;
    }
    return any;
  }
  int descriptor() const override { return -1; }
  TimePoint next_timer() const override {
    const auto& news = job_.process(rank_).news;
    return news.empty() ? TimePoint::max() : news.front().first;
  }

 private:
  SimJob& job_;
  int rank_;
};

class SimRankFace final : public SimRank {
 public:
  SimRankFace(SimJob& job, int rank) : job_(job), rank_(rank) {}
  int rank() const override { return rank_; }
  int world_size() const override { return job_.world_size(); }
  const Clock& clock() const override { return job_; }
  void compute(Duration duration) override {
    const TimePoint until = job_.now() + duration;
    while (job_.now() < until) job_.idle(rank_, until);
  }
  std::shared_ptr<store::Store> store() override {
    if (!store_) store_ = make_sim_store(job_, rank_, kJoinTimeout);
    return store_;
  }
  Result<std::shared_ptr<transport::Fabric>> join() override {
    transport::FabricOptions options;
    options.rank = rank_;
    options.world_size = world_size();
    options.clock = &job_;
    options.heartbeat_limit = job_.options().heartbeat_limit;
    options.threads = false;
    options.idle = [this](TimePoint until) { job_.idle(rank_, until); };
    options.rules = &collective::fingerprint_rules();
    options.timeout = kJoinTimeout;
    auto fabric = transport::Fabric::create(
        options, std::make_unique<SimConnector>(job_, rank_),
        transport::exchange_over(store(), "fabric", rank_, world_size(),
                                 deadline_after(steady_clock(), kJoinTimeout)));
    if (!fabric) return fabric.status();
    return std::shared_ptr<transport::Fabric>(std::move(*fabric));
  }

 private:
  SimJob& job_;
  int rank_;
  std::shared_ptr<store::Store> store_;
};

}  // namespace

// ---- the job

SimJob::SimJob(const SimOptions& options)
    : options_(options),
      random_(options.seed),
      processes_(options.hosts.size() + 1),
      server_({.secret = secret(), .job = "simulated"}),
      serving_(options.hosts.size()) {
  const std::size_t n = options_.hosts.size();
  pipes_.assign(n + 1, std::vector<std::shared_ptr<Pipe>>(n + 1));
  regions_.resize(n);
  std::map<int, shm::RegionShape> shapes;
  for (std::size_t r = 0; r < n; ++r)
    shapes[options_.hosts[r]].ranks.push_back(static_cast<int>(r));
  for (auto& [host, shape] : shapes) {
    shape.segment_bytes = kSegmentBytes;
    shape.ring_bytes = 4096;
    const std::size_t bytes = shm::region_bytes(shape);
    void* raw = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) std::abort();
    memory_[host] = std::shared_ptr<void>(raw, [bytes](void* memory) { munmap(memory, bytes); });
    shm::lay_out_region(static_cast<std::byte*>(raw), shape);
    for (std::size_t local = 0; local < shape.ranks.size(); ++local) {
      auto view = shm::open_region(static_cast<std::byte*>(raw), shape, static_cast<int>(local),
                                   memory_[host]);
      if (!view) std::abort();
      const auto rank = static_cast<std::size_t>(shape.ranks[local]);
      regions_[rank] = std::move(*view);
      processes_[rank].mailbox = &regions_[rank]->mailbox(static_cast<int>(local));
    }
  }
}

Duration SimJob::delay() {
  const auto span = static_cast<std::uint64_t>((options_.max_delay - options_.min_delay).count());
  // Mostly quick, now and then slow: one in eight draws from the whole span.
  return options_.min_delay +
         Duration(static_cast<std::int64_t>(draw(8) == 0 ? draw(span + 1) : draw(span / 20 + 1)));
}

bool SimJob::partitioned(int a, int b) const {
  const int x = host_of(a);
  const int y = host_of(b);
  return std::any_of(cuts_.begin(), cuts_.end(), [&](const auto& cut) {
    return cut == std::pair(x, y) || cut == std::pair(y, x);
  });
}

HostRegion* SimJob::region_of(int rank) {
  const bool alone = std::count(options_.hosts.begin(), options_.hosts.end(),
                                options_.hosts[static_cast<std::size_t>(rank)]) == 1;
  return options_.regions && !alone ? regions_[static_cast<std::size_t>(rank)].get() : nullptr;
}

std::vector<int> SimJob::host_numbers() const {
  std::map<int, int> numbers;
  std::vector<int> out;
  for (const int host : options_.hosts)
    out.push_back(numbers.try_emplace(host, static_cast<int>(numbers.size())).first->second);
  return out;
}

void SimJob::tell(int rank, Duration after, std::function<void()> news) {
  auto& queue = process(rank).news;
  TimePoint at = now_ + after;
  if (!queue.empty()) at = std::max(at, queue.back().first);
  queue.emplace_back(at, std::move(news));
}

std::unique_ptr<ByteStream> SimJob::stream_between(int from, int to) {
  auto pipe = [&](int a, int b) -> std::shared_ptr<Pipe>& {
    auto& slot = pipes_[static_cast<std::size_t>(a)][static_cast<std::size_t>(b)];
    if (!slot) {
      slot = std::make_shared<Pipe>();
      slot->from = a;
      slot->to = b;
    }
    return slot;
  };
  return std::make_unique<SimStream>(*this, pipe(from, to), pipe(to, from));
}

/// As those of real ranks on two hosts, once they have shaken hands.
std::array<std::unique_ptr<ByteStream>, 2> SimJob::encrypted_streams(int from, int to) {
  const auto session = [](TlsSession::Side side, int rank) {
    return TlsSession(side, {.role = Handshake::Role::link, .rank = rank, .job = "sim"}, secret());
  };
  TlsSession connector = session(TlsSession::Side::connector, from),
             acceptor = session(TlsSession::Side::acceptor, to);
  while (!connector.done() || !acceptor.done()) {
    acceptor.feed(as_bytes(connector.take_output()));
    connector.feed(as_bytes(acceptor.take_output()));
  }
  return {transport::make_tls_stream(stream_between(from, to), std::move(connector)),
          transport::make_tls_stream(stream_between(to, from), std::move(acceptor))};
}

void SimJob::request_stream(int from, int to) {
  auto& opened = pipes_[static_cast<std::size_t>(from)][static_cast<std::size_t>(to)];
  if (opened && !opened->ended && !process(to).killed)
    return;  // the other side asked at the same time: its answer is under way
  if (process(to).killed ||
      (process(to).started && process(to).fiber && process(to).fiber->done())) {
    tell(from, delay(), [this, from, to] {
      process(from).events->on_connect_failed(
          to, Status(Code::network,
                     "rank " + std::to_string(to) + " refused the simulated connection"));
    });
    return;
  }
  if (partitioned(from, to)) return;  // never answered; heartbeats and deadlines must do
  const bool encrypted = options_.encrypted && host_of(from) != host_of(to);
  auto streams = encrypted ? encrypted_streams(from, to)
                           : std::array{stream_between(from, to), stream_between(to, from)};
  for (const auto& [mine, theirs, made] :
       {std::tuple(from, to, &streams[0]), std::tuple(to, from, &streams[1])}) {
    auto stream = std::make_shared<std::unique_ptr<ByteStream>>(std::move(*made));
    tell(mine, delay(), [this, mine = mine, theirs = theirs, stream] {
      process(mine).events->on_stream(theirs, std::move(*stream));
    });
  }
}

void SimJob::kill(int rank) {
  Process& dead = process(rank);
  if (dead.killed) return;
  dead.killed = true;
  note(static_cast<std::uint64_t>(rank) + 0x1000);
  for (int peer = 0; peer <= store_place(); ++peer) {
    for (auto* pipe : {&pipes_[static_cast<std::size_t>(rank)][static_cast<std::size_t>(peer)],
                       &pipes_[static_cast<std::size_t>(peer)][static_cast<std::size_t>(rank)]}) {
      if (!*pipe || (*pipe)->ended) continue;
      (*pipe)->ended = true;
      (*pipe)->end_arrives = std::max((*pipe)->last_arrival, now_ + delay());
    }
    if (peer != rank && peer != store_place() && host_of(peer) == host_of(rank) &&
        !process(peer).killed) {
      tell(peer, delay(), [this, peer, rank] {
        process(peer).events->on_death(
            rank, Status(Code::peer_failed,
                         "rank " + std::to_string(rank) + " was killed by the simulator", {rank}));
      });
    }
  }
}

void SimJob::strike(const SimFault& fault) {
  switch (fault.kind) {
    case SimFault::Kind::kill: kill(fault.rank); break;
    case SimFault::Kind::stop: process(fault.rank).stopped = true; break;
    case SimFault::Kind::partition:
      cuts_.emplace_back(options_.hosts[static_cast<std::size_t>(fault.rank)],
                         options_.hosts[static_cast<std::size_t>(fault.other)]);
      for (auto& row : pipes_) {
        for (auto& pipe : row) {
          if (pipe && partitioned(pipe->from, pipe->to)) {
            pipe->cut = true;
            pipe->parcels.clear();
          }
        }
      }
      break;
  }
}

void SimJob::idle(int rank, TimePoint until) {
  Process& self = process(rank);
  self.wakes = std::max(until, now_ + std::chrono::nanoseconds(1));
  self.seen_word = self.mailbox->word.load();
  self.idle_since = now_;
  Fiber::yield();
}

bool SimJob::runnable(int rank) {
  Process& p = process(rank);
  if (p.stopped || p.killed || p.fiber->done()) return false;
  return !p.started || next_event(rank) <= now_;
}

TimePoint SimJob::next_arrival(int place, TimePoint after) const {
  TimePoint next = TimePoint::max();
  for (const auto& row : pipes_) {
    const auto& pipe = row[static_cast<std::size_t>(place)];
    if (!pipe || pipe->cut) continue;
    const auto parcel = std::find_if(pipe->parcels.begin(), pipe->parcels.end(),
                                     [after](const auto& one) { return one.arrives > after; });
    if (parcel != pipe->parcels.end()) {
      next = std::min(next, parcel->arrives);
    } else if (pipe->ended && pipe->end_arrives > after) {
      next = std::min(next, pipe->end_arrives);
    }
  }
  return next;
}

TimePoint SimJob::next_event(int rank) {
  Process& p = process(rank);
  if (p.mailbox->word.load() != p.seen_word) return now_;
  const TimePoint next = std::min(p.wakes, next_arrival(rank, p.idle_since));
  const auto news = std::find_if(p.news.begin(), p.news.end(),
                                 [&p](const auto& one) { return one.first > p.idle_since; });
  return news == p.news.end() ? next : std::min(next, news->first);
}

SimReport SimJob::run(const std::function<Status(SimRank&)>& body) {
  const int n = world_size();
  for (int r = 0; r < n; ++r) {
    Process& p = process(r);
    p.mailbox->sleepers.fetch_add(1);  // so that every wake-up shows in the word
    p.face = std::make_unique<SimRankFace>(*this, r);
    p.fiber = std::make_unique<Fiber>([this, r, &body] {
      process(r).outcome.status = body(*process(r).face);
      process(r).outcome.end = SimOutcome::End::finished;
    });
  }
  auto faults = options_.faults;
  std::sort(faults.begin(), faults.end(),
            [](const SimFault& a, const SimFault& b) { return a.at < b.at; });
  std::size_t struck = 0;
  const TimePoint limit = start_ + options_.limit;
  for (;;) {
    while (struck < faults.size() && faults[struck].at <= now_) strike(faults[struck++]);
    serve_store();
    std::vector<int> ready;
    bool live = false;
    TimePoint next =
        std::min(store_event(), struck < faults.size() ? faults[struck].at : TimePoint::max());
    for (int r = 0; r < n; ++r) {
      Process& p = process(r);
      if (p.stopped || p.killed || p.fiber->done()) continue;
      live = true;
      if (runnable(r))
        ready.push_back(r);
      else
        next = std::min(next, next_event(r));
    }
    if (!live || now_ > limit) break;
    if (ready.empty()) {
      now_ = std::min(std::max(next, now_ + std::chrono::nanoseconds(1)),
                      limit + std::chrono::nanoseconds(1));
      continue;
    }
    const int chosen = ready[draw(ready.size())];
    note(static_cast<std::uint64_t>(chosen));
    ++switches_;
    process(chosen).started = true;
    process(chosen).fiber->resume();
    if (draw(4) == 0)
      now_ += Duration(static_cast<std::int64_t>(draw(2000)));  // computing takes time
  }
  SimReport report;
  for (int r = 0; r < n; ++r) {
    Process& p = process(r);
    SimOutcome outcome = p.outcome;
    if (p.killed)
      outcome.end = SimOutcome::End::killed;
    else if (p.stopped)
      outcome.end = SimOutcome::End::stopped;
    else if (!p.fiber->done())
      outcome.end = SimOutcome::End::hung;
    report.ranks.push_back(std::move(outcome));
  }
  report.elapsed = now_ - start_;
  report.switches = switches_;
  report.digest = digest_;
  return report;
}

std::string describe_options(const SimOptions& options) {
  std::string text = "seed " + std::to_string(options.seed) + ", hosts ";
  for (const int host : options.hosts) text += std::to_string(host);
  text += options.regions ? ", regions" : ", no regions";
  if (options.encrypted) text += ", encrypted";
  for (const SimFault& fault : options.faults) {
    const char* kinds[] = {"kill", "stop", "partition"};
    text +=
        std::string(", ") + kinds[static_cast<int>(fault.kind)] + " " + std::to_string(fault.rank) +
        (fault.kind == SimFault::Kind::partition ? " from " + std::to_string(fault.other) : "") +
        " at " + describe(fault.at - TimePoint(std::chrono::seconds(1)));
  }
  return text;
}

SimReport run_sim_job(const SimOptions& options, const std::function<Status(SimRank&)>& body) {
  auto job = std::make_unique<SimJob>(options);
  SimReport report = job->run(body);
  const bool whole = std::all_of(
      report.ranks.begin(), report.ranks.end(),
      [](const SimOutcome& outcome) { return outcome.end == SimOutcome::End::finished; });
  if (!whole) static_cast<void>(job.release());  // what was abandoned points into it
  return report;
}

}  // namespace muster::testing
