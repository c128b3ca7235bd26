// SPDX-License-Identifier: BSD-3-Clause
#include "core/security/secret.h"

#include <fcntl.h>
#include <sodium.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bitset>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "core/base/environment.h"
#include "core/base/process/fork_guard.h"
#include "core/base/process/limits.h"
#include "core/net/socket_address.h"
#include "core/security/own_files.h"

namespace muster {

SecretBytes::SecretBytes(ConstBytes bytes) : size_(bytes.size()) {
  static const bool ready = ::sodium_init() >= 0;
  if (!ready) std::abort();  // a kernel without random numbers cannot keep a secret
  auto* const memory = static_cast<std::byte*>(::sodium_malloc(std::max<std::size_t>(size_, 1)));
  if (memory == nullptr) throw std::bad_alloc();
  std::copy(bytes.begin(), bytes.end(), memory);
  memory_ = std::shared_ptr<const std::byte>(
      memory, [](const std::byte* old) { ::sodium_free(const_cast<std::byte*>(old)); });
  ::sodium_mprotect_readonly(memory);
}

namespace {

constexpr std::size_t kShortestText = 16;               // limit: a secret that cannot be guessed
constexpr std::size_t kLeastDifferent = 8;              // limit: a secret that cannot be guessed
constexpr std::size_t kDigits = 64;                     // limit: 256 bits
constexpr std::size_t kCheckDigits = 8;                 // limit: 1 of 2^32 damaged texts passes
constexpr unsigned long long kPasses = 3;               // limit: RFC 9106, the second choice
constexpr std::size_t kMemory = std::size_t{64} << 20;  // limit: RFC 9106, the second choice
constexpr std::array<unsigned char, crypto_pwhash_SALTBYTES> kSalt{
    'm', 'u', 's', 't', 'e', 'r', ' ', 's', 'e', 'c', 'r', 'e', 't', ' ', 'v', '1'};

std::size_t different_characters(std::string_view text) {
  std::bitset<256> seen;
  for (const char c : text) seen.set(static_cast<unsigned char>(c));
  return seen.count();
}

std::string check_digits(std::string_view text) {
  return hexadecimal(short_hash(text)).substr(0, kCheckDigits);
}

bool has_form_of_ours(std::string_view text) {
  return text.starts_with(kSecretPrefix) || text.starts_with(kObserverPrefix);
}

bool is_whole(std::string_view text) {
  const std::size_t prefix =
      text.starts_with(kSecretPrefix) ? kSecretPrefix.size() : kObserverPrefix.size();
  if (text.size() != prefix + kDigits + 1 + kCheckDigits || text[prefix + kDigits] != '-')
    return false;
  return text.substr(prefix, kDigits).find_first_not_of("0123456789abcdef") ==
             std::string_view::npos &&
         text.ends_with(check_digits(text.substr(0, prefix + kDigits)));
}

std::atomic<std::uint64_t> stretched_count{0};

Result<SecretBytes> stretched(const SecretBytes& text) {
  ++stretched_count;
  std::array<unsigned char, 32> out{};
  if (::crypto_pwhash(out.data(), out.size(), text.text().data(), text.size(), kSalt.data(),
                      kPasses, kMemory, crypto_pwhash_ALG_ARGON2ID13) != 0) {
    return Status(Code::exhausted,
                  "there are no 64 MiB of memory to make a key of the secret; a secret from "
                  "`muster secret` needs none");
  }
  std::array<char, kDigits + 1> digits{};
  ::sodium_bin2hex(digits.data(), digits.size(), out.data(), out.size());
  SecretBytes key(as_bytes({digits.data(), kDigits}));
  ::sodium_memzero(out.data(), out.size());
  ::sodium_memzero(digits.data(), digits.size());
  return key;
}

}  // namespace

std::string text_of_key(std::string_view prefix, ConstBytes bits) {
  std::string digits = hexadecimal(bits);
  std::string text;
  text.reserve(prefix.size() + kDigits + 1 + kCheckDigits);  // a growing text leaves copies
  text.append(prefix).append(digits);
  ::sodium_memzero(digits.data(), digits.size());
  const std::string check = check_digits(text);
  return text.append("-").append(check);
}

std::uint64_t stretched_texts() { return stretched_count; }

Result<SecretBytes> key_of_text(const SecretBytes& text, const std::string& name) {
  if (has_form_of_ours(text.text())) {
    if (is_whole(text.text())) return text;
    return Status(Code::invalid_argument,
                  name +
                      " begins as what `muster secret` makes, but its check digits are wrong: a "
                      "character is missing or was changed; copy it again");
  }
  if (text.size() < kShortestText) {
    return Status(Code::invalid_argument,
                  name + " has " + std::to_string(text.size()) +
                      " characters; a secret needs at least 16: `muster secret` makes one");
  }
  if (const auto different = different_characters(text.text()); different < kLeastDifferent) {
    return Status(Code::invalid_argument,
                  name + " is made of " + std::to_string(different) +
                      " different characters, which can be guessed; a secret needs at least 8: "
                      "`muster secret` makes one");
  }
  struct KnownKeys {
    std::mutex mutex;  // held while a key is made, so each is made once
    std::vector<std::pair<SecretBytes, SecretBytes>> keys;
  };
  static constinit PerProcess<KnownKeys> of_process;
  KnownKeys& known = of_process.get();
  const std::lock_guard lock(known.mutex);
  for (const auto& [each, key] : known.keys) {
    if (equal_in_constant_time(each.view(), text.view())) return key;
  }
  auto key = stretched(text);
  if (key) known.keys.emplace_back(text, *key);
  return key;
}

namespace {

constexpr std::size_t kLongestFile = std::size_t{64} << 10;  // limit: a file that is no secret
constexpr std::size_t kHostKeyBytes = 32;
constexpr char kPublicConstant[] = "muster: this job runs without a secret";
constexpr std::string_view kSealedTitle = "muster secret\n";
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL;

/// A text that is wiped at the end.
struct Wiped {
  explicit Wiped(std::string given) : text(std::move(given)) {}
  Wiped(Wiped&&) = default;
  ~Wiped() { ::sodium_memzero(text.data(), text.size()); }
  SecretBytes kept() const { return SecretBytes(as_bytes(text)); }
  std::string text;
};

/// The whole of a small file; an error text names what the system said.
Result<Wiped> read_small_file(int file, const std::string& name) {
  Wiped contents{std::string(kLongestFile + 1, '\0')};
  std::size_t have = 0;
  while (have < contents.text.size()) {
    const ssize_t n = ::pread(file, contents.text.data() + have, contents.text.size() - have,
                              static_cast<off_t>(have));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Status(Code::refused, "cannot read " + name + ": " + errno_text(errno));
    if (n == 0) {
      contents.text.resize(have);
      return contents;
    }
    have += static_cast<std::size_t>(n);
  }
  return Status(Code::invalid_argument, name + " is longer than 64 KiB: that is not a secret");
}

Result<SecretBytes> key_from_file(const std::string& path) {
  const OwnRules rules{
      .name = "the secret's file (MUSTER_SECRET_FILE)", .closed = 077, .from_root = true};
  const auto file = open_own_file(path, O_RDONLY, rules);
  if (!file) return file.status();
  const std::string name = rules.name + " " + path;
  auto contents = read_small_file(file->get(), name);
  if (!contents) return contents.status();
  std::string& text = contents->text;
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  return key_of_text(contents->kept(), name);
}

/// The key in the sealed file of a launcher behind `link`, a descriptor in /proc, if it is one.
/// The inherited descriptor only names the file (`Secret::sealed`), so the kernel checks each time
/// whether this user may read it.
std::optional<SecretBytes> read_sealed(const std::string& link) {
  const Descriptor file(::open(link.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat info {};
  if (!file || ::fcntl(file.get(), F_GET_SEALS) != kSeals || ::fstat(file.get(), &info) != 0 ||
      info.st_uid != ::geteuid())
    return std::nullopt;
  auto contents = read_small_file(file.get(), "the secret of a launcher");
  if (!contents || !contents->text.starts_with(kSealedTitle)) return std::nullopt;
  return SecretBytes(as_bytes(contents->text).subspan(kSealedTitle.size()));
}

/// `place`: PID:FD. The descriptor may be inherited; a program that a worker starts without it
/// finds it with the launcher.
Result<SecretBytes> key_from_launcher(const std::string& place) {
  const std::string name = "MUSTER_SECRET_FD";
  const auto colon = place.find(':');
  const std::string process = place.substr(0, colon),
                    number = colon == std::string::npos ? "" : place.substr(colon + 1);
  const auto is_number = [](const std::string& text) {
    return !text.empty() && text.size() < 10 &&
           text.find_first_not_of("0123456789") == std::string::npos;
  };
  if (!is_number(process) || !is_number(number))
    return Status(Code::invalid_argument,
                  name + " is \"" + place + "\"; a launcher writes PROCESS:DESCRIPTOR there");
  if (auto inherited = read_sealed("/proc/self/fd/" + number)) {
    // Programs that this one starts find it with the launcher.
    if (::fcntl(std::stoi(number), F_SETFD, FD_CLOEXEC) != 0)
      return Status(Code::internal,
                    name + ": descriptor " + number +
                        " cannot be closed to other programs: " + errno_text(errno));
    return std::move(*inherited);
  }
  if (auto found = read_sealed("/proc/" + process + "/fd/" + number)) return std::move(*found);
  return Status(
      Code::invalid_argument,
      name + " is " + place + ", and there is no secret: this process did not inherit " +
          "the descriptor, and its launcher has ended, is out of sight or runs as another "
          "user; set MUSTER_SECRET or MUSTER_SECRET_FILE");
}

Result<Descriptor> open_host_directory(const std::string& path) {
  auto directory =
      make_own_folder(path, {.name = "the directory of this host's secret", .closed = 077});
  if (directory) return directory;
  return Status(Code::refused, directory.status().message() +
                                   "; or set MUSTER_SECRET to the same text on all ranks "
                                   "(`muster secret` makes one)");
}

/// Puts a new random key in place unless another process was faster; either way one whole key is
/// there afterwards.
Status place_host_key(int directory, const std::string& path) {
  std::array<std::byte, kHostKeyBytes> key;
  fill_random(key);
  std::array<std::byte, 8> unique;
  fill_random(unique);
  const std::string temporary = "new-" + hexadecimal(unique);
  const Descriptor file(::openat(directory, temporary.c_str(),
                                 O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file) return Status(Code::refused, "cannot write into " + path + ": " + errno_text(errno));
  const FileSizeSignalBlock block;
  const bool written =
      ::write(file.get(), key.data(), key.size()) == static_cast<ssize_t>(key.size());
  ::sodium_memzero(key.data(), key.size());
  // Not by a hard link: files with two names are refused.
  const bool placed = written && ::renameat2(directory, temporary.c_str(), directory, "secret",
                                             RENAME_NOREPLACE) == 0;
  const int error = errno;
  if (!placed) ::unlinkat(directory, temporary.c_str(), 0);
  if (!placed && !(written && error == EEXIST))
    return Status(Code::refused,
                  "cannot write this host's secret into " + path + ": " + errno_text(error));
  return {};
}

bool is_there(int directory, const char* name) {
  struct stat info {};
  return ::fstatat(directory, name, &info, AT_SYMLINK_NOFOLLOW) == 0;
}

Result<SecretBytes> host_key() {
  const std::string path = own_runtime_folder();
  const auto directory = open_host_directory(path);
  if (!directory) return directory.status();
  if (!is_there(directory->get(), "secret")) {
    if (Status placed = place_host_key(directory->get(), path); !placed) return placed;
  }
  const OwnRules rules{.name = "this host's secret", .closed = 077};
  const auto file = open_own_file("secret", O_RDONLY, rules, 0, directory->get());
  if (!file) return file.status().with_context("in " + path);
  auto key = read_small_file(file->get(), path + "/secret");
  if (!key) return key.status();
  if (key->text.size() != kHostKeyBytes)
    return Status(Code::refused, path + "/secret is damaged; remove it and start the job again");
  return key->kept();
}

Secret::Proof hmac(ConstBytes key, ConstBytes message) {
  crypto_auth_hmacsha256_state state;
  Secret::Proof proof;
  static_assert(sizeof proof == crypto_auth_hmacsha256_BYTES);
  crypto_auth_hmacsha256_init(&state, reinterpret_cast<const unsigned char*>(key.data()),
                              key.size());
  crypto_auth_hmacsha256_update(&state, reinterpret_cast<const unsigned char*>(message.data()),
                                message.size());
  crypto_auth_hmacsha256_final(&state, reinterpret_cast<unsigned char*>(proof.data()));
  sodium_memzero(&state, sizeof state);
  return proof;
}

}  // namespace

Result<std::string> host_directory() {
  const std::string path = own_runtime_folder();
  const auto directory = open_host_directory(path);
  return directory ? Result<std::string>(path) : Result<std::string>(directory.status());
}

Result<Secret> Secret::from_environment(Use use) {
  const auto made_of = [use](Kind kind, Result<SecretBytes> key) -> Result<Secret> {
    if (!key) return key.status();
    Secret secret(kind, std::move(*key));
    if (!secret.is_observer() || use == Use::observe) return secret;
    return Status(Code::refused,
                  "the secret in the environment is an observer's key, which can look at a running "
                  "job (`muster trace`, `muster top`, `muster doctor --job`) and not join it; a "
                  "rank needs the job's secret");
  };
  if (auto text = env_text("MUSTER_SECRET"))
    return made_of(Kind::given, key_of_text(Wiped(std::move(*text)).kept(), "MUSTER_SECRET"));
  if (const auto place = env_text("MUSTER_SECRET_FD"))
    return made_of(Kind::given, key_from_launcher(*place));
  if (const auto path = env_text("MUSTER_SECRET_FILE"))
    return made_of(Kind::given, key_from_file(*path));
  const auto insecure = env_flag("MUSTER_INSECURE");
  if (!insecure) return insecure.status();
  if (insecure->value_or(false)) return Secret(Kind::open, SecretBytes(as_bytes(kPublicConstant)));
  return made_of(Kind::host, host_key());
}

Secret Secret::given(std::string_view text) {
  return Secret(Kind::given, SecretBytes(as_bytes(text)));
}

Result<Descriptor> Secret::sealed() const {
  const FileSizeSignalBlock block;
  Descriptor file(::memfd_create("muster-secret", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const std::array<iovec, 2> parts{
      iovec{const_cast<char*>(kSealedTitle.data()), kSealedTitle.size()},
      iovec{const_cast<std::byte*>(key_.view().data()), key_.size()}};
  if (!file || ::fchmod(file.get(), 0600) != 0 ||
      ::writev(file.get(), parts.data(), parts.size()) !=
          static_cast<ssize_t>(kSealedTitle.size() + key_.size()) ||
      ::fcntl(file.get(), F_ADD_SEALS, kSeals) != 0)
    return Status(Code::exhausted,
                  "cannot make a memory file to hand the secret to workers: " + errno_text(errno));
  // A descriptor that can be read would give the secret to whatever a worker starts as another user
  // (su, runuser). This one only names the file.
  Descriptor name(
      ::open(("/proc/self/fd/" + std::to_string(file.get())).c_str(), O_PATH | O_CLOEXEC));
  if (name) return name;
  return Status(Code::exhausted, "cannot name the memory file that hands the secret to workers: " +
                                     errno_text(errno) + "; is /proc mounted?");
}

std::string Secret::random_text() {
  std::array<std::byte, 32> bytes;
  fill_random(bytes);
  std::string text = text_of_key(kSecretPrefix, bytes);
  ::sodium_memzero(bytes.data(), bytes.size());
  return text;
}

Secret Secret::random() { return Secret(Kind::given, Wiped(random_text()).kept()); }

bool Secret::is_observer() const { return key_.text().starts_with(kObserverPrefix); }

std::string Secret::observer_text() const {
  if (is_observer()) return std::string(key_.text());
  Proof bits = derive("muster observer");
  std::string text = text_of_key(kObserverPrefix, bits);
  ::sodium_memzero(bits.data(), bits.size());
  return text;
}

Secret Secret::observer() const {
  return is_observer() ? *this : Secret(kind_, Wiped(observer_text()).kept());
}

Secret::Proof Secret::prove(ConstBytes message) const { return hmac(key_.view(), message); }

Secret::Proof Secret::derive(std::string_view purpose) const {
  Proof extracted = hmac(as_bytes("muster"), key_.view());
  std::string info(purpose);
  info.push_back(1);  // the first block, and the only one
  const Proof key = hmac(extracted, as_bytes(info));
  sodium_memzero(extracted.data(), extracted.size());
  return key;
}

bool equal_in_constant_time(ConstBytes a, ConstBytes b) {
  return a.size() == b.size() && sodium_memcmp(a.data(), b.data(), a.size()) == 0;
}

void fill_random(MutableBytes out) {
  while (!out.empty()) {
    const ssize_t n = ::getrandom(out.data(), out.size(), 0);
    if (n > 0) {
      out = out.subspan(static_cast<std::size_t>(n));
    } else if (errno != EINTR) {
      std::abort();  // a kernel without random numbers cannot keep a secret
    }
  }
}

std::string random_name(std::size_t bytes) {
  std::vector<std::byte> name(bytes);
  fill_random(name);
  return hexadecimal(name);
}

std::array<std::byte, 16> short_hash(std::string_view text) {
  std::array<std::byte, crypto_hash_sha256_BYTES> whole;
  crypto_hash_sha256(reinterpret_cast<unsigned char*>(whole.data()),
                     reinterpret_cast<const unsigned char*>(text.data()), text.size());
  std::array<std::byte, 16> cut;
  std::memcpy(cut.data(), whole.data(), cut.size());
  return cut;
}

}  // namespace muster
