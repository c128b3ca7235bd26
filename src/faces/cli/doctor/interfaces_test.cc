// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/doctor/interfaces.h"

#include <gtest/gtest.h>

namespace muster::cli {
namespace {

using Lines = std::vector<std::string>;

// spec: V10.doctor each interface is a line with its addresses, but for many of one kind
TEST(Interfaces, AreAFewLines) {
  std::vector<InterfaceAddress> all = {
      {"lo", "127.0.0.1"},       {"eth0", "10.0.0.2"},       {"lo", "::1"},
      {"eth0", "fe80::1", true}, {"veth1", "fe80::2", true}, {"veth2", "fe80::3", true}};
  EXPECT_EQ(describe_interfaces(all), (Lines{"lo 127.0.0.1, ::1", "eth0 10.0.0.2",
                                             "2 with link-local addresses alone: veth1, veth2"}));
  for (int number = 0; number < 25; ++number)
    all.push_back({"br" + std::to_string(number), "172.17.0." + std::to_string(number)});
  const Lines lines = describe_interfaces(all);
  ASSERT_EQ(lines.size(), 8u);
  EXPECT_EQ(lines[5], "br3 172.17.0.3");
  EXPECT_EQ(lines[6], "21 more: br4, br5, br6, br7, br8, br9, br10, br11, ...");
  EXPECT_TRUE(describe_interfaces({}).empty());
}

}  // namespace
}  // namespace muster::cli
