// SPDX-License-Identifier: BSD-3-Clause
/// Streams over memory without a descriptor, for tests of what lies over a stream.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "core/transport/byte_stream.h"

namespace muster::transport {

/// Both directions of a wire that takes so much and no more.
struct TestWire {
  std::array<std::string, 2> bytes;
  std::size_t room = SIZE_MAX;
  bool ended = false;
};

class TestWireStream final : public ByteStream {
 public:
  TestWireStream(std::shared_ptr<TestWire> wire, std::size_t side)
      : wire_(std::move(wire)), side_(side) {}
  Result<std::size_t> write(std::span<const ConstBytes> pieces) override {
    std::size_t total = 0;
    for (const ConstBytes piece : pieces) {
      const std::size_t take = std::min(piece.size(), wire_->room);
      wire_->bytes[side_].append(as_text(piece.first(take)));
      wire_->room -= take;
      total += take;
    }
    return total;
  }
  Result<std::size_t> read(std::span<const MutableBytes> pieces) override {
    std::string& from = wire_->bytes[1 - side_];
    if (from.empty() && wire_->ended) return Status(Code::closed, "end of stream");
    std::size_t total = 0;
    for (const MutableBytes piece : pieces) {
      const std::size_t take = std::min(piece.size(), from.size());
      std::copy_n(as_bytes(from).begin(), take, piece.begin());
      from.erase(0, take);
      total += take;
    }
    return total;
  }
  int descriptor() const override { return -1; }
  const char* kind() const override { return "wire"; }

 private:
  const std::shared_ptr<TestWire> wire_;
  const std::size_t side_;
};

}  // namespace muster::transport
