// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/device_memory.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "core/collective/device_memory.h"
#include "core/group/call/dense_tensor.h"

namespace muster::group {
namespace {

/// Adds the slices' memory to `memory`. False unless each is one dense tensor on `device`.
template <class Bytes>
bool add_memory(const Slices& slices, c10::Device device, collective::SliceList<Bytes>& memory) {
  for (const auto& slice : slices) {
    if (slice.size() != 1) return false;
    const auto& tensor = slice.front();
    if (tensor.device() != device || !is_one_array(tensor) || !tensor.is_contiguous() ||
        tensor.is_conj() || tensor.is_neg())
      return false;
    auto* const data = static_cast<std::byte*>(const_cast<void*>(tensor.const_data_ptr()));
    memory.push_back(Bytes(data, tensor.nbytes()));
  }
  return true;
}

}  // namespace

bool use_device_memory(Call& call, const collective::Communicator& communicator) {
  if (call.device() != device_of_libraries.load() || call.is_message()) return false;
  const auto* const takes = dynamic_cast<const collective::TakesDeviceMemory*>(&communicator);
  if (takes == nullptr) return false;
  call.hold();
  if (call.staging() != nullptr) return false;
  const Slices& slices = call.inputs().empty() ? call.outputs() : call.inputs();
  if (slices.empty() || slices.front().empty()) return false;
  const auto device = slices.front().front().device();
  auto args = call.args;
  args.inputs.clear();
  args.outputs.clear();
  if (!add_memory(call.inputs(), device, args.inputs) ||
      !add_memory(call.outputs(), device, args.outputs))
    return false;
  if (!takes->takes_device_memory(args)) return false;
  call.args = std::move(args);
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.synchronizeStream(guard.getStream(device));
  return true;
}

}  // namespace muster::group
