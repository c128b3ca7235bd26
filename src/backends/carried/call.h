// SPDX-License-Identifier: BSD-3-Clause
/// One collective: from `collective::Args` to an operation of MPI, and back. An all_reduce of few
/// members is made of messages (`direct_all_reduce.h`).
///
/// MPI has no 16-bit floats, no bool of a known size, no averages and no factors, and its lists are
/// one piece of memory. Therefore: 16-bit floats are summed as float32 and rounded once, bools are
/// reduced as 0 and 1, an average is a sum and one division, a factor is applied to the input
/// first, floats of which a library's MIN and MAX would lose NaN go as integers
/// (`ordered_floats.h`), and slices that do not follow each other in memory go through a buffer.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "backends/carried/direct_all_reduce.h"
#include "backends/carried/library.h"
#include "backends/carried/tags.h"
#include "core/base/dtype.h"
#include "core/collective/communicator.h"
#include "muster/status.h"

namespace muster::carried {

/// How elements of a dtype are moved or reduced.
struct Carrier {
  Element element = Element::uint8;
  Count per_element = 1;  ///< 2 for complex numbers
  CarriedReduction op = CarriedReduction::sum;
  bool widens = false;      ///< 16-bit floats travel as float32
  bool normalises = false;  ///< bools are made 0 or 1 first
  bool orders = false;      ///< floats travel as integers of the same order
  bool converts() const { return widens || normalises || orders; }
};
/// For operations that only move: any type of the same width.
Carrier carrier_of(DType dtype);
/// `reduce` must be defined on `dtype`. `passes_nan_on`: as the library says.
Carrier carrier_of(DType dtype, collective::Reduce reduce, bool passes_nan_on = true);

/// The error of `call`, which gave `code`: "all_reduce failed: invalid communicator (Open MPI
/// v4.1.4)".
Status failed(const CallLibrary& library, std::string_view call, int code);

/// Code::unsupported if a library with int counts cannot carry out `args`.
Status check_counts(const CallLibrary& library, const collective::Args& args);

/// Whether the library alone reads and writes the memory of `args`, a collective of member `rank`:
/// nothing is reduced by muster, converted or copied into one piece.
bool is_left_to_library(const collective::Args& args, int rank);

/// Reusable, since buffers are kept. Not thread-safe.
class CarriedCall {
 public:
  CarriedCall(CallLibrary& library, Comm& comm, int rank, int size, CarriedTags tags)
      : library_(library),
        comm_(comm),
        rank_(rank),
        size_(size),
        tags_(tags),
        direct_(library, comm, rank, size) {}

  /// Starts the operation, call number `sequence` of the group. `args` must be valid and, like its
  /// memory, stay until the operation has ended.
  Status begin(const collective::Args& args, std::uint64_t sequence);
  /// Advances MPI; the result once the operation has ended.
  std::optional<Status> test();
  /// Whether MPI may still use the memory.
  bool active() const { return request_.active || direct_.active(); }

 private:
  /// Memory that grows and is not initialised.
  class Scratch {
   public:
    std::byte* get(std::size_t bytes);
    void trim();

   private:
    std::unique_ptr<std::byte[]> memory_;
    std::size_t size_ = 0;
  };
  /// Count and offset of each member's slice in one piece of memory, in elements.
  struct CarriedLayout {
    std::vector<Count> counts, places;
    std::size_t bytes = 0;
    bool even = true;
  };

  Status begin_direct(std::uint64_t sequence);
  void trim();
  int broadcast();
  int all_reduce();
  int reduce();
  int all_gather();
  int gather();
  int scatter();
  int reduce_scatter();
  int all_to_all();
  void finish();

  template <class Slices>
  void lay_out(CarriedLayout& layout, const Slices& slices) const;
  const std::byte* packed_inputs(bool must_copy);
  std::byte* place_for_outputs(const CarriedLayout& layout);
  /// The elements of `in`, as they are reduced, in `out`.
  void convert(std::byte* out, ConstBytes in);
  void restore_order(std::byte* data, Count count) const;
  void divide(std::byte* data, Count count) const;
  bool at_root() const { return args_->root == rank_; }
  bool averages() const { return args_->reduce == collective::Reduce::avg; }
  bool scales() const { return args_->reduce == collective::Reduce::premul_sum; }
  Count elements(std::size_t bytes) const {
    return static_cast<Count>(elements_in(bytes, args_->dtype)) * carrier_.per_element;
  }

  CallLibrary& library_;
  Comm& comm_;
  const int rank_;
  const int size_;
  const CarriedTags tags_;
  const collective::Args* args_ = nullptr;
  bool is_direct_ = false;
  DirectAllReduce direct_;
  Carrier carrier_;
  CarriedRequest request_;
  CarriedLayout sent_, received_;
  Scratch in_, out_, scaled_;
  std::byte* result_ = nullptr;  // in `out_` or `in_`: to be copied or narrowed at the end
};

}  // namespace muster::carried
