// SPDX-License-Identifier: BSD-3-Clause
/// The parts of a `TlsSession`: the bytes that wait on both sides of it, the cipher of its
/// payloads, and its state. Private to `tls_session.cc` (greetings, handshake, keys) and
/// `tls_payloads.cc` (records and payloads).
#pragma once

#include <openssl/evp.h>
#include <openssl/ssl.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/bytes.h"
#include "core/security/handshake.h"
#include "core/security/secret.h"
#include "core/security/tls_session.h"
#include "core/tunables/tunables_fixed.h"

namespace muster {
namespace tls {

/// A record's most, what stands before it, and what encryption may add.
inline constexpr std::size_t kRecordBytes = 16 * 1024;  // limit: TLS's own
inline constexpr std::size_t kRecordHeader = 5, kRecordExtra = 256;
/// So much output may wait before `write` takes no more.
inline constexpr std::size_t kMostOutput = fixed::kIoBuffer;
/// Pieces of at least this size travel outside of TLS records; so much of one at a time.
inline constexpr std::size_t kLeastPayload = fixed::kSmallMessage;
inline constexpr std::size_t kPayloadBytes = fixed::kIoBuffer;
inline constexpr std::size_t kSectionHeader = sizeof(std::uint32_t);
inline constexpr std::uint32_t kOutside = std::uint32_t{1} << 31;
/// Content types of TLS records are from here to there; no verdict is among them.
inline constexpr int kFirstContentType = 20, kLastContentType = 24;

struct FreeSsl {
  void operator()(SSL* ssl) const { SSL_free(ssl); }
};

/// The library's own words for its latest error; empties its list.
std::string library_error();

}  // namespace tls

/// Bytes that come at one end and go at the other. Keeps at most `kKept` bytes of memory while it
/// is empty.
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
        // Memory that is kept has its full size from the start.
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

 private:
  bool begin(bool encrypts) {
    std::array<unsigned char, 12> nonce{};
    std::memcpy(nonce.data(), &count_, sizeof count_);
    ++count_;
    return EVP_CipherInit_ex(context_.get(), nullptr, nullptr, nullptr, nonce.data(),
                             encrypts ? 1 : 0) == 1;
  }
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
  std::uint64_t count_ = 0;                  // the nonce: only grows, so no key meets one twice
  std::array<unsigned char, 16> nothing_{};  // for what the library adds at the end: nothing
};

struct TlsSession::Connection {
  /// In this order. A greeting is believed only once TLS, with a key of this connection, has proved
  /// the secret (`handshake`) and both sides have compared both greetings under it (`binding`).
  enum class State : std::uint8_t { greeting, handshake, binding, done, failed };

  Connection(Side which, const Handshake::Hello& hello, const Secret& job_secret,
             std::uint64_t bytes_per_key);
  Connection(const Connection&) = delete;

  void go_on(std::size_t came);
  bool begin_tls();
  bool eat_greeting();
  bool shake_hands();
  void forget_key();
  bool compare_bindings();
  void fail(Code code, Verdict why, std::string message);
  Status tampered(const std::string& how);
  bool encrypt(ConstBytes plain);
  Result<std::size_t> decrypt(MutableBytes to);
  std::size_t whole_record() const;
  bool has_record() const;

  std::uint64_t payloads_per_key() const {
    return std::max<std::uint64_t>(per_key / tls::kPayloadBytes, 1);
  }
  bool take_payload_key(bool of_connector, PayloadCipher& cipher);
  bool send_payload(ConstBytes payload);
  Result<std::size_t> read_section(MutableBytes to);
  Result<std::size_t> begin_section();
  Result<std::size_t> open_payload(MutableBytes to);
  std::size_t tag_bytes() const {
    return payloads == Payloads::plain ? 0 : PayloadCipher::kTagBytes;
  }

  const Side side;
  const Payloads payloads;
  const std::vector<Handshake::Hello::Service> also;
  const Secret secret;
  State state = State::greeting;
  Greeting mine, theirs{};
  SecretBytes key;  // until both sides have proved that they have it
  std::unique_ptr<SSL, tls::FreeSsl> ssl;
  ByteBuffer input;           // what the library has not read
  std::size_t of_record = 0;  // how much of the record at its front the library has yet to read
  std::size_t unproved = 0;   // bytes that came before the other side has proved the secret
  ByteBuffer output;          // what has not been sent
  std::string answer;         // of the binding, so far
  std::uint64_t written = 0;  // under the present key, as if records were full
  const std::uint64_t per_key;
  PayloadCipher sends, receives;
  // The section that is being read.
  std::array<std::byte, tls::kSectionHeader> section{};
  std::size_t section_have = 0;  // bytes of its header
  std::size_t inside_left = 0, outside_left = 0;
  std::size_t opened = 0;  // of a payload that is decrypted and stands at the front of `input`
  bool unwelcome = false;
  bool answered = false;  // the acceptor has said something behind its greeting
  bool proved = false;    // the other side has the secret
  Handshake::Peer peer;
  Verdict verdict = Verdict::accepted;
  Status failure;
};

}  // namespace muster
