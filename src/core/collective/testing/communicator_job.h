// SPDX-License-Identifier: BSD-3-Clause
/// Test support for communicators: groups whose ranks are threads, and calls on values.
#pragma once

#include "core/collective/communicator.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "testing/limits.h"
#include "testing/rank_threads.h"

namespace muster::collective::communicator_test {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::run_ranks;
using testing::Wire;
using Group = std::shared_ptr<Communicator>;
using Values = std::vector<std::int64_t>;

inline TimePoint in(Duration duration) { return steady_clock().now() + duration; }
inline TimePoint soon() { return in(muster::testing::kMustHappen); }

inline std::vector<int> all_of(int ranks) {
  std::vector<int> members(static_cast<std::size_t>(ranks));
  std::iota(members.begin(), members.end(), 0);
  return members;
}

inline Group make(const std::shared_ptr<transport::Fabric>& fabric, std::vector<int> members,
                  const std::string& name, bool use_region = true) {
  CommunicatorOptions options;
  options.name = name;
  options.timeout = muster::testing::kMustHappen;
  options.use_region = use_region;
  auto made = Communicator::create(fabric, std::move(members), options);
  EXPECT_TRUE(made.ok()) << made.status().message();
  return made.ok() ? *made : nullptr;
}

/// A group of all ranks on every rank's thread.
inline void with_group(int ranks, Wire wire,
                       const std::function<void(int rank, Communicator& group)>& body,
                       bool use_region = true) {
  run_ranks(ranks, wire, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
    if (const Group group = make(fabric, all_of(ranks), "test", use_region)) body(rank, *group);
  });
}

/// The same without a progress thread: started calls stay in the queue until a rank's thread waits.
inline void with_group_alone(int ranks,
                             const std::function<void(int rank, Communicator& group)>& body) {
  testing::RankThreadsOptions options;
  options.ranks = ranks;
  options.threads = false;
  run_ranks(options, [&](int rank, std::shared_ptr<transport::Fabric> fabric) {
    if (const Group group = make(fabric, all_of(ranks), "test")) body(rank, *group);
  });
}

/// Sets an environment variable while it lives; no rank may run when it is created or destroyed.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) {
    ::setenv(name, value.c_str(), 1);
  }
  ~Variable() { ::unsetenv(name_); }
  Variable(const Variable&) = delete;

 private:
  const char* name_;
};

inline ConstBytes bytes(const Values& values) { return std::as_bytes(std::span(values)); }
inline MutableBytes bytes(Values& values) { return std::as_writable_bytes(std::span(values)); }

inline Args all_reduce(const Values& in, Values& out, Reduce reduce = Reduce::sum) {
  Args args;
  args.op = Op::all_reduce;
  args.dtype = DType::int64;
  args.reduce = reduce;
  args.inputs = {bytes(in)};
  args.outputs = {bytes(out)};
  return args;
}
inline Args broadcast(Values& values, int root) {
  Args args;
  args.op = Op::broadcast;
  args.dtype = DType::int64;
  args.root = root;
  args.outputs = {bytes(values)};
  return args;
}
/// A gather of `mine` or a scatter into it. `all`: on the root, the concatenated pieces; unused
/// elsewhere.
inline Args pieces(Op op, Values& mine, Values& all, int root, const Communicator& group) {
  Args args;
  args.op = op;
  args.dtype = DType::int64;
  args.root = root;
  if (op == Op::gather) args.inputs = {bytes(std::as_const(mine))};
  if (op == Op::scatter) args.outputs = {bytes(mine)};
  for (int member = 0; group.rank() == root && member < group.size(); ++member) {
    const MutableBytes piece = bytes(all).subspan(
        static_cast<std::size_t>(member) * bytes(mine).size(), bytes(mine).size());
    if (op == Op::gather) args.outputs.push_back(piece);
    if (op == Op::scatter) args.inputs.push_back(piece);
  }
  return args;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace muster::collective::communicator_test
