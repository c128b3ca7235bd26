#include "core/transport/connect/listen_addresses.h"

#include <gtest/gtest.h>

#include "core/transport/channel/transfer_expectations.h"

namespace muster::transport {
namespace {

// spec: W7 with a store on loopback, without one, and without a secret, links listen on loopback
TEST(ListenAddresses, AreOfLoopbackUnlessOthersMayCome) {
  ConnectorOptions alone, on_loopback, without_secret;
  on_loopback.towards = "127.0.0.1";
  without_secret.towards = "192.0.2.1";
  without_secret.any_host = true;
  for (const auto& [options, others_may_come] :
       {std::pair(alone, true), std::pair(on_loopback, true), std::pair(without_secret, false)}) {
    const auto found = addresses_to_listen_on(options, others_may_come, soon());
    ASSERT_TRUE(found.ok()) << found.status().message();
    ASSERT_EQ(found->size(), 1u);
    EXPECT_TRUE(found->front().is_loopback()) << found->front().text();
  }
}

// spec: W7 an interface that is named is the only one
TEST(ListenAddresses, AreOfTheInterfacesNamed) {
  ConnectorOptions options;
  options.interfaces = {"lo"};
  options.towards = "192.0.2.1";
  const auto found = addresses_to_listen_on(options, true, soon());
  ASSERT_TRUE(found.ok()) << found.status().message();
  ASSERT_EQ(found->size(), 1u);
  EXPECT_TRUE(found->front().is_loopback());
  options.interfaces = {"no-such-interface"};
  EXPECT_FALSE(addresses_to_listen_on(options, true, soon()).ok());
}

}  // namespace
}  // namespace muster::transport
