// SPDX-License-Identifier: BSD-3-Clause
/// Several hosts on one machine: network namespaces joined by a bridge, each with its own loopback
/// and one address of either family. Needs root, or a system that lets users make namespaces (a
/// process that is not root then becomes root of one of its own; it must not have started threads
/// yet).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "muster/status.h"

namespace muster::testing {

class NetworkNamespaces {
 public:
  static Result<std::unique_ptr<NetworkNamespaces>> create(int hosts);
  ~NetworkNamespaces();
  NetworkNamespaces(const NetworkNamespaces&) = delete;
  NetworkNamespaces& operator=(const NetworkNamespaces&) = delete;

  /// Moves the calling thread into a host: in a forked child, before it has threads.
  Status enter(int host) const;
  std::string address(int host) const;     ///< IPv4
  std::string address_v6(int host) const;  ///< IPv6
  static const char* interface() { return "wire0"; }
  /// Pulls a host's plug, or puts it in again.
  Status set_plugged(int host, bool plugged) const;
  /// Sends at most this much from a host, as tc writes rates: "100mbit".
  Status limit(int host, const std::string& rate) const;

 private:
  explicit NetworkNamespaces(std::string prefix, int hosts)
      : prefix_(std::move(prefix)), hosts_(hosts) {}
  std::string name(int host) const { return prefix_ + std::to_string(host); }
  std::string hub() const { return prefix_ + "hub"; }

  std::string prefix_;
  int hosts_;
};

}  // namespace muster::testing
