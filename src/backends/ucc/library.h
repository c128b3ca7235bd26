// SPDX-License-Identifier: BSD-3-Clause
/// Finds and loads UCC's library at run time, and advances it.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "backends/carried/library.h"
#include "backends/ucc/api.h"
#include "muster/status.h"

namespace muster::ucc {

/// Thread-safe: one lock guards every call of UCC. Stays loaded until the process ends.
class UccLibrary final : public carried::CallLibrary {
 public:
  /// The process's UCC, loaded at the first call: MUSTER_UCC_LIBRARY, otherwise libucc.so.1.
  static const Result<UccLibrary*>& of_process();
  /// Loads `path`. Code::unsupported says what is missing, and what to install or set.
  static Result<std::unique_ptr<UccLibrary>> open(const std::string& path);

  std::string version() const override { return version_; }
  bool has_large_counts() const override { return true; }
  bool passes_nan_on() const override { return false; }
  std::string error_text(int code) const override { return functions_.status_string(code); }
  int test(carried::CarriedRequest& request, bool& done, carried::CarriedArrival* arrival) override;
  int cancel(carried::CarriedRequest&) override { return kErrorUnsupported; }

  /// The process's context, made at the first call. It has no members: teams find theirs.
  /// Code::unsupported in a child that was forked after that call.
  Result<UccContext*> context();
  const UccFunctions& functions() const { return functions_; }
  std::unique_lock<std::mutex> guard() { return std::unique_lock(lock_); }

 private:
  UccLibrary() = default;
  UccStatus make_context();

  UccFunctions functions_{};
  std::string version_;  // "UCC 1.9.0 (/path/libucc.so.1)"
  std::mutex lock_;      // held while in a function of UCC; guards the following
  UccContext* context_ = nullptr;
  int process_ = 0;  // that made it
};

}  // namespace muster::ucc
