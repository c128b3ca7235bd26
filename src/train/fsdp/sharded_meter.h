/// Bytes that sharded models hold beside their shards, counted where they are allocated and freed.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>

namespace muster::parallel {

/// Bytes of one kind: now, and the most since the last reset. Thread-safe; the peak is exact only
/// if one thread at a time adds.
class ByteMeter {
 public:
  void add(std::int64_t bytes) {
    const std::int64_t now = now_ += bytes;
    if (now > peak_) peak_ = now;
  }
  void subtract(std::int64_t bytes) { now_ -= bytes; }
  std::int64_t now() const { return now_; }
  std::int64_t peak() const { return peak_; }
  void reset_peak() { peak_ = now_.load(); }

  /// Counts bytes during its lifetime.
  class MeterScope {
   public:
    explicit MeterScope(ByteMeter& meter) : meter_(meter) {}
    MeterScope(MeterScope&& other) noexcept
        : meter_(other.meter_), bytes_(std::exchange(other.bytes_, 0)) {}
    ~MeterScope() { meter_.subtract(bytes_); }
    MeterScope(const MeterScope&) = delete;
    MeterScope& operator=(const MeterScope&) = delete;
    void add(std::int64_t bytes) {
      bytes_ += bytes;
      meter_.add(bytes);
    }

   private:
    ByteMeter& meter_;
    std::int64_t bytes_ = 0;
  };

 private:
  std::atomic<std::int64_t> now_ = 0, peak_ = 0;
};

/// The units on one group's ranks share one.
struct ShardedMeter {
  ByteMeter gathered;  ///< whole parameters, and parts of them kept between forward and backward
  ByteMeter staging;   ///< whole gradients and buffers of reductions, while they are reduced
};

}  // namespace muster::parallel
