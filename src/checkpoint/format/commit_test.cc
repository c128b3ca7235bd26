// SPDX-License-Identifier: BSD-3-Clause
// A save that is killed, refused or altered afterwards never costs the checkpoint before it.

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>

#include "checkpoint/format/files/digest.h"
#include "checkpoint/format/history.h"
#include "checkpoint/format/testing/states.h"
#include "core/base/descriptor.h"
#include "testing/budget.h"

namespace muster::shards {
namespace {

using namespace shards::testing;

std::string contents(const std::string& path) { return read_text(path, 1'000'000'000).value(); }
void write_contents(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

/// Texts between rank 0 and others over one socket each; a rank that is gone is an end of stream.
class SocketExchange {
 public:
  explicit SocketExchange(int ranks) {
    for (int rank = 1; rank < ranks; ++rank) {
      int pair[2];
      EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
      root_.emplace_back(pair[0]);
      leaf_.emplace_back(pair[1]);
    }
  }
  /// In the process of that rank: it keeps its own ends.
  SavingRanks of(int rank) {
    if (rank == 0) {
      leaf_.clear();
    } else {
      Descriptor mine = std::move(leaf_[static_cast<std::size_t>(rank - 1)]);
      root_.clear();
      leaf_.clear();
      leaf_.push_back(std::move(mine));
    }
    const int size = static_cast<int>(rank == 0 ? root_.size() + 1 : 2);
    return {rank, size,
            [this, rank](const std::string& mine, ExchangeLimit) { return exchange(rank, mine); }};
  }

 private:
  static bool send(int fd, const std::string& text) {
    const std::uint64_t length = text.size();
    return ::send(fd, &length, sizeof length, MSG_NOSIGNAL) == sizeof length &&
           (text.empty() ||
            ::send(fd, text.data(), length, MSG_NOSIGNAL) == static_cast<ssize_t>(length));
  }
  static bool receive(int fd, std::string& text) {
    std::uint64_t length = 0;
    if (::recv(fd, &length, sizeof length, MSG_WAITALL) != sizeof length) return false;
    text.resize(length);
    return text.empty() ||
           ::recv(fd, text.data(), length, MSG_WAITALL) == static_cast<ssize_t>(length);
  }
  Result<std::vector<std::string>> exchange(int rank, const std::string& mine) {
    const Status gone(Code::peer_failed, "a rank is gone");
    std::vector<std::string> all{mine};
    if (rank == 0) {
      for (const Descriptor& each : root_) {
        all.emplace_back();
        if (!receive(each.get(), all.back())) return gone;
      }
      for (const Descriptor& each : root_)
        for (const std::string& text : all)
          if (!send(each.get(), text)) return gone;
      return all;
    }
    if (!send(leaf_.front().get(), mine)) return gone;
    all.resize(2);
    for (std::string& text : all)
      if (!receive(leaf_.front().get(), text)) return gone;
    return all;
  }

  std::vector<Descriptor> root_, leaf_;
};

/// Two processes save over and over until they are killed.
pid_t start_rank(SocketExchange& exchange, int rank, const std::string& folder, int first_step) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  const SavingRanks ranks = exchange.of(rank);
  RankState state(Way::fsdp, rank, 2);
  state.fill();
  for (int round = 0;; ++round) {
    const CommitOptions options{.path = folder + "/" + (round % 2 == 0 ? "same" : "kept-") +
                                        (round % 2 == 0 ? "" : std::to_string(round)),
                                .step = first_step + round,
                                .keep_last = 3,
                                .durable = false};
    if (!save(state.shards, state.data(), "{}", options, ranks).ok()) ::_exit(0);
  }
}

// spec: S4.kill atomic: kill -9 of either rank at 200 seeded moments: every checkpoint that is
// there is whole, and there is always one
TEST(Commit, AKillLeavesThePreviousWhole) {
  const TemporaryFolder folder("muster-shards-");
  std::mt19937_64 random(muster::testing::test_seed());
  save_as(Way::fsdp, 2, {.path = folder.path() + "/same", .step = {}, .durable = false});
  const int rounds = muster::testing::test_rounds(200, 1000);
  for (int round = 0; round < rounds; ++round) {
    SocketExchange exchange(2);
    const pid_t ranks[2] = {start_rank(exchange, 0, folder.path(), round * 1'000'000),
                            start_rank(exchange, 1, folder.path(), round * 1'000'000)};
    exchange = SocketExchange(1);                        // the parent's ends
    ::usleep(static_cast<useconds_t>(random() % 6000));  // any moment will do
    const int victim = static_cast<int>(random() % 2);
    ::kill(ranks[victim], SIGKILL);
    for (const pid_t rank : ranks) ::waitpid(rank, nullptr, 0);
    const auto same = open_index(folder.path() + "/same");
    ASSERT_TRUE(same.ok()) << same.status().message();
    const auto all = checkpoints_in(folder.path());
    EXPECT_LE(all.size(), 4u);
    for (const std::string& each : all) {
      const auto index = open_index(each);
      ASSERT_TRUE(index.ok()) << index.status().message();
      ASSERT_EQ(verify(*index), std::vector<std::string>()) << each;
      ASSERT_EQ(wrong_when_loaded(*index, Way::plain, 1), 0) << each;
    }
  }
}

class Damaged : public ::testing::Test {
 protected:
  void SetUp() override {
    save_as(Way::fsdp, 2, {.path = path, .step = 7, .durable = false});
    ASSERT_TRUE(open_index(path).ok());
  }
  /// The first thing that is wrong with it: with its index, or when all is loaded.
  std::string complaint() const {
    const auto index = open_index(path);
    if (!index) return index.status().message();
    RankState state(Way::plain, 0, 1);
    Reader reader(*index);
    for (std::size_t i = 0; i < state.shards.size(); ++i)
      if (const Status read = reader.read(state.shards[i], state.memory[i]); !read)
        return read.message();
    return {};
  }

  TemporaryFolder folder{"muster-shards-"};
  std::string path = folder.path() + "/checkpoint";
  std::string first = path + "/shard-00001-model-00001-of-00001.safetensors";
};

// spec: S4.index truncated, altered: the index cut off at any byte, and with any byte flipped, is
// refused by name
TEST_F(Damaged, EveryByteOfTheIndexCounts) {
  const std::string file = path + "/muster.json", good = contents(file);
  for (std::size_t at = 0; at < good.size(); ++at) {
    const auto cut = read_index(std::string_view(good).substr(0, at));
    ASSERT_FALSE(cut.ok()) << "cut off at " << at;
    for (const char flip : {'\x01', '\x20', '\x80'}) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ flip);
      ASSERT_FALSE(read_index(bad).ok()) << "byte " << at;
    }
  }
  write_contents(file, good.substr(0, good.size() / 2));
  EXPECT_NE(complaint().find("muster.json"), std::string::npos) << complaint();
  write_contents(file, good + " ");
  EXPECT_NE(complaint().find("muster.json"), std::string::npos) << complaint();
}

// spec: S4.damage torn, truncated, altered: a file cut off at any byte or with any byte flipped is
// refused by the names of file and tensor
TEST_F(Damaged, EveryByteOfAFileCounts) {
  const std::string good = contents(first);
  const auto refused = [&](const std::string& bad) {
    write_contents(first, bad);
    const std::string said = complaint();
    const auto index = open_index(path);
    return said.find("shard-00001") != std::string::npos &&
           said.find("tensor '") != std::string::npos && !verify(*index).empty();
  };
  for (std::size_t at = 0; at < good.size(); at += 7)
    ASSERT_TRUE(refused(good.substr(0, at))) << "cut off at " << at << ": " << complaint();
  for (std::size_t at = 0; at < good.size(); at += 3) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x10);
    ASSERT_TRUE(refused(bad)) << "byte " << at << ": " << complaint();
  }
  write_contents(first, good);
  EXPECT_EQ(complaint(), "");
}

// spec: S9 partial reads: a flipped byte of a file is noticed or harmless also where another number
// of ranks reads parts of what was written; verify finds each
TEST_F(Damaged, EveryByteCountsForOtherRanks) {
  const auto index = open_index(path);
  ASSERT_TRUE(index.ok());
  int noticed = 0;
  for (const auto& [name, stored] : index->files) {
    const std::string file = path + "/" + name, good = contents(file);
    for (std::size_t at = 0; at < good.size(); at += 23) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ 1 << at % 8);
      write_contents(file, bad);
      ASSERT_FALSE(verify(*index).empty()) << file << " byte " << at;
      for (int rank = 0; rank < 3; ++rank) {
        RankState state(Way::fsdp, rank, 3);
        Reader reader(*index);
        bool is_read = true;
        for (std::size_t i = 0; i < state.shards.size(); ++i)
          is_read = reader.read(state.shards[i], state.memory[i]).ok() && is_read;
        noticed += is_read ? 0 : 1;
        ASSERT_TRUE(!is_read || state.wrong() == 0) << file << " byte " << at << " rank " << rank;
      }
    }
    write_contents(file, good);
  }
  EXPECT_GT(noticed, 0);
  EXPECT_EQ(complaint(), "");
}

// spec: S9 folders of a checkpoint that are read as safetensors files are verified too
TEST_F(Damaged, IsNoticedByReadersOfSafetensors) {
  std::string bad = contents(first);
  bad.back() = static_cast<char>(bad.back() ^ 1);
  write_contents(first, bad);
  const auto index = open_safetensors(path);
  ASSERT_TRUE(index.ok());
  EXPECT_FALSE(verify(*index).empty());
}

// spec: S4.incomplete incomplete: a lost file, and a folder without an index, are named
TEST_F(Damaged, LostFilesAreNamed) {
  std::filesystem::rename(first, first + ".lost");
  EXPECT_NE(complaint().find("shard-00001"), std::string::npos);
  EXPECT_FALSE(verify(*open_index(path)).empty());
  std::filesystem::rename(path + "/muster.json", path + "/x.json");
  EXPECT_NE(complaint().find("is no checkpoint"), std::string::npos);
  std::filesystem::remove_all(path);
  EXPECT_NE(complaint().find("is not there"), std::string::npos);
}

// spec: S4 altered: a pipe in the place of a file is refused, not waited for
TEST_F(Damaged, PipesAreRefused) {
  const std::string index = path + "/muster.json";
  std::filesystem::remove(index);
  ASSERT_EQ(::mkfifo(index.c_str(), 0600), 0);
  const auto opened = open_index(path);
  ASSERT_FALSE(opened.ok());
  EXPECT_NE(opened.status().message().find("is no file"), std::string::npos)
      << opened.status().message();
}

// spec: S4 what a symbolic link leads to is neither replaced nor removed
TEST(Commit, LinksAreNotFollowed) {
  const TemporaryFolder folder("muster-shards-");
  const std::string run = folder.path() + "/run", precious = folder.path() + "/precious";
  ASSERT_TRUE(save_small(precious).ok());
  std::filesystem::create_directory(run);
  std::filesystem::create_directory_symlink(precious, run + "/best");
  for (const std::string step : {"/1", "/2"}) ASSERT_TRUE(save_small(run + step, 1).ok());
  EXPECT_EQ(checkpoints_in(run), (std::vector{run + "/best", run + "/2"}));
  for (const std::string path : {"/best", "/best/"})
    EXPECT_NE(save_small(run + path).message().find("symbolic link"), std::string::npos) << path;
  EXPECT_FALSE(remove_checkpoint(run + "/best").ok());
  EXPECT_TRUE(std::filesystem::is_symlink(run + "/best"));
  EXPECT_TRUE(is_whole(precious));
}

// spec: S4 a checkpoint is not replaced while its folder has files that are none of its own
TEST(Commit, OtherFilesInACheckpointStay) {
  const TemporaryFolder folder("muster-shards-");
  const std::string path = folder.path() + "/c", notes = path + "/notes.txt";
  ASSERT_TRUE(save_small(path).ok());
  write_contents(notes, "text");
  EXPECT_NE(save_small(path).message().find("'notes.txt'"), std::string::npos);
  EXPECT_EQ(contents(notes), "text");
  EXPECT_TRUE(is_whole(path));
  std::filesystem::remove(notes);
  EXPECT_TRUE(save_small(path).ok());
  write_contents(path + "/muster.json", "{}");
  EXPECT_NE(save_small(path).message().find("is not replaced"), std::string::npos);
}

// spec: S4 nothing is committed of which rank 0 does not see all files; all ranks say so
TEST(Commit, RankZeroSeesAllFiles) {
  const TemporaryFolder folder("muster-shards-");
  on_threads(2, [&](const SavingRanks& ranks) {
    RankState state(Way::fsdp, ranks.rank, ranks.size);
    auto plan = plan_save(state.shards, {.path = folder.path() + "/c", .durable = false}, ranks);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    if (ranks.rank == 1) {
      plan->options.path = folder.path() + "/elsewhere/c";
      std::filesystem::create_directories(plan->folder());
    }
    const std::vector<std::byte> bytes(1 << 16);
    const std::vector<const std::byte*> data(plan->pieces_of(ranks.rank).size(), bytes.data());
    EXPECT_NE(finish_save(*plan, data, "{}", ranks).message().find("rank 0 cannot see"),
              std::string::npos);
  });
  EXPECT_FALSE(exists(folder.path() + "/c"));
  EXPECT_TRUE(unfinished_in(folder.path()).empty());
}

// spec: S4 a save that fails leaves nothing behind, unless a rank may still write
TEST(Commit, AFailedSaveLeavesNothing) {
  const TemporaryFolder folder("muster-shards-");
  const std::string path = folder.path() + "/c";
  on_threads(2, [&](const SavingRanks& ranks) {
    RankState state(Way::fsdp, ranks.rank, ranks.size);
    const CommitOptions options{.path = path, .step = {}, .durable = false};
    const Status before = ranks.rank == 1 ? Status(Code::invalid_argument, "no state") : Status();
    EXPECT_FALSE(plan_save(state.shards, options, ranks, before).ok());
    if (ranks.rank == 0) {
      EXPECT_TRUE(unfinished_in(folder.path()).empty());
    }
    auto plan = plan_save(state.shards, options, ranks);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    if (ranks.rank == 1) plan->options.path = folder.path() + "/not/there";
    const std::vector<std::byte> bytes(1 << 16);
    const std::vector<const std::byte*> data(plan->pieces_of(ranks.rank).size(), bytes.data());
    EXPECT_NE(finish_save(*plan, data, "{}", ranks).message().find("cannot create"),
              std::string::npos);
    if (ranks.rank == 0) {
      EXPECT_TRUE(unfinished_in(folder.path()).empty());
    }
    plan = plan_save(state.shards, options, ranks);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    EXPECT_NE(finish_save(*plan, data, "{}", ranks, before).message().find("no state"),
              std::string::npos);
    EXPECT_FALSE(exists(path));
  });
  const SavingRanks alone{
      0, 2, [](const std::string&, ExchangeLimit) {
        return Result<std::vector<std::string>>(Status(Code::peer_failed, "gone"));
      }};
  EXPECT_FALSE(plan_save({}, {.path = path, .durable = false}, alone).ok());
  EXPECT_EQ(unfinished_saves_of(path).size(), 1u);
}

// spec: S4 altered: pieces are hashed block by block, and each block counts
TEST(Commit, EveryBlockOfAPieceCounts) {
  const TemporaryFolder folder("muster-shards-");
  std::vector<std::byte> bytes(3 * kDigestBlock + 1000), loaded(bytes.size());
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 31 >> 3);
  const std::string path = folder.path() + "/c";
  ASSERT_TRUE(save_bytes(bytes, {.path = path, .step = {}, .durable = false}).ok());
  const auto index = open_index(path);
  ASSERT_TRUE(index.ok()) << index.status().message();
  const StoredTensor& tensor = index->tensors.at("t");
  const StoredPiece& piece = tensor.pieces.front();
  EXPECT_TRUE(BlockDigests::fits(piece.blocks, bytes.size()));
  const Shard wanted{"t", "U8", tensor.sizes, {box_of(tensor.sizes)}};
  ASSERT_TRUE(Reader(*index).read(wanted, loaded).ok());
  EXPECT_EQ(loaded, bytes);
  const std::string file = path + "/" + piece.file, good = contents(file);
  for (std::size_t at = piece.at; at < good.size(); at += kDigestBlock) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 1);
    write_contents(file, bad);
    EXPECT_NE(Reader(*index).read(wanted, loaded).message().find("digest"), std::string::npos);
  }
}

// spec: S9 digests by block: of a piece of several blocks a part is read, and flips in its blocks
// are noticed, others are harmless; a checkpoint of the first format is read as it was
TEST(Commit, PartsOfAPieceAreVerified) {
  const TemporaryFolder folder("muster-shards-");
  constexpr std::int64_t kRow = 1000, kRows = 4000;  // of 3.8 blocks
  std::vector<std::byte> bytes(kRow * kRows), part(700 * kRow);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 31 >> 7);
  const std::string path = folder.path() + "/c";
  const Shard whole{"t", "U8", {kRows, kRow}, {box_of({kRows, kRow})}};
  ASSERT_TRUE(save({whole}, {bytes.data()}, "{}", {.path = path, .durable = false}, {}).ok());
  auto index = open_index(path);
  ASSERT_TRUE(index.ok());
  const StoredPiece& piece = index->tensors.at("t").pieces.front();
  const std::string file = path + "/" + piece.file, good = contents(file);
  const Shard wanted{"t", "U8", {kRows, kRow}, {{{900, 0}, {700, kRow}}}};  // blocks 0 and 1
  for (std::size_t at = 77; at < bytes.size(); at += 100'003) {
    std::string bad = good;
    bad[piece.at + at] = static_cast<char>(bad[piece.at + at] ^ 4);
    write_contents(file, bad);
    const Status read = Reader(*index).read(wanted, part);
    EXPECT_EQ(read.ok(), at >= 2 * kDigestBlock) << at;
    if (read.ok()) {
      EXPECT_TRUE(std::equal(part.begin(), part.end(), bytes.begin() + 900 * kRow));
    }
  }
  write_contents(file, good);
  StoredPiece& first_format = index->tensors.at("t").pieces.front();
  first_format.blocks.clear();
  first_format.digest = digest_of(bytes);
  EXPECT_TRUE(Reader(*index).read(wanted, part).ok());
  std::vector<std::byte> loaded(bytes.size());
  EXPECT_TRUE(Reader(*index).read(whole, loaded).ok());
  EXPECT_EQ(loaded, bytes);
  EXPECT_TRUE(verify(*index).empty());
  first_format.digest = digest_of("other");
  EXPECT_FALSE(Reader(*index).read(whole, loaded).ok());
  EXPECT_FALSE(verify(*index).empty());
}

// spec: S4 what is no checkpoint, or must not be replaced, is left alone; all ranks say so
TEST(Commit, RefusesWhatIsInTheWay) {
  const TemporaryFolder folder("muster-shards-");
  std::filesystem::create_directory(folder.path() + "/c");
  write_contents(folder.path() + "/c/precious.txt", "text");
  on_threads(3, [&](const SavingRanks& ranks) {
    RankState state(Way::ddp, ranks.rank, ranks.size);
    const auto saved = [&](const CommitOptions& options) {
      return save(state.shards, state.data(), "{}", options, ranks).message();
    };
    EXPECT_NE(saved({.path = folder.path() + "/c", .step = {}}).find("not replaced"),
              std::string::npos);
    EXPECT_EQ(saved({.path = folder.path() + "/d", .step = {}, .durable = false}), "");
    EXPECT_NE(saved({.path = folder.path() + "/d", .step = {}, .overwrite = false})
                  .find("overwrite is off"),
              std::string::npos);
    EXPECT_EQ(saved({.path = folder.path() + "/d/", .step = {}, .durable = true}), "");
  });
  EXPECT_EQ(contents(folder.path() + "/c/precious.txt"), "text");
}

}  // namespace
}  // namespace muster::shards
