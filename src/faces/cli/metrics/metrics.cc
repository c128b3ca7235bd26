// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/metrics/metrics.h"

#include <algorithm>
#include <cctype>
#include <utility>

#include "core/security/secret.h"
#include "faces/cli/metrics/node_metrics.h"
#include "jobs/launch/options.h"

namespace muster::cli {
namespace {

constexpr const char* kTokenPurpose = "muster metrics token";
constexpr const char* kTokenPrefix = "muster-metrics-";

}  // namespace

Result<SocketAddress> parse_metrics_address(const std::string& text) {
  const bool only_port = !text.empty() && std::all_of(text.begin(), text.end(), [](char digit) {
    return std::isdigit(static_cast<unsigned char>(digit)) != 0;
  });
  auto endpoint = launch::parse_endpoint("--metrics", only_port ? "127.0.0.1:" + text : text);
  if (!endpoint) return endpoint.status();
  if (!endpoint->port)
    return Status(Code::invalid_argument,
                  "--metrics: \"" + text + "\" has no port; write PORT or ADDRESS:PORT");
  const std::string host = endpoint->host == "localhost" ? "127.0.0.1" : endpoint->host;
  auto address = SocketAddress::numeric(host, *endpoint->port);
  if (address) return address;
  return Status(Code::invalid_argument,
                "--metrics: \"" + host +
                    "\" is no numeric address; write one of this host, 0.0.0.0 for all interfaces, "
                    "or the port alone for the loopback interface");
}

Result<std::string> metrics_token() {
  const auto secret = Secret::from_environment(Secret::Use::observe);
  if (!secret) return secret.status();
  if (secret->kind() != Secret::Kind::given)
    return Status(Code::invalid_argument,
                  "there is no secret in the environment to make a token of; set MUSTER_SECRET or "
                  "MUSTER_SECRET_FILE to the job's secret or its observers' key");
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string token = kTokenPrefix;
  for (const std::byte byte : secret->observer().derive(kTokenPurpose)) {
    token += kDigits[std::to_integer<unsigned>(byte) >> 4];
    token += kDigits[std::to_integer<unsigned>(byte) & 15];
  }
  return token;
}

Result<std::unique_ptr<ScrapeServer>> serve_metrics(
    const SocketAddress& address, std::shared_ptr<const launch::NodeNumbers> numbers) {
  if (MUSTER_PROMETHEUS == 0)
    return Status(Code::unsupported,
                  "--metrics: this muster was built without prometheus-cpp; install it (Debian's "
                  "prometheus-cpp-dev) and build again");
  std::string token;
  if (!address.is_loopback()) {
    auto made = metrics_token();
    if (!made)
      return Status(made.status().code(), "--metrics " + address.text() +
                                              " can be reached from other hosts, which must show "
                                              "a token: " +
                                              made.status().message());
    token = std::move(*made);
  }
  const auto metrics = std::make_shared<NodeMetrics>(std::move(numbers));
  auto server = ScrapeServer::start(
      address, token, {[metrics] { return metrics->page(); }, [metrics] { metrics->look(); }});
  if (server) return server;
  return Status(server.status().code(), "--metrics " + address.text() + ": " +
                                            server.status().message() +
                                            "; choose another port, or 0 for a free one");
}

}  // namespace muster::cli
