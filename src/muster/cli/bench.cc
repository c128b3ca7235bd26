#include "muster/cli/bench.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <optional>

#include "muster/collective/communicator.h"
#include "muster/launch/spawn.h"
#include "muster/store/factory.h"
#include "muster/transport/arena.h"
#include "muster/transport/factory.h"

namespace muster::cli {
namespace {

using collective::Args;
using collective::Communicator;
using collective::Op;

struct BenchOptions {
  std::vector<std::string> ops{"all_reduce"};
  std::vector<std::uint64_t> sizes{8, 1024, 65536, 1048576, 16777216};
  std::vector<int> ranks{2};
  std::string transport = "shm";
  std::string memory = "private";
  double seconds = 0.3;
  std::string json;
};

struct Row {
  std::string op;
  int ranks = 0;
  std::uint64_t bytes = 0;
  double loop_us = 0;  // back to back, every rank rewrites its buffer before each call
  double p50_us = 0;   // one call after a barrier, from the last rank's start to the last rank's end
  double min_us = 0;
  double p99_us = 0;
  std::size_t iterations = 0;
};

std::optional<Op> op_named(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(Op::barrier); ++i) {
    if (collective::info(static_cast<Op>(i)).name == name) return static_cast<Op>(i);
  }
  return std::nullopt;
}

/// One rank's side of all measurements of one rank count.
class Bench {
 public:
  Bench(const BenchOptions& options, std::shared_ptr<Communicator> group) : options_(options), group_(std::move(group)) {}

  Status run(std::vector<Row>& rows) {
    for (const std::string& name : options_.ops) {
      const std::vector<std::uint64_t> sizes = name == "barrier" ? std::vector<std::uint64_t>{0} : options_.sizes;
      for (const std::uint64_t bytes : sizes) {
        auto row = measure(*op_named(name), bytes);
        if (!row) return row.status().with_context(name + " of " + std::to_string(bytes) + " bytes");
        rows.push_back(*row);
      }
    }
    return {};
  }

 private:
  static TimePoint limit() { return deadline_after(steady_clock(), std::chrono::minutes(2)); }

  Result<std::byte*> buffer(std::size_t bytes, std::vector<std::byte>& owned) {
    if (options_.memory == "arena") {
      auto arena = transport::Arena::of_process();
      if (!arena) return arena.status();
      return (*arena)->allocate(bytes);
    }
    owned.resize(bytes);
    return owned.data();
  }

  /// `bytes` is what each rank contributes to a reduction or receives in all from the others, as the MPI benchmarks count.
  Result<Row> measure(Op op, std::uint64_t bytes) {
    const auto n = static_cast<std::size_t>(group_->size());
    const std::size_t slice = bytes / n / 4 * 4;
    const bool lists_in = collective::info(op).lists_input;
    const bool lists_out = collective::info(op).lists_output;
    std::vector<std::byte> own_in;
    std::vector<std::byte> own_out;
    auto in = buffer(bytes + 64, own_in);
    if (!in) return in.status();
    auto out = buffer(bytes + 64, own_out);
    if (!out) return out.status();
    Args args;
    args.op = op;
    args.dtype = DType::float32;
    args.root = collective::info(op).rooted ? 0 : -1;
    const bool root = args.root < 0 || group_->rank() == 0;
    if (op != Op::barrier) {
      if (op != Op::broadcast && !lists_in) args.inputs = {ConstBytes(*in, lists_out ? slice : bytes)};
      for (std::size_t r = 0; lists_in && r < n && (op != Op::scatter || root); ++r) args.inputs.emplace_back(*in + r * slice, slice);
      if (!lists_out && (op != Op::reduce || root)) args.outputs = {MutableBytes(*out, lists_in ? slice : bytes)};
      for (std::size_t r = 0; lists_out && r < n && (op != Op::gather || root); ++r) args.outputs.emplace_back(*out + r * slice, slice);
      if (op == Op::all_reduce) args.outputs = {MutableBytes(*in, bytes)};  // in place, as torch does it
    }
    const auto rewrite = [&] { std::memset(*in, 1, bytes); };
    Row row;
    row.op = std::string(collective::info(op).name);
    row.ranks = static_cast<int>(n);
    row.bytes = bytes;
    const Status status = time_calls(args, rewrite, row);
    if (options_.memory == "arena") {
      auto arena = transport::Arena::of_process();
      (*arena)->free(*in);
      (*arena)->free(*out);
    }
    if (!status) return status;
    return row;
  }

  template <class Rewrite>
  Result<double> loop(const Args& args, const Rewrite& rewrite, std::size_t times) {
    if (const Status met = group_->run(Args{}, limit()); !met) return met;
    const TimePoint start = steady_clock().now();
    for (std::size_t i = 0; i < times; ++i) {
      rewrite();
      if (const Status done = group_->run(args, limit()); !done) return done;
    }
    return std::chrono::duration<double, std::micro>(steady_clock().now() - start).count() / static_cast<double>(times);
  }

  template <class Rewrite>
  Status time_calls(const Args& args, const Rewrite& rewrite, Row& row) {
    auto warm = loop(args, rewrite, 3);
    if (warm) warm = loop(args, rewrite, 20);
    if (!warm) return warm.status();
    std::int64_t times =
        std::clamp<std::int64_t>(static_cast<std::int64_t>(options_.seconds * 1e6 / 11 / std::max(*warm, 0.05)), 3, 200000);
    if (const Status agreed = share(times); !agreed) return agreed;
    std::vector<double> loops;
    for (int i = 0; i < 11; ++i) {
      auto took = loop(args, rewrite, static_cast<std::size_t>(times));
      if (!took) return took.status();
      loops.push_back(*took);
    }
    std::sort(loops.begin(), loops.end());
    row.loop_us = loops[loops.size() / 2];
    const std::size_t single = std::clamp<std::size_t>(static_cast<std::size_t>(times), 11, 2000);
    row.iterations = static_cast<std::size_t>(times) * 11 + single;
    return time_single(args, rewrite, single, row);
  }

  template <class Rewrite>
  Status time_single(const Args& args, const Rewrite& rewrite, std::size_t times, Row& row) {
    std::vector<std::int64_t> stamps(2 * times);
    for (std::size_t i = 0; i < times; ++i) {
      rewrite();
      if (const Status met = group_->run(Args{}, limit()); !met) return met;
      stamps[2 * i] = steady_clock().now().time_since_epoch().count();
      if (const Status done = group_->run(args, limit()); !done) return done;
      stamps[2 * i + 1] = steady_clock().now().time_since_epoch().count();
    }
    Args latest;  // the last start and the last end of every iteration
    latest.op = Op::all_reduce;
    latest.dtype = DType::int64;
    latest.reduce = collective::Reduce::max;
    latest.inputs = {std::as_bytes(std::span(std::as_const(stamps)))};
    latest.outputs = {std::as_writable_bytes(std::span(stamps))};
    if (const Status done = group_->run(latest, limit()); !done) return done;
    std::vector<double> spans(times);
    for (std::size_t i = 0; i < times; ++i) spans[i] = static_cast<double>(stamps[2 * i + 1] - stamps[2 * i]) / 1000;
    std::sort(spans.begin(), spans.end());
    row.min_us = spans.front();
    row.p50_us = spans[times / 2];
    row.p99_us = spans[times * 99 / 100];
    return {};
  }

  Status share(std::int64_t& value) {
    Args args;
    args.op = Op::broadcast;
    args.dtype = DType::int64;
    args.root = 0;
    args.outputs = {std::as_writable_bytes(std::span(&value, 1))};
    return group_->run(args, limit());
  }

  const BenchOptions& options_;
  std::shared_ptr<Communicator> group_;
};

Result<std::shared_ptr<Communicator>> join(const BenchOptions& options, int rank, int ranks, const std::string& secret,
                                           const std::string& path) {
  const Duration timeout = std::chrono::seconds(30);
  auto store = store::make_file_store(path, ranks, timeout);
  if (!store) return store.status();
  transport::ConnectorOptions connector;
  connector.rank = rank;
  connector.world_size = ranks;
  connector.job = "muster bench";
  connector.shared_memory = options.transport != "tcp";
  transport::FabricOptions fabric_options;
  fabric_options.rank = rank;
  fabric_options.world_size = ranks;
  fabric_options.timeout = timeout;
  fabric_options.rules = &collective::fingerprint_rules();
  auto fabric = transport::Fabric::create(fabric_options, transport::make_socket_connector(connector, Secret::given(secret)),
                                          transport::exchange_over(*store, "bench", rank, ranks, deadline_after(steady_clock(), timeout)));
  if (!fabric) return fabric.status();
  std::vector<int> members(static_cast<std::size_t>(ranks));
  std::iota(members.begin(), members.end(), 0);
  return Communicator::create(std::move(*fabric), members, {});
}

void print(const std::vector<Row>& rows) {
  for (const Row& row : rows) {
    std::printf("%-15s %5d %10llu %12.2f %12.2f %12.2f %12.2f\n", row.op.c_str(), row.ranks, static_cast<unsigned long long>(row.bytes),
                row.loop_us, row.p50_us, row.min_us, row.p99_us);
  }
  std::fflush(stdout);
}

void append_json(const BenchOptions& options, const std::vector<Row>& rows) {
  std::ofstream file(options.json, std::ios::app);
  for (const Row& row : rows) {
    file << "{\"library\":\"muster\",\"op\":\"" << row.op << "\",\"ranks\":" << row.ranks << ",\"bytes\":" << row.bytes
         << ",\"dtype\":\"float32\",\"memory\":\"" << options.memory << "\",\"transport\":\"" << options.transport
         << "\",\"loop_us\":" << row.loop_us << ",\"p50_us\":" << row.p50_us << ",\"min_us\":" << row.min_us << ",\"p99_us\":" << row.p99_us
         << ",\"iterations\":" << row.iterations << "}\n";
  }
}

Status bench_ranks(const BenchOptions& options, int ranks) {
  char folder[] = "/tmp/muster-bench-XXXXXX";
  if (::mkdtemp(folder) == nullptr) return Status(Code::exhausted, "no folder could be made in /tmp for the benchmark's store");
  const std::string secret = Secret::random_text();
  const Status status = launch::spawn_processes(ranks, [&](int rank) -> Status {
    auto group = join(options, rank, ranks, secret, std::string(folder) + "/store");
    if (!group) return group.status();
    std::vector<Row> rows;
    if (const Status done = Bench(options, *group).run(rows); !done) return done;
    if (rank == 0) print(rows);
    if (rank == 0 && !options.json.empty()) append_json(options, rows);
    return (*group)->close(deadline_after(steady_clock(), std::chrono::seconds(30)));
  });
  std::filesystem::remove_all(folder);
  return status;
}

}  // namespace

int run_bench(const std::vector<std::string>& arguments) {
  BenchOptions options;
  CLI::App app(
      "Times muster's collectives between processes of this machine. Every rank rewrites its buffer before each call.\n"
      "loop: back to back, rewrite included, median of 11 loops. p50: one call after a barrier, from the last rank's\n"
      "start to the last rank's end. Microseconds; float32.",
      "muster bench");
  std::vector<std::string> known;
  for (int i = 0; i <= static_cast<int>(Op::barrier); ++i) known.emplace_back(collective::info(static_cast<Op>(i)).name);
  app.add_option("--op", options.ops, "operations, comma separated")->delimiter(',')->check(CLI::IsMember(known))->capture_default_str();
  app.add_option("--sizes", options.sizes, "bytes, comma separated; 64KiB and 1MiB are understood")
      ->delimiter(',')
      ->transform(CLI::AsSizeValue(false))
      ->capture_default_str();
  app.add_option("--ranks", options.ranks, "numbers of processes, comma separated")
      ->delimiter(',')
      ->check(CLI::Range(1, 128))
      ->capture_default_str();
  app.add_option("--transport", options.transport, "shm or tcp")->check(CLI::IsMember({"shm", "tcp"}))->capture_default_str();
  app.add_option("--memory", options.memory, "private or arena (shared between local ranks)")
      ->check(CLI::IsMember({"private", "arena"}))
      ->capture_default_str();
  app.add_option("--seconds", options.seconds, "time of the loops of one row")->check(CLI::Range(0.01, 60.0))->capture_default_str();
  app.add_option("--json", options.json, "also append the rows to this file, one JSON object a line");
  try {
    std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());
    app.parse(std::move(reversed));
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  std::printf("%-15s %5s %10s %12s %12s %12s %12s   (%s, %s memory)\n", "operation", "ranks", "bytes", "loop us", "p50 us", "min us",
              "p99 us", options.transport.c_str(), options.memory.c_str());
  std::fflush(stdout);
  for (const int ranks : options.ranks) {
    if (const Status status = bench_ranks(options, ranks); !status) {
      std::fprintf(stderr, "muster bench: %s\n", status.message().c_str());
      return 1;
    }
  }
  return 0;
}

}  // namespace muster::cli
