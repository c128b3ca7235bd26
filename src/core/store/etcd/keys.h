/// Where a store's keys lie in etcd, below the store's root.
#pragma once

#include <array>
#include <cstdio>
#include <string>
#include <string_view>

namespace muster::store::etcd {

/// The length before it keeps one key's records from beginning like another's.
inline std::string counted(std::string_view text, std::size_t size) {
  std::array<char, 17> digits{};
  std::snprintf(digits.data(), digits.size(), "%08zx", size);
  return std::string(digits.data(), 8) + std::string(text);
}

struct Keys {
  std::string root;

  std::string users() const { return root + "k"; }
  std::string user(std::string_view key) const { return users() + std::string(key); }
  std::string queue(std::string_view key) const {
    return root + "q" + counted(key, key.size()) + "/";
  }
  std::string meeting(char kind, std::string_view key) const {
    return root + kind + counted(key, key.size()) + "/";
  }
  /// Pieces of the value that is under `place`, one of the above.
  std::string pieces(std::string_view place) const { return pieces(place, place.size()) + "/"; }
  /// What those of all places of `size` bytes begin with that begin with `place`.
  std::string pieces(std::string_view place, std::size_t size) const {
    return root + "p" + counted(place.substr(root.size()), size - root.size());
  }
};

}  // namespace muster::store::etcd
