// SPDX-License-Identifier: BSD-3-Clause
// Loads that find damage in the middle.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "core/base/process/temporary_folder.h"
#include "core/group/testing/ranks.h"
#include "muster/checkpoint.h"

namespace muster::checkpoint {
namespace {

using testing::on_ranks;

/// Tensors a, b and c, of which a rank has all.
struct ThreeTensors {
  explicit ThreeTensors(float value) {
    for (const char* name : {"a", "b", "c"}) {
      tensors.push_back(at::full({1 << 18}, value));
      state.add_tensor(name, tensors.back());
    }
  }
  State state;
  std::vector<at::Tensor> tensors;
};

/// Alters a byte in the middle of the file, which is one of tensor b.
void damage(const std::string& path) {
  for (const auto& each : std::filesystem::directory_iterator(path)) {
    const std::string name = each.path().string();
    if (!name.ends_with(".safetensors")) continue;
    std::fstream file(name, std::ios::in | std::ios::out | std::ios::binary);
    const auto middle = static_cast<std::streamoff>(std::filesystem::file_size(name) / 2);
    file.seekp(middle);
    file.put('\x7f');
  }
}

/// The path of a checkpoint of three tensors in the folder.
std::string saved_and_damaged(const TemporaryFolder& folder) {
  std::string path = folder.path() + "/c";
  ThreeTensors saved(3);
  save(saved.state, path);
  damage(path);
  return path;
}

// spec: S9 altered bytes that are found in the middle of a load: the error says on every rank how
// many tensors hold the checkpoint's values by now
TEST(CheckpointDamage, AFailedLoadSaysWhatItHasFilled) {
  const TemporaryFolder folder("muster-checkpoint-");
  const std::string path = saved_and_damaged(folder);
  on_ranks(2, [&](int rank) {
    ThreeTensors loaded(0);
    const std::string said = testing::message_of<DistError>([&] { load(loaded.state, path); });
    EXPECT_HAS(said, "tensor 'b'");
    EXPECT_HAS(said, "it is altered");
    EXPECT_HAS(said, "has filled 1 of the 3 tensors of this rank, and one of them in part");
    EXPECT_TRUE(loaded.tensors[0].eq(3).all().item<bool>()) << rank;
    EXPECT_TRUE(loaded.tensors[2].eq(0).all().item<bool>()) << rank;
    // A load that is refused before it reads has filled nothing, and its error says nothing of
    // that.
    State other;
    other.add_tensor("d", loaded.tensors[0]);
    EXPECT_EQ(testing::message_of<DistError>([&] { load(other, path); }).find("has filled"),
              std::string::npos);
  });
}

// spec: S9 one rank alone finds them: the others, whose tensors are whole, say that of theirs
TEST(CheckpointDamage, TheOtherRanksSayWhatTheyHave) {
  const TemporaryFolder folder("muster-checkpoint-");
  const std::string path = saved_and_damaged(folder);
  on_ranks(2, [&](int rank) {
    const auto mine = at::zeros({1 << 18});
    State state;
    state.add_tensor(rank == 0 ? "a" : "b", mine);
    const std::string said = testing::message_of<DistError>([&] { load(state, path); });
    EXPECT_HAS(said, "tensor 'b'");
    EXPECT_HAS(said, rank == 0 ? "has filled 1 of the 1 tensors of this rank: load"
                               : "has filled 0 of the 1 tensors of this rank, and one of them");
  });
}

}  // namespace
}  // namespace muster::checkpoint
