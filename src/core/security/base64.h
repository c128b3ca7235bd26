/// Base64 of RFC 4648, with padding: bytes in JSON.
#pragma once

#include <string>
#include <string_view>

namespace muster {

std::string base64(std::string_view bytes);
/// False, with `bytes` undefined, if `text` is no base64.
bool from_base64(std::string_view text, std::string& bytes);

}  // namespace muster
