// SPDX-License-Identifier: BSD-3-Clause
/// Names of backends: a single one (`Backend`), one per device type (`BackendConfig`), and options
/// of one backend (`ProcessGroupOptions`).
#pragma once

#include <c10/core/DeviceType.h>

#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/clock.h"

namespace muster {

class ProcessGroupBackend;         // backend.h
class Store;                       // store.h
struct DistributedBackendOptions;  // backend.h
struct ProcessGroupOptions;        // below

/// A backend's lower-case name; enum-like. `native` is muster's own CPU engine, `gloo` an alias of
/// it, and `tcp` the same engine without shared memory.
class Backend {
 public:
  /// Parses `name`, ignoring case. Throws DistError listing the known names if it is unknown.
  /// "undefined" is not accepted.
  explicit Backend(std::string_view name);

  /// Registers `name` (converted to lower case) as a backend of this process. backend.h
  /// specifies `func`. `devices` are the device types it serves if a group requests it without
  /// naming devices; empty: cpu and cuda. Throws if the name is taken.
  static void register_backend(
      const std::string& name,
      std::function<std::shared_ptr<ProcessGroupBackend>(
          const std::shared_ptr<Store>& store, int rank, int world_size, Duration timeout)>
          func,
      bool extended_api = false, const std::vector<std::string>& devices = {});
  static void register_backend(const std::string& name,
                               std::function<std::shared_ptr<ProcessGroupBackend>(
                                   const DistributedBackendOptions& options,
                                   const std::shared_ptr<ProcessGroupOptions>& pg_options)>
                                   func,
                               bool extended_api, const std::vector<std::string>& devices = {});

  static const Backend UNDEFINED;  ///< the value of an unset field
  static const Backend NATIVE;
  static const Backend GLOO;
  static const Backend TCP;
  static const Backend NCCL;
  static const Backend MPI;
  static const Backend UCC;

  constexpr std::string_view name() const { return name_; }
  operator std::string() const { return std::string(name_); }
  friend bool operator==(const Backend& a, const Backend& b) { return a.name_ == b.name_; }
  friend bool operator==(const Backend& a, std::string_view b) { return a.name_ == b; }
  friend std::ostream& operator<<(std::ostream& out, const Backend& backend) {
    return out << backend.name_;
  }

  /// Whether the backend can be used: this build has it, and the library it needs can be loaded.
  /// The first call for mpi loads the MPI library, without initialising it.
  bool is_available() const;
  /// Why it is not available, as the end of a sentence; empty if it is.
  std::string why_unavailable() const;
  /// Timeout of groups created without one: 30 minutes, 10 for nccl.
  Duration default_timeout() const;
  /// Every name that the constructor accepts, in lower case.
  static std::vector<std::string> known();

 private:
  struct Literal {};
  constexpr Backend(Literal, std::string_view name) : name_(name) {}
  std::string_view name_;  // points to a constant or a registered backend's name; never freed
};

/// Maps device types to backends: "native", or "cpu:native,cuda:nccl". Without text: native for CPU
/// tensors; for CUDA tensors nccl, if there are a GPU and NCCL's library, otherwise native, which
/// copies them through host memory.
class BackendConfig {
 public:
  /// Throws DistError naming the part of the text it cannot parse.
  static BackendConfig parse(const std::optional<std::string>& text);
  /// The configuration without text, on a machine with or without a GPU and NCCL.
  static BackendConfig standard(bool gpu, bool nccl);

  /// Empty if no backend serves such tensors.
  std::optional<Backend> for_device(c10::DeviceType device) const;
  const std::vector<std::pair<c10::DeviceType, Backend>>& entries() const { return entries_; }
  /// The requested text in lower case; if none was given, "cpu:native" or "cpu:native,cuda:nccl".
  const std::string& text() const { return text_; }
  /// 10 minutes if nccl is the only backend, otherwise 30 minutes.
  Duration default_timeout() const;

 private:
  std::vector<std::pair<c10::DeviceType, Backend>> entries_;
  std::string text_;
};

inline constexpr Backend Backend::UNDEFINED{Literal{}, "undefined"};
inline constexpr Backend Backend::NATIVE{Literal{}, "native"};
inline constexpr Backend Backend::GLOO{Literal{}, "gloo"};
inline constexpr Backend Backend::TCP{Literal{}, "tcp"};
inline constexpr Backend Backend::NCCL{Literal{}, "nccl"};
inline constexpr Backend Backend::MPI{Literal{}, "mpi"};
inline constexpr Backend Backend::UCC{Literal{}, "ucc"};

/// The device type that a plain device number refers to: the accelerator that a vendor has
/// registered with torch (PrivateUse1), else CUDA. Does not check that such a device exists.
c10::DeviceType accelerator_type();

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
  /// The configuration of a group's communicators (ncclConfig_t, by torch's names). A field that is
  /// not set is NCCL's own choice, or that of its NCCL_* variables.
  struct NCCLConfig {
    /// 1 is refused: NCCL cannot abort a communicator whose calls block.
    std::optional<int> blocking = {};
    std::optional<int> cga_cluster_size = {}, min_ctas = {}, max_ctas = {};
    std::optional<std::string> net_name = {};  ///< "IB", "Socket", or a plugin's
    std::optional<int> split_share = {};
    // From NCCL 2.27 on; refused by name before.
    std::optional<int> traffic_class = {};
    std::optional<std::string> comm_name = {};
    std::optional<int> collnet_enable = {}, cta_policy = {}, shrink_share = {}, nvls_ctas = {};
  };
  struct Options : ProcessGroupOptions {
    explicit Options(bool is_high_priority_stream = false)
        : is_high_priority_stream(is_high_priority_stream) {}
    Backend backend() const override { return Backend::NCCL; }
    std::string_view type_name() const override { return "ProcessGroupNCCL.Options"; }

    bool is_high_priority_stream;  ///< run NCCL kernels on high-priority CUDA streams
    NCCLConfig config = {};
  };
};

/// Always true.
bool is_available();
/// Always true: `gloo` is an alias of the native engine.
bool is_gloo_available();
bool is_mpi_available();
bool is_nccl_available();
bool is_ucc_available();
/// Whether TORCHELASTIC_RUN_ID is set; the launcher sets it.
bool is_torchelastic_launched();

}  // namespace muster
