/// Names of backends: one (`Backend`), and one per device (`BackendConfig`).
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

#include "muster/base/clock.h"

namespace muster {

class ProcessGroupBackend;         // process_group_backend.h
class Store;                       // store.h
struct DistributedBackendOptions;  // backend_registry.h
struct ProcessGroupOptions;        // pg_options.h

/// Enum-like: its values are lower-case names. `native` is muster's own CPU engine, `gloo` another
/// name for it, `tcp` the same without shared memory.
class Backend {
 public:
  /// Parses either case; an unknown name throws DistError with the list of the known ones.
  /// "undefined" is no valid argument.
  explicit Backend(std::string_view name);

  /// Makes `name` (in lower case) a backend of this process; see backend_registry.h for what the
  /// function gets and gives. `devices`: the kinds that it serves where a group names it without
  /// one; empty: cpu and cuda. Throws where there is such a backend already.
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

  static const Backend UNDEFINED;  ///< what a field holds before it is set
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

  /// Whether this build can make it.
  bool is_available() const;
  /// Of groups that are made without one: 30 minutes, 10 for nccl.
  Duration default_timeout() const;
  /// Every name that the constructor accepts, in lower case.
  static std::vector<std::string> known();

 private:
  struct Literal {};
  constexpr Backend(Literal, std::string_view name) : name_(name) {}
  std::string_view name_;  // of a constant or of a registered backend: lives for ever
};

/// Which backend serves which kind of device: "native", or "cpu:native,cuda:nccl". Absent: native
/// for CPU tensors, nccl for CUDA tensors where the build has it.
class BackendConfig {
 public:
  /// Throws DistError naming the part of the text that cannot be read.
  static BackendConfig parse(const std::optional<std::string>& text);

  /// Absent where no backend serves such tensors.
  std::optional<Backend> for_device(c10::DeviceType device) const;
  const std::vector<std::pair<c10::DeviceType, Backend>>& entries() const { return entries_; }
  /// The lower-case text that was asked for; where none was, "cpu:native" (or
  /// "cpu:native,cuda:nccl").
  const std::string& text() const { return text_; }
  /// nccl's where it is the only backend, else 30 minutes.
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

/// True wherever muster compiles.
bool is_available();
/// `gloo` is another name for the native engine, which is always there.
bool is_gloo_available();
bool is_mpi_available();
bool is_nccl_available();
bool is_ucc_available();
/// Whether TORCHELASTIC_RUN_ID is set, as the launcher does.
bool is_torchelastic_launched();

}  // namespace muster
