#include "muster/base/tls_session.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sodium.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>

#include "muster/base/greeting.h"

namespace muster {
namespace {

constexpr std::string_view kIdentity = "muster";
/// A record's most.
constexpr std::size_t kRecordBytes = 16 * 1024;  // limit: TLS's own
/// So much output may wait before `write` takes no more.
constexpr std::size_t kMostOutput = 256 * 1024;  // limit: memory
/// Content types of TLS records are from here to there; no verdict is among them.
constexpr int kFirstContentType = 20, kLastContentType = 24;
constexpr std::size_t kBindingBytes = crypto_hash_sha256_BYTES;
using Binding = std::array<std::byte, kBindingBytes>;

const unsigned char* identity_bytes() {
  return reinterpret_cast<const unsigned char*>(kIdentity.data());
}

struct FreeSsl {
  void operator()(SSL* ssl) const { SSL_free(ssl); }
};

Binding binding_of(const Greeting& connector, const Greeting& acceptor) {
  std::string text("muster greetings");
  text.append(as_text(connector)).append(as_text(acceptor));
  Binding binding;
  crypto_hash_sha256(reinterpret_cast<unsigned char*>(binding.data()),
                     reinterpret_cast<const unsigned char*>(text.data()), text.size());
  return binding;
}

/// Bytes that come at one end and go at the other.
class Buffer {
 public:
  ConstBytes bytes() const { return ConstBytes(memory_.get() + begin_, end_ - begin_); }
  /// Room for so many more behind them.
  MutableBytes room(std::size_t more) {
    if (capacity_ - end_ < more) {
      const std::size_t held = end_ - begin_;
      if (capacity_ < held + more) {
        capacity_ = std::max(held + more, 2 * capacity_);
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
  static constexpr std::size_t kKept = 64 * 1024;  // limit: memory of an idle connection
  std::unique_ptr<std::byte[]> memory_ = std::make_unique<std::byte[]>(0);
  std::size_t capacity_ = 0, begin_ = 0, end_ = 0;
};

/// The library's own words for its latest error; empties its list.
std::string library_error() {
  const unsigned long code = ERR_peek_last_error();
  ERR_clear_error();
  const char* reason = code != 0 ? ERR_reason_error_string(code) : nullptr;
  return reason != nullptr ? reason : "it ended early";
}

}  // namespace

struct TlsSession::Connection {
  enum class State : std::uint8_t { greeting, handshake, binding, done, failed };

  Connection(Side which, const Handshake::Hello& hello, const Secret& secret,
             std::uint64_t bytes_per_key);
  Connection(const Connection&) = delete;
  ~Connection() { sodium_memzero(key.data(), key.size()); }

  void go_on();
  bool begin_tls();
  bool eat_greeting();
  bool shake_hands();
  bool compare_bindings();
  void fail(Code code, Verdict why, std::string message);
  bool encrypt(ConstBytes plain);
  Result<std::size_t> decrypt(MutableBytes to);

  const Side side;
  State state = State::greeting;
  Greeting mine, theirs{};
  Secret::Proof key;
  std::unique_ptr<SSL, FreeSsl> ssl;
  Buffer input;               // what the library has not read
  Buffer output;              // what has not been sent
  std::string answer;         // of the binding, so far
  std::uint64_t written = 0;  // under the present key
  const std::uint64_t per_key;
  bool unwelcome = false;
  bool answered = false;  // the acceptor has said something behind its greeting
  Handshake::Peer peer;
  Verdict verdict = Verdict::accepted;
  Status failure;
};

namespace {

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
  const auto& key = connection_of(ssl).key;
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
  const ConstBytes waiting = connection.input.bytes();
  *count = std::min(most, waiting.size());
  if (*count == 0) {
    BIO_set_retry_read(bio);
    return 0;
  }
  std::memcpy(to, waiting.data(), *count);
  connection.input.drop(*count);
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

/// What all connections have in common; null where this OpenSSL cannot do it. Lives for ever: the
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
    // Nobody has a certificate, so none is ever good enough.
    SSL_CTX_set_verify(ctx, SSL_VERIFY_PEER, nullptr);
    SSL_CTX_set_psk_use_session_callback(ctx, use_key);
    SSL_CTX_set_psk_find_session_callback(ctx, find_key);
    // Several records are read at a time.
    SSL_CTX_set_read_ahead(ctx, 1);
    SSL_CTX_set_default_read_buffer_len(ctx, 4 * kRecordBytes);
    return ctx;
  }();
  return made;
}

}  // namespace

TlsSession::Connection::Connection(Side which, const Handshake::Hello& hello, const Secret& secret,
                                   std::uint64_t bytes_per_key)
    : side(which), mine(greeting_of(hello, secret.kind())), per_key(bytes_per_key) {
  std::string purpose =
      "muster tls, role " + std::to_string(static_cast<int>(hello.role)) + ", job ";
  purpose.append(as_text(short_hash(hello.job)));
  key = secret.derive(purpose);
  if (side == Side::connector) output.append(mine);  // the other one answers
  // An acceptor spends nothing on a stranger who has not even greeted.
  if (side == Side::connector && begin_tls()) {
    ERR_clear_error();
    SSL_do_handshake(ssl.get());  // the ClientHello, behind the greeting
  }
}

bool TlsSession::Connection::begin_tls() {
  SSL_CTX* const common = context();
  ssl.reset(common != nullptr ? SSL_new(common) : nullptr);
  BIO* bytes = ssl != nullptr ? BIO_new(byte_method()) : nullptr;
  if (bytes == nullptr) {
    fail(Code::exhausted, Verdict::bad_proof,
         "OpenSSL cannot make an encrypted connection with TLS 1.3 and AES-128-GCM here (" +
             library_error() + ")");
    return false;
  }
  BIO_set_data(bytes, this);
  BIO_set_init(bytes, 1);
  SSL_set_bio(ssl.get(), bytes, bytes);
  SSL_set_ex_data(ssl.get(), index_of_connection(), this);
  side == Side::acceptor ? SSL_set_accept_state(ssl.get()) : SSL_set_connect_state(ssl.get());
  return true;
}

void TlsSession::Connection::go_on() {
  for (bool more = true; more;) {
    switch (state) {
      case State::greeting: more = eat_greeting(); break;
      case State::handshake: more = shake_hands(); break;
      case State::binding: more = compare_bindings(); break;
      case State::done:
      case State::failed: return;
    }
  }
}

bool TlsSession::Connection::eat_greeting() {
  const ConstBytes came = input.bytes();
  const std::size_t have = std::min(came.size(), theirs.size());
  std::memcpy(theirs.data(), came.data(), have);
  // A stranger is recognised by its first wrong byte, and gets no answer at all.
  if (!may_be_greeting(theirs, have)) {
    fail(Code::refused, Verdict::bad_magic,
         "what came is not a muster greeting; something else uses this port, or the address is "
         "wrong");
    return false;
  }
  if (have < theirs.size()) return false;
  input.drop(have);
  peer = peer_of(theirs);
  if (side == Side::acceptor) output.append(mine);
  if (auto found = difference(mine, theirs); found.verdict != Verdict::accepted) {
    if (side == Side::acceptor) output.append(static_cast<std::byte>(found.verdict));
    fail(Code::refused, found.verdict, std::move(found.message));
    return false;
  }
  if (side == Side::acceptor && !begin_tls()) return false;
  state = State::handshake;
  return true;
}

bool TlsSession::Connection::shake_hands() {
  const ConstBytes came = input.bytes();
  if (side == Side::connector && !answered && !came.empty()) {
    answered = true;
    const int first = std::to_integer<int>(came.front());
    if (first < kFirstContentType || first > kLastContentType) {
      const auto said = static_cast<Verdict>(first);
      fail(Code::refused, said, refusal_text(said));
      return false;
    }
  }
  ERR_clear_error();
  const int result = SSL_do_handshake(ssl.get());
  if (result != 1) {
    if (SSL_get_error(ssl.get(), result) == SSL_ERROR_WANT_READ) return false;
    const std::string said = library_error();
    if (side == Side::acceptor) {
      fail(Code::refused, Verdict::bad_proof,
           whom(peer.rank) +
               " did not prove this job's secret; set the same MUSTER_SECRET on all ranks "
               "(without it all ranks must run on one host as one user) [TLS: " +
               said + "]");
    } else {
      fail(Code::refused, Verdict::bad_proof, refusal_text(Verdict::bad_proof));
    }
    return false;
  }
  // Without the key there is no way in: the other side would have to show a certificate.
  if (SSL_session_reused(ssl.get()) != 1) {
    fail(Code::refused, Verdict::bad_proof,
         whom(peer.rank) + " did not use this job's secret; an impostor may be on the way");
    return false;
  }
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
         "the greetings were changed on the way to or from " + whom(peer.rank) +
             "; somebody on the network tampers with this connection");
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
  state = State::failed;
  verdict = why;
  failure = Status(code, std::move(message),
                   peer.rank >= 0 ? std::vector<int>{peer.rank} : std::vector<int>{});
}

/// All of it; the library's output has no end.
bool TlsSession::Connection::encrypt(ConstBytes plain) {
  if (written >= per_key) {
    SSL_key_update(ssl.get(), SSL_KEY_UPDATE_NOT_REQUESTED);
    written = 0;
  }
  while (!plain.empty()) {
    ERR_clear_error();
    std::size_t taken = 0;
    if (SSL_write_ex(ssl.get(), plain.data(), plain.size(), &taken) != 1) {
      fail(Code::network, Verdict::accepted, "could not encrypt: " + library_error());
      return false;
    }
    plain = plain.subspan(taken);
    written += taken;
  }
  return true;
}

Result<std::size_t> TlsSession::Connection::decrypt(MutableBytes to) {
  std::size_t got = 0;
  ERR_clear_error();
  const int result = SSL_read_ex(ssl.get(), to.data(), to.size(), &got);
  if (result == 1) return got;
  switch (SSL_get_error(ssl.get(), result)) {
    case SSL_ERROR_WANT_READ: return std::size_t{0};
    case SSL_ERROR_ZERO_RETURN:
      fail(Code::closed, Verdict::accepted, whom(peer.rank) + " has closed the connection");
      break;
    default:
      fail(Code::network, Verdict::accepted,
           "what came from " + whom(peer.rank) + " was changed on the way (" + library_error() +
               "); somebody on the network tampers with this connection");
  }
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
  connection_->go_on();
}
MutableBytes TlsSession::room(std::size_t bytes) { return connection_->input.room(bytes); }
void TlsSession::came(std::size_t bytes) {
  connection_->input.came(bytes);
  connection_->go_on();
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
void TlsSession::set_unwelcome() { connection_->unwelcome = true; }

Result<std::size_t> TlsSession::write(std::span<const ConstBytes> pieces) {
  if (failed()) return failure();
  std::size_t taken = 0;
  std::array<std::byte, kRecordBytes> gathered;
  std::size_t filled = 0;
  const auto flush = [&] {
    const std::size_t bytes = std::exchange(filled, 0);
    return bytes == 0 || connection_->encrypt(ConstBytes(gathered).first(bytes));
  };
  for (ConstBytes piece : pieces) {
    while (!piece.empty()) {
      if (output().size() >= kMostOutput) break;
      // A whole record is encrypted where it lies; less is gathered with what follows.
      const std::size_t bytes = std::min(piece.size(), kRecordBytes - filled);
      if (bytes == kRecordBytes) {
        if (!connection_->encrypt(piece.first(bytes))) return failure();
      } else {
        std::memcpy(gathered.data() + filled, piece.data(), bytes);
        filled += bytes;
        if (filled == kRecordBytes && !flush()) return failure();
      }
      taken += bytes;
      piece = piece.subspan(bytes);
    }
    if (!piece.empty()) break;
  }
  if (!flush()) return failure();
  return taken;
}

Result<std::size_t> TlsSession::read(std::span<const MutableBytes> pieces) {
  if (failed()) return failure();
  std::size_t total = 0;
  for (MutableBytes piece : pieces) {
    while (!piece.empty()) {
      const auto got = connection_->decrypt(piece);
      if (!got.ok()) return total > 0 ? Result<std::size_t>(total) : got;
      if (*got == 0) return total;
      total += *got;
      piece = piece.subspan(*got);
    }
  }
  return total;
}

}  // namespace muster
