// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/format/files/digest.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstdio>

namespace muster::shards {

namespace {

constexpr std::size_t kBlockDigits = 32;

std::string digits_of(const XXH128_hash_t& hash) {
  std::array<char, 40> text{};
  std::snprintf(text.data(), text.size(), "%016llx%016llx",
                static_cast<unsigned long long>(hash.high64),
                static_cast<unsigned long long>(hash.low64));
  return text.data();
}

}  // namespace

std::string digest_of(std::span<const std::byte> bytes) {
  return digits_of(XXH3_128bits(bytes.data(), bytes.size()));
}

std::string digest_of(std::string_view text) {
  return digest_of(std::as_bytes(std::span(text.data(), text.size())));
}

struct Digest::RunningHash {
  XXH3_state_t hash;
};

Digest::Digest() : state_(std::make_unique<RunningHash>()) { XXH3_128bits_reset(&state_->hash); }
Digest::~Digest() = default;

void Digest::add(std::span<const std::byte> bytes) {
  XXH3_128bits_update(&state_->hash, bytes.data(), bytes.size());
}

void Digest::reset() { XXH3_128bits_reset(&state_->hash); }

std::string Digest::text() const { return digits_of(XXH3_128bits_digest(&state_->hash)); }

void BlockDigests::add(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const auto part = bytes.first(std::min(bytes.size(), kDigestBlock - in_block_));
    current_.add(part);
    in_block_ += part.size();
    if (in_block_ == kDigestBlock) static_cast<void>(text());
    bytes = bytes.subspan(part.size());
  }
}

std::string BlockDigests::text() {
  if (in_block_ > 0) {
    text_ += current_.text();
    current_.reset();
    in_block_ = 0;
  }
  return text_;
}

bool BlockDigests::fits(std::string_view blocks, std::uint64_t bytes) {
  return blocks.size() == (bytes + kDigestBlock - 1) / kDigestBlock * kBlockDigits;
}

std::string_view BlockDigests::of_block(std::string_view blocks, std::uint64_t number) {
  return blocks.substr(number * kBlockDigits, kBlockDigits);
}

}  // namespace muster::shards
