// SPDX-License-Identifier: BSD-3-Clause
/// Abstract Unix sockets: how processes of one host meet. No file system, no left-overs; reachable
/// by any user of the same network namespace, so the other side's user is checked (SO_PEERCRED) and
/// the secret proved.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "core/base/bytes.h"
#include "core/base/descriptor.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster {

/// Non-blocking and close-on-exec.
Result<Descriptor> listen_locally(const std::string& name);
/// Non-blocking. Code::refused if no socket listens under that name in this network namespace;
/// waits while its backlog is full.
Result<Descriptor> connect_locally(const std::string& name, TimePoint deadline);
/// Whether the other end is run by this process's user.
bool is_same_user(int socket);

// Messages over Unix sockets that carry descriptors.

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
