// SPDX-License-Identifier: BSD-3-Clause
/// A hash for what is compared or named, not for secrets.
#pragma once

#include <cstdint>
#include <string_view>

namespace muster {

/// XXH3's 64 bits: the same on every host and in every build.
std::uint64_t hash_of(std::string_view bytes);

}  // namespace muster
