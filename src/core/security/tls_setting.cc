#include "core/security/tls_setting.h"

#include "core/base/environment.h"

namespace muster {

Result<Handshake::Payloads> payloads_from_environment() {
  const std::string text = env_text("MUSTER_TLS").value_or("full");
  if (text == "full") return Handshake::Payloads::encrypted;
  if (text == "control") return Handshake::Payloads::authenticated;
  if (text == "control-plain") return Handshake::Payloads::plain;
  return Status(Code::invalid_argument,
                "MUSTER_TLS is \"" + text +
                    "\"; it may be full (the default), or on networks that are trusted control "
                    "(payloads are authenticated, not encrypted) or control-plain (payloads are "
                    "neither); connections between processes are never without TLS");
}

std::string describe(Handshake::Payloads payloads) {
  switch (payloads) {
    case Handshake::Payloads::encrypted: return "encrypted (TLS 1.3)";
    case Handshake::Payloads::authenticated:
      return "encrypted (TLS 1.3) but for payloads, which are authenticated (MUSTER_TLS=control)";
    case Handshake::Payloads::plain:
      return "encrypted (TLS 1.3) but for payloads, which anybody on the way can read and change "
             "(MUSTER_TLS=control-plain)";
  }
  return "protected in an unknown way";
}

}  // namespace muster
