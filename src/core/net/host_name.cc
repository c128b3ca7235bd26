#include "core/net/host_name.h"

#include <limits.h>
#include <netdb.h>
#include <unistd.h>

namespace muster {

std::string host_name() {
  char name[HOST_NAME_MAX + 1] = {};
  if (::gethostname(name, sizeof name - 1) != 0 || name[0] == '\0') return "localhost";
  return name;
}

std::string full_host_name() {
  const std::string plain = host_name();
  if (plain.find('.') != std::string::npos) return plain;
  addrinfo hints{};
  hints.ai_flags = AI_CANONNAME;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(plain.c_str(), nullptr, &hints, &found) != 0) return plain;
  // A hosts file that calls everything "localhost" says nothing about this host.
  const std::string canonical = found->ai_canonname != nullptr ? found->ai_canonname : "";
  ::freeaddrinfo(found);
  return canonical.starts_with(plain + ".") ? canonical : plain;
}

std::string in_own_domain(const std::string& name) {
  const std::string own = full_host_name();
  const std::size_t dot = own.find('.');
  return dot == std::string::npos ? name : name + own.substr(dot);
}

}  // namespace muster
