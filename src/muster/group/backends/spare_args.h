/// Lists of slices that keep their memory from call to call.
#pragma once

#include <memory>

#include "muster/collective/communicator.h"

namespace muster::group {

/// This thread's own Args, for a call that ends before its function does; new ones where they are lent already.
class LentArgs {
 public:
  LentArgs();
  ~LentArgs();
  LentArgs(const LentArgs&) = delete;
  LentArgs& operator=(const LentArgs&) = delete;

  collective::Args& operator*() const { return *args_; }
  collective::Args* operator->() const { return args_; }

 private:
  collective::Args* args_;
  std::unique_ptr<collective::Args> own_;
};

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
