// SPDX-License-Identifier: BSD-3-Clause
/// The machine's network interfaces in a few lines: hosts of containers have dozens.
#pragma once

#include <string>
#include <vector>

namespace muster::cli {

struct InterfaceAddress {
  std::string interface, address;
  bool link_local = false;  ///< as every IPv6 interface has one; it reaches no other network
};

/// A line for each of the first interfaces, with its addresses; one for all others, and one for
/// those that have link-local addresses alone. `all`: each interface's addresses in a row.
std::vector<std::string> describe_interfaces(const std::vector<InterfaceAddress>& all);

}  // namespace muster::cli
