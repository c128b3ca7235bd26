// SPDX-License-Identifier: BSD-3-Clause
/// Sums of more than 1 MiB that do not match, each on a group of its own.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "backends/carried/testing/rank.h"
#include "core/base/log/log.h"
#include "core/tunables/tunables_fixed.h"

namespace muster::carried::test {

using collective::Reduce;

/// Memory of a call whose end would show a write behind it. It is unmapped with this: then a write
/// by MPI ends the process.
class MappedValues {
 public:
  MappedValues(std::size_t count, std::int64_t value)
      : bytes_((count + 2 * kFence) * sizeof(std::int64_t)),
        memory_(static_cast<std::int64_t*>(
            ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))),
        all_(memory_, count + 2 * kFence) {
    std::ranges::fill(all_, kUntouched);
    std::ranges::fill(values(), value);
  }
  ~MappedValues() { ::munmap(memory_, bytes_); }
  MappedValues(const MappedValues&) = delete;

  std::span<std::int64_t> values() { return all_.subspan(kFence, all_.size() - 2 * kFence); }
  bool all_are(std::int64_t value) { return all_of(values(), value); }
  bool fences_hold() const {
    return all_of(all_.first(kFence), kUntouched) && all_of(all_.last(kFence), kUntouched);
  }

 private:
  static bool all_of(std::span<const std::int64_t> values, std::int64_t wanted) {
    return std::ranges::all_of(values, [=](std::int64_t value) { return value == wanted; });
  }
  static constexpr std::size_t kFence = 4096;
  static constexpr std::int64_t kUntouched = 0x5a5a5a5a5a5a5a5a;
  const std::size_t bytes_;
  std::int64_t* const memory_;
  const std::span<std::int64_t> all_;
};

/// The call of rank 1 while the others sum `kLarge` values.
struct Mismatch {
  const char* name;
  std::size_t count;
  Op op = Op::all_reduce;
  DType dtype = DType::int64;
  Reduce reduce = Reduce::sum;
};
/// With three members, each reduces two chunks of the `kLarge` values, which are 4 MB.
inline constexpr std::size_t kChunk = fixed::kMpiRound / 3 / sizeof(std::int64_t),
                             kLarge = 6 * kChunk;

inline void fail_large_sum(const TestJob& job, const Mismatch& one, const std::string& level) {
  const std::string what = one.name + level;
  const Group group = job.world(what);
  const bool differs = my_rank == 1;
  const std::size_t count = differs ? one.count : kLarge;
  auto in = std::make_unique<MappedValues>(count, 1),
       out = std::make_unique<MappedValues>(count, 0);
  Args args;
  args.op = differs ? one.op : Op::all_reduce;
  args.dtype = differs ? one.dtype : DType::int64;
  args.reduce = differs ? one.reduce : Reduce::sum;
  if (args.op != Op::all_reduce) args.root = 0;
  if (args.op != Op::broadcast) args.inputs = {std::as_bytes(in->values())};
  args.outputs = {std::as_writable_bytes(out->values())};
  Status status = group->run(args, soon());
  // A member whose messages all fit learns of it in its next call.
  Values next{1}, sum(1);
  if (status.ok()) status = group->run(sum_of(next, sum), soon());
  const auto elements = std::to_string(kLarge) + " elements";
  expect_says(status, {"rank 1", "all_reduce", elements.c_str()}, what);
  expect(status.code() == Code::mismatch, what + ": another code: " + status.message());
  expect(in->fences_hold() && out->fences_hold(), what + ": a write beside the tensor");
  expect(get_debug_level() != DebugLevel::DETAIL || out->all_are(0), what + ": MPI got the call");
  if (group->keeps_memory()) {  // as the callers of communicators do
    static_cast<void>(in.release());
    static_cast<void>(out.release());
  }
  in.reset();
  out.reset();
  const Group other = job.world("after " + what);  // all go on polling MPI
  expect_ok(other->run(sum_of(next, sum), soon()), "after " + what);
  expect(sum[0] == other->size(), "a wrong sum after " + what);
  close(other);
}

inline void fail_large_sums(const TestJob& job) {
  // Rank 2 finds a short message; what rank 0 then sends it arrives after the group's end.
  const Mismatch less{"one element less", kLarge - 1};
  // All messages but those of the last chunks have the right sizes.
  const Mismatch more{"chunks more", kLarge + 3 * kChunk};
  const Mismatch half{"half", kLarge / 2};
  const Mismatch broadcast{"a broadcast", kLarge, Op::broadcast};
  const Mismatch reduce{"a reduce", kLarge, Op::reduce};
  for (const auto& one : {less, more, half, broadcast, reduce}) fail_large_sum(job, one, "");
  set_debug_level(DebugLevel::DETAIL);
  const Mismatch doubles{"doubles", kLarge, Op::all_reduce, DType::float64};
  const Mismatch maximum{"a maximum", kLarge, Op::all_reduce, DType::int64, Reduce::max};
  for (const auto& one : {less, broadcast, doubles, maximum})
    fail_large_sum(job, one, " at DETAIL");
  set_debug_level(DebugLevel::OFF);
}

}  // namespace muster::carried::test
