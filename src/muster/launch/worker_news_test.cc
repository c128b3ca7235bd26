#include "muster/launch/worker_news.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

namespace muster::launch {
namespace {

WorkerChannel channel() {
  auto made = make_worker_channel();
  EXPECT_TRUE(made.ok());
  return std::move(*made);
}

// spec: L6 what the launcher tells a worker that stays comes whole, and its end is known
TEST(WorkerNews, ComesWhole) {
  WorkerChannel ends = channel();
  EXPECT_TRUE(is_worker_channel(ends.worker.get()));
  const WorkerNews news{WorkerNewsKind::epoch, 7,        3,     {5, 8, 1, 2, 1, 4, 5, 8},
                        "[::1]:29400",         "host-a", 29500, "because"};
  const WorkerNews leave{WorkerNewsKind::leave, 0, 0, {}, {}, {}, 0, std::string(100'000, 'x')};
  tell_worker(ends.agent.get(), news);
  tell_worker(ends.agent.get(), leave);
  ends.agent.reset();
  const auto first = read_worker_news(ends.worker.get());
  const auto second = read_worker_news(ends.worker.get());
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(first->epoch, 7);
  EXPECT_EQ(first->restarts, 3);
  EXPECT_EQ(first->ranks, news.ranks);
  EXPECT_EQ(first->agent_store, "[::1]:29400");
  EXPECT_EQ(first->master_addr, "host-a");
  EXPECT_EQ(first->master_port, 29500);
  EXPECT_EQ(first->reason, "because");
  EXPECT_EQ(second->kind, WorkerNewsKind::leave);
  EXPECT_EQ(read_worker_news(ends.worker.get()).status().code(), Code::closed);
}

// spec: L6 that training has ended is known to the launcher, also when the worker has died since
// and has not read all news
TEST(WorkerNews, TheEndOfTrainingSurvivesTheWorker) {
  WorkerChannel ends = channel();
  EXPECT_FALSE(take_trained(ends.agent.get()));
  tell_worker(ends.agent.get(), {});
  tell_trained(ends.worker.get());
  ends.worker.reset();
  EXPECT_TRUE(take_trained(ends.agent.get()));
  EXPECT_FALSE(take_trained(ends.agent.get()));
  tell_worker(ends.agent.get(), {});  // no SIGPIPE, though the worker is gone
}

// spec: L6 a worker whose socket is full holds up no launcher
TEST(WorkerNews, AWorkerThatDoesNotReadHoldsNobodyUp) {
  const WorkerChannel ends = channel();
  const WorkerNews news{.reason = std::string(2000, 'x')};
  for (int i = 0; i < 10'000; ++i) tell_worker(ends.agent.get(), news);
  EXPECT_EQ(read_worker_news(ends.worker.get())->reason, news.reason);
}

// spec: L6 a child of a worker does not take another descriptor of that number for the launcher's
TEST(WorkerNews, OtherDescriptorsAreNone) {
  int stream[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, stream), 0);
  const Descriptor one(stream[0]), other(stream[1]);
  const Descriptor null(::open("/dev/null", O_RDONLY));
  EXPECT_FALSE(is_worker_channel(one.get()));
  EXPECT_FALSE(is_worker_channel(null.get()));
  EXPECT_FALSE(is_worker_channel(-1));
}

}  // namespace
}  // namespace muster::launch
