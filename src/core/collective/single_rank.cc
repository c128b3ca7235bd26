#include "core/collective/single_rank.h"

#include <algorithm>
#include <cstring>

#include "core/collective/kernels/kernels.h"

namespace muster::collective {

void run_single_rank(const Args& args) {
  if (args.op == Op::barrier || args.op == Op::broadcast) return;
  const ConstBytes input = args.inputs[0];
  const MutableBytes out = args.outputs[0];
  if (!info(args.op).reduces) {
    if (!input.empty() && input.data() != out.data())
      std::memcpy(out.data(), input.data(), std::min(input.size(), out.size()));
    return;
  }
  const std::size_t count = elements_in(out.size(), args.dtype);
  if (args.reduce == Reduce::premul_sum)
    return scale(out.data(), input.data(), count, args.dtype, args.factor);
  const std::byte* inputs[] = {input.data()};
  reduce_complete(out.data(), inputs, count, args.dtype, args.reduce);
}

}  // namespace muster::collective
