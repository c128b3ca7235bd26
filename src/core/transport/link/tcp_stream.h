/// A plain byte stream over a connected socket. Between processes it carries a TLS stream
/// (`tls_stream.h`).
#pragma once

#include <memory>

#include "core/base/process/fork_guard.h"
#include "core/transport/byte_stream.h"

namespace muster::transport {

/// `socket` is connected; made non-blocking and without Nagle's delay here.
std::unique_ptr<ByteStream> make_tcp_stream(GuardedDescriptor socket);

}  // namespace muster::transport
