/// Lists of slices that keep their memory from call to call.
#pragma once

#include "muster/collective/communicator.h"

namespace muster::group {

/// Args whose lists are this thread's last ones, emptied. Any number at once, on any thread: where another has taken them, they are new.
class SpareArgs {
 public:
  SpareArgs();
  ~SpareArgs();
  SpareArgs(SpareArgs&&) = default;
  SpareArgs& operator=(SpareArgs&&) = delete;

  collective::Args& operator*() { return args_; }
  const collective::Args& operator*() const { return args_; }
  collective::Args* operator->() { return &args_; }
  const collective::Args* operator->() const { return &args_; }

 private:
  collective::Args args_;
};

}  // namespace muster::group
