/// Abstract Unix sockets: how processes of one host pass memory files to each other. No file
/// system, no left-overs; reachable by any user of the same network namespace, so the other side's
/// user is checked (SO_PEERCRED) and the secret proved.
#pragma once

#include <cstdint>
#include <string>

#include "muster/base/clock.h"
#include "muster/base/descriptor.h"
#include "muster/base/handshake.h"
#include "muster/base/secret.h"
#include "muster/base/status.h"

namespace muster::transport {

/// Non-blocking and close-on-exec.
Result<Descriptor> listen_locally(const std::string& name);
/// Code::refused where nobody listens under that name here (it may in another network namespace);
/// waits while its backlog is full.
Result<Descriptor> connect_locally(const std::string& name, TimePoint deadline);
/// Whether the other end is run by this process's user.
bool is_same_user(int socket);

/// What may be asked for: the note in the greeting.
enum class Want : std::uint64_t { region = 1, arena = 2 };

/// Answers a request on a socket whose peer has proved the secret; -1 says that there is no such
/// thing here.
void answer_with(int socket, int passed);
/// Connects, proves the secret, asks, receives. `hello.note` is set to `want`. Code::unsupported
/// where the other side has no such thing.
Result<Descriptor> fetch_locally(const std::string& name, Want want, Handshake::Hello hello,
                                 const Secret& secret, TimePoint deadline);

}  // namespace muster::transport
