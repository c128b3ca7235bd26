// SPDX-License-Identifier: BSD-3-Clause
/// TLS 1.3 between two processes of a job, keyed with the job's secret. Bytes in, bytes out: no
/// sockets, no clock, no threads of its own.
///
///   connector -> acceptor   Greeting (`handshake.h`)
///   acceptor  -> connector  Greeting, then a verdict byte if it refuses
///   connector -> acceptor   ClientHello
///   acceptor  -> connector  ServerHello to Finished, or a verdict byte that refuses
///   connector -> acceptor   Finished; encrypted: hash of both greetings
///   acceptor  -> connector  encrypted: verdict byte, hash of both greetings
///
/// The pre-shared key is derived by HKDF from the secret (observers': from the observer's key), the
/// role, the job and the nonces of both greetings. So it is of one connection: OpenSSL keeps
/// secrets that are made of it, which a core dump shows, and no other connection can be made with
/// them. It is forgotten once both sides have proved that they have it. Every connection also makes
/// a Diffie-Hellman key (psk_dhe_ke), so a secret that leaks later opens no recorded connection.
/// Greetings travel in the clear, so that both sides can say what differs; inside the connection
/// both compare what they have seen of them. There are no certificates, tickets or early data.
/// Sources: RFC 8446 and 9257 (external keys), RFC 5869 (HKDF).
///
/// OpenSSL's record layer copies every byte three times. So large pieces travel outside of it: the
/// encrypted stream is a row of sections, each behind 4 bytes:
///
///   length u32                  so many bytes follow
///   length u32, highest bit set a payload of so many bytes follows outside, right behind the
///   record
///                               that ends with this
///
/// A payload is encrypted by AES-128-GCM and followed by its tag of 16 bytes, with keys that both
/// sides export from the connection (RFC 8446, 7.5), one for each direction, and the payload's
/// number as nonce, which never repeats under a key. Its place and length stand in the record.
/// `Handshake::Payloads::plain`, for networks that are trusted, leaves a payload as it is, without
/// a tag.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/base/bytes.h"
#include "core/security/handshake.h"
#include "core/security/secret.h"
#include "muster/status.h"

namespace muster {

/// One side of one connection; not thread-safe.
class TlsSession {
 public:
  using Side = Handshake::Side;
  using Verdict = Handshake::Verdict;
  using Payloads = Handshake::Payloads;

  /// AES-GCM is safe for 2^24.5 records under one key (RFC 8446, 5.5). Records get a new key after
  /// so many bytes, each counted as a full one: after 2^22; payloads after 2^20. The same on both
  /// sides.
  static constexpr std::uint64_t kBytesPerKey = std::uint64_t{64} << 30;  // limit: the cipher's own

  TlsSession(Side side, const Handshake::Hello& hello, const Secret& secret,
             std::uint64_t bytes_per_key = kBytesPerKey);
  ~TlsSession();
  TlsSession(TlsSession&&) noexcept;
  TlsSession& operator=(TlsSession&&) noexcept;

  /// Takes all of the bytes that have come from the other side.
  void feed(ConstBytes ciphertext);
  /// The same without a copy: at least `bytes` of room, of which the first `came(n)` are then used.
  MutableBytes room(std::size_t bytes);
  void came(std::size_t bytes);
  /// Bytes that have come and are not decrypted yet: the caller stops feeding while they are many.
  std::size_t unread() const;

  /// Bytes to be sent, in order; they stay until `sent` says how many have gone.
  ConstBytes output() const;
  void sent(std::size_t bytes);
  std::string take_output();

  /// Both sides have proved the secret and agree on the greetings: `write` and `read` work.
  bool done() const;
  bool failed() const;
  /// Code::refused with what differed and what to try; Code::network where bytes were changed on
  /// the way.
  const Status& failure() const;
  Verdict verdict() const;
  /// A connector's failure that nothing authenticates: it was found before the other side had
  /// proved the secret, so anybody on the way can have brought it about. Never without a secret.
  bool failed_in_the_clear() const;
  /// Connector: only the acceptor's verdict is missing, and it may have accepted already.
  bool awaits_verdict() const;
  /// The other side's description of itself, to be trusted once `done`.
  const Handshake::Peer& peer() const;
  /// Acceptor: refuses a peer that is who it says but is not wanted now. Before `done`.
  void set_unwelcome();

  /// Encrypts from the pieces in order and says how many bytes; 0 while 64 KiB of output wait to
  /// be sent. After a failure: that.
  Result<std::size_t> write(std::span<const ConstBytes> pieces);
  /// Decrypts into the pieces in order and says how many bytes; 0 where nothing whole has come.
  Result<std::size_t> read(std::span<const MutableBytes> pieces);
  /// Whether `read` has something to give, or to say, of what has come already.
  bool readable() const;

  struct Connection;  ///< private (tls_connection.h)

 private:
  std::unique_ptr<Connection> connection_;
};

}  // namespace muster
