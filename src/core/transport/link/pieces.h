// SPDX-License-Identifier: BSD-3-Clause
/// A caller's list of pieces of memory, as streams over other streams work it off. Private to
/// `transport/link`.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

namespace muster::transport {

/// A copy of the caller's list, which shrinks.
template <class Bytes>
class Pieces {
 public:
  static constexpr std::size_t kMostPieces = 64;  // limit: more come with the next call

  explicit Pieces(std::span<const Bytes> pieces) : left_(list_.data(), 0) {
    const std::size_t count = std::min(pieces.size(), list_.size());
    std::copy_n(pieces.begin(), count, list_.begin());
    left_ = std::span(list_.data(), count);
    took(0);
  }
  bool empty() const { return left_.empty(); }
  std::span<const Bytes> left() const { return left_; }
  /// The first `bytes` were dealt with.
  void took(std::size_t bytes) {
    while (!left_.empty() && bytes >= left_.front().size()) {
      bytes -= left_.front().size();
      left_ = left_.subspan(1);
    }
    if (bytes > 0) left_.front() = left_.front().subspan(bytes);
  }
  /// Fills in pieces of the first `most` bytes and returns their number; adds their bytes to
  /// `bytes`.
  std::size_t first(std::size_t most, std::span<Bytes> into, std::size_t& bytes) const {
    std::size_t count = 0;
    for (const Bytes& piece : left_) {
      if (most == 0 || count == into.size()) break;
      into[count] = piece.first(std::min(piece.size(), most));
      most -= into[count].size();
      bytes += into[count].size();
      ++count;
    }
    return count;
  }

 private:
  std::array<Bytes, kMostPieces> list_;
  std::span<Bytes> left_;
};

}  // namespace muster::transport
