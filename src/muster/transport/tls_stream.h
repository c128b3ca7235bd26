/// A byte stream over another one that carries what a `TlsSession` makes of it. Knows no sockets:
/// tests put it over memory.
#pragma once

#include <memory>

#include "muster/base/tls_session.h"
#include "muster/transport/byte_stream.h"

namespace muster::transport {

/// `session` is done; what it holds of either direction is the stream's beginning.
///
/// What was changed on the way is Code::refused, with a sentence that says so, and final.
std::unique_ptr<ByteStream> make_tls_stream(std::unique_ptr<ByteStream> wire, TlsSession session);

}  // namespace muster::transport
