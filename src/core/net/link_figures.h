// SPDX-License-Identifier: BSD-3-Clause
/// Figures of a TCP connection, as the kernel has measured them.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "muster/clock.h"

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
/// Before so much was sent, a rate tells of the start of a connection alone.
inline constexpr std::uint64_t kTellingBytes = 1 << 20;  // limit: many windows of a near link

/// Reads those of a connected TCP socket. Absent for other descriptors, and where the kernel does
/// not tell (Linux before 4.19). One system call.
std::optional<LinkFigures> link_figures(int descriptor);

/// How far a connection has come; bytes since it was made.
struct SendPosition {
  std::uint64_t written = 0;       ///< handed to this host's kernel
  std::uint64_t acknowledged = 0;  ///< by the peer's kernel, which tells nothing of its process
};
/// Reads that of a connected TCP socket; absent where its figures are. Two system calls: bytes that
/// are acknowledged between them are missing in `written`.
std::optional<SendPosition> send_position(int descriptor);

/// Largest number of connections of a link, its strands.
inline constexpr std::size_t kMostStrands = 64;  // limit: descriptors of one link
/// How many a link needs: one for each `trip` of its round trip that has begun, at least one, at
/// most `most`.
std::uint16_t strands_for(std::chrono::microseconds round_trip, Duration trip, std::int64_t most);

}  // namespace muster
