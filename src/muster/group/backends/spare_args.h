/// Lists of slices that keep their memory from call to call.
#pragma once

#include <memory>
#include <utility>

#include "muster/collective/communicator.h"

namespace muster::group {

/// A thread's own Args while nobody has them; null also before they are first wanted, and after the
/// thread's end.
inline constinit thread_local collective::Args* spare_args = nullptr;

/// This thread's own Args, for a call that ends before its function does; new ones where they are
/// lent already.
class LentArgs {
 public:
  LentArgs() : args_(std::exchange(spare_args, nullptr)) {
    if (args_ == nullptr) [[unlikely]]
      make();
    args_->dtype = DType::uint8;
    args_->reduce = collective::Reduce::sum;
    args_->factor = 1.0;
    args_->root = -1;
    args_->tag = 0;
  }
  ~LentArgs() {
    if (own_) return;
    args_->inputs.clear();
    args_->outputs.clear();
    args_->each = collective::Args::kUnsaid;
    spare_args = args_;
  }
  LentArgs(const LentArgs&) = delete;
  LentArgs& operator=(const LentArgs&) = delete;

  collective::Args& operator*() const { return *args_; }
  collective::Args* operator->() const { return args_; }

 private:
  void make();

  collective::Args* args_;
  std::unique_ptr<collective::Args> own_;
};

/// Args whose lists are this thread's last ones, emptied. Any number at once, on any thread: where
/// another has taken them, they are new.
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
