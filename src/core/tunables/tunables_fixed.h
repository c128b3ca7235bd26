// SPDX-License-Identifier: BSD-3-Clause
/// The rows of the table (tunables.h) that no override may change. Constants alone: kernels that
/// are compiled for one instruction set include it too.
#pragma once

#include <cstddef>
#include <cstdint>

namespace muster {

/// Numbers that the members of a group must have alike, or that size arrays: no override.
namespace fixed {

// Messages over links.
inline constexpr std::size_t kEagerBytes = 64 * 1024;
inline constexpr std::size_t kFragmentBytes = 256 * 1024;
inline constexpr std::size_t kEnvelopeCredit = 4096;
inline constexpr std::size_t kSmallMessage = 4 * 1024;
inline constexpr std::size_t kGatheredWrite = 32 * 1024;
inline constexpr std::size_t kInlineCopy = 1024;
inline constexpr std::size_t kIoBuffer = 64 * 1024;
inline constexpr std::size_t kIoShare = 1024 * 1024;
// Algorithms over links.
inline constexpr std::size_t kReduceChunk = 128 * 1024;
inline constexpr std::size_t kHostChunk = 32 * 1024;
inline constexpr std::size_t kLeastMessage = 16 * 1024;
inline constexpr std::size_t kGatheredMost = 4 * 1024 * 1024;
inline constexpr std::size_t kReduceDepth = 2;
inline constexpr std::size_t kForwardDepth = 4;
inline constexpr std::size_t kStrandWindow = 4 * 1024 * 1024;
inline constexpr std::size_t kInFlight = 8;
inline constexpr std::size_t kEncodedPiece = 512 * 1024;
inline constexpr std::size_t kEncodedPieces = 12;
inline constexpr std::size_t kMpiDirect = 4;
inline constexpr std::size_t kMpiRound = 2 * 1024 * 1024;
// The region of a host.
inline constexpr std::size_t kRegionSlots = 128;
inline constexpr std::size_t kInlineBytes = 72;
inline constexpr std::size_t kSlotBytes = 16 * 1024;
inline constexpr std::size_t kWindows = 4;
inline constexpr std::size_t kWindowBytes = 512 * 1024;
inline constexpr std::size_t kWideGroup = 16;
inline constexpr std::size_t kCacheBlock = 8 * 1024;
inline constexpr std::size_t kReclaimBlock = 2 * 1024;
inline constexpr std::size_t kReclaimBytes = 4 * 1024 * 1024;
inline constexpr std::size_t kReclaimFewBytes = 16 * 1024 * 1024;
inline constexpr std::size_t kEarlyCopy = 2 * 1024 * 1024;
// Polls, and what is taken at once.
inline constexpr int kCheckPauses = 8;
inline constexpr int kClockPolls = 32;
inline constexpr int kPollsOnOneCore = 2;
inline constexpr int kBusyPauses = 8;
inline constexpr int kPassPauses = 2;
inline constexpr int kTakenWithoutPass = 128;
inline constexpr std::size_t kPlainPasses = 64;
inline constexpr std::size_t kPlainLinks = 2;
inline constexpr int kReadyLinks = 64;
inline constexpr std::size_t kShortPiece = 96;
inline constexpr std::size_t kQuickPages = 256;
inline constexpr std::size_t kQuickBytes = 32 * 1024 * 1024;
inline constexpr std::int64_t kSweepNanoseconds = 10'000'000;
// Models and checkpoints.
inline constexpr std::int64_t kInPlaceGradient = 64 * 1024;
inline constexpr std::int64_t kConvertedPart = 64 * 1024 * 1024;

}  // namespace fixed

}  // namespace muster
