/// `MUSTER_TLS`: what of a link over TCP is encrypted. The same on every rank, or they refuse each
/// other.
///
///   full (or not set)  everything
///   control            payloads of tensors are authenticated, and can be read on the way
///   control-plain      payloads of tensors can be read and changed on the way
///
/// Whatever it says, both sides prove the job's secret, and everything but payloads is encrypted:
/// stores, launchers, observers and remote calls are in full.
#pragma once

#include <string>

#include "core/security/handshake.h"
#include "muster/status.h"

namespace muster {

/// Code::invalid_argument, naming the variable and what it may be, where it is something else.
Result<Handshake::Payloads> payloads_from_environment();

/// "encrypted (TLS 1.3)", or what is not.
std::string describe(Handshake::Payloads payloads);

}  // namespace muster
