#include "core/security/tls_setting.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace muster {
namespace {

using Payloads = Handshake::Payloads;

// spec: W1.encrypted everything is encrypted unless it is said; there is no word for no encryption
TEST(TlsSetting, OnlyPayloadsMayBeLeftPlain) {
  ::unsetenv("MUSTER_TLS");
  EXPECT_EQ(payloads_from_environment().value(), Payloads::encrypted);
  for (const auto& [text, payloads] :
       {std::pair("full", Payloads::encrypted), std::pair("control", Payloads::authenticated),
        std::pair("control-plain", Payloads::plain)}) {
    ::setenv("MUSTER_TLS", text, 1);
    EXPECT_EQ(payloads_from_environment().value(), payloads) << text;
    EXPECT_EQ(describe(payloads).find(text) != std::string::npos, payloads != Payloads::encrypted);
  }
  for (const char* text : {"plain", "off", "0", "none", "CONTROL", "control "}) {
    ::setenv("MUSTER_TLS", text, 1);
    const Status refused = payloads_from_environment().status();
    EXPECT_EQ(refused.code(), Code::invalid_argument) << text;
    EXPECT_NE(refused.message().find("MUSTER_TLS is \"" + std::string(text)), std::string::npos);
  }
  ::unsetenv("MUSTER_TLS");
}

}  // namespace
}  // namespace muster
