// SPDX-License-Identifier: BSD-3-Clause
/// What one rank of the stand-in knows of a communicator.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backends/nccl/library.h"
#include "mailboxes.h"

namespace muster::standin {

/// A stream of the test device; the same layout as muster::testing::deferred::NativeStream.
struct Stream {
  void (*run)(Stream* stream, void (*task)(void*), void* argument);
  c10::DeviceIndex device;
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

inline int read_number(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : otherwise;
}

struct StandinKernel;

struct Comm {
  Comm(const std::string& its_name, int ranks, int rank, int its_device)
      : name(its_name), device(its_device), boxes(name, ranks, rank, device) {}
  const std::string name;
  const int device;
  Mailboxes boxes;
  const Knob hang = Knob::read("NCCL_STANDIN_HANG"), late = Knob::read("NCCL_STANDIN_LATE"),
             error = Knob::read("NCCL_STANDIN_ASYNC_ERROR"), kept = Knob::read("NCCL_STANDIN_KEPT"),
             deaf = Knob::read("NCCL_STANDIN_DEAF");
  const int looks_in_progress = read_number("NCCL_STANDIN_IN_PROGRESS", 1);
  const int places = read_number("NCCL_STANDIN_ROOM", 3);
  const bool sees_death = read_number("NCCL_STANDIN_SEES_DEATH", 0) != 0;
  const bool may_share_devices = read_number("NCCL_MULTI_RANK_GPU_ENABLE", 0) != 0;
  const bool aborts_together = read_number("NCCL_STANDIN_ABORT_TOGETHER", 1) != 0;

  std::atomic<bool> aborted{false};
  std::atomic<bool> revoked{false};
  std::atomic<bool> dividing{false};
  int divisions = 0;           // splits, shrinks and growths: every member counts alike
  bool has_growth_id = false;  // that no growth has used yet
  std::atomic<bool> has_error{false};
  std::atomic<bool> are_devices_known{false}, has_shared_device{false};
  std::atomic<int> running{0};           // kernels, issued or not
  int operations = 0;                    // kernels so far
  std::atomic<int> finished{0};          // kernels; they run in order, on whatever stream
  std::mutex mutex;                      // guards the following
  std::map<int, double> premul;          // factor by operation
  int looks_left = 0;                    // until `unissued` is issued
  std::vector<StandinKernel*> unissued;  // kernels that are not on their streams yet

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
  /// Carries out the transfers, or ends early because of an abort; false then.
  bool exchange(std::vector<NcclTransfer> transfers) {
    return boxes.exchange(std::move(transfers), [this] {
      if (sees_death && boxes.has_lost_a_member()) has_error = true;
      return is_aborted();
    });
  }
};

inline Comm* comm_of(nccl::CommHandle handle) { return reinterpret_cast<Comm*>(handle); }

}  // namespace muster::standin
