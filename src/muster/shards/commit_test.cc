// A save that is killed, refused or altered afterwards never costs the checkpoint before it.

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "muster/base/descriptor.h"
#include "muster/shards/files/digest.h"
#include "muster/shards/test_states.h"
#include "muster/testing/budget.h"

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
  Ranks of(int rank) {
    if (rank == 0) {
      leaf_.clear();
    } else {
      Descriptor mine = std::move(leaf_[static_cast<std::size_t>(rank - 1)]);
      root_.clear();
      leaf_.clear();
      leaf_.push_back(std::move(mine));
    }
    const int size = static_cast<int>(rank == 0 ? root_.size() + 1 : 2);
    return {rank, size, [this, rank](const std::string& mine) { return exchange(rank, mine); }};
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
pid_t start_rank(SocketExchange& exchange, int rank, const std::string& folder) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  const Ranks ranks = exchange.of(rank);
  RankState state(Way::fsdp, rank, 2);
  state.fill();
  for (int round = 0;; ++round) {
    const SaveOptions options{.path = folder + "/" + (round % 2 == 0 ? "same" : "kept-") +
                                      (round % 2 == 0 ? "" : std::to_string(round)),
                              .step = round,
                              .keep_last = 3,
                              .durable = false};
    if (!save(state.shards, state.data(), "{}", options, ranks).ok()) ::_exit(0);
  }
}

// spec: S4 atomic: kill -9 of either rank at 200 seeded moments: every checkpoint that is there is
// whole, and there is always one
TEST(Commit, AKillLeavesThePreviousWhole) {
  const TemporaryFolder folder("muster-shards-");
  std::mt19937_64 random(muster::testing::test_seed());
  save_as(Way::fsdp, 2, {.path = folder.path() + "/same", .step = {}, .durable = false});
  const int rounds = muster::testing::test_rounds(200, 1000);
  for (int round = 0; round < rounds; ++round) {
    SocketExchange exchange(2);
    const pid_t ranks[2] = {start_rank(exchange, 0, folder.path()),
                            start_rank(exchange, 1, folder.path())};
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

// spec: S4 truncated, altered: the index cut off at any byte, and with any byte flipped, is refused
// by name
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

// spec: S4 torn, truncated, altered: a file cut off at any byte or with any byte flipped is refused
// by the names of file and tensor
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

// spec: S4 incomplete: a lost file, and a folder without an index, are named
TEST_F(Damaged, LostFilesAreNamed) {
  std::filesystem::rename(first, first + ".lost");
  EXPECT_NE(complaint().find("shard-00001"), std::string::npos);
  EXPECT_FALSE(verify(*open_index(path)).empty());
  std::filesystem::rename(path + "/muster.json", path + "/x.json");
  EXPECT_NE(complaint().find("is no checkpoint"), std::string::npos);
  std::filesystem::remove_all(path);
  EXPECT_NE(complaint().find("is not there"), std::string::npos);
}

// spec: S7 keep the last n: the newest ones, never fewer
TEST(Commit, KeepsTheLast) {
  const TemporaryFolder folder("muster-shards-");
  for (int step = 0; step < 6; ++step) {
    save_as(Way::ddp, 2,
            {.path = folder.path() + "/step-" + std::to_string(step),
             .step = step,
             .keep_last = 2,
             .durable = false});
    const auto all = checkpoints_in(folder.path());
    ASSERT_EQ(all.size(), std::min<std::size_t>(2, static_cast<std::size_t>(step) + 1));
    EXPECT_EQ(open_index(all.back())->step, step);
  }
  std::filesystem::create_directory(folder.path() + "/other");
  EXPECT_EQ(checkpoints_in(folder.path()).size(), 2u);
  EXPECT_TRUE(unfinished_in(folder.path()).empty());
}

/// One rank that writes one tensor.
Status save_bytes(const std::vector<std::byte>& bytes, const SaveOptions& options) {
  const Extent sizes{static_cast<std::int64_t>(bytes.size())};
  return save({{"t", "U8", sizes, {box_of(sizes)}}}, {bytes.data()}, "{}", options, {});
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
  EXPECT_EQ(piece.digest, digest_of(bytes));
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

// spec: S4 what is no checkpoint, or must not be replaced, is left alone; all ranks say so
TEST(Commit, RefusesWhatIsInTheWay) {
  const TemporaryFolder folder("muster-shards-");
  std::filesystem::create_directory(folder.path() + "/c");
  write_contents(folder.path() + "/c/precious.txt", "text");
  on_threads(3, [&](const Ranks& ranks) {
    RankState state(Way::ddp, ranks.rank, ranks.size);
    const auto saved = [&](const SaveOptions& options) {
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
