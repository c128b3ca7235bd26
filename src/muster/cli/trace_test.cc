#include "muster/cli/trace.h"

#include <gtest/gtest.h>

#include "muster/cli/launched.h"
#include "muster/store/factory.h"

namespace muster::cli::testing {
namespace {

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(TraceCommand, ChoicesThatContradictAreNamed) {
  for (const char* command : {"trace", "top"}) {
    const auto both = run({command, "--store", "localhost:1", "--dir", "/tmp"});
    EXPECT_EQ(both.code, 2);
    EXPECT_TRUE(has(both.err, "--store excludes --dir") || has(both.err, "--dir excludes --store")) << both.err;
  }
}

// spec: J3 what is not understood is refused by every command, in one line that names it, with exit code 2
TEST(Commands, RefuseWhatTheyDoNotUnderstand) {
  struct Refused {
    std::vector<std::string> words;
    std::string names;
  };
  std::vector<Refused> refused = {{{"--version", "twice"}, "twice"},
                                  {{"help", "run"}, "run"},
                                  {{"dance"}, "dance"},
                                  {{"run", "--nproc-per-node", "many", "true"}, "many"},
                                  {{"launch", "--dance", "true"}, "--dance"},
                                  {{"doctor", "--dance"}, "--dance"},
                                  {{"doctor", "nurse"}, "nurse"},
                                  {{"bench", "--ranks", "200"}, "128"},
                                  {{"bench", "--simulate", "--latency-us", "abc"}, "abc"},
                                  {{"bench", "--seconds", "abc"}, "abc"},
                                  {{"bench", "dance"}, "dance"},
                                  {{"bench", "p2p", "--dance"}, "--dance"},
                                  {{"bench", "floors", "--dance"}, "--dance"}};
  for (const char* command : {"trace", "top"}) {
    for (const char* option : {"--pid", "--wait", "--store"}) refused.push_back({{command, option, "abc"}, "abc"});
    refused.push_back({{command, "--pid", "0"}, "\"0\" is not a whole number above 0"});
    refused.push_back({{command, "--store", "localhost"}, "\"localhost\" has no port; write HOST:PORT"});
    refused.push_back({{command, "--dance"}, "--dance"});
  }
  for (const auto& [words, names] : refused) {
    const auto outcome = run(words);
    EXPECT_EQ(outcome.code, 2) << words[0] << "\n" << outcome.out << outcome.err;
    EXPECT_EQ(outcome.out, "") << words[0];
    const std::string first = outcome.err.substr(0, outcome.err.find('\n'));
    EXPECT_TRUE(has(first, names)) << outcome.err;
    EXPECT_LT(first.size(), 200u) << outcome.err;
  }
}

TEST(TraceCommand, AStoreWithoutAJobSaysSo) {
  store::TcpStoreOptions served;
  served.host = "127.0.0.1";
  served.port = 0;
  served.is_server = true;
  served.secret = Secret::given("the secret of this test");
  const auto store = store::make_tcp_store(served);
  ASSERT_TRUE(store.ok()) << store.status().message();
  const auto place = "127.0.0.1:" + std::to_string((*store)->port());
  const auto none = run({"top", "--once", "--store", place}, {{"MUSTER_SECRET", "the secret of this test"}});
  EXPECT_EQ(none.code, 1);
  EXPECT_TRUE(has(none.err, "no job that can be asked runs on this store")) << none.err;
  const auto stranger = run({"top", "--once", "--store", place}, {{"MUSTER_SECRET", "a guess of a stranger"}});
  EXPECT_EQ(stranger.code, 1);
  EXPECT_TRUE(has(stranger.err, "secret")) << stranger.err;
}

}  // namespace
}  // namespace muster::cli::testing
