// SPDX-License-Identifier: BSD-3-Clause
// libnccl_standin.so: NCCL's functions, as far as muster uses them, over host memory. It stands in
// for NCCL in tests without a GPU: tensors are on the device of testing/deferred_device.h, and
// a stream is a `NativeStream` of it.
//
// Variables, read when a communicator is made, let it misbehave. R is a rank of the communicator, N
// the number of one of its operations, from 1:
//   NCCL_STANDIN_HANG=R:N         the operation does nothing until the communicator is aborted
//   NCCL_STANDIN_LATE=R:N:MS      it begins so many milliseconds later
//   NCCL_STANDIN_ASYNC_ERROR=R:N  after it (while it hangs, with NCCL_STANDIN_HANG for the same
//                                 operation), the communicator has an asynchronous error: later
//                                 calls are refused
//   NCCL_STANDIN_IN_PROGRESS=K    each enqueueing is in progress for K looks at the communicator
// and, read when a communicator grows, R being a rank of the new one:
//   NCCL_STANDIN_GROW_ERROR=R     ncclCommGrow fails on that rank
//   NCCL_STANDIN_GROW_ABSENT=R    that rank never gets to the others; ncclCommGrow is in progress
// Compiled with STANDIN_VERSION and STANDIN_LACKS_CONFIG or STANDIN_LACKS_PREMUL it is an older
// version without these functions, and without those that came later. musterStandinCalls(FUNCTION)
// says how often this process called one of those that make, divide and stop communicators.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backends/nccl/library.h"
#include "mailboxes.h"
#include "reductions.h"

#ifndef STANDIN_VERSION
#define STANDIN_VERSION 23007
#endif
#define STANDIN_EXPORT extern "C" __attribute__((visibility("default")))

namespace muster::standin {
namespace {

using nccl::ErrorCode;
using nccl::NcclReduction;
using nccl::Type;

constexpr ErrorCode kInternalError = 3, kInvalidArgument = 4, kInvalidUsage = 5, kRemoteError = 6;

/// A stream of the test device; the same layout as muster::testing::deferred::NativeStream.
struct Stream {
  void (*run)(Stream* stream, void (*task)(void*), void* argument);
};

/// R:N or R:N:VALUE.
struct Knob {
  int rank = -1;
  int operation = 0;
  int value = 0;
  static Knob read(const char* name) {
    Knob knob;
    if (const char* const text = std::getenv(name))
      std::sscanf(text, "%d:%d:%d", &knob.rank, &knob.operation, &knob.value);
    return knob;
  }
  bool hits(int its_rank, int its_operation) const {
    return rank == its_rank && operation == its_operation;
  }
};

int read_number(const char* name, int otherwise = 0) {
  const char* const text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : otherwise;
}

struct Comm {
  Comm(const std::string& its_name, int ranks, int rank)
      : name(its_name), boxes(name, ranks, rank) {}
  const std::string name;
  Mailboxes boxes;
  const Knob hang = Knob::read("NCCL_STANDIN_HANG"), late = Knob::read("NCCL_STANDIN_LATE"),
             error = Knob::read("NCCL_STANDIN_ASYNC_ERROR");
  const int looks_in_progress = read_number("NCCL_STANDIN_IN_PROGRESS");

  std::atomic<bool> aborted{false};
  std::atomic<bool> revoked{false};
  std::atomic<bool> dividing{false};
  int divisions = 0;           // splits, shrinks and growths: every member counts alike
  bool has_growth_id = false;  // that no growth has used yet
  std::atomic<bool> has_error{false};
  std::atomic<int> looks_left{0};
  std::atomic<int> running{0};   // operations on streams
  int operations = 0;            // enqueued
  std::atomic<int> finished{0};  // operations; they run in order, on whatever stream
  std::mutex mutex;              // of the reductions
  std::map<int, double> premul;  // factor by operation

  /// Changes what others wait for. The last change may be the last use of this communicator.
  template <class Change>
  void change(const Change& make) {
    const std::lock_guard lock(state_mutex);
    make();
    changed.notify_all();
  }
  template <class Holds>
  void wait_until(const Holds& holds) {
    std::unique_lock lock(state_mutex);
    changed.wait(lock, holds);
  }
  void wait_for_abort(std::chrono::milliseconds at_most) {
    std::unique_lock lock(state_mutex);
    changed.wait_for(lock, at_most, [this] { return is_aborted(); });
  }
  std::mutex state_mutex;
  std::condition_variable changed;

  bool is_aborted() const { return aborted || revoked; }
};

/// A function call, once it is on the stream.
struct Operation {
  Comm* comm;
  Stream* stream;
  bool is_message;
  NcclTransfer message;       // of a message
  std::function<void()> run;  // of a collective
};

/// Calls of functions by name.
std::mutex calls_mutex;
std::map<std::string, int> calls;
[[maybe_unused]] void count(const char* function) {
  const std::lock_guard lock(calls_mutex);
  ++calls[function];
}

thread_local int group_depth = 0;
thread_local std::vector<Operation> group;
thread_local std::string last_error;

/// All operations of one group on one communicator and stream.
struct Task {
  Comm* comm;
  std::vector<NcclTransfer> messages;
  std::vector<std::function<void()>> collectives;
  int number;
  static void run(void* argument) {
    const std::unique_ptr<Task> task(static_cast<Task*>(argument));
    Comm& comm = *task->comm;
    comm.wait_until([&] { return comm.finished == task->number - 1 || comm.is_aborted(); });
    task->carry_out();
    comm.change([&] {
      ++comm.finished;
      --comm.running;
    });
  }
  void carry_out() {
    const int rank = comm->boxes.rank();
    if (comm->hang.hits(rank, number)) {
      if (comm->error.hits(rank, number)) comm->has_error = true;
      comm->wait_until([this] { return comm->is_aborted(); });
    }
    if (comm->late.hits(rank, number))
      comm->wait_for_abort(std::chrono::milliseconds(comm->late.value));
    if (comm->is_aborted()) return;
    if (!messages.empty())
      comm->boxes.exchange(std::move(messages), [this] { return comm->is_aborted(); });
    for (const auto& collective : collectives) collective();
    if (comm->error.hits(rank, number)) comm->has_error = true;
  }
};

ErrorCode end_group() {
  std::map<std::pair<Comm*, Stream*>, std::unique_ptr<Task>> tasks;
  for (auto& operation : std::exchange(group, {})) {
    auto& task = tasks[{operation.comm, operation.stream}];
    if (task == nullptr) task = std::make_unique<Task>(Task{operation.comm, {}, {}, 0});
    if (operation.is_message)
      task->messages.push_back(operation.message);
    else
      task->collectives.push_back(std::move(operation.run));
  }
  ErrorCode result = nccl::kSuccess;
  for (auto& [where, task] : tasks) {
    Comm* const comm = where.first;
    if (comm->has_error) {
      result = kRemoteError;  // as NCCL refuses calls then
      continue;
    }
    task->number = ++comm->operations;
    ++comm->running;
    comm->looks_left = comm->looks_in_progress;
    if (comm->looks_in_progress > 0) result = nccl::kInProgress;
    if (where.second == nullptr)
      Task::run(task.release());
    else
      where.second->run(where.second, &Task::run, task.release());
  }
  return result;
}

ErrorCode enqueue(Operation operation) {
  if (operation.comm == nullptr) {
    last_error = "the communicator is null";
    return kInvalidUsage;
  }
  group.push_back(std::move(operation));
  return group_depth > 0 ? nccl::kSuccess : end_group();
}

Comm* comm_of(nccl::CommHandle handle) { return reinterpret_cast<Comm*>(handle); }

ErrorCode collective(nccl::CommHandle handle, nccl::StreamHandle stream,
                     std::function<void(Comm&)> body) {
  Comm* const comm = comm_of(handle);
  return enqueue({comm, static_cast<Stream*>(stream), false, {}, [comm, body = std::move(body)] {
                    body(*comm);
                  }});
}

ErrorCode message(nccl::CommHandle handle, nccl::StreamHandle stream, int peer, bool sends,
                  void* data, std::size_t bytes) {
  return enqueue({comm_of(handle),
                  static_cast<Stream*>(stream),
                  true,
                  {peer, sends, static_cast<std::byte*>(data), bytes},
                  {}});
}

/// Every rank's `bytes` bytes; empty if aborted.
std::vector<std::vector<std::byte>> gathered(Comm& comm, const void* data, std::size_t bytes) {
  const int ranks = comm.boxes.ranks(), me = comm.boxes.rank();
  std::vector<std::vector<std::byte>> all(static_cast<std::size_t>(ranks));
  std::vector<NcclTransfer> transfers;
  std::vector<std::byte> mine(static_cast<const std::byte*>(data),
                              static_cast<const std::byte*>(data) + bytes);
  for (int peer = 0; peer < ranks; ++peer) {
    auto& theirs = all[static_cast<std::size_t>(peer)];
    theirs = mine;
    if (peer == me) continue;
    transfers.push_back({peer, true, mine.data(), bytes});
    transfers.push_back({peer, false, theirs.data(), bytes});
  }
  if (!comm.boxes.exchange(std::move(transfers), [&] { return comm.is_aborted(); })) return {};
  return all;
}

/// Reduces all ranks' inputs; writes `count` elements from element `first` on, if `out` is there.
void reduce_all(Comm& comm, const void* input, std::size_t total, std::byte* out, std::size_t first,
                std::size_t count, Type type, NcclReduction reduction) {
  const auto factor_of = [&](NcclReduction made) {
    const std::lock_guard lock(comm.mutex);
    return comm.premul.at(static_cast<int>(made));
  };
  std::vector<double> factors;
  const bool premul = static_cast<int>(reduction) > static_cast<int>(NcclReduction::avg);
  if (premul) {
    const double mine = factor_of(reduction);
    for (const auto& one : gathered(comm, &mine, sizeof mine)) {
      double factor = 0;
      std::memcpy(&factor, one.data(), sizeof factor);
      factors.push_back(factor);
    }
  }
  const auto all = gathered(comm, input, total * bytes_of(type));
  if (out == nullptr || all.empty()) return;
  std::vector<const std::byte*> parts;
  for (const auto& one : all) parts.push_back(one.data() + first * bytes_of(type));
  reduce(parts, premul ? &factors : nullptr, out, count, type,
         premul ? NcclReduction::sum : reduction);
}

[[maybe_unused]] ErrorCode open_comm(nccl::CommHandle* handle, int ranks, const std::string& name,
                                     int rank) {
  try {
    auto* const comm = new Comm(name, ranks, rank);
    comm->looks_left = comm->looks_in_progress;
    *handle = reinterpret_cast<nccl::CommHandle>(comm);
    return nccl::kInProgress;
  } catch (const std::exception& error) {
    last_error = error.what();
    return kInvalidUsage;
  }
}

[[maybe_unused]] std::string growth_name(const Comm& parent) {
  return parent.name + ".g" + std::to_string(parent.divisions + 1);
}

/// ncclCommGrow on a rank that is no member of the parent.
[[maybe_unused]] ErrorCode join_growth(int ranks, const nccl::UniqueId* id, int rank,
                                       nccl::CommHandle* made) {
  if (id == nullptr || rank < 0 || rank >= ranks) {
    last_error = "a rank that joins has other arguments";
    return kInvalidArgument;
  }
  if (!Mailboxes::is_begun(id->bytes)) {
    last_error = "a rank that joins came before the parent's members";
    return kInternalError;
  }
  if (read_number("NCCL_STANDIN_GROW_ERROR", -1) == rank) {
    last_error = "NCCL_STANDIN_GROW_ERROR says so";
    return kInternalError;
  }
  const bool absent = read_number("NCCL_STANDIN_GROW_ABSENT", -1) == rank;
  return open_comm(made, ranks, std::string(id->bytes) + (absent ? ".absent" : ""), rank);
}

}  // namespace
}  // namespace muster::standin

using namespace muster::standin;
namespace nccl = muster::nccl;

STANDIN_EXPORT const char* musterStandinDevice() { return "deferred"; }

STANDIN_EXPORT int musterStandinCalls(const char* function) {
  const std::lock_guard lock(calls_mutex);
  return calls[function];
}

STANDIN_EXPORT ErrorCode ncclGetVersion(int* version) {
  *version = STANDIN_VERSION;
  return nccl::kSuccess;
}
STANDIN_EXPORT const char* ncclGetErrorString(ErrorCode code) {
  return code == kRemoteError ? "remote process exited or there was a network error"
                              : "invalid usage";
}
STANDIN_EXPORT const char* ncclGetLastError(nccl::CommHandle) { return last_error.c_str(); }
STANDIN_EXPORT ErrorCode ncclGetUniqueId(nccl::UniqueId* id) {
  std::random_device random;
  std::snprintf(id->bytes, sizeof id->bytes, "/nccl_standin.%08x%08x", random(), random());
  return nccl::kSuccess;
}
#ifndef STANDIN_LACKS_CONFIG
STANDIN_EXPORT ErrorCode ncclCommInitRankConfig(nccl::CommHandle* comm, int ranks,
                                                nccl::UniqueId id, int rank, nccl::Config*) {
  count("ncclCommInitRankConfig");
  return open_comm(comm, ranks, id.bytes, rank);
}
#endif
#if STANDIN_VERSION >= 21800
STANDIN_EXPORT ErrorCode ncclCommSplit(nccl::CommHandle handle, int color, int key,
                                       nccl::CommHandle* made, nccl::Config*) {
  count("ncclCommSplit");
  Comm* const parent = comm_of(handle);
  const std::string name = parent->name + ".s" + std::to_string(++parent->divisions);
  *made = nullptr;
  parent->dividing = true;
  ++parent->running;
  std::thread([=] {
    struct Part {
      int color, key;
    };
    const Part mine{color, key};
    std::vector<std::pair<int, int>> members;  // key and rank
    const auto all = gathered(*parent, &mine, sizeof mine);
    for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
      Part part;
      std::memcpy(&part, all[static_cast<std::size_t>(rank)].data(), sizeof part);
      if (part.color == color) members.emplace_back(part.key, rank);
    }
    std::sort(members.begin(), members.end());
    const auto me = std::find(members.begin(), members.end(), std::pair(key, parent->boxes.rank()));
    if (color >= 0 && me != members.end())
      open_comm(made, static_cast<int>(members.size()), name + "." + std::to_string(color),
                static_cast<int>(me - members.begin()));
    parent->change([=] {
      parent->dividing = false;
      --parent->running;
    });
  }).detach();
  return nccl::kInProgress;
}
#endif
#if STANDIN_VERSION >= 22700
STANDIN_EXPORT ErrorCode ncclCommShrink(nccl::CommHandle handle, int* excluded, int excluded_count,
                                        nccl::CommHandle* made, nccl::Config*, int) {
  count("ncclCommShrink");
  Comm* const parent = comm_of(handle);
  const int me = parent->boxes.rank();
  const auto before =
      std::count_if(excluded, excluded + excluded_count, [&](int rank) { return rank < me; });
  return open_comm(made, parent->boxes.ranks() - excluded_count,
                   parent->name + ".k" + std::to_string(++parent->divisions),
                   me - static_cast<int>(before));
}
#endif
#if STANDIN_VERSION >= 22800
STANDIN_EXPORT ErrorCode ncclCommRevoke(nccl::CommHandle handle, int) {
  count("ncclCommRevoke");
  Comm* const comm = comm_of(handle);
  comm->change([=] { comm->revoked = true; });
  return nccl::kInProgress;
}
#endif
#if STANDIN_VERSION >= 22900
STANDIN_EXPORT ErrorCode ncclCommGetUniqueId(nccl::CommHandle handle, nccl::UniqueId* id) {
  count("ncclCommGetUniqueId");
  Comm* const parent = comm_of(handle);
  if (std::exchange(parent->has_growth_id, true)) {
    last_error = "an earlier id has not been used";
    return kInvalidUsage;
  }
  std::snprintf(id->bytes, sizeof id->bytes, "%s", growth_name(*parent).c_str());
  return nccl::kSuccess;
}
STANDIN_EXPORT ErrorCode ncclCommGrow(nccl::CommHandle handle, int ranks, const nccl::UniqueId* id,
                                      int rank, nccl::CommHandle* made, nccl::Config*) {
  count("ncclCommGrow");
  *made = nullptr;
  Comm* const parent = comm_of(handle);
  if (parent == nullptr) return join_growth(ranks, id, rank, made);
  const int old = parent->boxes.ranks(), me = parent->boxes.rank();
  const bool made_the_id = id != nullptr && growth_name(*parent) == id->bytes;
  if (rank != -1 || ranks <= old || made_the_id != parent->has_growth_id) {
    last_error = "a member of the parent has other arguments";
    return kInvalidArgument;
  }
  const std::string name = growth_name(*parent);
  ++parent->divisions;
  if (read_number("NCCL_STANDIN_GROW_ERROR", -1) == me) {
    last_error = "NCCL_STANDIN_GROW_ERROR says so";
    return kInternalError;
  }
  parent->has_growth_id = false;
  return open_comm(made, ranks, name, me);
}
#endif
STANDIN_EXPORT ErrorCode ncclCommAbort(nccl::CommHandle handle) {
  Comm* const comm = comm_of(handle);
  comm->change([=] { comm->aborted = true; });
  comm->wait_until([=] { return comm->running == 0; });
  delete comm;
  return nccl::kSuccess;
}
STANDIN_EXPORT ErrorCode ncclCommDestroy(nccl::CommHandle handle) { return ncclCommAbort(handle); }
STANDIN_EXPORT ErrorCode ncclCommGetAsyncError(nccl::CommHandle handle, ErrorCode* error) {
  Comm* const comm = comm_of(handle);
  if (comm->revoked) {
    *error = comm->running > 0 ? nccl::kInProgress : nccl::kSuccess;
    return nccl::kSuccess;
  }
  const bool in_progress =
      !comm->boxes.all_here() || comm->dividing || comm->looks_left.fetch_sub(1) > 0;
  *error = comm->has_error ? kRemoteError : in_progress ? nccl::kInProgress : nccl::kSuccess;
  return nccl::kSuccess;
}
STANDIN_EXPORT ErrorCode ncclGroupStart() {
  ++group_depth;
  return nccl::kSuccess;
}
STANDIN_EXPORT ErrorCode ncclGroupEnd() { return --group_depth > 0 ? nccl::kSuccess : end_group(); }

STANDIN_EXPORT ErrorCode ncclAllReduce(const void* in, void* out, std::size_t count, Type type,
                                       NcclReduction reduction, nccl::CommHandle comm,
                                       nccl::StreamHandle stream) {
  return collective(comm, stream, [=](Comm& on) {
    reduce_all(on, in, count, static_cast<std::byte*>(out), 0, count, type, reduction);
  });
}
STANDIN_EXPORT ErrorCode ncclReduce(const void* in, void* out, std::size_t count, Type type,
                                    NcclReduction reduction, int root, nccl::CommHandle comm,
                                    nccl::StreamHandle stream) {
  return collective(comm, stream, [=](Comm& on) {
    auto* const to = on.boxes.rank() == root ? static_cast<std::byte*>(out) : nullptr;
    reduce_all(on, in, count, to, 0, count, type, reduction);
  });
}
STANDIN_EXPORT ErrorCode ncclReduceScatter(const void* in, void* out, std::size_t count, Type type,
                                           NcclReduction reduction, nccl::CommHandle comm,
                                           nccl::StreamHandle stream) {
  return collective(comm, stream, [=](Comm& on) {
    const auto rank = static_cast<std::size_t>(on.boxes.rank());
    reduce_all(on, in, count * static_cast<std::size_t>(on.boxes.ranks()),
               static_cast<std::byte*>(out), rank * count, count, type, reduction);
  });
}
STANDIN_EXPORT ErrorCode ncclBroadcast(const void* in, void* out, std::size_t count, Type type,
                                       int root, nccl::CommHandle comm, nccl::StreamHandle stream) {
  return collective(comm, stream, [=](Comm& on) {
    const std::size_t bytes = count * bytes_of(type);
    std::vector<NcclTransfer> transfers;
    auto* const data = static_cast<std::byte*>(out);
    if (on.boxes.rank() != root) {
      transfers.push_back({root, false, data, bytes});
    } else {
      if (in != out) std::memcpy(out, in, bytes);
      for (int peer = 0; peer < on.boxes.ranks(); ++peer)
        if (peer != root) transfers.push_back({peer, true, data, bytes});
    }
    on.boxes.exchange(std::move(transfers), [&] { return on.is_aborted(); });
  });
}
STANDIN_EXPORT ErrorCode ncclAllGather(const void* in, void* out, std::size_t count, Type type,
                                       nccl::CommHandle comm, nccl::StreamHandle stream) {
  return collective(comm, stream, [=](Comm& on) {
    const std::size_t bytes = count * bytes_of(type);
    const auto all = gathered(on, in, bytes);
    for (std::size_t rank = 0; rank < all.size(); ++rank)
      std::memcpy(static_cast<std::byte*>(out) + rank * bytes, all[rank].data(), bytes);
  });
}
STANDIN_EXPORT ErrorCode ncclSend(const void* data, std::size_t count, Type type, int peer,
                                  nccl::CommHandle comm, nccl::StreamHandle stream) {
  return message(comm, stream, peer, true, const_cast<void*>(data), count * bytes_of(type));
}
STANDIN_EXPORT ErrorCode ncclRecv(void* data, std::size_t count, Type type, int peer,
                                  nccl::CommHandle comm, nccl::StreamHandle stream) {
  return message(comm, stream, peer, false, data, count * bytes_of(type));
}

#ifndef STANDIN_LACKS_PREMUL
STANDIN_EXPORT ErrorCode ncclRedOpCreatePreMulSum(NcclReduction* made, void* scalar, Type type, int,
                                                  nccl::CommHandle handle) {
  Comm* const comm = comm_of(handle);
  const double factor = number_at(scalar, type);
  const std::lock_guard lock(comm->mutex);
  const int number =
      static_cast<int>(NcclReduction::avg) + 1 + static_cast<int>(comm->premul.size());
  comm->premul[number] = factor;
  *made = static_cast<NcclReduction>(number);
  return nccl::kSuccess;
}
// The factor stays: an operation that is enqueued may use it later.
STANDIN_EXPORT ErrorCode ncclRedOpDestroy(NcclReduction, nccl::CommHandle) {
  return nccl::kSuccess;
}
#endif
