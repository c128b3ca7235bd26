#include "core/security/base64.h"

#include <openssl/evp.h>

namespace muster {

std::string base64(std::string_view bytes) {
  std::string text(4 * ((bytes.size() + 2) / 3) + 1, '\0');
  const int written = EVP_EncodeBlock(reinterpret_cast<unsigned char*>(text.data()),
                                      reinterpret_cast<const unsigned char*>(bytes.data()),
                                      static_cast<int>(bytes.size()));
  text.resize(static_cast<std::size_t>(written));
  return text;
}

bool from_base64(std::string_view text, std::string& bytes) {
  bytes.clear();
  if (text.empty()) return true;
  if (text.size() % 4 != 0) return false;
  bytes.resize(text.size() / 4 * 3);
  const int written = EVP_DecodeBlock(reinterpret_cast<unsigned char*>(bytes.data()),
                                      reinterpret_cast<const unsigned char*>(text.data()),
                                      static_cast<int>(text.size()));
  if (written < 0) return false;
  // EVP_DecodeBlock counts the bytes that the padding stands for.
  const std::size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  if (static_cast<std::size_t>(written) < padding) return false;
  bytes.resize(static_cast<std::size_t>(written) - padding);
  return true;
}

}  // namespace muster
