#include "core/base/env.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <cstring>

namespace muster {

std::optional<std::string> env_text(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

void wipe_env(const char* name) {
  if (char* value = std::getenv(name); value != nullptr)
    ::explicit_bzero(value, std::strlen(value));
  ::unsetenv(name);
}

Result<std::optional<std::int64_t>> env_integer(const char* name, std::int64_t low,
                                                std::int64_t high) {
  const auto text = env_text(name);
  if (!text) return std::optional<std::int64_t>();
  std::int64_t value = 0;
  const char* end = text->data() + text->size();
  const auto [stop, error] = std::from_chars(text->data(), end, value);
  if (error != std::errc() || stop != end || value < low || value > high) {
    return Status(Code::invalid_argument, "environment variable " + std::string(name) + " is \"" +
                                              *text + "\"; expected a whole number from " +
                                              std::to_string(low) + " to " + std::to_string(high));
  }
  return std::optional<std::int64_t>(value);
}

Result<std::optional<bool>> env_flag(const char* name) {
  const auto text = env_text(name);
  if (!text) return std::optional<bool>();
  std::string lower = *text;
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (lower == "1" || lower == "true" || lower == "yes" || lower == "on")
    return std::optional<bool>(true);
  if (lower == "0" || lower == "false" || lower == "no" || lower == "off")
    return std::optional<bool>(false);
  return Status(Code::invalid_argument, "environment variable " + std::string(name) + " is \"" +
                                            *text +
                                            "\"; expected 1 or 0 (true, false, yes, no, on, off)");
}

}  // namespace muster
