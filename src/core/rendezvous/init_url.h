/// Parses init methods: `tcp://host:port?rank=0&world_size=4`, `file:///path`, `env://`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "muster/status.h"

namespace muster::store {

struct InitUrl {
  enum class Scheme { env, tcp, file };
  Scheme scheme = Scheme::env;
  std::string host;  ///< tcp: without brackets
  std::uint16_t port = 0;
  std::string path;  ///< file
  std::optional<int> rank;
  std::optional<int> world_size;
};

/// Errors name the invalid part and show the whole text.
Result<InitUrl> parse_init_url(const std::string& text);
/// Parses a decimal integer in [low, high]; otherwise empty.
std::optional<std::int64_t> whole_number(const std::string& text, std::int64_t low,
                                         std::int64_t high);

}  // namespace muster::store
