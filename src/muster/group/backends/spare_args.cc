#include "muster/group/backends/spare_args.h"

namespace muster::group {
namespace {

// Args may outlive the thread's own: those of a global object, at the end of the process.
constinit thread_local bool spare_args_over = false;
struct OwnArgs : collective::Args {
  ~OwnArgs() {
    spare_args = nullptr;
    spare_args_over = true;
  }
  bool made = false;
};
thread_local OwnArgs own_args;

/// Null where they are lent.
collective::Args* find_spare_args() {
  if (spare_args != nullptr || spare_args_over) return spare_args;
  if (own_args.made) return nullptr;
  own_args.made = true;
  return spare_args = &own_args;
}

}  // namespace

void LentArgs::make() {
  args_ = find_spare_args();
  spare_args = nullptr;
  if (args_ != nullptr) return;
  own_ = std::make_unique<collective::Args>();
  args_ = own_.get();
}

SpareArgs::SpareArgs() {
  collective::Args* const spare = find_spare_args();
  if (spare == nullptr) return;
  std::swap(args_.inputs, spare->inputs);
  std::swap(args_.outputs, spare->outputs);
}

SpareArgs::~SpareArgs() {
  collective::Args* const spare = find_spare_args();
  if (spare == nullptr) return;
  args_.inputs.clear();
  args_.outputs.clear();
  if (args_.inputs.capacity() > spare->inputs.capacity()) std::swap(args_.inputs, spare->inputs);
  if (args_.outputs.capacity() > spare->outputs.capacity())
    std::swap(args_.outputs, spare->outputs);
}

}  // namespace muster::group
