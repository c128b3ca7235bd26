/// Abstract Unix sockets: how processes of one host meet. No file system, no left-overs; reachable
/// by any user of the same network namespace, so the other side's user is checked (SO_PEERCRED) and
/// the secret proved.
#pragma once

#include <string>

#include "core/base/descriptor.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster {

/// Non-blocking and close-on-exec.
Result<Descriptor> listen_locally(const std::string& name);
/// Non-blocking. Code::refused if no socket listens under that name in this network namespace;
/// waits while its backlog is full.
Result<Descriptor> connect_locally(const std::string& name, TimePoint deadline);
/// Whether the other end is run by this process's user.
bool is_same_user(int socket);

}  // namespace muster
