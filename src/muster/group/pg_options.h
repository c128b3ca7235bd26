/// Backend-specific options.
#pragma once

#include <string_view>

#include "muster/group/backend_name.h"

namespace muster {

/// Base class of the options of one backend. The native backend has none.
struct ProcessGroupOptions {
  virtual ~ProcessGroupOptions() = default;
  /// The backend these options are for (UNDEFINED: one that a program registered), and the name of
  /// their type in error messages.
  virtual Backend backend() const { return Backend::UNDEFINED; }
  virtual std::string_view type_name() const { return "options for a registered backend"; }
};

/// torch's name for the nccl backend's options.
struct ProcessGroupNCCL {
  struct Options : ProcessGroupOptions {
    explicit Options(bool is_high_priority_stream = false)
        : is_high_priority_stream(is_high_priority_stream) {}
    Backend backend() const override { return Backend::NCCL; }
    std::string_view type_name() const override { return "ProcessGroupNCCL.Options"; }

    bool is_high_priority_stream;  ///< run NCCL kernels on high-priority CUDA streams
  };
};

/// Throws DistBackendError (Code::unsupported), naming both, if no backend of `config` accepts
/// `options`. Null is always accepted.
void check_pg_options(const ProcessGroupOptions* options, const BackendConfig& config,
                      std::string_view caller);

}  // namespace muster
