/// What no_sync() of a wrapper returns.
#pragma once

namespace muster::parallel {

/// While it lives, backward only adds gradients up on this rank. `Core` has require_sync() and
/// set_require_sync(bool), and outlives it.
template <class Core>
class NoSync {
 public:
  explicit NoSync(Core& core) : core_(core), before_(core.require_sync()) {
    core.set_require_sync(false);
  }
  ~NoSync() { core_.set_require_sync(before_); }
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  Core& core_;
  const bool before_;
};

}  // namespace muster::parallel
