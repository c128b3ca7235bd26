// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/process/launcher_socket.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cstdlib>
#include <string>

#include "core/base/descriptor.h"

namespace muster {
namespace {

struct SocketPair {
  explicit SocketPair(int type) {
    int ends[2];
    if (::socketpair(AF_UNIX, type, 0, ends) != 0) return;
    one = Descriptor(ends[0]);
    other = Descriptor(ends[1]);
  }
  Descriptor one, other;
};

// spec: L6 programs that a worker starts do not hold its socket: the agent sees the worker's end
TEST(LauncherSocket, ProgramsOfTheWorkerDoNotGetIt) {
  const auto flags_of = [](int descriptor) { return ::fcntl(descriptor, F_GETFD) & FD_CLOEXEC; };
  const SocketPair ends(SOCK_SEQPACKET);
  const Descriptor null(::open("/dev/null", O_RDONLY));
  for (const int descriptor : {ends.other.get(), null.get()}) {
    ASSERT_EQ(::fcntl(descriptor, F_SETFD, 0), 0);
    ASSERT_EQ(::setenv(kLauncherSocketVariable, std::to_string(descriptor).c_str(), 1), 0);
    keep_launcher_socket_from_programs();
  }
  EXPECT_NE(flags_of(ends.other.get()), 0);
  EXPECT_EQ(flags_of(null.get()), 0) << "not the launcher's";
  ::unsetenv(kLauncherSocketVariable);
  keep_launcher_socket_from_programs();
}

// spec: L6 a child of a worker does not take another descriptor of that number for the launcher's
TEST(LauncherSocket, OtherDescriptorsAreNone) {
  const SocketPair stream(SOCK_STREAM);
  const Descriptor null(::open("/dev/null", O_RDONLY));
  ASSERT_TRUE(stream.one);
  EXPECT_FALSE(is_launcher_socket(stream.one.get()));
  EXPECT_FALSE(is_launcher_socket(null.get()));
  EXPECT_FALSE(is_launcher_socket(-1));
}

}  // namespace
}  // namespace muster
