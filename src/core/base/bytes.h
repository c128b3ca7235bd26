// SPDX-License-Identifier: BSD-3-Clause
/// Byte spans and the one little-endian encoding of everything that crosses a wire.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

namespace muster {

static_assert(std::endian::native == std::endian::little,
              "the wire format is little-endian and copied as it is");

using ConstBytes = std::span<const std::byte>;
using MutableBytes = std::span<std::byte>;

inline ConstBytes as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}
inline std::string_view as_text(ConstBytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Two digits a byte, in lower case.
inline std::string hexadecimal(ConstBytes bytes) {
  std::string text;
  for (const std::byte byte : bytes) {
    text += "0123456789abcdef"[std::to_integer<unsigned>(byte) >> 4];
    text += "0123456789abcdef"[std::to_integer<unsigned>(byte) & 15];
  }
  return text;
}

/// Appends fixed-width values and length-prefixed text to a string.
class ByteWriter {
 public:
  template <class T>
  requires std::is_trivially_copyable_v<T> ByteWriter& put(const T& value) {
    out_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  /// A 32-bit length, then the bytes.
  ByteWriter& put_text(std::string_view text) {
    put(static_cast<std::uint32_t>(text.size()));
    out_.append(text);
    return *this;
  }
  /// Bytes as they are; their length is for the caller to have said.
  ByteWriter& put_bytes(std::string_view bytes) {
    out_.append(bytes);
    return *this;
  }
  std::string take() { return std::move(out_); }
  const std::string& view() const { return out_; }

 private:
  std::string out_;
};

/// Reads what ByteWriter wrote. Every read checks what is left; once one fails all later ones do,
/// so that a parser may read a whole record and ask `ok()` once. Nothing is allocated on the word
/// of the sender.
class ByteReader {
 public:
  explicit ByteReader(std::string_view in) : in_(in) {}

  template <class T>
  requires std::is_trivially_copyable_v<T> T get() {
    T value{};
    if (!take(sizeof value)) return value;
    std::memcpy(&value, in_.data() + at_ - sizeof value, sizeof value);
    return value;
  }
  /// A view into the input, empty when the record is broken.
  std::string_view get_text() {
    const auto length = get<std::uint32_t>();
    if (!ok_ || !take(length)) return {};
    return in_.substr(at_ - length, length);
  }
  bool ok() const { return ok_; }
  bool at_end() const { return ok_ && at_ == in_.size(); }
  std::size_t left() const { return in_.size() - at_; }

 private:
  bool take(std::size_t n) {
    if (!ok_ || n > in_.size() - at_) return ok_ = false;
    at_ += n;
    return true;
  }
  std::string_view in_;
  std::size_t at_ = 0;
  bool ok_ = true;
};

// Memory read in words of 8 bytes. A wider read of words that were just written is slow: it waits
// until all of them have left the processor's store buffer.

/// The word at `from`, in a register of its own.
inline std::uint64_t word_at(const void* from) noexcept {
  std::uint64_t word;
  std::memcpy(&word, from, sizeof word);
#if defined(__GNUC__)
  asm("" : "+r"(word));
#endif
  return word;
}

template <std::size_t Words>
inline void copy_words(void* to, const void* from) noexcept {
  for (std::size_t i = 0; i < Words; ++i) {
    const std::uint64_t word = word_at(static_cast<const std::byte*>(from) + 8 * i);
    std::memcpy(static_cast<std::byte*>(to) + 8 * i, &word, sizeof word);
  }
}

template <std::size_t Words>
inline bool equal_words(const void* a, const void* b) noexcept {
  std::uint64_t unlike = 0;
  for (std::size_t i = 0; i < Words; ++i)
    unlike |= word_at(static_cast<const std::byte*>(a) + 8 * i) ^
              word_at(static_cast<const std::byte*>(b) + 8 * i);
  return unlike == 0;
}

/// So much, in words and then in bytes.
inline void copy_few(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  for (; bytes >= 8; bytes -= 8, to += 8, from += 8) copy_words<1>(to, from);
  for (; bytes > 0; --bytes) *to++ = *from++;
}

}  // namespace muster
