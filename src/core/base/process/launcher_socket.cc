// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/process/launcher_socket.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <cerrno>
#include <limits>
#include <string>

#include "core/base/descriptor.h"
#include "core/base/environment.h"
#include "core/base/log/log.h"

namespace muster {

bool is_launcher_socket(int descriptor) {
  int domain = 0, type = 0;
  socklen_t size = sizeof(int);
  return ::getsockopt(descriptor, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 &&
         ::getsockopt(descriptor, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && domain == AF_UNIX &&
         type == SOCK_SEQPACKET;
}

void keep_launcher_socket_from_programs() {
  const auto told = env_integer(kLauncherSocketVariable, 0, std::numeric_limits<int>::max());
  const int descriptor = told && *told ? static_cast<int>(**told) : -1;
  if (descriptor < 0 || !is_launcher_socket(descriptor)) return;
  if (::fcntl(descriptor, F_SETFD, FD_CLOEXEC) != 0)
    log(LogLevel::warning,
        "the launcher's socket stays open in programs that this process starts: " +
            errno_text(errno));
}

}  // namespace muster
