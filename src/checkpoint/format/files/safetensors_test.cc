// SPDX-License-Identifier: BSD-3-Clause
// Headers of safetensors files: written, read back, refused.

#include "checkpoint/format/files/safetensors.h"
#include "testing/budget.h"

#include <gtest/gtest.h>

namespace muster::shards {
namespace {

std::vector<HeaderEntry> entries() {
  return {{"w", "F32", {{2, 0}, {2, 4}}, 0, 0}, {"s", "I64", {{}, {}}, 0, 0}};
}

std::string refusal(const std::string& json, std::uint64_t bytes) {
  const auto read = read_header(json, bytes);
  return read.ok() ? "" : read.status().message();
}

// spec: S3 the header has torch's words, and what it says is read back
TEST(Safetensors, HeadersAreReadBack) {
  auto written = entries();
  const std::string bytes = write_header(written);
  EXPECT_EQ(bytes.size() % 8, 0u);
  EXPECT_NE(bytes.find(R"("DCP_VERSION":"1.0")"), std::string::npos);
  EXPECT_NE(bytes.find(R"({\"s\":{\"saved_offsets\":[]},\"w\":{\"saved_offsets\":[2,0]}})"),
            std::string::npos);
  const auto read = read_header(std::string_view(bytes).substr(8), 40);
  ASSERT_TRUE(read.ok()) << read.status().message();
  ASSERT_EQ(read->size(), 2u);
  EXPECT_EQ((*read)[0].name, "w");
  EXPECT_EQ((*read)[0].box, written[0].box);
  EXPECT_EQ((*read)[1].begin, 32u);
  EXPECT_EQ((*read)[1].end, 40u);
}

// spec: S3 a header of many tensors takes time in proportion to them: 60,000, and a
// part of them in the sanitized builds, take a moment
TEST(Safetensors, ManyTensorsAreWrittenAndRead) {
  const int count = muster::testing::test_rounds(60'000, 60'000);
  std::vector<HeaderEntry> many;
  many.reserve(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i)
    many.push_back({"layers." + std::to_string(i) + ".weight", "F32", {{0}, {1}}, 0, 0});
  const std::string bytes = write_header(many);
  EXPECT_EQ(many.back().end, many.size() * 4);
  const std::string last = R"("layers.)" + std::to_string(count - 1) +
                           R"(.weight":{"data_offsets":[)" + std::to_string(4 * (count - 1)) + "," +
                           std::to_string(4 * count) + "]";
  EXPECT_NE(bytes.find(last), std::string::npos);
  const auto read = read_header(std::string_view(bytes).substr(8), many.back().end);
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(read->size(), many.size());
}

// spec: S4 altered: values nested so deep that they would exhaust the stack are refused
TEST(Safetensors, DeepNestingIsRefused) {
  const std::string deep = std::string(1'000'000, '[') + std::string(1'000'000, ']');
  EXPECT_NE(refusal("{\"w\":" + deep + "}", 0).find("nests more than"), std::string::npos);
  std::string sharding = R"({"__metadata__":{"DCP_SHARDING_INFO":"{\"w\":)";
  sharding.append(deep).append(R"(}"}})");
  EXPECT_NE(refusal(sharding, 0).find("nests more than"), std::string::npos);
  EXPECT_NE(refusal("{\"w\":", 0).find("no JSON from byte"), std::string::npos);
}

// spec: S4 offsets outside of the file, out of order or overlapping are refused by name
TEST(Safetensors, WhatCannotBeIsRefusedByName) {
  const auto one = [](const std::string& rest) { return R"({"w":{)" + rest + "}}"; };
  EXPECT_EQ(refusal(one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])"), 8), "");
  for (const std::string& bad : {
           one(R"("dtype":"F31","shape":[2],"data_offsets":[0,8])"),
           one(R"("dtype":"F32","shape":[3],"data_offsets":[0,8])"),
           one(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"),
           one(R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])"),
           one(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"),
           one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8,9])"),
           one(R"("dtype":"F32","shape":[2])"),
           one(R"("dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8])"),
           one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8],"more":1)"),
           one(R"("dtype":"F32","shape":[3],"data_offsets":[0,12])"),
           one(R"("dtype":"F32","shape":[1],"data_offsets":[4,8])"),
           std::string(R"({"w":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},)"
                       R"("w":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})"),
           std::string(R"({"v":{"dtype":"U8","shape":[5],"data_offsets":[0,5]},)"
                       R"("w":{"dtype":"U8","shape":[5],"data_offsets":[3,8]}})"),
           std::string(R"({"__metadata__":{"DCP_SHARDING_INFO":"{}"},)"
                       R"("w":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})"),
       })
    EXPECT_NE(refusal(bad, 8).find("'w'"), std::string::npos) << bad << ": " << refusal(bad, 8);
  EXPECT_NE(refusal("[]", 0), "");
  EXPECT_NE(refusal(" {}", 0), "");
  EXPECT_NE(refusal("", 0), "");
  EXPECT_NE(refusal("{}", 1), "");
  EXPECT_NE(refusal(R"({"__metadata__":{"a":1}})", 0), "");
}

}  // namespace
}  // namespace muster::shards
