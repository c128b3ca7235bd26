// SPDX-License-Identifier: BSD-3-Clause
// The ranks that `muster bench` measures: calls of muster::all_reduce(tensor) and its like, with
// the recorder, the check of calls and the deadline that every program has.

#include <ATen/Parallel.h>
#include <torch/types.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <iostream>
#include <string>

#include "faces/cli/bench/measurement.h"
#include "muster/distributed.h"

namespace {

using muster::Code;
using muster::Status;
using muster::cli::bench::Cell;

struct Options {
  int ranks = 2;
  int rank = -1;  // the only one of them that runs here; -1: all of them do
  bool threads = false;
  std::string folder, transport = "shm";
  std::string init_method;  // default: a file in the folder
  std::chrono::seconds timeout = std::chrono::minutes(2);
};

/// The exception of a call as a Status.
template <class Call>
Status caught(const Call& call) {
  try {
    call();
    return {};
  } catch (const muster::DistError& error) {
    return Status(error.code(), error.what(), error.ranks());
  } catch (const std::exception& error) {
    return Status(Code::internal, error.what());
  }
}

at::ScalarType dtype_named(const std::string& name) {
  static const std::pair<const char*, at::ScalarType> kNames[] = {
      {"float32", at::kFloat},
      {"float64", at::kDouble},
      {"float16", at::kHalf},
      {"bfloat16", at::kBFloat16},
      {"uint8", at::kByte},
      {"int8", at::kChar},
      {"int16", at::kShort},
      {"int32", at::kInt},
      {"int64", at::kLong},
      {"bool", at::kBool},
      {"complex64", at::kComplexFloat},
      {"complex128", at::kComplexDouble}};
  for (const auto& [known, dtype] : kNames) {
    if (name == known) return dtype;
  }
  return at::ScalarType::Undefined;
}

class TensorRank final : public muster::cli::bench::TimedRank {
 public:
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Status prepare(const Cell& cell) override {
    const auto dtype = dtype_named(cell.dtype);
    if (dtype == at::ScalarType::Undefined)
      return Status(Code::unsupported, "the worker knows no element type " + cell.dtype);
    const auto width = static_cast<std::int64_t>(c10::elementSize(dtype));
    const std::int64_t count = static_cast<std::int64_t>(cell.bytes) / width,
                       part = static_cast<std::int64_t>(cell.bytes) / size_ / width;
    const bool arena = cell.memory == "arena";
    const auto made = [&](std::int64_t elements) {
      return arena ? muster::empty_shared({elements}, dtype).zero_() : at::zeros({elements}, dtype);
    };
    return caught([&] {
      muster::use_shared_allocator({.enabled = cell.memory == "allocator"});
      data_ = made(count);
      other_ = made(cell.op == "ping_pong" ? count : part * size_);
      pieces_.clear();
      for (int r = 0; r < size_; ++r) pieces_.push_back(other_.narrow(0, r * part, part));
      given_.clear();
      for (int r = 0; r < size_; ++r) given_.push_back(data_.narrow(0, r * part, part));
      call_ = call_of(cell.op, part);
    });
  }
  muster::MutableBytes written() override {
    return {static_cast<std::byte*>(data_.data_ptr()), static_cast<std::size_t>(data_.nbytes())};
  }
  Status call() override { return caught(call_); }

  Status barrier() override {
    return caught([] { muster::barrier(); });
  }
  Status share(std::int64_t& value) override {
    return caught([&] { muster::broadcast(at::from_blob(&value, {1}, at::kLong), {.src = 0}); });
  }
  Status latest(std::span<std::int64_t> values) override {
    const auto count = static_cast<std::int64_t>(values.size());
    return caught([&] {
      muster::all_reduce(at::from_blob(values.data(), {count}, at::kLong),
                         {.op = muster::ReduceOp::MAX});
    });
  }

 private:
  std::function<void()> call_of(const std::string& op, std::int64_t part) {
    const at::Tensor mine = data_.narrow(0, 0, part), out = pieces_[0],
                     whole = data_.narrow(0, 0, part * size_);
    if (op == "all_reduce") return [this] { muster::all_reduce(data_); };
    if (op == "broadcast") return [this] { muster::broadcast(data_, {.src = 0}); };
    if (op == "reduce") return [this] { muster::reduce(data_, {.dst = 0}); };
    if (op == "all_gather") return [this, mine] { muster::all_gather_into_tensor(other_, mine); };
    if (op == "reduce_scatter") return [out, whole] { muster::reduce_scatter_tensor(out, whole); };
    if (op == "all_to_all") return [this, whole] { muster::all_to_all_single(other_, whole); };
    if (op == "barrier") return [] { muster::barrier(); };
    if (op == "ping_pong") {
      if (rank_ > 1) return [] {};
      return [this] {
        const int other = 1 - rank_;
        if (rank_ == 0) muster::send(data_, {.dst = other});
        muster::recv(other_, {.src = other});
        if (rank_ == 1) muster::send(data_, {.dst = other});
      };
    }
    if (op == "gather")
      return [mine, options = muster::GatherOptions{
                        .gather_list = rank_ == 0 ? pieces_ : muster::TensorList{}}] {
        muster::gather(mine, options);
      };
    if (op == "scatter")
      return [out, options = muster::ScatterOptions{
                       .scatter_list = rank_ == 0 ? given_ : muster::TensorList{}}] {
        muster::scatter(out, options);
      };
    throw muster::DistError("the worker knows no operation " + op, Code::unsupported);
  }

  const int rank_ = muster::get_rank();
  const int size_ = muster::get_world_size();
  at::Tensor data_, other_;
  muster::TensorList pieces_, given_;
  std::function<void()> call_;
};

void serve_orders(const Options& options) {
  {
    TensorRank subject;
    if (const Status served = muster::cli::bench::serve(subject, options.folder); !served)
      throw std::runtime_error(served.message());
  }
  muster::destroy_process_group();
}

void serve_rank(int rank, const Options& options) {
  at::set_num_threads(1);
  muster::init_process_group({.backend = options.transport == "tcp" ? "tcp" : "native",
                              .init_method = options.init_method.empty()
                                                 ? "file://" + options.folder + "/store"
                                                 : options.init_method,
                              .timeout = options.timeout,
                              .world_size = options.ranks,
                              .rank = rank});
  serve_orders(options);
}

/// mpirun starts every rank.
void serve_rank_of_mpi(const Options& options) {
  at::set_num_threads(1);
  muster::init_process_group({.backend = "mpi", .timeout = std::chrono::minutes(2)});
  serve_orders(options);
}

}  // namespace

int main(int count, char** words) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    if (word == "--threads") options.threads = true;
    if (i + 1 == count) break;
    if (word == "--ranks") options.ranks = std::stoi(words[++i]);
    if (word == "--rank") options.rank = std::stoi(words[++i]);
    if (word == "--folder") options.folder = words[++i];
    if (word == "--transport") options.transport = words[++i];
    if (word == "--init") options.init_method = words[++i];
    if (word == "--timeout") options.timeout = std::chrono::seconds(std::stoi(words[++i]));
  }
  try {
    if (options.transport == "mpi") {
      serve_rank_of_mpi(options);
      return 0;
    }
    if (options.rank >= 0) {
      serve_rank(options.rank, options);
      return 0;
    }
    muster::spawn(
        serve_rank, std::tuple(options),
        {.nprocs = options.ranks,
         .mode = options.threads ? muster::SpawnMode::threads : muster::SpawnMode::processes});
  } catch (const std::exception& error) {
    std::cerr << "muster_bench_worker: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
