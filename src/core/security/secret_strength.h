/// The text form of secrets, and how strong a text chosen by a user is. Private to base/.
///
/// A text of `muster secret` is "muster-secret-", 64 random hexadecimal digits, "-" and 8 check
/// digits; an observer's key begins with "muster-observer-" instead. Only these count as random.
/// An attacker with one recorded greeting can try any other text as fast as a hash goes. Such a
/// text therefore goes through Argon2id (64 MiB, 3 passes: 0.1 s a guess instead of 1 us), and is
/// refused where it is short or has few characters.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/security/secret_bytes.h"
#include "muster/status.h"

namespace muster {

inline constexpr std::string_view kSecretPrefix = "muster-secret-";
inline constexpr std::string_view kObserverPrefix = "muster-observer-";

/// `bits` with the check digits of its form.
std::string text_of_key(std::string_view prefix, ConstBytes bits);

/// `text` itself where its form says that it is random, else 64 hexadecimal digits, the same for
/// the same text everywhere. `name` is what a refusal calls it: the variable, or the file. Threads
/// that ask for one text at once wait for one computation; a process stretches a text once.
Result<SecretBytes> key_of_text(const SecretBytes& text, const std::string& name);

/// How many texts this process has stretched.
std::uint64_t stretched_texts();

}  // namespace muster
