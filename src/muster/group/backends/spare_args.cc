#include "muster/group/backends/spare_args.h"

#include <utility>

namespace muster::group {
namespace {

// Args may outlive them: those of a global object, at the end of the process. Nor are they to be had while they are lent.
constinit thread_local bool spare_lists_taken = false;
struct SpareLists : collective::Args {
  ~SpareLists() { spare_lists_taken = true; }
};
thread_local SpareLists spare_lists;

}  // namespace

LentArgs::LentArgs() {
  if (spare_lists_taken) {
    own_ = std::make_unique<collective::Args>();
    args_ = own_.get();
    return;
  }
  spare_lists_taken = true;
  args_ = &spare_lists;
  args_->dtype = DType::uint8;
  args_->reduce = collective::Reduce::sum;
  args_->factor = 1.0;
  args_->root = -1;
  args_->tag = 0;
}

LentArgs::~LentArgs() {
  if (own_) return;
  args_->inputs.clear();
  args_->outputs.clear();
  spare_lists_taken = false;
}

SpareArgs::SpareArgs() {
  if (spare_lists_taken) return;
  std::swap(args_.inputs, spare_lists.inputs);
  std::swap(args_.outputs, spare_lists.outputs);
}

SpareArgs::~SpareArgs() {
  if (spare_lists_taken) return;
  args_.inputs.clear();
  args_.outputs.clear();
  if (args_.inputs.capacity() > spare_lists.inputs.capacity()) std::swap(args_.inputs, spare_lists.inputs);
  if (args_.outputs.capacity() > spare_lists.outputs.capacity()) std::swap(args_.outputs, spare_lists.outputs);
}

}  // namespace muster::group
