// SPDX-License-Identifier: BSD-3-Clause
// Fuzzers of what a checkpoint's files hold: headers and indexes.

#include "testing/fuzz.h"

#include <gtest/gtest.h>

#include "checkpoint/format/files/digest.h"
#include "checkpoint/format/files/safetensors.h"
#include "checkpoint/format/testing/states.h"

namespace muster::shards {
namespace {

using namespace shards::testing;
using muster::testing::Fuzz;
using muster::testing::FuzzRun;

// spec: S4 altered: a header of any bytes is refused, or every tensor of it lies in the file
TEST(ShardsFuzz, DamagedHeadersAreRefusedOrFit) {
  Fuzz fuzz(71);
  std::vector<HeaderEntry> entries;
  for (const auto& [name, dtype, sizes] : tensors())
    entries.push_back({name, dtype, box_of(sizes), 0, 0});
  const std::string good = write_header(entries).substr(kLengthBytes);
  const std::uint64_t bytes = entries.back().end;
  ASSERT_TRUE(read_header(good, bytes).ok());
  for (FuzzRun run(3000); run.goes_on();) {
    const std::string bad = fuzz.one_in(5) ? fuzz.noise(200) : fuzz.damaged(good);
    const auto read = read_header(bad, bytes);
    if (!read) {
      EXPECT_FALSE(read.status().message().empty());
      continue;
    }
    std::uint64_t at = 0;
    for (const HeaderEntry& entry : *read) {
      ASSERT_EQ(entry.begin, at);
      at = entry.end;
    }
    ASSERT_EQ(at, bytes);
  }
}

/// `body` of an index, with the digest that belongs to it.
std::string with_digest(const std::string& body) {
  return body + ",\n \"digest\": \"" + digest_of(body) + "\"\n}\n";
}

// spec: S4 altered: a number of an index that is not whole, or that does not fit, is refused and
// neither cut off nor taken for another
TEST(ShardsFuzz, NumbersThatDoNotFitAreRefused) {
  const TemporaryFolder folder("muster-shards-");
  save_as(Way::fsdp, 3, {.path = folder.path() + "/c", .step = 5, .durable = false});
  const std::string good = *read_text(folder.path() + "/c/muster.json", 1'000'000);
  const std::string body = good.substr(0, good.rfind(",\n \"digest\""));
  ASSERT_TRUE(read_index(with_digest(body)).ok());
  for (const std::string field :
       {"bytes", "header_bytes", "at", "world_size", "offsets", "shape"}) {
    const std::size_t digits = body.find_first_of("0123456789", body.find('"' + field + "\": "));
    const std::size_t end = std::min(body.size(), body.find_first_not_of("0123456789", digits));
    for (const std::string bad : {"5.9e20", "1.5", "-9.3e18", "18446744073709551616"}) {
      const auto index = read_index(with_digest(body.substr(0, digits) + bad + body.substr(end)));
      ASSERT_FALSE(index.ok()) << field << " " << bad;
      EXPECT_NE(index.status().message().find("whole number"), std::string::npos)
          << index.status().message();
    }
  }
}

// spec: S4 altered: an index whose digest someone made anew is refused, or every read of it stays
// within its files
TEST(ShardsFuzz, DamagedIndexesAreRefusedOrFit) {
  Fuzz fuzz(72);
  const TemporaryFolder folder("muster-shards-");
  save_as(Way::fsdp, 3, {.path = folder.path() + "/c", .step = 5, .durable = false});
  const std::string good = *read_text(folder.path() + "/c/muster.json", 1'000'000);
  const std::size_t ending = good.rfind(",\n \"digest\"");
  for (FuzzRun run(1500); run.goes_on();) {
    const std::string body = fuzz.damaged(good.substr(0, ending));
    auto index = read_index(with_digest(body));
    if (!index) {
      EXPECT_FALSE(index.status().message().empty());
      continue;
    }
    index->folder = folder.path() + "/c";
    Reader reader(*index);
    for (const auto& [name, tensor] : index->tensors) {
      const Shard whole{name, tensor.dtype, tensor.sizes, {box_of(tensor.sizes)}};
      const std::int64_t size = whole.elements() * element_bytes(tensor.dtype);
      if (size > 1'000'000) continue;
      std::vector<std::byte> memory(static_cast<std::size_t>(size));
      const Status read = reader.read(whole, memory);
      EXPECT_TRUE(read.ok() || !read.message().empty());
    }
    const auto wrong = verify(*index);
    EXPECT_TRUE(wrong.empty() || !wrong.front().empty());
  }
}

TEST(ShardsFuzz, DescriptionsOfRanksAreRefusedOrPlanned) {
  Fuzz fuzz(73);
  const RankState a(Way::fsdp, 0, 2), b(Way::fsdp, 1, 2);
  const std::string good = text_of_shards(a.shards);
  for (FuzzRun run(1500); run.goes_on();) {
    const auto read = read_shards(fuzz.damaged(good));
    if (!read) continue;
    const auto plan = plan_files({*read, b.shards});
    EXPECT_TRUE(plan.ok() || !plan.status().message().empty());
  }
}

}  // namespace
}  // namespace muster::shards
