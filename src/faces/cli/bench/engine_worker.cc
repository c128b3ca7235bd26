// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/commands.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <numeric>
#include <optional>

#include "core/base/threads/thread_start.h"
#include "core/collective/communicator.h"
#include "core/collective/select/selection.h"
#include "core/shm/arena/arena.h"
#include "core/store/factory.h"
#include "core/transport/factory.h"
#include "faces/cli/bench/measurement.h"
#include "faces/cli/parse.h"
#include "jobs/launch/spawn.h"

namespace muster::cli {
namespace {

using bench::Cell;

using collective::Args;
using collective::Communicator;
using collective::Op;

std::optional<DType> dtype_named(const std::string& name) {
  for (int i = 0; i < kDTypes; ++i) {
    if (name_of(static_cast<DType>(i)) == name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

/// Memory of one side of a call, private or in the arena.
class Buffer {
 public:
  Buffer() = default;
  ~Buffer() { release(); }
  Buffer(const Buffer&) = delete;

  Status resize(std::size_t bytes, bool arena) {
    release();
    if (!arena) {
      own_.assign(bytes, std::byte{0});
      data_ = own_.data();
      return {};
    }
    auto heap = shm::Arena::of_process();
    if (!heap) return heap.status();
    auto taken = (*heap)->allocate(bytes);
    if (!taken) return taken.status();
    arena_ = *heap;
    data_ = *taken;
    return {};
  }
  std::byte* data() const { return data_; }

 private:
  void release() {
    if (arena_ != nullptr) arena_->free(data_);
    arena_ = nullptr;
    own_ = {};
  }
  std::vector<std::byte> own_;
  shm::Arena* arena_ = nullptr;
  std::byte* data_ = nullptr;
};

class EngineRank final : public bench::TimedRank {
 public:
  explicit EngineRank(std::shared_ptr<Communicator> group) : group_(std::move(group)) {}
  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }

  Status prepare(const Cell& cell) override {
    const auto op = collective::op_named(cell.op);
    const auto dtype = dtype_named(cell.dtype);
    if (!op || !dtype)
      return Status(Code::unsupported, "the engine has no " + cell.op + " of " + cell.dtype);
    const auto& row = collective::info(*op);
    const std::size_t width = size_of(*dtype), n = static_cast<std::size_t>(size());
    const std::size_t slice = cell.bytes / n / width * width, bytes = cell.bytes / width * width;
    for (Buffer* side : {&input_, &output_}) {
      if (Status made = side->resize(bytes + 64, cell.memory != "private"); !made) return made;
    }
    args_ = Args();
    args_.op = *op;
    args_.dtype = *dtype;
    args_.root = row.rooted ? 0 : -1;
    const bool root = !row.rooted || rank() == 0;
    written_ = {input_.data(), bytes};
    if (*op == Op::barrier) return {};
    for (std::size_t r = 0; row.lists_input && root && r < n; ++r)
      args_.inputs.emplace_back(input_.data() + r * slice, slice);
    for (std::size_t r = 0; row.lists_output && root && r < n; ++r)
      args_.outputs.emplace_back(output_.data() + r * slice, slice);
    const std::size_t in = row.lists_output ? slice : bytes, out = row.lists_input ? slice : bytes;
    if (!row.lists_input && *op != Op::broadcast) args_.inputs = {ConstBytes(input_.data(), in)};
    if (!row.lists_output && (*op != Op::reduce || root))
      args_.outputs = {MutableBytes(output_.data(), out)};
    // In place, as torch does it.
    if (*op == Op::all_reduce || *op == Op::broadcast)
      args_.outputs = {MutableBytes(input_.data(), bytes)};
    return {};
  }
  MutableBytes written() override { return written_; }
  Status call() override { return group_->run(args_, limit()); }

  Status barrier() override { return group_->run(Args{}, limit()); }
  Status share(std::int64_t& value) override {
    Args args;
    args.op = Op::broadcast;
    args.dtype = DType::int64;
    args.root = 0;
    args.outputs = {std::as_writable_bytes(std::span(&value, 1))};
    return group_->run(args, limit());
  }
  Status latest(std::span<std::int64_t> values) override {
    Args args;
    args.op = Op::all_reduce;
    args.dtype = DType::int64;
    args.reduce = collective::Reduce::max;
    args.inputs = {std::as_bytes(values)};
    args.outputs = {std::as_writable_bytes(values)};
    return group_->run(args, limit());
  }

 private:
  static TimePoint limit() { return deadline_after(steady_clock(), std::chrono::minutes(2)); }

  std::shared_ptr<Communicator> group_;
  Buffer input_, output_;
  Args args_;
  MutableBytes written_;
};

struct WorkerOptions {
  std::string folder, transport = "shm", secret;
  int ranks = 2;
  bool threads = false;
};

Status serve_rank(const WorkerOptions& options, int rank) {
  const Duration timeout = std::chrono::minutes(1);
  auto store = store::make_file_store(options.folder + "/store", options.ranks, timeout);
  if (!store) return store.status();
  transport::ConnectorOptions connector;
  connector.rank = rank;
  connector.world_size = options.ranks;
  connector.job = "muster bench";
  connector.shared_memory = options.transport != "tcp";
  transport::FabricOptions fabric_options;
  fabric_options.rank = rank;
  fabric_options.world_size = options.ranks;
  fabric_options.timeout = timeout;
  fabric_options.rules = &collective::fingerprint_rules();
  const TimePoint deadline = deadline_after(steady_clock(), timeout);
  auto fabric = transport::Fabric::create(
      fabric_options, transport::make_socket_connector(connector, Secret::given(options.secret)),
      transport::exchange_over(*store, "bench", rank, options.ranks, deadline));
  if (!fabric) return fabric.status();
  std::vector<int> members(static_cast<std::size_t>(options.ranks));
  std::iota(members.begin(), members.end(), 0);
  auto group = Communicator::create(std::move(*fabric), members, {});
  if (!group) return group.status();
  EngineRank subject(*group);
  if (Status served = bench::serve(subject, options.folder); !served) return served;
  return (*group)->close(deadline_after(steady_clock(), timeout));
}

int serve_ranks(WorkerOptions options) {
  options.secret = Secret::random_text();
  const auto body = [&](int rank) { return serve_rank(options, rank); };
  const Status status = options.threads ? spawn_threads(options.ranks, body)
                                        : launch::spawn_processes(options.ranks, body);
  if (!status) std::fprintf(stderr, "muster bench-worker: %s\n", status.message().c_str());
  return status ? 0 : 1;
}

}  // namespace

Command bench_worker_command() {
  auto options = std::make_shared<WorkerOptions>();
  auto app = make_app("muster bench-worker", "The ranks that muster bench measures.");
  app->add_option("--folder", options->folder)->required();
  app->add_option("--ranks", options->ranks)->required();
  app->add_option("--transport", options->transport);
  app->add_flag("--threads", options->threads);
  return make_command(app, [options] { return serve_ranks(*options); });
}

}  // namespace muster::cli
