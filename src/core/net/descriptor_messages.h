/// Messages over Unix sockets that carry descriptors.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <span>
#include <vector>

#include "core/base/bytes.h"
#include "core/base/descriptor.h"

namespace muster {

inline constexpr std::size_t kMostDescriptors = 253;  // limit: of the kernel, a message

struct DescriptorMessage {
  ssize_t bytes = 0;  ///< what `recvmsg` returned; below 0: errno says why
  std::vector<Descriptor> descriptors{};
  bool cut_off = false;  ///< some were sent that are not here: this process has too many open
};

/// `flags` as of `recvmsg`. The descriptors are closed on exec.
DescriptorMessage receive_descriptors(int socket, MutableBytes into, int flags);
/// At most `kMostDescriptors`. `flags` as of `sendmsg`; no SIGPIPE. False: errno says why.
bool send_descriptors(int socket, ConstBytes bytes, std::span<const int> descriptors, int flags);

}  // namespace muster
