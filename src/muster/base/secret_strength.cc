#include "muster/base/secret_strength.h"

#include <sodium.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <mutex>
#include <utility>
#include <vector>

#include "muster/base/secret.h"

namespace muster {
namespace {

constexpr std::size_t kShortestText = 16;               // limit: a secret that cannot be guessed
constexpr std::size_t kLeastDifferent = 8;              // limit: a secret that cannot be guessed
constexpr std::size_t kRandomText = 64;                 // limit: what `muster secret` makes
constexpr unsigned long long kPasses = 3;               // limit: RFC 9106, the second choice
constexpr std::size_t kMemory = std::size_t{64} << 20;  // limit: RFC 9106, the second choice
constexpr std::array<unsigned char, crypto_pwhash_SALTBYTES> kSalt{
    'm', 'u', 's', 't', 'e', 'r', ' ', 's', 'e', 'c', 'r', 'e', 't', ' ', 'v', '1'};

std::size_t different_characters(std::string_view text) {
  std::bitset<256> seen;
  for (const char c : text) seen.set(static_cast<unsigned char>(c));
  return seen.count();
}

bool is_random(std::string_view text) {
  return text.size() == kRandomText &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

Result<SecretBytes> stretched(const SecretBytes& text) {
  std::array<unsigned char, 32> out{};
  if (::crypto_pwhash(out.data(), out.size(), text.text().data(), text.size(), kSalt.data(),
                      kPasses, kMemory, crypto_pwhash_ALG_ARGON2ID13) != 0) {
    return Status(Code::exhausted,
                  "there are no 64 MiB of memory to make a key of the secret; a secret from "
                  "`muster secret` needs none");
  }
  std::array<char, kRandomText + 1> digits{};
  ::sodium_bin2hex(digits.data(), digits.size(), out.data(), out.size());
  SecretBytes key(as_bytes({digits.data(), kRandomText}));
  ::sodium_memzero(out.data(), out.size());
  ::sodium_memzero(digits.data(), digits.size());
  return key;
}

}  // namespace

Result<SecretBytes> key_of_text(const SecretBytes& text, const std::string& name) {
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
  if (is_random(text.text())) return text;
  static std::mutex mutex;
  static auto* const known = new std::vector<std::pair<SecretBytes, SecretBytes>>;
  const std::lock_guard lock(mutex);
  for (const auto& [each, key] : *known) {
    if (equal_in_constant_time(each.view(), text.view())) return key;
  }
  auto key = stretched(text);
  if (key) known->emplace_back(text, *key);
  return key;
}

}  // namespace muster
