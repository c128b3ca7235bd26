/// 128-bit XXH3 digests as 32 hexadecimal digits: they find damage, not forgery.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace muster::shards {

std::string digest_of(std::span<const std::byte> bytes);
std::string digest_of(std::string_view text);

/// Data that is read or written is hashed in blocks of so many bytes, while they are in the cache.
inline constexpr std::size_t kDigestBlock = std::size_t{1} << 18;

/// The digest of bytes that come one behind the other.
class Digest {
 public:
  Digest();
  ~Digest();
  void add(std::span<const std::byte> bytes);
  std::string text() const;

 private:
  struct RunningHash;
  std::unique_ptr<RunningHash> state_;
};

}  // namespace muster::shards
