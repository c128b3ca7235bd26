// SPDX-License-Identifier: BSD-3-Clause
#include "core/rendezvous/rendezvous.h"

#include <charconv>
#include <limits>

namespace muster::store {
namespace {

Status wrong(const std::string& url, const std::string& what) {
  return Status(Code::invalid_argument, "the init method \"" + url + "\" " + what);
}

Status parse_query(const std::string& url, const std::string& query, InitUrl& out) {
  std::size_t begin = 0;
  while (begin < query.size()) {
    const std::size_t end = std::min(query.find('&', begin), query.size());
    const std::string item = query.substr(begin, end - begin);
    begin = end + 1;
    const std::size_t equals = item.find('=');
    const std::string name = item.substr(0, equals),
                      value = equals == std::string::npos ? "" : item.substr(equals + 1);
    if (name != "rank" && name != "world_size")
      return wrong(url,
                   "has the unknown parameter \"" + name + "\"; there are rank and world_size");
    const auto number =
        whole_number(value, name == "rank" ? 0 : 1, std::numeric_limits<int>::max());
    if (!number)
      return wrong(url, "gives " + name + " as \"" + value + "\"; expected a whole number");
    std::optional<int>& target = name == "rank" ? out.rank : out.world_size;
    if (target) return wrong(url, "gives " + name + " twice");
    target = static_cast<int>(*number);
  }
  return {};
}

Status parse_authority(const std::string& url, const std::string& authority, InitUrl& out) {
  std::string port;
  if (!authority.empty() && authority.front() == '[') {
    const std::size_t close = authority.find(']');
    if (close == std::string::npos)
      return wrong(url, "opens a bracket around an IPv6 address and does not close it");
    out.host = authority.substr(1, close - 1);
    const std::string rest = authority.substr(close + 1);
    if (rest.empty() || rest.front() != ':')
      return wrong(url, "has no port; expected tcp://host:port");
    port = rest.substr(1);
  } else {
    const std::size_t colon = authority.rfind(':');
    if (colon == std::string::npos) return wrong(url, "has no port; expected tcp://host:port");
    out.host = authority.substr(0, colon);
    port = authority.substr(colon + 1);
    if (out.host.find(':') != std::string::npos)
      return wrong(url, "has an IPv6 address without brackets; expected tcp://[address]:port");
  }
  if (out.host.empty())
    return wrong(url, "has no host; expected tcp://host:port, the address of rank 0");
  const auto number = whole_number(port, 1, 65535);
  if (!number)
    return wrong(url,
                 "gives the port as \"" + port + "\"; expected a whole number from 1 to 65535");
  out.port = static_cast<std::uint16_t>(*number);
  return {};
}

}  // namespace

std::optional<std::int64_t> whole_number(const std::string& text, std::int64_t low,
                                         std::int64_t high) {
  std::int64_t value = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || stop != text.data() + text.size() || value < low || value > high)
    return std::nullopt;
  return value;
}

Result<InitUrl> parse_init_url(const std::string& text) {
  const std::size_t colon = text.find("://");
  const std::string scheme = colon == std::string::npos ? std::string() : text.substr(0, colon);
  InitUrl url;
  if (scheme == "env") {
    url.scheme = InitUrl::Scheme::env;
  } else if (scheme == "tcp") {
    url.scheme = InitUrl::Scheme::tcp;
  } else if (scheme == "file") {
    url.scheme = InitUrl::Scheme::file;
  } else {
    return wrong(text, "is not known; expected env://, tcp://host:port or file:///path");
  }
  const std::string rest = text.substr(colon + 3);
  const std::size_t question = rest.find('?');
  const std::string body = rest.substr(0, question);
  if (question != std::string::npos) {
    if (Status query = parse_query(text, rest.substr(question + 1), url); !query) return query;
  }
  if (url.scheme == InitUrl::Scheme::env && !body.empty())
    return wrong(text, "has more than env://; host and port come from MASTER_ADDR and MASTER_PORT");
  if (url.scheme == InitUrl::Scheme::tcp) {
    const std::string authority =
        !body.empty() && body.back() == '/' ? body.substr(0, body.size() - 1) : body;
    if (Status parsed = parse_authority(text, authority, url); !parsed) return parsed;
  }
  if (url.scheme == InitUrl::Scheme::file) {
    if (body.empty() || body.front() != '/')
      return wrong(text, "has no absolute path; expected file:///path/to/file with three slashes");
    url.path = body;
  }
  return url;
}

}  // namespace muster::store
