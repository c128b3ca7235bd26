#include "core/security/secret_bytes.h"

#include <sodium.h>

#include <algorithm>
#include <cstdlib>
#include <new>

namespace muster {

SecretBytes::SecretBytes(ConstBytes bytes) : size_(bytes.size()) {
  static const bool ready = ::sodium_init() >= 0;
  if (!ready) std::abort();  // a kernel without random numbers cannot keep a secret
  auto* const memory = static_cast<std::byte*>(::sodium_malloc(std::max<std::size_t>(size_, 1)));
  if (memory == nullptr) throw std::bad_alloc();
  std::copy(bytes.begin(), bytes.end(), memory);
  memory_ = std::shared_ptr<const std::byte>(
      memory, [](const std::byte* old) { ::sodium_free(const_cast<std::byte*>(old)); });
  ::sodium_mprotect_readonly(memory);
}

}  // namespace muster
