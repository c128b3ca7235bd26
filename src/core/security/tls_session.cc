// SPDX-License-Identifier: BSD-3-Clause
#include "core/security/tls_session.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sodium.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "core/security/handshake.h"
#include "core/security/tls_connection.h"
#include "core/tunables/tunables_fixed.h"

namespace muster {
namespace {

constexpr std::string_view kIdentity = "muster";
/// A peer of ours says less than a kilobyte before it has proved the secret.
constexpr std::size_t kMostUnproved = 8 * 1024;  // limit: of unauthenticated peers
constexpr const char* kUnlessTampered =
    ", unless somebody on the network tampers with this connection";
constexpr const char* kTampers = "; somebody on the network tampers with this connection";
constexpr std::size_t kBindingBytes = crypto_hash_sha256_BYTES;
using Binding = std::array<std::byte, kBindingBytes>;

const unsigned char* identity_bytes() {
  return reinterpret_cast<const unsigned char*>(kIdentity.data());
}

Binding binding_of(const Greeting& connector, const Greeting& acceptor) {
  std::string text("muster greetings");
  text.append(as_text(connector)).append(as_text(acceptor));
  Binding binding;
  crypto_hash_sha256(reinterpret_cast<unsigned char*>(binding.data()),
                     reinterpret_cast<const unsigned char*>(text.data()), text.size());
  return binding;
}

using Connection = TlsSession::Connection;

int index_of_connection() {
  static const int index = SSL_get_ex_new_index(0, nullptr, nullptr, nullptr, nullptr);
  return index;
}

Connection& connection_of(const SSL* ssl) {
  return *static_cast<Connection*>(SSL_get_ex_data(ssl, index_of_connection()));
}

/// The key as the library wants one that was agreed on elsewhere; null for want of memory.
SSL_SESSION* session_of(SSL* ssl) {
  const unsigned char aes_128_gcm_sha256[] = {0x13, 0x01};
  const SSL_CIPHER* cipher = SSL_CIPHER_find(ssl, aes_128_gcm_sha256);
  SSL_SESSION* session = SSL_SESSION_new();
  const ConstBytes key = connection_of(ssl).key.view();
  if (session != nullptr && cipher != nullptr &&
      SSL_SESSION_set1_master_key(session, reinterpret_cast<const unsigned char*>(key.data()),
                                  key.size()) == 1 &&
      SSL_SESSION_set_cipher(session, cipher) == 1 &&
      SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) == 1 &&
      SSL_SESSION_set1_id_context(session, identity_bytes(), kIdentity.size()) == 1) {
    return session;
  }
  SSL_SESSION_free(session);
  return nullptr;
}

int use_key(SSL* ssl, const EVP_MD* wanted, const unsigned char** identity, std::size_t* length,
            SSL_SESSION** session) {
  *session = nullptr;
  *identity = nullptr;
  *length = 0;
  if (wanted != nullptr && EVP_MD_get_type(wanted) != NID_sha256) return 1;  // no key of ours
  *session = session_of(ssl);
  if (*session == nullptr) return 0;
  *identity = identity_bytes();
  *length = kIdentity.size();
  return 1;
}

int find_key(SSL* ssl, const unsigned char* identity, std::size_t length, SSL_SESSION** session) {
  *session = nullptr;
  if (std::string_view(reinterpret_cast<const char*>(identity), length) != kIdentity) return 1;
  *session = session_of(ssl);
  return *session != nullptr ? 1 : 0;
}

// The library's side of the bytes: they come from `input` and go to `output`.
int read_bytes(BIO* bio, char* to, std::size_t most, std::size_t* count) {
  auto& connection = *static_cast<Connection*>(BIO_get_data(bio));
  BIO_clear_retry_flags(bio);
  // One record at a time: what follows may not be the library's.
  if (connection.of_record == 0) connection.of_record = connection.whole_record();
  *count = std::min(most, connection.of_record);
  if (*count == 0) {
    BIO_set_retry_read(bio);
    return 0;
  }
  std::memcpy(to, connection.input.bytes().data(), *count);
  connection.input.drop(*count);
  connection.of_record -= *count;
  return 1;
}

int write_bytes(BIO* bio, const char* from, std::size_t bytes, std::size_t* count) {
  static_cast<Connection*>(BIO_get_data(bio))->output.append(as_bytes({from, bytes}));
  *count = bytes;
  return 1;
}

long control_bytes(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

BIO_METHOD* byte_method() {
  static BIO_METHOD* const method = [] {
    BIO_METHOD* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "muster bytes");
    BIO_meth_set_read_ex(made, read_bytes);
    BIO_meth_set_write_ex(made, write_bytes);
    BIO_meth_set_ctrl(made, control_bytes);
    return made;
  }();
  return method;
}

/// The settings of all connections; null if this OpenSSL cannot do them. Lives for ever: the
/// library must not take itself down at the process's end, while threads may still be in it.
SSL_CTX* context() {
  static SSL_CTX* const made = []() -> SSL_CTX* {
    OPENSSL_init_ssl(OPENSSL_INIT_NO_ATEXIT, nullptr);
    SSL_CTX* ctx = SSL_CTX_new(TLS_method());
    if (ctx == nullptr || SSL_CTX_set_min_proto_version(ctx, TLS1_3_VERSION) != 1 ||
        SSL_CTX_set_max_proto_version(ctx, TLS1_3_VERSION) != 1 ||
        SSL_CTX_set_ciphersuites(ctx, "TLS_AES_128_GCM_SHA256") != 1 ||
        SSL_CTX_set1_groups_list(ctx, "X25519:P-256") != 1 ||
        SSL_CTX_set_num_tickets(ctx, 0) != 1 ||
        SSL_CTX_set_session_id_context(ctx, identity_bytes(), kIdentity.size()) != 1) {
      SSL_CTX_free(ctx);
      return nullptr;
    }
    SSL_CTX_set_options(ctx, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
    SSL_CTX_set_session_cache_mode(ctx, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_mode(ctx, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    // There are no certificates, so a peer that presents one is refused.
    SSL_CTX_set_verify(ctx, SSL_VERIFY_PEER, nullptr);
    SSL_CTX_set_psk_use_session_callback(ctx, use_key);
    SSL_CTX_set_psk_find_session_callback(ctx, find_key);
    return ctx;
  }();
  return made;
}

}  // namespace

/// The library's own words for its latest error; empties its list.
std::string tls::library_error() {
  const unsigned long code = ERR_peek_last_error();
  ERR_clear_error();
  const char* reason = code != 0 ? ERR_reason_error_string(code) : nullptr;
  return reason != nullptr ? reason : "it ended early";
}

TlsSession::Connection::Connection(Side which, const Handshake::Hello& hello,
                                   const Secret& job_secret, std::uint64_t bytes_per_key)
    : side(which),
      payloads(hello.payloads),
      also(hello.also),
      secret(job_secret),
      mine(greeting_of(hello, job_secret.kind())),
      per_key(bytes_per_key) {
  if (side == Side::connector) output.append(mine);  // the other one answers
}

/// The key is of this connection alone: the library keeps secrets that are made of it, and a core
/// dump that shows them must not open another connection.
bool TlsSession::Connection::begin_tls() {
  const bool connects = side == Side::connector;
  std::string purpose =
      "muster tls, role " + std::to_string(static_cast<int>(role_of(mine))) + ", job ";
  purpose.append(as_text(job_of(mine))).append(", nonces ");
  purpose.append(as_text(nonce_of(connects ? mine : theirs)));
  purpose.append(as_text(nonce_of(connects ? theirs : mine)));
  Secret::Proof derived = secret_of(secret, mine).derive(purpose);
  key = SecretBytes(derived);
  sodium_memzero(derived.data(), derived.size());
  SSL_CTX* const common = context();
  ssl.reset(common != nullptr ? SSL_new(common) : nullptr);
  BIO* bytes = ssl != nullptr ? BIO_new(byte_method()) : nullptr;
  if (bytes == nullptr) {
    fail(Code::exhausted, Verdict::bad_proof,
         "OpenSSL cannot make an encrypted connection with TLS 1.3 and AES-128-GCM here (" +
             tls::library_error() + ")");
    return false;
  }
  BIO_set_data(bytes, this);
  BIO_set_init(bytes, 1);
  SSL_set_bio(ssl.get(), bytes, bytes);
  SSL_set_ex_data(ssl.get(), index_of_connection(), this);
  connects ? SSL_set_connect_state(ssl.get()) : SSL_set_accept_state(ssl.get());
  return true;
}

void TlsSession::Connection::go_on(std::size_t came) {
  for (bool more = true; more;) {
    switch (state) {
      case State::greeting: more = eat_greeting(); break;
      case State::handshake: more = shake_hands(); break;
      case State::binding: more = compare_bindings(); break;
      case State::done:
      case State::failed: return;
    }
  }
  unproved += came;
  if (state != State::done && state != State::failed && unproved > kMostUnproved)
    fail(Code::refused, Verdict::bad_proof,
         whom(peer.rank) + " says much and does not prove this job's secret");
}

bool TlsSession::Connection::eat_greeting() {
  const ConstBytes came = input.bytes();
  const std::size_t have = std::min(came.size(), theirs.size());
  std::memcpy(theirs.data(), came.data(), have);
  // A peer that speaks another protocol is refused at its first wrong byte, without any answer.
  if (!may_be_greeting(theirs, have)) {
    fail(Code::refused, Verdict::bad_magic,
         "what came is not a muster greeting; something else uses this port, or the address is "
         "wrong");
    return false;
  }
  if (have < theirs.size()) return false;
  input.drop(have);
  peer = peer_of(theirs);
  if (side == Side::acceptor) {
    take_role(mine, theirs, also);
    output.append(mine);
  }
  if (auto found = difference(mine, theirs); found.verdict != Verdict::accepted) {
    if (side == Side::acceptor) output.append(static_cast<std::byte>(found.verdict));
    fail(Code::refused, found.verdict, std::move(found.message));
    return false;
  }
  if (!begin_tls()) return false;
  state = State::handshake;
  return true;
}

bool TlsSession::Connection::shake_hands() {
  const ConstBytes came = input.bytes();
  if (side == Side::connector && !answered && !came.empty()) {
    answered = true;
    const int first = std::to_integer<int>(came.front());
    if (first < tls::kFirstContentType || first > tls::kLastContentType) {
      // Nothing protects this byte, so it is not believed: this side has found no difference
      // between the greetings. Either they were changed on the way, or the byte is forged.
      fail(Code::network, Verdict::bad_proof,
           whom(peer.rank) + " seems to refuse a greeting that agrees with its own (" +
               refusal_text(static_cast<Verdict>(first)) + ")" + kTampers);
      return false;
    }
  }
  ERR_clear_error();
  const int result = SSL_do_handshake(ssl.get());
  if (result != 1) {
    if (SSL_get_error(ssl.get(), result) == SSL_ERROR_WANT_READ) return false;
    const std::string said = tls::library_error();
    if (side == Side::acceptor) {
      fail(Code::refused, Verdict::bad_proof,
           whom(peer.rank) +
               " did not prove this job's secret; set the same MUSTER_SECRET on all ranks "
               "(without it all ranks must run on one host as one user), unless somebody on the "
               "network tampers with this connection [TLS: " +
               said + "]");
    } else {
      fail(Code::refused, Verdict::bad_proof, refusal_text(Verdict::bad_proof) + kUnlessTampered);
    }
    return false;
  }
  forget_key();
  // Without the key there is no way in: the other side would have to show a certificate.
  if (SSL_session_reused(ssl.get()) != 1) {
    fail(Code::refused, Verdict::bad_proof,
         whom(peer.rank) + " did not use this job's secret; an impostor may be on the way");
    return false;
  }
  proved = true;
  const bool connects = side == Side::connector;
  const Binding binding = binding_of(connects ? mine : theirs, connects ? theirs : mine);
  std::string said;
  if (!connects)
    said.push_back(static_cast<char>(unwelcome ? Verdict::unwelcome : Verdict::accepted));
  said.append(as_text(binding));
  if (!encrypt(as_bytes(said))) return false;
  state = State::binding;
  return true;
}

/// Nothing needs it any more, and with it a process could make connections of its own. The library
/// keeps a copy for tickets, which there are none of.
void TlsSession::Connection::forget_key() {
  const std::array<unsigned char, sizeof(Secret::Proof)> nothing{};
  if (SSL_SESSION* session = SSL_get_session(ssl.get()); session != nullptr)
    SSL_SESSION_set1_master_key(session, nothing.data(), nothing.size());
  key = {};
}

bool TlsSession::Connection::compare_bindings() {
  const bool connects = side == Side::connector;
  const std::size_t expected = kBindingBytes + (connects ? 1 : 0);
  while (answer.size() < expected) {
    std::array<std::byte, kBindingBytes + 1> piece;
    const auto read = decrypt(MutableBytes(piece).first(expected - answer.size()));
    if (!read.ok() || *read == 0) return false;
    answer.append(as_text(ConstBytes(piece).first(*read)));
  }
  const Binding binding = binding_of(connects ? mine : theirs, connects ? theirs : mine);
  if (!equal_in_constant_time(as_bytes(answer).subspan(connects ? 1 : 0), binding)) {
    fail(Code::network, Verdict::bad_proof,
         "the greetings were changed on the way to or from " + whom(peer.rank) + kTampers);
    return false;
  }
  const auto said = connects ? static_cast<Verdict>(answer[0]) : Verdict::accepted;
  if (said != Verdict::accepted) {
    fail(Code::refused, said, refusal_text(said));
  } else if (unwelcome) {
    fail(Code::refused, Verdict::unwelcome,
         "this side does not want the connection of " + whom(peer.rank) + " now");
  } else {
    state = State::done;
  }
  return false;
}

void TlsSession::Connection::fail(Code code, Verdict why, std::string message) {
  key = {};
  state = State::failed;
  verdict = why;
  failure = Status(code, std::move(message),
                   peer.rank >= 0 ? std::vector<int>{peer.rank} : std::vector<int>{});
}

Status TlsSession::Connection::tampered(const std::string& how) {
  fail(Code::network, Verdict::accepted,
       "what came from " + whom(peer.rank) + " was changed on the way (" + how + ")" + kTampers);
  return failure;
}

TlsSession::TlsSession(Side side, const Handshake::Hello& hello, const Secret& secret,
                       std::uint64_t bytes_per_key)
    : connection_(std::make_unique<Connection>(side, hello, secret, bytes_per_key)) {}
TlsSession::~TlsSession() = default;
TlsSession::TlsSession(TlsSession&&) noexcept = default;
TlsSession& TlsSession::operator=(TlsSession&&) noexcept = default;

void TlsSession::feed(ConstBytes ciphertext) {
  connection_->input.append(ciphertext);
  connection_->go_on(ciphertext.size());
}
MutableBytes TlsSession::room(std::size_t bytes) { return connection_->input.room(bytes); }
void TlsSession::came(std::size_t bytes) {
  connection_->input.came(bytes);
  connection_->go_on(bytes);
}
std::size_t TlsSession::unread() const { return connection_->input.bytes().size(); }

ConstBytes TlsSession::output() const { return connection_->output.bytes(); }
void TlsSession::sent(std::size_t bytes) { connection_->output.drop(bytes); }
std::string TlsSession::take_output() {
  std::string taken(as_text(output()));
  sent(taken.size());
  return taken;
}

bool TlsSession::done() const { return connection_->state == Connection::State::done; }
bool TlsSession::failed() const { return connection_->state == Connection::State::failed; }
const Status& TlsSession::failure() const { return connection_->failure; }
TlsSession::Verdict TlsSession::verdict() const { return connection_->verdict; }
const Handshake::Peer& TlsSession::peer() const { return connection_->peer; }
bool TlsSession::failed_in_the_clear() const {
  const Connection& it = *connection_;
  return failed() && it.side == Side::connector && !it.proved &&
         it.secret.kind() == Secret::Kind::given;
}
bool TlsSession::awaits_verdict() const {
  return connection_->side == Side::connector && connection_->state == Connection::State::binding;
}
void TlsSession::set_unwelcome() { connection_->unwelcome = true; }

}  // namespace muster
