#include "core/security/secret_strength.h"

#include <sodium.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bitset>
#include <mutex>
#include <utility>
#include <vector>

#include "core/security/secret.h"

namespace muster {
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
