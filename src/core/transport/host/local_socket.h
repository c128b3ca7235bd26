/// How processes of one host pass memory files to each other: over abstract Unix sockets, whose
/// other side's user is checked and proves the secret.
#pragma once

#include <cstdint>
#include <string>

#include "core/base/descriptor.h"
#include "core/net/unix_socket.h"
#include "core/security/handshake.h"
#include "core/security/secret.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::transport {

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
