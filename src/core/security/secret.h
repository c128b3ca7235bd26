// SPDX-License-Identifier: BSD-3-Clause
/// The job's secret and the proofs made with it.
///
/// Every connection of a job, store or link, proves the same secret both ways (`handshake.h`,
/// `tls_session.h`). It comes from the first of these:
///  1. `MUSTER_SECRET`, a text: kind `given`. A key that `muster secret` made is used as it is; any
///     other text is stretched (Argon2id), and refused below 16 characters or 8 different ones;
///  2. `MUSTER_SECRET_FD`, PID:FD: the key that a launcher hands to its workers, in a sealed memory
///     file that they inherit, or find with the launcher while it lives; kind `given`. Processes of
///     other users cannot read it. The inherited descriptor is close-on-exec once it has been read;
///  3. the contents of the file `MUSTER_SECRET_FILE`, this user's or root's and closed to all
///     others: kind `given`;
///  4. `MUSTER_INSECURE=1`: kind `open`, a public constant that protects nothing;
///  5. none of them: kind `host`, 32 random bytes in a directory that only this user can read on
///     this host (`$XDG_RUNTIME_DIR/muster` or `/tmp/muster-UID`, mode 0700, owner checked), so
///     that only ranks of one user on one host find each other.
/// Its bytes are left out of core dumps and wiped with the last copy (`SecretBytes`).
///
/// An observer's key is derived from the secret (`observer`). It takes the secret's place in the
/// environment of a process that may only look at the job.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "core/base/bytes.h"
#include "core/base/descriptor.h"
#include "muster/status.h"

namespace muster {

/// Bytes that must not leave this process: kept in pages of their own, which core dumps leave out,
/// which are not swapped out where the system allows that, and which are wiped when the last copy
/// of this handle goes (libsodium's guarded memory).
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

// The text form of secrets, and how strong a text chosen by a user is. Private to base/.
//
// A text of `muster secret` is "muster-secret-", 64 random hexadecimal digits, "-" and 8 check
// digits; an observer's key begins with "muster-observer-" instead. Only these count as random.
// An attacker with one recorded greeting can try any other text as fast as a hash goes. Such a
// text therefore goes through Argon2id (64 MiB, 3 passes: 0.1 s a guess instead of 1 us), and is
// refused where it is short or has few characters.

inline constexpr std::string_view kSecretPrefix = "muster-secret-";
inline constexpr std::string_view kObserverPrefix = "muster-observer-";

/// `bits` with the check digits of its form.
std::string text_of_key(std::string_view prefix, ConstBytes bits);

/// `text` itself where its form says that it is random, else 64 hexadecimal digits, the same for
/// the same text everywhere. `name` is what a refusal calls it: the variable, or the file. Threads
/// that ask for one text at once wait for one computation; a process stretches a text once.
Result<SecretBytes> key_of_text(const SecretBytes& text, const std::string& name);

/// How many texts this process has stretched.
std::uint64_t stretched_texts();

class Secret {
 public:
  enum class Kind : std::uint8_t { given = 1, open = 2, host = 3 };
  using Proof = std::array<std::byte, 32>;

  enum class Use : std::uint8_t { join, observe };

  /// As described above; an unreadable file or a secret that is too weak is an error that names
  /// the variable. Code::refused for an observer's key unless `use` is to observe.
  static Result<Secret> from_environment(Use use = Use::join);
  /// With `text` as its key: for random texts, and for tests.
  static Secret given(std::string_view text);
  /// 256 random bits in the text form of secrets: what `muster secret` prints, and what a launcher
  /// makes for its job.
  static std::string random_text();
  /// A secret of that kind, of which no copy is left elsewhere.
  static Secret random();

  Kind kind() const { return kind_; }
  /// The key itself, to hand it to another process of the job where nobody else can read it; that
  /// process makes the same secret of it by `given`. Only where the secret is `given`.
  const SecretBytes& key() const { return key_; }
  /// The key of the job's observers, which tells nothing of the secret; an observer's own is the
  /// same.
  Secret observer() const;
  bool is_observer() const;
  /// In the text form, for an environment or a file. Only where the secret is `given`.
  std::string observer_text() const;
  /// HMAC-SHA256 of `message` keyed with the secret.
  Proof prove(ConstBytes message) const;
  /// The secret in a sealed memory file, closed on exec. A process of the same user that inherits
  /// it, and finds "PID:FD" in MUSTER_SECRET_FD, has the same secret. The descriptor is opened with
  /// O_PATH: it cannot be read, only opened again (/proc/self/fd/FD) by a user that may.
  Result<Descriptor> sealed() const;
  /// A key of its own for `purpose`, which tells nothing of the secret or of other keys
  /// (HKDF-SHA256, RFC 5869).
  Proof derive(std::string_view purpose) const;

 private:
  Secret(Kind kind, SecretBytes key) : kind_(kind), key_(std::move(key)) {}
  Kind kind_;
  SecretBytes key_;
};

/// A directory of this user on this host, where the secret of jobs without a given one lies: made
/// if need be, and closed to all others.
Result<std::string> host_directory();

/// Takes the same time whatever the contents.
bool equal_in_constant_time(ConstBytes a, ConstBytes b);
/// Cryptographically strong.
void fill_random(MutableBytes out);
/// `bytes` random bytes as hexadecimal digits: a name that no one else has.
std::string random_name(std::size_t bytes);
/// SHA-256, cut to 16 bytes: names of jobs on the wire.
std::array<std::byte, 16> short_hash(std::string_view text);

}  // namespace muster
