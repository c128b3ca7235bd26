/// Finds and loads NCCL's library at run time.
#pragma once

#include <c10/core/DeviceType.h>

#include <memory>
#include <string>

#include "backends/nccl/functions.h"
#include "muster/status.h"

namespace muster::nccl {

/// Thread-safe. A loaded library stays loaded until the process ends.
class NcclLibrary {
 public:
  /// The process's NCCL, loaded at the first call: MUSTER_NCCL_LIBRARY, otherwise the copy that
  /// torch has loaded, the wheel beside torch, or the system's. A process never holds two copies:
  /// if MUSTER_NCCL_LIBRARY names another copy than the one loaded, that is an error.
  static const Result<std::shared_ptr<const NcclLibrary>>& of_process();
  /// Loads `path`. Code::unsupported names the missing file, or the function that it lacks and its
  /// version.
  static Result<std::shared_ptr<const NcclLibrary>> open(const std::string& path);

  const Functions& functions() const { return functions_; }
  /// "2.28.9"
  const std::string& version() const { return version_; }
  const std::string& path() const { return path_; }
  /// "NCCL 2.28.9 (/path/libnccl.so.2)"
  std::string text() const { return "NCCL " + version_ + " (" + path_ + ")"; }
  /// The device type of its buffers: CUDA, except for the stand-in of tests.
  c10::DeviceType device() const { return device_; }
  /// Code::unsupported if the library lacks the function of that name.
  Status need(const char* function) const;
  /// NCCL's words for `code`: "unhandled cuda error".
  std::string error_text(ErrorCode code) const;

 private:
  Functions functions_{};
  std::string version_, path_;
  c10::DeviceType device_ = c10::DeviceType::CUDA;
};

}  // namespace muster::nccl
