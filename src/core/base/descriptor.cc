// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/descriptor.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>

#include "core/base/process/limits.h"

namespace muster {

void Descriptor::reset(int fd) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

int poll_milliseconds(TimePoint now, TimePoint until) {
  if (until == TimePoint::max()) return -1;
  if (until <= now) return 0;
  const std::int64_t left = std::chrono::ceil<std::chrono::milliseconds>(until - now).count();
  return static_cast<int>(std::min<std::int64_t>(left, INT_MAX));
}

std::string errno_text(int error) {
  const char* name = ::strerrorname_np(error);
  const char* description = ::strerrordesc_np(error);
  if (name == nullptr || description == nullptr) return "error " + std::to_string(error);
  std::string text(description);
  // "Connection refused" reads on within a sentence; "RFS specific error" stays as it is.
  if (text.size() > 1 && text[1] >= 'a' && text[1] <= 'z')
    text[0] = static_cast<char>(::tolower(text[0]));
  if (error == EFBIG)
    return text + " (" + name + "); the limit on file sizes is " + std::to_string(largest_file()) +
           " bytes, raise it (ulimit -f)";
  return text + " (" + name + ")";
}

}  // namespace muster
