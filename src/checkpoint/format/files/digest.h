// SPDX-License-Identifier: BSD-3-Clause
/// 128-bit XXH3 digests as 32 hexadecimal digits: they find damage, not forgery.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace muster::shards {

std::string digest_of(std::span<const std::byte> bytes);
std::string digest_of(std::string_view text);

/// Data that is read or written is hashed in parts of so many bytes, while they are in the cache.
inline constexpr std::size_t kHashedTogether = std::size_t{1} << 18;
/// Each so many bytes of a piece of a tensor have a digest of their own, so that a part of the
/// piece is verified without the rest.
inline constexpr std::size_t kDigestBlock = std::size_t{1} << 20;  // limit: of the format

/// The digest of bytes that come one behind the other.
class Digest {
 public:
  Digest();
  ~Digest();
  void add(std::span<const std::byte> bytes);
  std::string text() const;
  /// Begins anew.
  void reset();

 private:
  struct RunningHash;
  std::unique_ptr<RunningHash> state_;
};

/// The digests of the blocks of a piece as one text, in their order: 32 digits for each.
class BlockDigests {
 public:
  /// Bytes that come one behind the other.
  void add(std::span<const std::byte> bytes);
  std::string text();

  /// Whether `blocks` has a digest for each block of a piece of `bytes`.
  static bool fits(std::string_view blocks, std::uint64_t bytes);
  /// The digest of block `number`.
  static std::string_view of_block(std::string_view blocks, std::uint64_t number);

 private:
  Digest current_;
  std::size_t in_block_ = 0;
  std::string text_;
};

}  // namespace muster::shards
