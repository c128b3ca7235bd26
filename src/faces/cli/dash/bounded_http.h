// SPDX-License-Identifier: BSD-3-Clause
/// cpp-httplib's server with bounds that it lacks: for a whole request, however slowly it comes,
/// its size, the number of peers, and the headers that it reads.
#pragma once

#if MUSTER_HTTPLIB
#include <httplib.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

#include "muster/clock.h"
#include "muster/status.h"

namespace muster::cli {

/// All requests are for the pre-routing handler. One request per connection.
class BoundedHttpServer final : public httplib::Server {
 public:
  /// A peer has `limit` for its request, and may stop for as long while it takes the answer, which
  /// it has within six limits. Making the answer takes as long as it takes.
  explicit BoundedHttpServer(Duration limit);
  ~BoundedHttpServer() override;

  /// Listens on the loopback interface; returns the port. Code::invalid_argument if it is taken.
  Result<std::uint16_t> bind(std::uint16_t port);
  /// Ends `listen_after_bind` and every connection, also before the first has begun. Thread-safe.
  void end();

 private:
  class PeerThreads;

  // Called by cpp-httplib on a thread of PeerThreads.
  bool process_and_close_socket(socket_t socket) override;
  void serve(int socket);
  /// The peer that has not sent its whole request for longest is dropped, if there is one.
  void drop_oldest();
  void drop_front();  // with `lock_`
  void drop_all();

  const Duration limit_;
  std::mutex lock_;            // guards all below; no socket is closed without it
  std::list<int> unheard_{};   // whose requests are not whole, the oldest first
  std::list<int> answered_{};  // whose requests are
  bool ending_ = false;
  /// Peers wait and every thread has one. Written by PeerThreads under its lock.
  std::atomic<bool> is_full_ = false;
  int listener_ = -1;  // taken from the library by `end`; closed when nobody can accept from it
};

}  // namespace muster::cli
#endif
