/// Bytes that must not leave this process: kept in pages of their own, which core dumps leave out,
/// which are not swapped out where the system allows that, and which are wiped when the last copy
/// of this handle goes (libsodium's guarded memory).
#pragma once

#include <memory>

#include "core/base/bytes.h"

namespace muster {

class SecretBytes {
 public:
  SecretBytes() = default;
  /// A copy. Throws std::bad_alloc where there is no memory.
  explicit SecretBytes(ConstBytes bytes);

  ConstBytes view() const { return {memory_.get(), size_}; }
  std::string_view text() const { return as_text(view()); }
  std::size_t size() const { return size_; }

 private:
  std::shared_ptr<const std::byte> memory_;
  std::size_t size_ = 0;
};

}  // namespace muster
