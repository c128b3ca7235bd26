// The unsharded export, and folders that others wrote.

#include "muster/shards/convert.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "muster/shards/files/digest.h"
#include "muster/shards/files/disk.h"
#include "muster/shards/testing/states.h"

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
  EXPECT_FALSE(std::filesystem::exists(out + ".writing"));
  EXPECT_FALSE(export_whole(*index, out + "2", {.prefix = "nobody."}).ok());
}

// spec: S4 atomic: an export that fails, or is killed, leaves nothing under its name
TEST(Convert, AnExportIsWholeOrNotThere) {
  const TemporaryFolder folder("muster-shards-");
  save_as(Way::fsdp, 2, {.path = folder.path() + "/c", .step = {}, .durable = false});
  auto index = open_index(folder.path() + "/c");
  ASSERT_TRUE(index.ok());
  const std::string out = folder.path() + "/out";
  std::filesystem::create_directory(out + ".writing");  // as one that was killed leaves it
  EXPECT_NE(export_whole(*index, out).message().find("out.writing"), std::string::npos);
  std::filesystem::remove(out + ".writing");
  std::filesystem::resize_file(folder.path() + "/c/shard-00002-model-00001-of-00001.safetensors",
                               100);
  EXPECT_FALSE(export_whole(*index, out).ok());
  EXPECT_FALSE(std::filesystem::exists(out) || std::filesystem::exists(out + ".writing"));
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
    index->tensors = {{"data", {"U8", {rest}, {{"data", box_of({rest}), header_bytes, ""}}}}};
    ASSERT_TRUE(write_text(path + "/muster.json", text_of_index(*index), false).ok());
    const auto read = open_index(path);
    ASSERT_TRUE(read.ok()) << read.status().message();
    EXPECT_FALSE(export_whole(*read, folder.path() + "/out").ok()) << header_bytes;
    EXPECT_FALSE(verify(*read).empty());
  }
}

}  // namespace
}  // namespace muster::shards
