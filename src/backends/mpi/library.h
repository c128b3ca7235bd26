/// What muster needs of a library that carries a group's calls, and of an MPI library, as a plugin
/// provides it. Backend ucc has a `Comm` and a `CallLibrary` of its own.
///
/// The plugin (`plugin/`) is compiled once per flavour of MPI, because `mpi.h` differs: the MPI-5
/// ABI, Open MPI, MPICH. It includes nothing of muster but this header and links with nothing: the
/// loader (`loader.h`) has loaded the MPI library before. All decisions are on muster's side.
///
/// Every function that returns `int` returns MPI's error code, 0 for success. Counts are elements.
/// An operation's buffers, and the arrays of counts, belong to the caller and stay until the
/// request has completed. Memory without elements has an address too: null means in place, as MPI
/// defines it for the operation; so does `in == out` in a reduction.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace muster::mpi {

/// Version of this interface. A plugin exports, with C linkage,
///     unsigned muster_mpi_plugin_abi();               // returns kPluginAbi
///     muster::mpi::Library* muster_mpi_library();     // one per process, never destroyed
inline constexpr unsigned kPluginAbi = 2;

/// A count that the library's functions cannot take; no error code of MPI.
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
enum class MpiReduction : std::uint8_t { sum, product, min, max, band, bor, bxor };

enum class ThreadLevel : std::uint8_t { single, funneled, serialized, multiple };

inline constexpr int kAnySource = -1;

struct MpiRequest {
  std::uint64_t handle = 0;
  bool active = false;
  std::vector<int> ints;      ///< counts and displacements for a library without large counts
  std::vector<Count> counts;  ///< those of a call of ucc without any
};

/// How a receive ended.
struct MpiArrival {
  int source = -1;
  Count bytes = 0;
  bool cancelled = false;
};

/// A communicator of the library.
class Comm {
 public:
  /// Does not give MPI's communicator back: that takes all members (`free`).
  virtual ~Comm() = default;
  virtual int free() = 0;

  virtual int barrier(MpiRequest& request) = 0;
  virtual int broadcast(void* data, Count count, Element type, int root, MpiRequest& request) = 0;
  virtual int all_reduce(const void* in, void* out, Count count, Element type, MpiReduction op,
                         MpiRequest& request) = 0;
  /// `out` is used on the root only.
  virtual int reduce(const void* in, void* out, Count count, Element type, MpiReduction op,
                     int root, MpiRequest& request) = 0;
  /// `each`: elements of one member; `out` has all of them, in order of members.
  virtual int all_gather(const void* in, void* out, Count each, Element type,
                         MpiRequest& request) = 0;
  virtual int gather(const void* in, void* out, Count each, Element type, int root,
                     MpiRequest& request) = 0;
  virtual int scatter(const void* in, void* out, Count each, Element type, int root,
                      MpiRequest& request) = 0;
  /// `counts`: elements of each member's result.
  virtual int reduce_scatter(const void* in, void* out, const Count* counts, Element type,
                             MpiReduction op, MpiRequest& request) = 0;
  virtual int all_to_all_uneven(const void* in, const Count* sent, const Count* sent_places,
                                void* out, const Count* received, const Count* received_places,
                                Element type, MpiRequest& request) = 0;
  virtual int send(const void* data, Count bytes, int member, int tag, MpiRequest& request) = 0;
  virtual int receive(void* data, Count bytes, int member_or_any, int tag, MpiRequest& request) = 0;
};

/// What carrying calls takes besides a `Comm`. Thread-safe.
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

  /// Advances the library. `arrival` may be null.
  virtual int test(MpiRequest& request, bool& done, MpiArrival* arrival) = 0;
  /// Of a receive; it still has to be tested until it is done.
  virtual int cancel(MpiRequest& request) = 0;
};

/// Thread-safe, if `initialize` gave at least `serialized`: below `multiple`, one lock guards every
/// call of MPI.
class Library : public CallLibrary {
 public:
  /// Initialises MPI unless the program has. `ours`: whether it did, and `finalize` is due.
  virtual int initialize(bool& ours, ThreadLevel& level) = 0;
  virtual bool is_finalized() const = 0;
  virtual int finalize() = 0;

  /// This process's rank in MPI_COMM_WORLD, its size, and the largest tag.
  virtual int world(int& rank, int& size, std::int64_t& last_tag) = 0;
  /// Every rank of MPI_COMM_WORLD calls it; blocks. `all`: one `text` per rank.
  virtual int exchange_texts(const std::string& text, std::vector<std::string>& all) = 0;
  /// The members call it, and nobody else; blocks until all have.
  virtual int create(std::span<const int> world_ranks, int tag, Comm*& made) = 0;
};

}  // namespace muster::mpi
