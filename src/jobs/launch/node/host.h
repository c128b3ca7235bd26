// SPDX-License-Identifier: BSD-3-Clause
/// This machine: its resources for workers, its name, and a port that is kept free for a program.
#pragma once

#include <cstdint>
#include <string>

#include "core/base/descriptor.h"
#include "muster/status.h"

namespace muster::launch {

/// Number of cores that this process may use: its affinity mask, limited by the CPU quota of its
/// control group (v2 and v1), rounded up, at least 1.
int allowed_cores();
/// Number of NVIDIA devices (/dev/nvidia0 ...), limited by CUDA_VISIBLE_DEVICES.
int gpu_count();
/// Host name, with the domain if the resolver knows one.
std::string full_host_name();
/// Whether the name means another machine on each machine: "localhost", "127.0.0.1", "::1".
bool is_loopback_name(const std::string& name);
/// The path of the running program.
std::string own_program();

/// Reserved on all addresses of this host by sockets that are bound but do not listen. The kernel
/// does not hand it out as a free port, but a server that asks for exactly this port with
/// SO_REUSEADDR gets it.
class ReservedPort {
 public:
  static Result<ReservedPort> take();
  std::uint16_t number() const { return number_; }

 private:
  Descriptor four_, six_;  // a host may have no IPv6
  std::uint16_t number_ = 0;
};

}  // namespace muster::launch
