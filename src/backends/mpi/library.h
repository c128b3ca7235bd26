// SPDX-License-Identifier: BSD-3-Clause
/// The functions of an MPI library besides carrying calls, as a plugin provides them.
///
/// The plugin (`plugin/`) is compiled once per flavour of MPI, because `mpi.h` differs: the MPI-5
/// ABI, Open MPI, MPICH. It includes nothing of muster but this header and the one included here,
/// and links with nothing: the loader (`loader.h`) has loaded the MPI library before. All decisions
/// are on muster's side.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "backends/carried/library.h"

namespace muster::mpi {

using carried::CarriedArrival;
using carried::CarriedReduction;
using carried::CarriedRequest;
using carried::Comm;
using carried::Count;
using carried::Element;
using carried::kAnySource;
using carried::kCountTooLarge;

/// Version of this interface. A plugin exports, with C linkage,
///     unsigned muster_mpi_plugin_abi();               // returns kPluginAbi
///     muster::mpi::Library* muster_mpi_library();     // one per process, never destroyed
inline constexpr unsigned kPluginAbi = 4;

enum class ThreadLevel : std::uint8_t { single, funneled, serialized, multiple };

/// Thread-safe, if `initialize` gave at least `serialized`: below `multiple`, one lock guards every
/// call of MPI.
class Library : public carried::CallLibrary {
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
