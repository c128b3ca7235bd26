/// The first 128 bytes of both sides of every connection: who speaks, of which job, for what. They
/// give nothing away and prove nothing; what proves them comes after (`handshake.h`,
/// `tls_session.h`). Private to base/.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "core/base/bytes.h"
#include "core/security/handshake.h"
#include "core/security/secret.h"

namespace muster {

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

/// What a connection of this greeting is keyed with: the observer's key for its role.
Secret secret_of(const Secret& secret, const Greeting& greeting);

/// What the sender says of itself.
Handshake::Peer peer_of(const Greeting& greeting);

/// Whether the first `have` bytes may be the beginning of a greeting.
bool may_be_greeting(const Greeting& greeting, std::size_t have);

/// What must be equal in both greetings and is not: the first difference; `accepted` where there is
/// none.
struct Difference {
  Handshake::Verdict verdict = Handshake::Verdict::accepted;
  std::string message;
};
Difference difference(const Greeting& mine, const Greeting& theirs);

/// "the other side (rank 3)".
std::string whom(std::int32_t rank);

/// What the other side meant by refusing with `verdict`.
std::string refusal_text(Handshake::Verdict verdict);

}  // namespace muster
