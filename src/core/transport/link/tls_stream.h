/// A byte stream encrypted with a `TlsSession` over another stream. Knows no sockets: tests run it
/// over memory.
#pragma once

#include <memory>

#include "core/security/tls_session.h"
#include "core/transport/byte_stream.h"

namespace muster::transport {

/// `session` has finished its handshake; bytes that it holds in either direction begin the stream.
///
/// Tampered data is Code::refused, with a sentence that says so, and final.
std::unique_ptr<ByteStream> make_tls_stream(std::unique_ptr<ByteStream> wire, TlsSession session);

}  // namespace muster::transport
