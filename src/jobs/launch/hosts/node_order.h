// SPDX-License-Identifier: BSD-3-Clause
/// What the launcher that starts nodes by ssh tells each of them, through the node's standard input
/// (`muster node`). Nothing of it is on a command line: other users of the machine can read those,
/// and a shell takes them apart.
///
/// The order comes first. Each byte after it is the number of a signal for the node, and the end
/// of the stream means that the launcher or the connection is gone.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/security/secret.h"
#include "muster/status.h"

namespace muster::launch {

struct NodeOrder {
  std::optional<Secret> secret;        ///< of kind `given`; absent: as the variables say
  std::string folder;                  ///< where the node works
  std::vector<std::string> variables;  ///< NAME=value, beside what ssh sets there
  std::vector<std::string> words;      ///< of `muster run`
};

/// The bytes for the stream, to be wiped by the caller.
std::string encode(const NodeOrder& order);

/// Code::aborted if the stream ends before the whole order; Code::invalid_argument if something
/// else comes, or an order of another version. Reads nothing that follows the order.
Result<NodeOrder> read_node_order(int fd);

/// Makes this process the one that the order is for: its variables, its folder, its secret. Not
/// while other threads use the environment.
Status take_order(const NodeOrder& order);

/// Moves the stream away from standard input, where workers would find it, and starts a thread that
/// sends this process each signal that comes through it, and SIGTERM at its end. Call it once, from
/// the main thread, before anything is started there.
Status follow_launcher();

}  // namespace muster::launch
