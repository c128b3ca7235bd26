// SPDX-License-Identifier: BSD-3-Clause
/// The functions of a library that carries out a group's calls: MPI as a plugin of backend mpi
/// provides it, or UCC.
///
/// Every function that returns `int` returns the library's error code, 0 for success. Counts are
/// elements. An operation's buffers, and the arrays of counts, belong to the caller and stay until
/// the request has completed. Memory without elements has an address too: null means in place, as
/// MPI defines it for the operation; so does `in == out` in a reduction.
///
/// Plugins include this header: it needs nothing else of muster.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace muster::carried {

/// A count that the library's functions cannot take; no error code of theirs.
inline constexpr int kCountTooLarge = -77;

using Count = std::int64_t;

enum class Element : std::uint8_t {
  uint8,
  uint16,
  uint32,
  uint64,
  int8,
  int16,
  int32,
  int64,
  float32,
  float64,
};
inline constexpr int kElements = 10;

/// On floats, min and max pass NaN on, unless the library says otherwise (`passes_nan_on`).
enum class CarriedReduction : std::uint8_t { sum, product, min, max, band, bor, bxor };

inline constexpr int kAnySource = -1;

struct CarriedRequest {
  std::uint64_t handle = 0;
  bool active = false;
  std::vector<int> ints;      ///< counts and displacements for a library without large counts
  std::vector<Count> counts;  ///< those of a call of ucc without any
};

/// How a receive ended.
struct CarriedArrival {
  int source = -1;
  Count bytes = 0;
  bool cancelled = false;
};

/// A communicator of the library.
class Comm {
 public:
  /// Does not give the library's communicator back: that takes all members (`free`).
  virtual ~Comm() = default;
  virtual int free() = 0;

  virtual int barrier(CarriedRequest& request) = 0;
  virtual int broadcast(void* data, Count count, Element type, int root,
                        CarriedRequest& request) = 0;
  virtual int all_reduce(const void* in, void* out, Count count, Element type, CarriedReduction op,
                         CarriedRequest& request) = 0;
  /// `out` is used on the root only.
  virtual int reduce(const void* in, void* out, Count count, Element type, CarriedReduction op,
                     int root, CarriedRequest& request) = 0;
  /// `each`: elements of one member; `out` has all of them, in order of members.
  virtual int all_gather(const void* in, void* out, Count each, Element type,
                         CarriedRequest& request) = 0;
  virtual int gather(const void* in, void* out, Count each, Element type, int root,
                     CarriedRequest& request) = 0;
  virtual int scatter(const void* in, void* out, Count each, Element type, int root,
                      CarriedRequest& request) = 0;
  /// `counts`: elements of each member's result.
  virtual int reduce_scatter(const void* in, void* out, const Count* counts, Element type,
                             CarriedReduction op, CarriedRequest& request) = 0;
  virtual int all_to_all_uneven(const void* in, const Count* sent, const Count* sent_places,
                                void* out, const Count* received, const Count* received_places,
                                Element type, CarriedRequest& request) = 0;
  virtual int send(const void* data, Count bytes, int member, int tag, CarriedRequest& request) = 0;
  virtual int receive(void* data, Count bytes, int member_or_any, int tag,
                      CarriedRequest& request) = 0;
};

/// The functions that are not of one `Comm`. Thread-safe.
class CallLibrary {
 public:
  virtual ~CallLibrary() = default;

  /// The library's own first line about itself.
  virtual std::string version() const = 0;
  /// Whether counts may exceed an int: MPI 4.
  virtual bool has_large_counts() const = 0;
  /// Whether MIN and MAX of floats are NaN where one of them is.
  virtual bool passes_nan_on() const { return true; }
  virtual std::string error_text(int code) const = 0;
  /// Whether buffers may be memory of CUDA devices, once the library is initialised.
  virtual bool takes_device_memory() const { return false; }

  /// Advances the library. `arrival` may be null.
  virtual int test(CarriedRequest& request, bool& done, CarriedArrival* arrival) = 0;
  /// Cancels a receive, which still has to be tested until it is done.
  virtual int cancel(CarriedRequest& request) = 0;
};

}  // namespace muster::carried
