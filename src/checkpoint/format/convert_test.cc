// SPDX-License-Identifier: BSD-3-Clause
// The unsharded export, and folders that others wrote.

#include "checkpoint/format/convert.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "checkpoint/format/files/digest.h"
#include "checkpoint/format/files/disk.h"
#include "checkpoint/format/files/safetensors.h"
#include "checkpoint/format/testing/states.h"

namespace muster::shards {
namespace {

using namespace shards::testing;

// spec: S3 the unsharded export: whole tensors by their names without the prefix, in files of the
// given size, and an index of them
TEST(Convert, ExportsWholeTensorsAndReadsThemBack) {
  const TemporaryFolder folder("muster-shards-");
  save_as(Way::fsdp, 3, {.path = folder.path() + "/c", .step = {}, .durable = false});
  const auto index = open_index(folder.path() + "/c");
  ASSERT_TRUE(index.ok());
  const std::string out = folder.path() + "/out";
  ASSERT_TRUE(export_whole(*index, out, {.prefix = "model.", .file_bytes = 250}).ok());
  const auto map =
      nlohmann::json::parse(*read_text(out + "/model.safetensors.index.json", 1'000'000));
  EXPECT_EQ(map["weight_map"].size(), 6u);
  for (const auto& [name, file] : map["weight_map"].items())
    EXPECT_TRUE(std::filesystem::exists(out + "/" + file.get<std::string>())) << name;
  EXPECT_TRUE(map["weight_map"].contains("conv.weight"));
  const auto exported = open_safetensors(out);
  ASSERT_TRUE(exported.ok()) << exported.status().message();
  EXPECT_GT(exported->files.size(), 1u);
  Reader one(*index), other(*exported);
  for (const auto& [name, tensor] : exported->tensors) {
    Shard shard{name, tensor.dtype, tensor.sizes, {box_of(tensor.sizes)}};
    std::vector<std::byte> a(static_cast<std::size_t>(shard.elements() * 8)), b = a;
    ASSERT_TRUE(other.read(shard, a).ok());
    shard.name = "model." + name;
    ASSERT_TRUE(one.read(shard, b).ok());
    EXPECT_EQ(a, b) << name;
  }
  EXPECT_FALSE(export_whole(*index, out).ok());
  EXPECT_FALSE(export_whole(*index, out + "2", {.prefix = "nobody."}).ok());
}

// spec: S4 atomic: an export that fails, or is killed, leaves nothing under its name
TEST(Convert, AnExportIsWholeOrNotThere) {
  const TemporaryFolder folder("muster-shards-");
  save_as(Way::fsdp, 2, {.path = folder.path() + "/c", .step = {}, .durable = false});
  auto index = open_index(folder.path() + "/c");
  ASSERT_TRUE(index.ok());
  const std::string out = folder.path() + "/out";
  std::filesystem::resize_file(folder.path() + "/c/shard-00002-model-00001-of-00001.safetensors",
                               100);
  EXPECT_FALSE(export_whole(*index, out).ok());
  const std::filesystem::directory_iterator left(folder.path());
  EXPECT_EQ(std::distance(begin(left), end(left)), 1);
}

// spec: S8 two exports to one folder: one is there, whole, and the other one is refused by name
TEST(Convert, TwoExportsToOneFolder) {
  const TemporaryFolder folder("muster-shards-");
  save_as(Way::fsdp, 2, {.path = folder.path() + "/c", .step = {}, .durable = false});
  const auto index = open_index(folder.path() + "/c");
  ASSERT_TRUE(index.ok());
  const std::string out = folder.path() + "/out";
  std::array<Status, 2> done;
  std::thread other([&] { done[0] = export_whole(*index, out); });
  done[1] = export_whole(*index, out);
  other.join();
  EXPECT_NE(done[0].ok(), done[1].ok());
  EXPECT_NE((done[0].message() + done[1].message()).find(out), std::string::npos);
  EXPECT_TRUE(open_safetensors(out).ok());
  const std::filesystem::directory_iterator left(folder.path());
  EXPECT_EQ(std::distance(begin(left), end(left)), 2);
}

// spec: S3 a folder of torch's writer has no index of muster's: its headers say all, and it becomes
// a checkpoint
TEST(Convert, ReadsAndImportsShardedSafetensors) {
  const TemporaryFolder folder("muster-shards-");
  const std::string path = folder.path() + "/c", made = folder.path() + "/made";
  save_as(Way::mesh, 4, {.path = path, .step = {}, .durable = false});
  std::filesystem::remove(path + "/muster.json");
  EXPECT_FALSE(open_index(path).ok());
  const auto index = open_safetensors(path);
  ASSERT_TRUE(index.ok()) << index.status().message();
  EXPECT_EQ(wrong_when_loaded(*index, Way::fsdp, 3), 0);
  ASSERT_TRUE(import_safetensors(*index, made).ok());
  const auto imported = open_index(made);
  ASSERT_TRUE(imported.ok());
  EXPECT_EQ(wrong_when_loaded(*imported, Way::zero, 2), 0);
  std::filesystem::remove(path + "/shard-00003-model-00001-of-00001.safetensors");
  EXPECT_FALSE(open_safetensors(path).ok());
}

// spec: S7 convert of a file that claims more than it holds (with holes, or sizes beyond all
// memory) is done or refused by name: no memory is taken for what it claims
TEST(Convert, FilesWithHoles) {
  const TemporaryFolder folder("muster-shards-");
  for (const std::int64_t bytes : {std::int64_t{200} << 20, std::int64_t{1} << 42}) {
    const std::string from = folder.path() + "/" + std::to_string(bytes);
    std::filesystem::create_directory(from);
    std::vector<HeaderEntry> entries{{"hole", "U8", box_of({bytes}), 0, 0}};
    const std::string header = write_header(entries, false), file = from + "/a.safetensors";
    ASSERT_TRUE(write_text(file, header, false).ok());
    std::filesystem::resize_file(file, header.size() + static_cast<std::uint64_t>(bytes));
    const auto index = open_safetensors(from);
    ASSERT_TRUE(index.ok()) << index.status().message();
    const Status done = import_safetensors(*index, from + "-made");
    if (bytes < std::int64_t{1} << 40) {
      ASSERT_TRUE(done.ok()) << done.message();
      EXPECT_TRUE(export_whole(*open_index(from + "-made"), from + "-out").ok());
      std::filesystem::remove_all(from + "-made");
      std::filesystem::remove_all(from + "-out");
    } else {
      EXPECT_NE(done.message().find("has room for"), std::string::npos) << done.message();
      EXPECT_NE(export_whole(*index, from + "-out", {.prefix = ""}).message().find("has room for"),
                std::string::npos);
      EXPECT_FALSE(exists(from + "-made"));
    }
  }
}

// spec: S4 an index that others wrote gives away no file that is no checkpoint's, also where the
// folder has a link to one
TEST(Convert, ReadsNoFileThatIsNoCheckpoints) {
  const TemporaryFolder folder("muster-shards-");
  const std::string path = folder.path() + "/c", key = folder.path() + "/key";
  save_as(Way::plain, 1, {.path = path, .step = {}, .durable = false});
  ASSERT_TRUE(write_text(key, "nobody else's", false).ok());
  std::filesystem::create_symlink(key, path + "/data");
  auto index = open_index(path);
  ASSERT_TRUE(index.ok()) << index.status().message();
  for (const std::uint64_t header_bytes : {0, 4, 8}) {
    const std::string header = std::string("nobody else's").substr(0, header_bytes);
    const auto rest = static_cast<std::int64_t>(13 - header_bytes);
    index->files = {{"data", {13, header_bytes, digest_of(header)}}};
    index->tensors = {{"data", {"U8", {rest}, {{"data", box_of({rest}), header_bytes, "", ""}}}}};
    ASSERT_TRUE(write_text(path + "/muster.json", text_of_index(*index), false).ok());
    const auto read = open_index(path);
    ASSERT_TRUE(read.ok()) << read.status().message();
    EXPECT_FALSE(export_whole(*read, folder.path() + "/out").ok()) << header_bytes;
    EXPECT_FALSE(verify(*read).empty());
  }
}

}  // namespace
}  // namespace muster::shards
