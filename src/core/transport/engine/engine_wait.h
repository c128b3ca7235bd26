/// How threads wait in a fabric: passes while there is progress, then pauses, then sleep. Private
/// to `transport/`.
#pragma once

#include <atomic>
#include <functional>

#include "core/transport/engine/pass_loop.h"

namespace muster::transport {

class EngineWait {
 public:
  EngineWait(EngineContext& engine, PassLoop& loop) : engine_(engine), loop_(loop) {}

  /// `Fabric::wait`.
  bool wait(const std::function<bool()>& done, TimePoint deadline);
  /// `Fabric::spin_for_peer`.
  bool spin_for_peer(int rank) const;

 private:
  class Poller;
  enum class Slept : std::uint8_t {
    nothing,   ///< woken for nothing
    progress,  ///< the awaited operation has made progress
    done,
  };
  Slept sleep_until_news(TimePoint until, const std::function<bool()>& done);

  EngineContext& engine_;
  PassLoop& loop_;
  std::atomic<int> sleepers_{0};
};

}  // namespace muster::transport
