// SPDX-License-Identifier: BSD-3-Clause
/// Ranks, as threads, whose groups use backend nccl with the stand-in library on the test device.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "core/group/testing/ranks.h"
#include "testing/deferred_device.h"
#include "testing/limits.h"

namespace muster::testing {

/// Has this process use the stand-in, and outlive timeouts. Before anything asks for NCCL.
inline void use_standin() {
  static const bool once = [] {
    ::setenv("MUSTER_NCCL_LIBRARY", NCCL_STANDIN, 1);
    ::setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2", 0);
    deferred::install();
    return true;
  }();
  static_cast<void>(once);
}

inline void* standin_symbol(const char* name) {
  static void* const library = ::dlopen(NCCL_STANDIN, RTLD_NOW | RTLD_LOCAL);
  return ::dlsym(library, name);
}

/// How often this process has called that function of the stand-in.
inline int standin_calls(const char* function) {
  return reinterpret_cast<int (*)(const char*)>(standin_symbol("musterStandinCalls"))(function);
}
/// The threads that NCCL_STANDIN_KEPT keeps.
inline int kept_threads() {
  return reinterpret_cast<int (*)()>(standin_symbol("musterStandinKept"))();
}
/// The first use that NCCL forbids since the last call; empty: none.
inline std::string nccl_violation() {
  return reinterpret_cast<const char* (*)()>(standin_symbol("musterStandinViolation"))();
}
inline void release_kept_threads() {
  reinterpret_cast<void (*)()>(standin_symbol("musterStandinRelease"))();
}

/// Waits until it holds. False only if it never does.
template <class Holds>
bool comes_true(const Holds& holds) {
  const auto limit = steady_clock().now() + kMustHappen;
  while (!holds()) {
    if (steady_clock().now() >= limit) return false;
    std::this_thread::yield();
  }
  return true;
}

/// Sets a variable, or removes it, for as long as it lives. Those of `use_standin` outlive it.
class Variable {
 public:
  Variable(const char* name, const std::optional<std::string>& value) : name_(name) {
    use_standin();
    if (const char* const before = std::getenv(name)) before_ = before;
    set(value);
  }
  ~Variable() { set(before_); }
  Variable(const Variable&) = delete;

 private:
  void set(const std::optional<std::string>& value) const {
    value ? ::setenv(name_, value->c_str(), 1) : ::unsetenv(name_);
  }

  const char* const name_;
  std::optional<std::string> before_;
};

inline at::Device device_of(int rank) {
  return at::Device(deferred::kType, static_cast<c10::DeviceIndex>(rank));
}

/// The text of the exception that `call` throws; empty if it throws none.
template <class Call>
std::string text_of(const Call& call) {
  try {
    call();
    return {};
  } catch (const DistError& error) {
    return error.what();
  }
}

inline at::Tensor some(int rank) { return deferred::on_device(values(rank, {4}), rank); }

/// The error that this rank gets: from the call itself, or from one of the next. Each call is
/// carried out first, or ended by that error.
inline std::string told(const std::function<void()>& call) {
  const auto limit = steady_clock().now() + muster::testing::kMustHappen;
  while (steady_clock().now() < limit) {
    if (auto text = text_of(call); !text.empty()) return text;
    const c10::impl::VirtualGuardImpl guard(deferred::kType);
    guard.synchronizeDevice(guard.getDevice().index());
  }
  return "nothing was thrown";
}

/// Runs `body(rank)`; rank r's current device is r. Afterwards, nothing that NCCL forbids must have
/// been done, nor memory been written that was freed.
inline void on_nccl_ranks(int ranks, const std::function<void(int)>& body,
                          const std::string& backend = "cpu:native,deferred:nccl") {
  use_standin();
  const auto store = std::make_shared<HashStore>();
  spawn(
      [&](int rank) {
        const c10::DeviceGuard on(device_of(rank));
        init_process_group({.backend = backend,
                            .timeout = std::chrono::seconds(20),
                            .world_size = ranks,
                            .rank = rank,
                            .store = store});
        body(rank);
        destroy_process_group();
      },
      {.nprocs = ranks, .mode = SpawnMode::threads});
  EXPECT_EQ(nccl_violation(), "");
  EXPECT_FALSE(deferred::ReusedMemory::get().was_written());
}

/// Runs ranks whose group fails; what destroy throws is no matter.
inline void on_failing_ranks(int ranks, const std::function<void(int)>& body) {
  on_nccl_ranks(ranks, [&](int rank) {
    body(rank);
    text_of([] { destroy_process_group(); });
    const auto store = std::make_shared<HashStore>();  // for the helper's own destroy
    init_process_group({.world_size = 1, .rank = 0, .store = store});
  });
}

}  // namespace muster::testing
