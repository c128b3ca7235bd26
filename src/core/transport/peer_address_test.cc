// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/transport/peer_address.h"
#include "core/wait/topology.h"
#include "testing/fuzz.h"

namespace muster::transport {
namespace {

TEST(PeerAddress, IsReadBackAndNeverTrusted) {
  PeerAddress contact;
  ASSERT_TRUE(describe_this_process(contact).ok());
  contact.local_name = "muster-1-2";
  contact.host_label = "a";
  contact.nonce = 77;
  contact.quota = 2.5;
  contact.addresses = {*SocketAddress::numeric("10.0.0.1", 5), *SocketAddress::numeric("::1", 6)};
  const std::string text = encode(contact);
  const auto back = decode_peer_address(text, 3);
  ASSERT_TRUE(back.ok());
  EXPECT_EQ(encode(*back), text);
  EXPECT_EQ(back->quota, 2.5);
  EXPECT_TRUE(same_process(*back, contact));
  EXPECT_TRUE(could_share_memory(*back, contact));
  for (std::size_t cut = 0; cut < text.size(); ++cut) {
    const auto broken = decode_peer_address(std::string_view(text).substr(0, cut), 3);
    ASSERT_FALSE(broken.ok()) << cut;
    EXPECT_EQ(broken.status().ranks(), std::vector<int>({3}));
  }
  EXPECT_FALSE(decode_peer_address(text + "x", 3).ok());
}

TEST(PeerAddress, RanksBoundToCoresOfTheirOwnHaveThemTogether) {
  PeerAddress here;
  ASSERT_TRUE(describe_this_process(here).ok());
  EXPECT_EQ(cores_together(std::vector<const PeerAddress*>{&here, &here}),
            cores_within(own_cores().size(), cpu_quota()));
  std::vector<PeerAddress> bound(4);
  for (std::size_t rank = 0; rank < bound.size(); ++rank)
    bound[rank].cores = std::string(rank + 1, '\0') + '\x11';
  std::vector<const PeerAddress*> ranks{&bound[0], &bound[1], &bound[2]};
  EXPECT_EQ(cores_together(ranks), 6);
  ranks.push_back(&bound[2]);
  EXPECT_EQ(cores_together(ranks), 6) << "two ranks on the same cores";
  bound[0].quota = 5;
  bound[2].quota = 3.5;
  EXPECT_EQ(cores_together(ranks), 3) << "the same to all, whatever quota each one has";
  EXPECT_EQ(cores_together({}), 1);
}

// spec: A1 what a rank publishes of itself is read or refused by its name, whatever it is
TEST(ContactFuzz, DamagedContactsAndVerdictsAreRefusedByName) {
  PeerAddress contact;
  ASSERT_TRUE(describe_this_process(contact).ok());
  contact.local_name = "muster-1-2";
  contact.addresses = {*SocketAddress::numeric("10.0.0.1", 5), *SocketAddress::numeric("::1", 6)};
  const std::string text = encode(contact);
  const std::string verdict = encode(MeetingVerdict{true, 3, 77, "a reason"});
  ASSERT_TRUE(decode_verdict(verdict, 1).ok());
  for (std::size_t cut = 0; cut < verdict.size(); ++cut)
    EXPECT_FALSE(decode_verdict(verdict.substr(0, cut), 1).ok()) << cut;
  testing::Fuzz fuzz(9);
  for (testing::FuzzRun run(4000); run.goes_on();) {
    const auto back = decode_peer_address(fuzz.one_in(8) ? fuzz.noise(400) : fuzz.damaged(text), 3);
    if (back.ok()) {
      const auto again = decode_peer_address(encode(*back), 3);
      ASSERT_TRUE(again.ok());
      EXPECT_EQ(encode(*again), encode(*back));
    } else {
      EXPECT_EQ(back.status().ranks(), std::vector<int>({3}));
    }
    const auto met = decode_verdict(fuzz.one_in(8) ? fuzz.noise(60) : fuzz.damaged(verdict), 4);
    EXPECT_TRUE(met.ok() || met.status().ranks() == std::vector<int>({4}));
  }
}

}  // namespace
}  // namespace muster::transport
