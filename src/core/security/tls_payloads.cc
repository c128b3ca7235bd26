// SPDX-License-Identifier: BSD-3-Clause
#include <openssl/ssl.h>
#include <sodium.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "core/security/tls_connection.h"
#include "core/security/tls_session.h"
#include "core/tunables/tunables_fixed.h"

namespace muster {

/// All of it; the library's output has no end.
bool TlsSession::Connection::encrypt(ConstBytes plain) {
  if (written >= per_key) {
    SSL_key_update(ssl.get(), SSL_KEY_UPDATE_NOT_REQUESTED);
    written = 0;
  }
  while (!plain.empty()) {
    std::size_t taken = 0;
    if (SSL_write_ex(ssl.get(), plain.data(), plain.size(), &taken) != 1) {
      fail(Code::network, Verdict::accepted, "could not encrypt: " + tls::library_error());
      return false;
    }
    plain = plain.subspan(taken);
    written += tls::kRecordBytes;
  }
  return true;
}

Result<std::size_t> TlsSession::Connection::decrypt(MutableBytes to) {
  std::size_t got = 0;
  if (!has_record()) return got;
  if (SSL_read_ex(ssl.get(), to.data(), to.size(), &got) == 1) return got;
  // SSL_get_error would count errors that others have left in this thread's list, and emptying that
  // each time costs as much as decrypting a small message.
  if (SSL_want_read(ssl.get())) return std::size_t{0};
  return tampered(tls::library_error());
}

/// The length of the record at the front of the input, or what is there of something that is none
/// (the library finds out); 0 where it is not whole yet.
std::size_t TlsSession::Connection::whole_record() const {
  const ConstBytes came = input.bytes();
  if (came.size() < tls::kRecordHeader) return 0;
  const int type = std::to_integer<int>(came[0]);
  const std::size_t length =
      std::to_integer<std::size_t>(came[3]) << 8 | std::to_integer<std::size_t>(came[4]);
  if (type < tls::kFirstContentType || type > tls::kLastContentType ||
      length > tls::kRecordBytes + tls::kRecordExtra)
    return came.size();
  return came.size() < tls::kRecordHeader + length ? 0 : tls::kRecordHeader + length;
}

bool TlsSession::Connection::has_record() const {
  return SSL_pending(ssl.get()) > 0 || of_record > 0 || whole_record() > 0;
}

/// The key of the next payloads, which both sides export from the connection (RFC 8446, 7.5).
bool TlsSession::Connection::take_payload_key(bool of_connector, PayloadCipher& cipher) {
  constexpr std::string_view kLabel = "EXPORTER-muster-payloads";
  std::array<unsigned char, 9> which{static_cast<unsigned char>(of_connector ? 1 : 0)};
  const std::uint64_t number = cipher.count() / payloads_per_key();
  std::memcpy(which.data() + 1, &number, sizeof number);
  std::array<unsigned char, PayloadCipher::kKeyBytes> key_bytes;
  const bool made =
      SSL_export_keying_material(ssl.get(), key_bytes.data(), key_bytes.size(), kLabel.data(),
                                 kLabel.size(), which.data(), which.size(), 1) == 1 &&
      cipher.use(key_bytes.data());
  sodium_memzero(key_bytes.data(), key_bytes.size());
  return made;
}

bool TlsSession::Connection::send_payload(ConstBytes payload) {
  const MutableBytes to = output.room(payload.size() + tag_bytes());
  PayloadCipher::Tag tag;
  bool made = payloads == Payloads::plain || sends.count() % payloads_per_key() != 0 ||
              take_payload_key(side == Side::connector, sends);
  if (payloads == Payloads::plain)
    std::memcpy(to.data(), payload.data(), payload.size());
  else
    made = made && sends.encrypt(payload, to.data(), tag);
  if (!made) {
    fail(Code::network, Verdict::accepted, "could not encrypt: " + tls::library_error());
    return false;
  }
  std::memcpy(to.data() + payload.size(), tag.data(), tag_bytes());
  output.came(to.size());
  return true;
}

/// From one section at most; 0 where nothing whole has come.
Result<std::size_t> TlsSession::Connection::read_section(MutableBytes to) {
  for (;;) {
    if (opened > 0) {
      const std::size_t bytes = std::min(to.size(), opened);
      std::memcpy(to.data(), input.bytes().data(), bytes);
      opened -= bytes;
      input.drop(bytes + (opened == 0 ? tag_bytes() : 0));
      return bytes;
    }
    if (inside_left > 0) {
      auto got = decrypt(to.first(std::min(to.size(), inside_left)));
      if (got.ok()) inside_left -= *got;
      return got;
    }
    if (outside_left > 0) {
      auto bytes = open_payload(to);
      if (!bytes.ok() || *bytes > 0 || opened == 0) return bytes;
      continue;
    }
    auto begun = begin_section();
    if (!begun.ok() || *begun == 0) return begun;
  }
}

/// Reads a header; 0 where it is not there yet.
Result<std::size_t> TlsSession::Connection::begin_section() {
  while (section_have < tls::kSectionHeader) {
    auto got = decrypt(MutableBytes(section).subspan(section_have));
    if (!got.ok() || *got == 0) return got;
    section_have += *got;
  }
  section_have = 0;
  std::uint32_t header;
  std::memcpy(&header, section.data(), sizeof header);
  const std::size_t length = header & ~tls::kOutside;
  if (length == 0 || length > tls::kPayloadBytes) return tampered("a section of a wrong length");
  ((header & tls::kOutside) != 0 ? outside_left : inside_left) = length;
  return length;
}

/// Straight to where it goes if it fits there; else it is opened where it is. 0 for that, and where
/// it has not come yet.
Result<std::size_t> TlsSession::Connection::open_payload(MutableBytes to) {
  const std::size_t bytes = outside_left;
  if (input.bytes().size() < bytes + tag_bytes()) return std::size_t{0};
  const ConstBytes sealed = input.bytes().first(bytes);
  const bool fits = bytes <= to.size();
  if (payloads != Payloads::plain) {
    PayloadCipher::Tag tag;
    std::memcpy(tag.data(), sealed.data() + bytes, tag.size());
    bool good = receives.count() % payloads_per_key() != 0 ||
                take_payload_key(side == Side::acceptor, receives);
    good = good && receives.decrypt(sealed, fits ? to.data() : input.front(), tag);
    if (!good) {
      // Decrypted bytes must not be visible if their tag is wrong.
      if (fits) std::memset(to.data(), 0, bytes);
      return tampered("the tag of a payload is wrong");
    }
  }
  outside_left = 0;
  if (!fits) {
    opened = bytes;
    return std::size_t{0};
  }
  if (payloads == Payloads::plain) std::memcpy(to.data(), sealed.data(), bytes);
  input.drop(bytes + tag_bytes());
  return bytes;
}

namespace {

/// Sections that share a record.
class TlsRecord {
 public:
  std::size_t room() const { return bytes_.size() - tls::kSectionHeader - filled_; }
  void add(ConstBytes more) {
    std::memcpy(bytes_.data() + filled_, more.data(), more.size());
    filled_ += more.size();
  }
  /// Begins with one of what was added, and ends with the announcement of a payload of `outside`
  /// bytes, if any. Empty where there is neither.
  ConstBytes take(std::size_t outside) {
    const auto inside = static_cast<std::uint32_t>(std::exchange(filled_, tls::kSectionHeader) -
                                                   tls::kSectionHeader);
    const std::size_t begin = inside > 0 ? 0 : tls::kSectionHeader;
    std::size_t end = tls::kSectionHeader + inside;
    std::memcpy(bytes_.data(), &inside, sizeof inside);
    if (outside > 0) {
      const std::uint32_t announced = static_cast<std::uint32_t>(outside) | tls::kOutside;
      std::memcpy(bytes_.data() + end, &announced, sizeof announced);
      end += tls::kSectionHeader;
    }
    return ConstBytes(bytes_).subspan(begin, end - begin);
  }

 private:
  std::array<std::byte, tls::kRecordBytes> bytes_;
  std::size_t filled_ = tls::kSectionHeader;
};

}  // namespace

Result<std::size_t> TlsSession::write(std::span<const ConstBytes> pieces) {
  if (failed()) return failure();
  Connection& to = *connection_;
  TlsRecord record;
  std::size_t taken = 0;
  for (ConstBytes piece : pieces) {
    while (!piece.empty() && output().size() < tls::kMostOutput) {
      std::size_t bytes = 0;
      if (piece.size() >= tls::kLeastPayload) {
        bytes = std::min(piece.size(), tls::kPayloadBytes);
        if (!to.encrypt(record.take(bytes)) || !to.send_payload(piece.first(bytes)))
          return failure();
      } else {
        if (record.room() == 0 && !to.encrypt(record.take(0))) return failure();
        bytes = std::min(piece.size(), record.room());
        record.add(piece.first(bytes));
      }
      taken += bytes;
      piece = piece.subspan(bytes);
    }
    if (!piece.empty()) break;
  }
  if (!to.encrypt(record.take(0))) return failure();
  return taken;
}

Result<std::size_t> TlsSession::read(std::span<const MutableBytes> pieces) {
  if (failed()) return failure();
  std::size_t total = 0;
  for (MutableBytes piece : pieces) {
    while (!piece.empty()) {
      const auto got = connection_->read_section(piece);
      if (!got.ok()) return total > 0 ? Result<std::size_t>(total) : got;
      if (*got == 0) return total;
      total += *got;
      piece = piece.subspan(*got);
    }
  }
  return total;
}

bool TlsSession::readable() const {
  const Connection& from = *connection_;
  if (from.state == Connection::State::failed || from.opened > 0) return true;
  if (from.state != Connection::State::done) return false;
  if (from.outside_left > 0)
    return from.input.bytes().size() >= from.outside_left + from.tag_bytes();
  return from.has_record();
}

}  // namespace muster
