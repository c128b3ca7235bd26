// SPDX-License-Identifier: BSD-3-Clause
/// Words for the command line of a shell.
#pragma once

#include <string>
#include <string_view>

namespace muster {

/// `text` as one word of a POSIX shell, csh and fish, which take it as it is: in single quotes if
/// it has other than letters, digits and a few signs.
std::string shell_word(std::string_view text);

}  // namespace muster
