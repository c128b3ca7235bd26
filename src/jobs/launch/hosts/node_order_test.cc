// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/hosts/node_order.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "core/base/descriptor.h"

namespace muster::launch {
namespace {

NodeOrder some_order() {
  return {Secret::given("the key of a job, for tests"),
          "/a folder/with 'quotes'",
          {"A=b", "EMPTY=", "LINES=one\ntwo=2"},
          {"--nnodes=2", "--", "sh", "-c", "echo \"$A\"; exit 3", ""}};
}

/// A stream that has `text` and then ends.
Descriptor stream_of(const std::string& text) {
  int ends[2];
  EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const Descriptor in(ends[1]);
  EXPECT_EQ(::write(ends[1], text.data(), text.size()), static_cast<ssize_t>(text.size()));
  return Descriptor(ends[0]);
}

// spec: V5.hosts what a node is told comes as it was, whatever characters it has, and what follows
// stays in the stream
TEST(NodeOrder, ComesAsItWas) {
  const Descriptor stream = stream_of(encode(some_order()) + "\x0f");
  const auto order = read_node_order(stream.get());
  ASSERT_TRUE(order.ok()) << order.status().message();
  EXPECT_EQ(order->secret->key().text(), "the key of a job, for tests");
  EXPECT_EQ(order->folder, some_order().folder);
  EXPECT_EQ(order->variables, some_order().variables);
  EXPECT_EQ(order->words, some_order().words);
  char next = 0;
  EXPECT_EQ(::read(stream.get(), &next, 1), 1);
  EXPECT_EQ(next, 15);
}

// spec: V5.hosts without a secret of its own a job has that of the variables
TEST(NodeOrder, WithoutASecret) {
  NodeOrder order = some_order();
  order.secret.reset();
  EXPECT_FALSE(read_node_order(stream_of(encode(order)).get())->secret.has_value());
}

// spec: V5.refusal a connection that is cut at any byte starts nothing
TEST(NodeOrder, CutAtEveryByte) {
  const std::string whole = encode(some_order());
  for (std::size_t size = 0; size < whole.size(); ++size) {
    const auto order = read_node_order(stream_of(whole.substr(0, size)).get());
    ASSERT_FALSE(order.ok()) << size;
    EXPECT_EQ(order.status().code(), Code::aborted) << size;
  }
}

// spec: V5.refusal another version, lengths that lie, and bytes that belong to nothing
TEST(NodeOrder, WhatIsNoOrderIsRefused) {
  const std::string whole = encode(some_order());
  const std::size_t title = whole.find('\n') + 1;
  std::string other = whole;
  other[title - 2] = '2';
  std::string longer = whole;
  longer.replace(title, 4, "\xff\xff\xff\xff");
  std::string lying = whole;
  lying.replace(title + 4, 4, "\xff\xff\xff\x7f");
  std::string loose = whole + "more";
  loose[title] = static_cast<char>(loose[title] + 4);
  for (const std::string& text : {other, longer, lying, loose}) {
    const auto order = read_node_order(stream_of(text).get());
    ASSERT_FALSE(order.ok());
    EXPECT_EQ(order.status().code(), Code::invalid_argument) << order.status().message();
  }
}

// spec: V5.hosts a signal for workers that comes before there are any ends no node; the end of the
// stream does
TEST(FollowLauncher, SignalsBeforeThereAreWorkers) {
  const Descriptor stream =
      stream_of(std::string{static_cast<char>(SIGUSR1), static_cast<char>(SIGUSR2)});
  const pid_t node = ::fork();
  ASSERT_GE(node, 0);
  if (node == 0) {
    sigset_t end;
    sigemptyset(&end);
    sigaddset(&end, SIGTERM);
    ::pthread_sigmask(SIG_BLOCK, &end, nullptr);
    int came = 0;
    if (::dup2(stream.get(), STDIN_FILENO) < 0 || !follow_launcher() || ::sigwait(&end, &came) != 0)
      ::_exit(1);
    ::_exit(came == SIGTERM ? 0 : 2);
  }
  int status = 0;
  while (::waitpid(node, &status, 0) < 0 && errno == EINTR) {
  }
  EXPECT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace muster::launch
