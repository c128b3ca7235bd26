// SPDX-License-Identifier: BSD-3-Clause
/// Shared by the rank programs of the tests of backends mpi and ucc: how they report, and their
/// job. Below tensors.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "core/collective/communicator.h"
#include "core/rendezvous/rendezvous.h"
#include "core/transport/fabric.h"
#include "muster/status.h"
#include "testing/limits.h"

namespace muster::carried::test {

using collective::Args;
using collective::Op;
using Group = std::shared_ptr<collective::Communicator>;
using Values = std::vector<std::int64_t>;

/// The library whose calls are tested.
struct TestedLibrary {
  std::string name;
  std::function<Result<store::Rendezvous>(store::RendezvousOptions)> join;
  std::function<Result<Group>(std::shared_ptr<transport::Fabric>, std::vector<int>,
                              const collective::CommunicatorOptions&)>
      create;
  std::function<std::string()> text;
  const char* wrong_size = "elements of int64, and the receive is for";  ///< of a message
  bool compares_calls = false;                                           ///< before it gets them
};

inline TestedLibrary tested;
inline int my_rank = -1;
inline int problems = 0;

inline void report(const std::string& what) {
  ++problems;
  std::printf("rank %d: %s\n", my_rank, what.c_str());
  std::fflush(stdout);
}
inline void expect(bool holds, const std::string& what) {
  if (!holds) report(what);
}
inline void expect_ok(const Status& status, const std::string& what) {
  if (!status.ok()) report(what + ": " + status.message());
}
inline void expect_says(const Status& status, std::initializer_list<const char*> words,
                        const std::string& what) {
  if (status.ok()) return report(what + ": it succeeded");
  for (const char* word : words)
    expect(status.message().find(word) != std::string::npos,
           what + ": '" + word + "' is not in: " + status.message());
}

inline TimePoint soon() { return steady_clock().now() + muster::testing::kMustHappen; }

struct TestJob {
  store::Rendezvous found;
  std::shared_ptr<transport::Fabric> fabric;

  Group make(std::vector<int> members, const std::string& name) const {
    collective::CommunicatorOptions options;
    options.name = name;
    options.timeout = muster::testing::kMustHappen;
    auto group = tested.create(fabric, std::move(members), options);
    if (group.ok()) return *group;
    report("making " + name + ": " + group.status().message());
    std::exit(1);
  }
  Group world(const std::string& name = "world") const {
    std::vector<int> members(static_cast<std::size_t>(found.world_size));
    std::iota(members.begin(), members.end(), 0);
    return make(members, name);
  }
};

inline void close(const Group& group) { expect_ok(group->close(soon()), "close"); }

inline Args args_of(Op op, const Values& in, Values& out, int root = -1) {
  Args args;
  args.op = op;
  args.dtype = DType::int64;
  args.root = root;
  args.inputs = {std::as_bytes(std::span(in))};
  args.outputs = {std::as_writable_bytes(std::span(out))};
  return args;
}
inline Args sum_of(const Values& in, Values& out) { return args_of(Op::all_reduce, in, out); }

}  // namespace muster::carried::test
