// SPDX-License-Identifier: BSD-3-Clause
#include "core/transport/fabric.h"

#include "core/transport/engine/engine.h"

namespace muster::transport {
namespace {

class EngineFabric final : public Fabric {
 public:
  explicit EngineFabric(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) {}
  ~EngineFabric() override { engine_->shut_down(); }

  Status start() { return engine_->start(*this); }

  int rank() const override { return engine_->context().rank(); }
  int world_size() const override { return engine_->context().world_size(); }
  const Clock& clock() const override { return *engine_->context().options.clock; }
  std::span<const int> hosts() const override { return engine_->context().hosts; }
  int cores() const override { return engine_->connector().cores(); }
  std::uint64_t refusals() const override { return engine_->connector().refusals(); }
  std::map<int, LinkFigures> link_figures() const override { return engine_->link_figures(); }
  shm::HostRegion* region() override { return engine_->connector().region(); }
  Channel& bootstrap() override { return engine_->channels().bootstrap(); }
  Channel& agreements() override { return engine_->channels().agreements(); }
  Result<std::shared_ptr<Channel>> open(std::uint32_t id, std::vector<int> members) override {
    return engine_->open(engine_, id, std::move(members));
  }
  std::uint32_t next_channel_id() const override { return engine_->next_channel_id(); }
  bool threads() const override { return engine_->context().options.threads; }
  bool poll() override {
    flush_batch();
    return engine_->loop().poll(false);
  }
  bool spin_for_peer(int rank) override {
    flush_batch();
    return engine_->waiting().spin_for_peer(rank);
  }
  void poll_peer(int rank) override { engine_->loop().poll_peer(rank); }
  bool wait(const std::function<bool()>& done, TimePoint deadline) override {
    return engine_->waiting().wait(done, deadline);
  }
  void wake() override { engine_->connector().mailbox().wake(); }
  void leave() override { engine_->shut_down(); }
  void leave_unclosed(const std::string& after) override { engine_->leave_unclosed(after); }
  void fail_rank(const std::string& why, const std::vector<int>& earlier) override {
    engine_->fail_rank(why, earlier);
  }
  Status death_of(int rank) const override { return engine_->death_of(rank); }
  Status gone(int rank) const override { return engine_->why_gone(rank); }
  void declare_dead(int rank, Status evidence) override { engine_->declare_dead(rank, evidence); }
  Traffic traffic() const override { return engine_->traffic(); }
  void suspend_heartbeats(bool on) override { engine_->suspend_heartbeats(on); }

 private:
  void write_batches() override { engine_->write_batches(); }
  void flush_batch() {
    if (SendBatch* const batch = SendBatch::of(*this)) batch->flush();
  }

  // Channels that their users still hold keep it alive; all of them have failed by then.
  std::shared_ptr<Engine> engine_;
};

Status check(const FabricOptions& options, const Connector* connector) {
  if (options.world_size < 1 || options.rank < 0 || options.rank >= options.world_size) {
    return Status(Code::invalid_argument, "rank " + std::to_string(options.rank) +
                                              " is not one of a job of " +
                                              std::to_string(options.world_size) + " ranks");
  }
  if (connector == nullptr || options.clock == nullptr)
    return Status(Code::invalid_argument, "a fabric needs a connector and a clock");
  return {};
}

}  // namespace

Result<std::unique_ptr<Fabric>> Fabric::create(const FabricOptions& options,
                                               std::unique_ptr<Connector> connector,
                                               const Exchange& exchange) {
  if (Status status = check(options, connector.get()); !status) return status;
  auto engine = std::make_shared<Engine>(options, std::move(connector));
  if (Status status = engine->meet(exchange); !status) return status;
  auto fabric = std::make_unique<EngineFabric>(std::move(engine));
  if (Status status = fabric->start(); !status) return status;
  return std::unique_ptr<Fabric>(std::move(fabric));
}

Exchange exchange_over(std::shared_ptr<store::Store> store, std::string prefix, int rank,
                       int world_size, TimePoint deadline) {
  return [=](const std::string& round, const std::string& mine) {
    return store->all_gather(prefix + "/" + round, rank, world_size, mine,
                             time_left(steady_clock(), deadline));
  };
}

}  // namespace muster::transport
