#include "muster/base/secret.h"

#include <fcntl.h>
#include <sodium.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "muster/base/descriptor.h"
#include "muster/base/env.h"
#include "muster/base/socket_address.h"

namespace muster {
namespace {

constexpr std::size_t kShortestText = 16;  // limit: a secret that cannot be guessed
constexpr std::size_t kLongestFile = std::size_t{64} << 10;  // limit: a file that is no secret
constexpr std::size_t kHostKeyBytes = 32;
constexpr char kEverybodyKnows[] = "muster: this job runs without a secret";

/// The whole of a small file; an error text names what the system said.
Result<std::string> read_small_file(int file, const std::string& name) {
  std::string contents;
  char piece[4096];
  for (;;) {
    const ssize_t n = ::read(file, piece, sizeof piece);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Status(Code::refused, "cannot read " + name + ": " + errno_text(errno));
    if (n == 0) return contents;
    contents.append(piece, static_cast<std::size_t>(n));
    if (contents.size() > kLongestFile)
      return Status(Code::invalid_argument, name + " is longer than 64 KiB: that is not a secret");
  }
}

Result<std::string> secret_from_file(const std::string& path) {
  const std::string name = "the secret's file " + path + " (MUSTER_SECRET_FILE)";
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file)
    return Status(Code::invalid_argument, "cannot open " + name + ": " + errno_text(errno));
  auto contents = read_small_file(file.get(), name);
  if (!contents) return contents;
  while (!contents->empty() && (contents->back() == '\n' || contents->back() == '\r'))
    contents->pop_back();
  if (contents->size() < kShortestText) {
    return Status(Code::invalid_argument, name + " holds " + std::to_string(contents->size()) +
                                              " characters; a secret needs at least 16");
  }
  return contents;
}

std::string path_of_host_directory() {
  if (const auto runtime = env_text("XDG_RUNTIME_DIR")) return *runtime + "/muster";
  return "/tmp/muster-" + std::to_string(::geteuid());
}

Result<Descriptor> open_host_directory(const std::string& path) {
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    return Status(
        Code::refused,
        "cannot make " + path + ", where this host's secret would be kept: " + errno_text(errno) +
            "; set MUSTER_SECRET to the same text of at least 16 characters on all ranks");
  }
  Descriptor directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat info {};
  if (!directory || ::fstat(directory.get(), &info) != 0) {
    return Status(Code::refused, "cannot open the directory of this host's secret, " + path + ": " +
                                     errno_text(errno));
  }
  if (info.st_uid != ::geteuid() || (info.st_mode & 077) != 0) {
    return Status(Code::refused, "the directory of this host's secret, " + path +
                                     ", must belong to this user and be closed to all others (mode "
                                     "0700); remove it, or set MUSTER_SECRET on all ranks");
  }
  return directory;
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
  const bool written =
      ::write(file.get(), key.data(), key.size()) == static_cast<ssize_t>(key.size());
  const bool placed =
      written &&
      (::linkat(directory, temporary.c_str(), directory, "secret", 0) == 0 || errno == EEXIST);
  const int error = errno;
  ::unlinkat(directory, temporary.c_str(), 0);
  if (!placed)
    return Status(Code::refused,
                  "cannot write this host's secret into " + path + ": " + errno_text(error));
  return {};
}

Result<std::string> host_key() {
  const std::string path = path_of_host_directory();
  const auto directory = open_host_directory(path);
  if (!directory) return directory.status();
  for (int attempt = 0; attempt < 2; ++attempt) {
    const Descriptor file(::openat(directory->get(), "secret", O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
    if (file) {
      auto key = read_small_file(file.get(), path + "/secret");
      if (key && key->size() != kHostKeyBytes)
        return Status(Code::refused,
                      path + "/secret is damaged; remove it and start the job again");
      return key;
    }
    if (errno != ENOENT)
      return Status(Code::refused, "cannot open " + path + "/secret: " + errno_text(errno));
    if (Status placed = place_host_key(directory->get(), path); !placed) return placed;
  }
  return Status(Code::refused, path + "/secret vanishes as soon as it is made");
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
  const std::string path = path_of_host_directory();
  const auto directory = open_host_directory(path);
  return directory ? Result<std::string>(path) : Result<std::string>(directory.status());
}

Result<Secret> Secret::from_environment() {
  if (auto text = env_text("MUSTER_SECRET")) {
    if (text->size() < kShortestText) {
      return Status(Code::invalid_argument, "MUSTER_SECRET has " + std::to_string(text->size()) +
                                                " characters; a secret needs at least 16");
    }
    return given(std::move(*text));
  }
  if (const auto path = env_text("MUSTER_SECRET_FILE")) {
    auto text = secret_from_file(*path);
    if (!text) return text.status();
    return given(std::move(*text));
  }
  const auto insecure = env_flag("MUSTER_INSECURE");
  if (!insecure) return insecure.status();
  if (insecure->value_or(false)) return Secret(Kind::open, kEverybodyKnows);
  auto key = host_key();
  if (!key) return key.status();
  return Secret(Kind::host, std::move(*key));
}

Secret Secret::given(std::string text) { return Secret(Kind::given, std::move(text)); }

std::string Secret::random_text() {
  std::array<std::byte, 32> bytes;
  fill_random(bytes);
  return hexadecimal(bytes);
}

Secret::Proof Secret::prove(ConstBytes message) const { return hmac(as_bytes(key_), message); }

Secret::Proof Secret::derive(std::string_view purpose) const {
  Proof extracted = hmac(as_bytes("muster"), as_bytes(key_));
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

std::array<std::byte, 16> short_hash(std::string_view text) {
  std::array<std::byte, crypto_hash_sha256_BYTES> whole;
  crypto_hash_sha256(reinterpret_cast<unsigned char*>(whole.data()),
                     reinterpret_cast<const unsigned char*>(text.data()), text.size());
  std::array<std::byte, 16> cut;
  std::memcpy(cut.data(), whole.data(), cut.size());
  return cut;
}

}  // namespace muster
