#include "muster/group/backends/spare_args.h"

#include <utility>

namespace muster::group {
namespace {

// Args may outlive them: those of a global object, at the end of the process.
thread_local bool spare_lists_gone = false;
struct SpareLists : collective::Args {
  ~SpareLists() { spare_lists_gone = true; }
};
thread_local SpareLists spare_lists;

}  // namespace

SpareArgs::SpareArgs() {
  if (spare_lists_gone) return;
  std::swap(args_.inputs, spare_lists.inputs);
  std::swap(args_.outputs, spare_lists.outputs);
}

SpareArgs::~SpareArgs() {
  if (spare_lists_gone) return;
  args_.inputs.clear();
  args_.outputs.clear();
  if (args_.inputs.capacity() > spare_lists.inputs.capacity()) std::swap(args_.inputs, spare_lists.inputs);
  if (args_.outputs.capacity() > spare_lists.outputs.capacity()) std::swap(args_.outputs, spare_lists.outputs);
}

}  // namespace muster::group
