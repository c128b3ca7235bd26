/// Options that only one kind of backend understands.
#pragma once

#include <string_view>

#include "muster/group/backend_name.h"

namespace muster {

/// Options of one kind of backend; the native one has none.
struct ProcessGroupOptions {
  virtual ~ProcessGroupOptions() = default;
  /// The backend they are for; UNDEFINED: one that a program has registered. And how people write
  /// their type.
  virtual Backend backend() const { return Backend::UNDEFINED; }
  virtual std::string_view type_name() const { return "options for a registered backend"; }
};

/// torch's name for what belongs to the nccl backend.
struct ProcessGroupNCCL {
  struct Options : ProcessGroupOptions {
    explicit Options(bool is_high_priority_stream = false)
        : is_high_priority_stream(is_high_priority_stream) {}
    Backend backend() const override { return Backend::NCCL; }
    std::string_view type_name() const override { return "ProcessGroupNCCL.Options"; }

    bool is_high_priority_stream;  ///< its kernels run on CUDA streams of high priority
  };
};

/// Throws DistBackendError (Code::unsupported) where no backend of `config` can use `options`,
/// naming both. Null is always right.
void check_pg_options(const ProcessGroupOptions* options, const BackendConfig& config,
                      std::string_view caller);

}  // namespace muster
