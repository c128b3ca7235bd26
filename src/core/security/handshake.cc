// SPDX-License-Identifier: BSD-3-Clause
#include "core/security/handshake.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "core/base/environment.h"

namespace muster {
namespace {

constexpr std::size_t kProofBytes = sizeof(Secret::Proof);

}  // namespace

Handshake::Handshake(Side side, const Hello& hello, const Secret& secret)
    : side_(side), secret_(secret), also_(hello.also), mine_(greeting_of(hello, secret.kind())) {
  if (side == Side::connector) output_.append(as_text(mine_));
}

std::string Handshake::take_output() { return std::exchange(output_, {}); }

std::size_t Handshake::feed(ConstBytes input) {
  std::size_t eaten = 0;
  while (eaten < input.size() && !done() && !failed()) {
    const std::size_t n = std::min(need_ - have_, input.size() - eaten);
    std::memcpy(input_.data() + have_, input.data() + eaten, n);
    have_ += n;
    eaten += n;
    // A peer that speaks another protocol is refused at its first wrong byte, not only once it has
    // sent a whole greeting.
    if (state_ == State::greeting && !may_be_greeting(input_, have_)) {
      fail(Verdict::bad_magic,
           "what came is not a muster greeting; something else uses this port, or the address is "
           "wrong");
      break;
    }
    if (have_ < need_) break;
    switch (state_) {
      case State::greeting: eat_greeting(); break;
      case State::proof: eat_proof(); break;
      case State::verdict: eat_verdict(); break;
      case State::done:
      case State::failed: break;
    }
  }
  return eaten;
}

void Handshake::eat_greeting() {
  theirs_ = input_;
  have_ = 0;
  peer_ = peer_of(theirs_);
  // The acceptor greets even where it refuses, so that the other side can say what differs; a
  // greeting gives nothing away.
  if (side_ == Side::acceptor) {
    take_role(mine_, theirs_, also_);
    output_.append(as_text(mine_));
  }
  if (auto found = difference(mine_, theirs_); found.verdict != Verdict::accepted)
    return fail(found.verdict, std::move(found.message));
  if (side_ == Side::acceptor) {
    state_ = State::proof;
    need_ = kProofBytes;
  } else {
    output_.append(as_text(proof_of(Side::connector)));
    state_ = State::verdict;
    need_ = 1;
  }
}

void Handshake::eat_proof() {
  have_ = 0;
  if (!equal_in_constant_time(ConstBytes(input_).first(kProofBytes), proof_of(Side::connector))) {
    return fail(Verdict::bad_proof,
                whom(peer_.rank) +
                    " did not prove this job's secret; set the same MUSTER_SECRET on all ranks "
                    "(without it all ranks must run on one host as one user)");
  }
  if (unwelcome_)
    return fail(Verdict::unwelcome,
                "this side does not want the connection of " + whom(peer_.rank) + " now");
  output_.push_back(static_cast<char>(Verdict::accepted));
  output_.append(as_text(proof_of(Side::acceptor)));
  state_ = State::done;
}

void Handshake::eat_verdict() {
  const auto verdict = static_cast<Verdict>(input_[0]);
  if (verdict != Verdict::accepted) return fail(verdict, refusal_text(verdict));
  if (need_ == 1) {
    need_ = 1 + kProofBytes;
    return;
  }
  if (!equal_in_constant_time(ConstBytes(input_).subspan(1, kProofBytes),
                              proof_of(Side::acceptor))) {
    return fail(Verdict::bad_proof, whom(peer_.rank) +
                                        " accepted this side but did not prove that it holds the "
                                        "job's secret itself; an impostor may listen there");
  }
  state_ = State::done;
}

void Handshake::fail(Verdict verdict, std::string message) {
  // A peer that did not even greet gets no answer at all.
  if (side_ == Side::acceptor && verdict != Verdict::bad_magic)
    output_.push_back(static_cast<char>(verdict));
  state_ = State::failed;
  verdict_ = verdict;
  failure_ = Status(Code::refused, std::move(message),
                    peer_.rank >= 0 ? std::vector<int>{peer_.rank} : std::vector<int>{});
}

Secret::Proof Handshake::proof_of(Side side) const {
  const bool connects = side_ == Side::connector;
  std::string message(side == Side::connector ? "muster proof of the connector"
                                              : "muster proof of the acceptor");
  message.append(as_text(connects ? mine_ : theirs_));
  message.append(as_text(connects ? theirs_ : mine_));
  return secret_of(secret_, mine_).prove(as_bytes(message));
}

namespace {

// Greeting: the offset of each field. The rest up to 128 bytes is zero, and the proof covers it.
constexpr std::size_t kMagicAt = 0, kProtocolAt = 8, kRoleAt = 10, kKindAt = 11, kRankAt = 12,
                      kWorldAt = 16, kJobAt = 24, kBuildAt = 40, kNoteAt = 48, kNonceAt = 56,
                      kPayloadsAt = 88, kStrandAt = 92;
constexpr std::array<char, 8> kMagic{'m', 'u', 's', 't', 'e', 'r', '\r', '\n'};
constexpr std::size_t kNonceBytes = 32;
using JobHash = std::array<std::byte, 16>;
static_assert(sizeof(Handshake::Strand) == 8 && std::is_trivially_copyable_v<Handshake::Strand>);

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
  set_field(greeting, kStrandAt, hello.strand);
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
  return {field<std::int32_t>(greeting, kRankAt),
          field<std::int32_t>(greeting, kWorldAt),
          field<std::uint64_t>(greeting, kBuildAt),
          field<std::uint64_t>(greeting, kNoteAt),
          role_of(greeting),
          field<Handshake::Strand>(greeting, kStrandAt)};
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

Result<Handshake::Payloads> payloads_from_environment() {
  const std::string text = env_text("MUSTER_TLS").value_or("full");
  if (text == "full") return Handshake::Payloads::encrypted;
  if (text == "control-plain") return Handshake::Payloads::plain;
  return Status(Code::invalid_argument,
                "MUSTER_TLS is \"" + text +
                    "\"; it may be full (the default), or on networks that are trusted "
                    "control-plain (payloads are neither encrypted nor authenticated); connections "
                    "between processes are never without TLS");
}

std::string describe(Handshake::Payloads payloads) {
  switch (payloads) {
    case Handshake::Payloads::encrypted: return "encrypted (TLS 1.3)";
    case Handshake::Payloads::plain:
      return "encrypted (TLS 1.3) but for payloads, which anybody on the way can read and change "
             "(MUSTER_TLS=control-plain)";
  }
  return "protected in an unknown way";
}

}  // namespace muster
