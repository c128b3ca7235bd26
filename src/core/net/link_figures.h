// SPDX-License-Identifier: BSD-3-Clause
/// Figures of a TCP connection, as the kernel has measured them.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

namespace muster {

struct LinkFigures {
  /// The shortest round trip of the last minutes, waiting in queues excluded; 0: not known yet.
  std::chrono::microseconds round_trip{};
  /// The latest rate at which the peer has acknowledged bytes while enough of them were there to
  /// send; 0: not known yet.
  std::uint64_t bytes_per_s = 0;
  std::uint64_t sent = 0;    ///< bytes, those that were sent again included
  std::uint64_t resent = 0;  ///< bytes
};

/// Reads those of a connected TCP socket. Absent for other descriptors, and where the kernel does
/// not tell (Linux before 4.19). One system call.
std::optional<LinkFigures> link_figures(int descriptor);

}  // namespace muster
