/// The descriptors of a fabric that have news: an epoll set that pollers ask without waiting and
/// the watcher sleeps on.
#pragma once

#include <cstdint>
#include <span>

#include "core/base/process/fork_guard.h"
#include "muster/status.h"

namespace muster::transport {

class ReadySet {
 public:
  static constexpr int kConnector = -1;
  struct Ready {
    int token = 0;  ///< a rank, or kConnector
    bool readable = false;
    bool writable = false;
  };

  Status open();
  /// For epoll in epoll: readable while anything in here is ready.
  int descriptor() const { return epoll_.get(); }
  bool add(int descriptor, int token);
  bool want_writable(int descriptor, int token, bool on);
  void remove(int descriptor);
  /// What is ready now; one system call.
  std::span<const Ready> poll();

 private:
  static constexpr int kMost = 64;  // limit: of one look
  GuardedDescriptor epoll_;
  Ready ready_[kMost];
};

}  // namespace muster::transport
