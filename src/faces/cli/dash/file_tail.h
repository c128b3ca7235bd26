// SPDX-License-Identifier: BSD-3-Clause
/// The end of a file that only this user can have written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "muster/status.h"

namespace muster::cli {

struct FileTail {
  std::string text;
  std::uint64_t bytes = 0;  ///< of the whole file
};
/// At most the last `most` bytes. `name`: what messages call it. Links are not followed, and a pipe
/// blocks nobody.
Result<FileTail> tail_of_file(const std::string& path, const std::string& name, std::size_t most);

}  // namespace muster::cli
