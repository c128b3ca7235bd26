// SPDX-License-Identifier: BSD-3-Clause
/// The start of a connection within a host, over a Unix socket. All sizes are fixed, and both sides
/// prove the job's secret before anything else is parsed. Connections over TCP use `tls_session.h`,
/// with the same greeting. Bytes in, bytes out; no I/O, no clock.
///
///   connector -> acceptor   Greeting (128 bytes: magic, protocol, role, secret kind, rank, world
///                           size, job hash, build hash, nonce, note, strand)
///   acceptor -> connector   Greeting
///   connector -> acceptor   proof over ("connector", both greetings), 32 bytes
///   acceptor -> connector   verdict byte, then its own proof over ("acceptor", both greetings), 32
///                           bytes
/// The acceptor reveals nothing made with the secret before the connector has proved that it holds
/// it. Observers prove the observer's key that is made of the secret. Differences in role,
/// protocol, build, job or secret kind are told apart, and the error names both sides' values. A
/// refusal is a verdict byte other than `accepted`.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/bytes.h"
#include "core/security/secret.h"
#include "muster/status.h"

namespace muster {

inline constexpr std::uint16_t kProtocolVersion = 6;

class Handshake {
 public:
  enum class Side : std::uint8_t { connector, acceptor };
  enum class Role : std::uint8_t {
    store = 1,
    link = 2,
    region = 3,
    rendezvous = 4,
    rpc = 5,       ///< a link between workers of remote calls
    launcher = 6,  ///< a launcher's connection to the job's store
    observer = 7   ///< a process that looks at a running job through its store
  };
  /// How the payloads of a link over TCP travel. Everything else is always encrypted.
  enum class Payloads : std::uint8_t {
    encrypted = 0,
    plain = 2  ///< readable and changeable on the way
  };
  enum class Verdict : std::uint8_t {
    accepted = 0,
    bad_magic,
    bad_protocol,
    bad_role,
    bad_job,
    bad_build,
    bad_kind,
    bad_proof,
    unwelcome,
    bad_payloads
  };

  /// A link may be a bundle of connections; this says which of them one is.
  struct Strand {
    std::uint16_t number = 0;
    std::uint16_t of = 1;
    std::uint32_t bundle = 0;  ///< the same for all strands of a bundle
    bool operator==(const Strand&) const = default;
  };

  struct Hello {
    Role role = Role::store;
    std::int32_t rank = -1;        ///< -1: none yet
    std::int32_t world_size = -1;  ///< -1: unknown
    /// Hashed; empty matches only empty. Stores and links of one job use the same text.
    std::string job = {};
    std::uint64_t build = 0;  ///< hash of what both sides must share; 0 is not compared
    std::uint64_t note = 0;   ///< free for the role (a stream number, say)
    Payloads payloads = Payloads::encrypted;  ///< must be the same on both sides
    Strand strand = {};                       ///< connector's
    /// Acceptor: what is served besides `role`, and as which job: it answers as what was asked for.
    struct Service {
      Role role = Role::store;
      std::string job = {};
    };
    std::vector<Service> also = {};
  };
  /// The other side's greeting, trustworthy once `done()`.
  struct Peer {
    std::int32_t rank = -1;
    std::int32_t world_size = -1;
    std::uint64_t build = 0;
    std::uint64_t note = 0;
    Role role = Role::store;
    Strand strand = {};
  };

  Handshake(Side side, const Hello& hello, const Secret& secret);

  /// Bytes to be sent now; empties the buffer.
  std::string take_output();
  /// Eats bytes from the other side; returns how many it took (the rest belongs to what follows the
  /// handshake). Never asks for more than the fixed sizes, never allocates on the sender's word.
  std::size_t feed(ConstBytes input);
  bool done() const { return state_ == State::done; }
  bool failed() const { return state_ == State::failed; }
  /// Code::refused with what differed and what to try.
  const Status& failure() const { return failure_; }
  /// Why it failed, ours or the other side's word; `accepted` while it has not.
  Verdict verdict() const { return verdict_; }
  const Peer& peer() const { return peer_; }
  /// Acceptor: refuse a peer that is who it says but not wanted now (a crossing connection, a full
  /// house). Must be set before the connector's proof arrives.
  void set_unwelcome() { unwelcome_ = true; }

 private:
  enum class State : std::uint8_t { greeting, proof, verdict, done, failed };
  static constexpr std::size_t kGreetingBytes = 128;

  void eat_greeting();
  void eat_proof();
  void eat_verdict();
  void fail(Verdict verdict, std::string message);
  Secret::Proof proof_of(Side side) const;

  Side side_;
  Secret secret_;
  std::vector<Hello::Service> also_;
  State state_ = State::greeting;
  std::array<std::byte, kGreetingBytes> mine_{};
  std::array<std::byte, kGreetingBytes> theirs_{};
  std::array<std::byte, kGreetingBytes> input_{};
  std::size_t have_ = 0;
  std::size_t need_ = kGreetingBytes;
  std::string output_;
  Peer peer_;
  Status failure_;
  Verdict verdict_ = Verdict::accepted;
  bool unwelcome_ = false;
};

// The first 128 bytes of both sides of every connection: who speaks, of which job, for what. They
// give nothing away and prove nothing; what proves them comes after (`Handshake`,
// `TlsSession`). Private to base/.

using Greeting = std::array<std::byte, 128>;

/// With a nonce of its own.
Greeting greeting_of(const Handshake::Hello& hello, Secret::Kind kind);

/// `mine` speaks in the role that `theirs` asks for, and for its job, if that is one of `served`.
void take_role(Greeting& mine, const Greeting& theirs,
               std::span<const Handshake::Hello::Service> served);
Handshake::Role role_of(const Greeting& greeting);
/// The hash of the job.
ConstBytes job_of(const Greeting& greeting);
/// 32 random bytes, new in every greeting.
ConstBytes nonce_of(const Greeting& greeting);

/// The key of a connection with this greeting: the observer's key for the observer's role, else
/// `secret`.
Secret secret_of(const Secret& secret, const Greeting& greeting);

/// The fields in which the sender describes itself.
Handshake::Peer peer_of(const Greeting& greeting);

/// Whether the first `have` bytes may be the beginning of a greeting.
bool may_be_greeting(const Greeting& greeting, std::size_t have);

/// The first field that must be equal in both greetings and is not; `accepted` if all are equal.
struct Difference {
  Handshake::Verdict verdict = Handshake::Verdict::accepted;
  std::string message;
};
Difference difference(const Greeting& mine, const Greeting& theirs);

/// "the other side (rank 3)".
std::string whom(std::int32_t rank);

/// Explains the other side's `verdict`, a refusal.
std::string refusal_text(Handshake::Verdict verdict);

// `MUSTER_TLS`: what of a link over TCP is encrypted. The same on every rank, or they refuse each
// other.
//
//   full (or not set)  everything
//   control-plain      payloads of tensors can be read and changed on the way
//
// Whatever it says, both sides prove the job's secret, and everything but payloads is encrypted:
// stores, launchers, observers and remote calls are in full.

/// Code::invalid_argument, naming the variable and what it may be, where it is something else.
Result<Handshake::Payloads> payloads_from_environment();

/// "encrypted (TLS 1.3)", or what is not.
std::string describe(Handshake::Payloads payloads);

}  // namespace muster
