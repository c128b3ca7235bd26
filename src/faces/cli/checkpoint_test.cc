// SPDX-License-Identifier: BSD-3-Clause
// `muster checkpoint` as its user runs it.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "checkpoint/format/save.h"
#include "core/base/process/temporary_folder.h"
#include "testing/shell.h"

namespace muster::cli {
namespace {

using muster::testing::Ended;

Ended run(const std::string& arguments) {
  return muster::testing::run_shell(std::string(MUSTER_COMMAND) + " checkpoint " + arguments);
}

class CheckpointCommand : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::vector<float> weights(12, 1.5F);
    const shards::Shard shard{"model.w", "F32", {3, 4}, {shards::box_of({3, 4})}};
    const Status saved =
        shards::save({shard}, {reinterpret_cast<const std::byte*>(weights.data())},
                     R"({"epoch": 3})", {.path = path, .step = 70, .durable = false}, {});
    ASSERT_TRUE(saved.ok()) << saved.message();
  }
  TemporaryFolder folder{"muster-cli-"};
  std::string path = folder.path() + "/step-70";
};

// spec: S7.tell ls, show and verify say what is there
TEST_F(CheckpointCommand, TellsWhatIsThere) {
  std::filesystem::create_directory(folder.path() + "/step-80.saving");
  const Ended ls = run("ls " + folder.path());
  EXPECT_EQ(ls.code, 0);
  EXPECT_NE(ls.output.find("step-70"), std::string::npos) << ls.output;
  EXPECT_NE(ls.output.find("never finished"), std::string::npos) << ls.output;
  const Ended show = run("show " + path);
  EXPECT_EQ(show.code, 0);
  EXPECT_NE(show.output.find("step 70"), std::string::npos) << show.output;
  EXPECT_NE(show.output.find("model.w"), std::string::npos) << show.output;
  EXPECT_NE(show.output.find("epoch = 3"), std::string::npos) << show.output;
  EXPECT_EQ(run("verify " + path).code, 0);
  EXPECT_EQ(run("verify " + folder.path()).code, 1);
  EXPECT_EQ(run("ls " + folder.path() + "/nowhere").code, 1);
  EXPECT_EQ(run("frobnicate").code, 2);
  EXPECT_EQ(run("").code, 2);
}

// spec: V4.json checkpoint ls, show and verify --json: an object a line, of the same
TEST_F(CheckpointCommand, TellsItAsJson) {
  using nlohmann::json;
  std::filesystem::create_directory(folder.path() + "/step-80.saving");
  std::istringstream rows(run("ls --json " + folder.path()).output);
  std::string line;
  ASSERT_TRUE(std::getline(rows, line));
  const json whole = json::parse(line, nullptr, false);
  EXPECT_EQ(whole.value("step", 0), 70) << line;
  EXPECT_EQ(whole.value("path", ""), path);
  EXPECT_GE(whole.value("bytes", 0), 48) << "twelve float32 and what the file says of them";
  EXPECT_EQ(whole.value("finished", false), true);
  ASSERT_TRUE(std::getline(rows, line));
  EXPECT_EQ(json::parse(line, nullptr, false).value("finished", true), false) << line;
  EXPECT_FALSE(std::getline(rows, line)) << line;
  const json shown = json::parse(run("show --json " + path).output, nullptr, false);
  EXPECT_EQ(shown["values"], json({{"epoch", 3}})) << shown;
  EXPECT_EQ(shown["tensors"]["model.w"]["shape"], json({3, 4})) << shown;
  const json verified = json::parse(run("verify --json " + path).output, nullptr, false);
  EXPECT_EQ(verified.value("whole", false), true) << verified;
}

// spec: V4.json a damaged checkpoint is damaged in JSON too, by the exit code as well
TEST_F(CheckpointCommand, TellsDamageAsJson) {
  std::filesystem::remove(path + "/shard-00001-model-00001-of-00001.safetensors");
  const Ended ended = run("verify --json " + path);
  EXPECT_EQ(ended.code, 1);
  const auto verified = nlohmann::json::parse(ended.output, nullptr, false);
  EXPECT_EQ(verified.value("whole", true), false) << ended.output;
  EXPECT_FALSE(verified["faults"].empty()) << ended.output;
  EXPECT_EQ(run("ls --json " + folder.path() + "/nowhere").code, 1);
}

// spec: S7 names that others chose give the terminal no commands and make no lines of their own
TEST_F(CheckpointCommand, ShowsNamesAsText) {
  const float weight = 1;
  const shards::Shard evil{"a\x1b]0;b\x07\nc\u009bd", "F32", {1}, {shards::box_of({1})}};
  const std::string there = folder.path() + "/evil";
  ASSERT_TRUE(shards::save({evil}, {reinterpret_cast<const std::byte*>(&weight)},
                           "{\"x\\u001b\\ny\": \"\u007f\u0085\"}",
                           {.path = there, .step = {}, .durable = false}, {})
                  .ok());
  const Ended show = run("show " + there);
  EXPECT_EQ(show.code, 0) << show.output;
  const Ended as_json = run("show --json " + there);
  EXPECT_TRUE(nlohmann::json::parse(as_json.output, nullptr, false).is_object()) << as_json.output;
  EXPECT_NE(show.output.find("a ]0;b  c d"), std::string::npos) << show.output;
  EXPECT_NE(show.output.find("x  y = "), std::string::npos) << show.output;
  std::filesystem::remove(there + "/shard-00001-model-00001-of-00001.safetensors");
  const Ended verify = run("verify " + there);
  EXPECT_NE(verify.output.find("a ]0;b  c d"), std::string::npos) << verify.output;
  for (const std::string& text : {show.output, verify.output, as_json.output}) {
    EXPECT_EQ(text.find_first_of("\x1b\x07\x7f"), std::string::npos);
    EXPECT_EQ(text.find("\xc2\x9b"), std::string::npos);
    EXPECT_EQ(text.find("\xc2\x85"), std::string::npos);
  }
}

// spec: S7.verify verify names what is damaged, and ends with 1
TEST_F(CheckpointCommand, FindsDamage) {
  const std::string file = path + "/shard-00001-model-00001-of-00001.safetensors";
  std::fstream(file, std::ios::in | std::ios::out | std::ios::ate | std::ios::binary)
      .seekp(-1, std::ios::end)
      .put('x');
  const Ended verify = run("verify " + path);
  EXPECT_EQ(verify.code, 1);
  EXPECT_NE(verify.output.find("'model.w'"), std::string::npos) << verify.output;
  EXPECT_NE(verify.output.find("shard-00001"), std::string::npos) << verify.output;
}

// spec: S7.convert convert: to whole safetensors files and back; what only torch reads is said so
TEST_F(CheckpointCommand, Converts) {
  const std::string out = folder.path() + "/out", back = folder.path() + "/back";
  const Ended exported = run("convert --prefix model. " + path + " " + out);
  EXPECT_EQ(exported.code, 0) << exported.output;
  EXPECT_TRUE(std::filesystem::exists(out + "/model.safetensors.index.json"));
  EXPECT_EQ(run("convert " + out + " " + back).code, 0);
  EXPECT_EQ(run("verify " + back).code, 0);
  EXPECT_EQ(run("convert " + path + " " + out).code, 1);
  const Ended torch = run("convert " + path + " x.pt");
  EXPECT_EQ(torch.code, 1);
  EXPECT_NE(torch.output.find("python -m muster.checkpoint"), std::string::npos);
}

}  // namespace
}  // namespace muster::cli
