/// AES-128-GCM over the payloads of one direction of a connection. Private to base/.
#pragma once

#include <openssl/evp.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "core/base/bytes.h"

namespace muster {

/// AES-128-GCM over the payloads of one direction: the same calls, in the same order, on both
/// sides.
class PayloadCipher {
 public:
  static constexpr std::size_t kKeyBytes = 16, kTagBytes = 16;
  using Tag = std::array<std::byte, kTagBytes>;

  /// From the next payload on.
  bool use(const unsigned char* key) {
    if (context_ == nullptr) context_.reset(EVP_CIPHER_CTX_new());
    return context_ != nullptr &&
           EVP_EncryptInit_ex(context_.get(), EVP_aes_128_gcm(), nullptr, key, nullptr) == 1;
  }
  /// Which payload is next.
  std::uint64_t count() const { return count_; }

  bool encrypt(ConstBytes plain, std::byte* to, Tag& tag) {
    return begin(true) && feed(plain, to) && end(tag);
  }
  /// `sealed` may be where it goes.
  bool decrypt(ConstBytes sealed, std::byte* to, Tag tag) {
    int ignored = 0;
    return begin(false) && feed(sealed, to) &&
           EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_SET_TAG, kTagBytes, tag.data()) == 1 &&
           EVP_CipherFinal_ex(context_.get(), nothing_.data(), &ignored) == 1;
  }
  bool authenticate(ConstBytes payload, Tag& tag) {
    return begin(true) && feed(payload, nullptr) && end(tag);
  }

 private:
  bool begin(bool encrypts) {
    std::array<unsigned char, 12> nonce{};
    std::memcpy(nonce.data(), &count_, sizeof count_);
    ++count_;
    return EVP_CipherInit_ex(context_.get(), nullptr, nullptr, nullptr, nonce.data(),
                             encrypts ? 1 : 0) == 1;
  }
  /// To nowhere: as data that is authenticated and not encrypted.
  bool feed(ConstBytes bytes, std::byte* to) {
    int ignored = 0;
    return EVP_CipherUpdate(context_.get(), reinterpret_cast<unsigned char*>(to), &ignored,
                            reinterpret_cast<const unsigned char*>(bytes.data()),
                            static_cast<int>(bytes.size())) == 1;
  }
  bool end(Tag& tag) {
    int ignored = 0;
    return EVP_CipherFinal_ex(context_.get(), nothing_.data(), &ignored) == 1 &&
           EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_GET_TAG, kTagBytes, tag.data()) == 1;
  }

  struct Free {
    void operator()(EVP_CIPHER_CTX* context) const { EVP_CIPHER_CTX_free(context); }
  };
  std::unique_ptr<EVP_CIPHER_CTX, Free> context_;
  std::uint64_t count_ = 0;
  std::array<unsigned char, 16> nothing_{};  // for what the library adds at the end: nothing
};

}  // namespace muster
