#include "muster/transport/contact.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

namespace muster::transport {
namespace {

TEST(Contact, IsReadBackAndNeverTrusted) {
  Contact contact;
  ASSERT_TRUE(describe_this_process(contact).ok());
  contact.local_name = "muster-1-2";
  contact.host_label = "a";
  contact.nonce = 77;
  contact.addresses = {*SocketAddress::numeric("10.0.0.1", 5), *SocketAddress::numeric("::1", 6)};
  const std::string text = encode(contact);
  const auto back = decode_contact(text, 3);
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(encode(*back), text);
  EXPECT_TRUE(same_process(*back, contact));
  EXPECT_TRUE(could_share_memory(*back, contact));
  for (std::size_t cut = 0; cut < text.size(); ++cut) {
    const auto broken = decode_contact(std::string_view(text).substr(0, cut), 3);
    ASSERT_FALSE(broken.ok()) << cut;
    EXPECT_EQ(broken.status().ranks(), std::vector<int>({3}));
  }
  EXPECT_FALSE(decode_contact(text + "x", 3).ok());
  std::mt19937_64 random(9);
  for (int round = 0; round < 5000; ++round) {
    std::string noise = text;
    for (int i = 0; i < 4; ++i) noise[random() % noise.size()] = static_cast<char>(random());
    static_cast<void>(decode_contact(noise, 3).ok());  // must only not crash
  }
}

}  // namespace
}  // namespace muster::transport
