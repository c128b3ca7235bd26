#include "core/security/greeting.h"

#include <algorithm>

namespace muster {
namespace {

// Greeting: where each field stands. What is left up to 128 bytes is zero and part of what is
// proved.
constexpr std::size_t kMagicAt = 0, kProtocolAt = 8, kRoleAt = 10, kKindAt = 11, kRankAt = 12,
                      kWorldAt = 16, kJobAt = 24, kBuildAt = 40, kNoteAt = 48, kNonceAt = 56,
                      kPayloadsAt = 88;
constexpr std::array<char, 8> kMagic{'m', 'u', 's', 't', 'e', 'r', '\r', '\n'};
constexpr std::size_t kNonceBytes = 32;
using JobHash = std::array<std::byte, 16>;

template <class T>
T field(const Greeting& greeting, std::size_t at) {
  T value;
  std::memcpy(&value, greeting.data() + at, sizeof value);
  return value;
}

template <class T>
void set_field(Greeting& greeting, std::size_t at, const T& value) {
  std::memcpy(greeting.data() + at, &value, sizeof value);
}

std::string digits_of(std::uint64_t value) {
  std::array<std::byte, 8> bytes;
  for (int i = 0; i < 8; ++i)
    bytes[static_cast<std::size_t>(i)] = static_cast<std::byte>(value >> (56 - 8 * i));
  return hexadecimal(bytes);
}

std::string role_name(std::uint8_t role) {
  switch (static_cast<Handshake::Role>(role)) {
    case Handshake::Role::store: return "store";
    case Handshake::Role::link: return "link";
    case Handshake::Role::region: return "region";
    case Handshake::Role::rendezvous: return "rendezvous";
    case Handshake::Role::rpc: return "remote call";
    case Handshake::Role::launcher: return "launcher";
    case Handshake::Role::observer: return "observer";
  }
  return "role " + std::to_string(role);
}

std::string payloads_name(std::uint8_t payloads) {
  switch (static_cast<Handshake::Payloads>(payloads)) {
    case Handshake::Payloads::encrypted: return "encrypts all it sends (MUSTER_TLS is not set)";
    case Handshake::Payloads::authenticated:
      return "leaves payloads unencrypted (MUSTER_TLS=control)";
    case Handshake::Payloads::plain:
      return "leaves payloads unencrypted and unauthenticated (MUSTER_TLS=control-plain)";
  }
  return "protects payloads in way " + std::to_string(payloads);
}

std::string kind_name(std::uint8_t kind) {
  switch (static_cast<Secret::Kind>(kind)) {
    case Secret::Kind::given: return "a given secret (MUSTER_SECRET or MUSTER_SECRET_FILE)";
    case Secret::Kind::open: return "no secret (MUSTER_INSECURE=1)";
    case Secret::Kind::host:
      return "its host's own secret (neither MUSTER_SECRET nor MUSTER_INSECURE is set)";
  }
  return "secret kind " + std::to_string(kind);
}

}  // namespace

Greeting greeting_of(const Handshake::Hello& hello, Secret::Kind kind) {
  Greeting greeting{};
  set_field(greeting, kMagicAt, kMagic);
  set_field(greeting, kProtocolAt, kProtocolVersion);
  set_field(greeting, kRoleAt, hello.role);
  set_field(greeting, kKindAt, kind);
  set_field(greeting, kRankAt, hello.rank);
  set_field(greeting, kWorldAt, hello.world_size);
  set_field(greeting, kJobAt, short_hash(hello.job));
  set_field(greeting, kBuildAt, hello.build);
  set_field(greeting, kNoteAt, hello.note);
  set_field(greeting, kPayloadsAt, hello.payloads);
  fill_random(MutableBytes(greeting).subspan(kNonceAt, kNonceBytes));
  return greeting;
}

Handshake::Role role_of(const Greeting& greeting) {
  return field<Handshake::Role>(greeting, kRoleAt);
}

ConstBytes job_of(const Greeting& greeting) {
  return ConstBytes(greeting).subspan(kJobAt, sizeof(JobHash));
}

ConstBytes nonce_of(const Greeting& greeting) {
  return ConstBytes(greeting).subspan(kNonceAt, kNonceBytes);
}

void take_role(Greeting& mine, const Greeting& theirs,
               std::span<const Handshake::Hello::Service> served) {
  const auto found = std::ranges::find(served, role_of(theirs), &Handshake::Hello::Service::role);
  if (found == served.end()) return;
  set_field(mine, kRoleAt, found->role);
  set_field(mine, kJobAt, short_hash(found->job));
}

Secret secret_of(const Secret& secret, const Greeting& greeting) {
  return role_of(greeting) == Handshake::Role::observer ? secret.observer() : secret;
}

Handshake::Peer peer_of(const Greeting& greeting) {
  return {field<std::int32_t>(greeting, kRankAt), field<std::int32_t>(greeting, kWorldAt),
          field<std::uint64_t>(greeting, kBuildAt), field<std::uint64_t>(greeting, kNoteAt),
          role_of(greeting)};
}

bool may_be_greeting(const Greeting& greeting, std::size_t have) {
  return std::memcmp(greeting.data(), kMagic.data(), std::min(have, kMagic.size())) == 0;
}

std::string whom(std::int32_t rank) {
  return rank < 0 ? std::string("the other side")
                  : "the other side (rank " + std::to_string(rank) + ")";
}

Difference difference(const Greeting& mine, const Greeting& theirs) {
  using Verdict = Handshake::Verdict;
  const std::string other = whom(field<std::int32_t>(theirs, kRankAt));
  const auto my_protocol = field<std::uint16_t>(mine, kProtocolAt),
             their_protocol = field<std::uint16_t>(theirs, kProtocolAt);
  if (my_protocol != their_protocol) {
    return {Verdict::bad_protocol, "this side speaks protocol " + std::to_string(my_protocol) +
                                       ", " + other + " speaks protocol " +
                                       std::to_string(their_protocol) +
                                       "; run the same version of muster everywhere"};
  }
  const auto my_role = field<std::uint8_t>(mine, kRoleAt),
             their_role = field<std::uint8_t>(theirs, kRoleAt);
  if (my_role != their_role) {
    return {Verdict::bad_role, "this side is a " + role_name(my_role) + " connection, " + other +
                                   " wants a " + role_name(their_role) +
                                   " connection; check host and port"};
  }
  const auto my_kind = field<std::uint8_t>(mine, kKindAt),
             their_kind = field<std::uint8_t>(theirs, kKindAt);
  if (my_kind != their_kind) {
    return {Verdict::bad_kind, "this side uses " + kind_name(my_kind) + ", " + other + " uses " +
                                   kind_name(their_kind) +
                                   "; set the same MUSTER_SECRET on all ranks"};
  }
  const auto my_job = field<JobHash>(mine, kJobAt), their_job = field<JobHash>(theirs, kJobAt);
  if (my_job != their_job) {
    return {Verdict::bad_job,
            "this side belongs to the job with hash " + hexadecimal(my_job) + ", " + other +
                " to the job with hash " + hexadecimal(their_job) +
                "; two jobs share one address, their names (--rdzv-id, TORCHELASTIC_RUN_ID, "
                "group_name) differ, or the port is translated on the way"};
  }
  const auto my_build = field<std::uint64_t>(mine, kBuildAt),
             their_build = field<std::uint64_t>(theirs, kBuildAt);
  if (my_build != their_build && my_build != 0 && their_build != 0) {
    return {Verdict::bad_build, "this side's build has hash " + digits_of(my_build) + ", that of " +
                                    other + " has " + digits_of(their_build) +
                                    "; run the same version of muster everywhere"};
  }
  const auto my_payloads = field<std::uint8_t>(mine, kPayloadsAt),
             their_payloads = field<std::uint8_t>(theirs, kPayloadsAt);
  if (my_payloads != their_payloads) {
    return {Verdict::bad_payloads, "this side " + payloads_name(my_payloads) + ", " + other + " " +
                                       payloads_name(their_payloads) +
                                       "; set MUSTER_TLS to the same on all ranks"};
  }
  return {};
}

std::string refusal_text(Handshake::Verdict verdict) {
  using Verdict = Handshake::Verdict;
  switch (verdict) {
    case Verdict::bad_proof:
      return "the other side refused this side's proof: the two hold different secrets; set the "
             "same MUSTER_SECRET on all ranks "
             "(without it all ranks must run on one host as one user)";
    case Verdict::unwelcome:
      return "the other side knows this rank but does not want this connection now";
    case Verdict::bad_magic: return "the other side did not recognise this side's greeting";
    case Verdict::bad_protocol: return "the other side refused this side's protocol version";
    case Verdict::bad_role: return "the other side does not serve this kind of connection";
    case Verdict::bad_job: return "the other side belongs to another job";
    case Verdict::bad_build: return "the other side is another build of muster";
    case Verdict::bad_kind: return "the other side uses another kind of secret";
    case Verdict::bad_payloads:
      return "the other side protects payloads in another way; set MUSTER_TLS to the same on all "
             "ranks";
    case Verdict::accepted: break;
  }
  return "the other side answered with the unknown verdict " +
         std::to_string(static_cast<int>(verdict));
}

}  // namespace muster
