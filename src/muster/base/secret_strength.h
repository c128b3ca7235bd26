/// What a text that somebody chose is worth as a secret. Private to base/.
///
/// Whoever captures one greeting can try texts against it, as fast as a hash goes. So what is not
/// random goes through Argon2id (64 MiB, 3 passes: 0.1 s a guess instead of 1 us), once a process;
/// what is short or of few characters is refused, since no price of a guess would help.
#pragma once

#include <string>

#include "muster/base/secret_bytes.h"
#include "muster/status.h"

namespace muster {

/// A key of 64 hexadecimal digits: `text` itself where it is one that `muster secret` makes, else
/// the same digits for the same text everywhere. `name` is what the refusal calls it: the variable,
/// or the file. Threads that ask for one text at once wait for one computation.
Result<SecretBytes> key_of_text(const SecretBytes& text, const std::string& name);

}  // namespace muster
