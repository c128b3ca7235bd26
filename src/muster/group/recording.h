/// What the flight recorder keeps of a request.
#pragma once

#include <cstdint>
#include <vector>

#include "muster/group/request.h"
#include "muster/group/scalar_type.h"
#include "muster/trace/recorder.h"

namespace muster::group {

/// Views into `request`; `ranks` are what traces call the group's members. No allocation.
inline trace::Call call_of(const Request& request, const std::vector<int>& ranks) {
  trace::Call call;
  call.name = request.name;
  call.sequence = request.sequence;
  call.tag = request.tag;
  call.async = request.async_op;
  const int other = collective::is_message(request.op) ? request.peer : request.root;
  if (other >= 0 && other < static_cast<int>(ranks.size()))
    call.peer = ranks[static_cast<std::size_t>(other)];
  const auto bytes_of = [](const Slices& slices) {
    std::uint64_t bytes = 0;
    for (const auto& slice : slices) {
      for (const auto& tensor : slice)
        bytes +=
            static_cast<std::uint64_t>(tensor.numel()) * tensor.element_size();  // sparse ones too
    }
    return bytes;
  };
  const auto in = bytes_of(request.inputs), out = bytes_of(request.outputs);
  call.bytes = in > out ? in : out;
  for (const auto* slices : {&request.inputs, &request.outputs}) {
    if (slices->empty() || slices->front().empty()) continue;
    const auto& first = slices->front().front();
    call.dtype = static_cast<std::uint8_t>(to_dtype(first.scalar_type()));
    call.shape = {first.sizes().data(), first.sizes().size()};
    break;
  }
  return call;
}

}  // namespace muster::group
