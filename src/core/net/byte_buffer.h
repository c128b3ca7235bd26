/// Bytes that come at one end and go at the other. Private to base/.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <utility>

#include "core/base/bytes.h"
#include "core/tunables/tunables_fixed.h"

namespace muster {

/// Keeps a little memory while it is empty.
class ByteBuffer {
 public:
  ConstBytes bytes() const { return ConstBytes(memory_.get() + begin_, end_ - begin_); }
  std::byte* front() { return memory_.get() + begin_; }
  /// Room for so many more behind them.
  MutableBytes room(std::size_t more) {
    if (capacity_ - end_ < more) {
      const std::size_t held = end_ - begin_;
      if (capacity_ < held + more) {
        capacity_ = std::max(held + more, 2 * capacity_);
        // What is kept is made once.
        if (capacity_ > fixed::kIoBuffer) capacity_ = std::max(held + more, kKept);
        std::unique_ptr<std::byte[]> larger(new std::byte[capacity_]);
        std::memcpy(larger.get(), memory_.get() + begin_, held);
        memory_ = std::move(larger);
      } else {
        std::memmove(memory_.get(), memory_.get() + begin_, held);
      }
      begin_ = 0;
      end_ = held;
    }
    return MutableBytes(memory_.get() + end_, more);
  }
  void came(std::size_t bytes) { end_ += bytes; }
  void append(ConstBytes more) {
    if (more.empty()) return;
    std::memcpy(room(more.size()).data(), more.data(), more.size());
    came(more.size());
  }
  void append(std::byte one) { append(ConstBytes(&one, 1)); }
  void drop(std::size_t bytes) {
    begin_ += bytes;
    if (begin_ < end_) return;
    begin_ = end_ = 0;
    if (capacity_ > kKept) {
      memory_ = std::make_unique<std::byte[]>(0);
      capacity_ = 0;
    }
  }

 private:
  // Enough for what `write` lets wait and for a socket's bytes, so that neither is made anew.
  static constexpr std::size_t kKept = 3 * fixed::kIoBuffer;  // limit: memory of a connection
  std::unique_ptr<std::byte[]> memory_ = std::make_unique<std::byte[]>(0);
  std::size_t capacity_ = 0, begin_ = 0, end_ = 0;
};

}  // namespace muster
