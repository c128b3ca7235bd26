#include "muster/launch/worker_news.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <climits>

namespace muster::launch {
namespace {

// spec: L6 what the launcher tells a worker that stays comes whole, and its end is known
TEST(WorkerNews, ComesWholeThroughAPipe) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  WorkerNews news{WorkerNewsKind::epoch, 7,        3,     {5, 8, 1, 2, 1, 4, 5, 8},
                  "[::1]:29400",         "host-a", 29500, "because"};
  const WorkerNews leave{WorkerNewsKind::leave, 0, 0, {}, {}, {}, 0, std::string(100'000, 'x')};
  EXPECT_LE(encode(leave).size(), static_cast<std::size_t>(PIPE_BUF));
  const std::string bytes = encode(news) + encode(leave);
  ASSERT_EQ(::write(ends[1], bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  ::close(ends[1]);
  const auto first = read_worker_news(ends[0]), second = read_worker_news(ends[0]);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(first->epoch, 7);
  EXPECT_EQ(first->restarts, 3);
  EXPECT_EQ(first->ranks, news.ranks);
  EXPECT_EQ(first->agent_store, "[::1]:29400");
  EXPECT_EQ(first->master_addr, "host-a");
  EXPECT_EQ(first->master_port, 29500);
  EXPECT_EQ(first->reason, "because");
  EXPECT_EQ(second->kind, WorkerNewsKind::leave);
  EXPECT_EQ(read_worker_news(ends[0]).status().code(), Code::closed);
  ::close(ends[0]);
}

}  // namespace
}  // namespace muster::launch
