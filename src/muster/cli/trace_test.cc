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
    EXPECT_NE(both.code, 0);
    EXPECT_TRUE(has(both.err, "--store excludes --dir") || has(both.err, "--dir excludes --store")) << both.err;
    const auto no_port = run({command, "--store", "localhost"});
    EXPECT_EQ(no_port.code, 1);
    EXPECT_TRUE(has(no_port.err, "\"localhost\" has no port; write HOST:PORT")) << no_port.err;
    const auto bad_wait = run({command, "--store", "localhost:1", "--wait", "never"});
    EXPECT_NE(bad_wait.code, 0);
    EXPECT_TRUE(has(bad_wait.err, "--wait")) << bad_wait.err;
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
