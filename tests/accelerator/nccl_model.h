// SPDX-License-Identifier: BSD-3-Clause
/// The stand-in for NCCL by its own functions, without a backend above it.
#pragma once

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "backends/nccl/library.h"
#include "nccl_ranks.h"
#include "testing/limits.h"

namespace muster::testing {

inline const nccl::Functions& model() {
  static const nccl::Functions functions = [] {
    use_standin();
    nccl::Functions found{};
    for (const auto& row : nccl::kFunctions) {
      void* const function = standin_symbol(row.name);
      std::memcpy(reinterpret_cast<char*>(&found) + row.offset, &function, sizeof function);
    }
    return found;
  }();
  return functions;
}

/// Kernels that have room on a device, and that wait for it.
inline int running_on(int device) {
  return reinterpret_cast<int (*)(int)>(standin_symbol("musterStandinRunning"))(device);
}
inline int waiting_on(int device) {
  return reinterpret_cast<int (*)(int)>(standin_symbol("musterStandinWaiting"))(device);
}
/// A stream of a rank, whose device has the rank's number.
class ModelStream {
 public:
  ModelStream(int rank, c10::StreamId id)
      : stream_(deferred::stream_of(static_cast<c10::DeviceIndex>(rank), id)) {}
  nccl::StreamHandle handle() const { return stream_.native_handle(); }
  const c10::Stream& stream() const { return stream_; }
  std::size_t length() const { return deferred::Timeline::get().length(stream_); }
  bool is_done() const { return deferred::Timeline::get().is_done(stream_, length()); }

 private:
  c10::Stream stream_;
};

/// One communicator, of which this process has all ranks. Non-blocking. The rest of it is
/// aborted at the end.
class ModelComm {
 public:
  /// `connects`: waits until the ranks are connected. `devices`: the ranks'.
  explicit ModelComm(bool connects = true, const std::vector<int>& devices = {0, 1}) : handles_(2) {
    constexpr int ranks = 2;
    nccl::UniqueId id{};
    model().get_unique_id(&id);
    for (int rank = 0; rank < ranks; ++rank) {
      const c10::DeviceGuard on(device_of(devices[static_cast<std::size_t>(rank)]));
      nccl::Config config;
      config.blocking = 0;
      model().comm_init_rank_config(&handles_[static_cast<std::size_t>(rank)], ranks, id, rank,
                                    &config);
    }
    if (connects) {
      EXPECT_TRUE(is_connected());
    }
  }
  ~ModelComm() {
    model().group_start();
    for (int rank = 0; rank < static_cast<int>(handles_.size()); ++rank) abort(rank);
    model().group_end();
  }
  ModelComm(const ModelComm&) = delete;

  nccl::CommHandle of(int rank) const { return handles_[static_cast<std::size_t>(rank)]; }
  nccl::ErrorCode state(int rank) const {
    nccl::ErrorCode state = nccl::kSuccess;
    model().comm_get_async_error(of(rank), &state);
    return state;
  }
  /// Waits until what the rank has issued is on its streams, as NCCL asks for. Returns how that
  /// has ended, if the call was in progress.
  nccl::ErrorCode settle(int rank, nccl::ErrorCode code = nccl::kInProgress) const {
    while (code == nccl::kInProgress) code = state(rank);
    return code;
  }
  bool is_connected() const {
    return comes_true([&] {
      for (int rank = 0; rank < static_cast<int>(handles_.size()); ++rank)
        if (state(rank) != nccl::kSuccess) return false;
      return true;
    });
  }
  /// Does nothing if the rank has aborted it.
  void abort(int rank) {
    if (auto* const handle = std::exchange(handles_[static_cast<std::size_t>(rank)], nullptr))
      model().comm_abort(handle);
  }

 private:
  std::vector<nccl::CommHandle> handles_;
};

}  // namespace muster::testing
