#include "muster/group/calls_made.h"

#include "muster/group/backends/native.h"

namespace muster::group {

std::optional<std::uint64_t> calls_made(const ProcessGroup& group) {
  const auto& backends = group.parts().backends;
  const auto* native = backends.empty()
                           ? nullptr
                           : dynamic_cast<const NativeBackend*>(backends.front().second.get());
  if (native == nullptr) return {};
  return native->communicator()->sequence();
}

}  // namespace muster::group
