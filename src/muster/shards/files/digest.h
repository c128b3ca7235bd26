/// 128-bit XXH3 digests as 32 hexadecimal digits: they find damage, not forgery.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace muster::shards {

std::string digest_of(std::span<const std::byte> bytes);
std::string digest_of(std::string_view text);

}  // namespace muster::shards
