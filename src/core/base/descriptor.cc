#include "core/base/descriptor.h"

#include <unistd.h>

namespace muster {

void Descriptor::reset(int fd) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

}  // namespace muster
