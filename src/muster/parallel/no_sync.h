/// The return type of a wrapper's no_sync().
#pragma once

namespace muster::parallel {

/// While it lives, backward accumulates gradients on this rank only. `Core` has require_sync() and
/// set_require_sync(bool) and outlives it.
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
