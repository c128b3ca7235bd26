// SPDX-License-Identifier: BSD-3-Clause
/// Scopes of a group's backends by the device of tensors.
#pragma once

#include <c10/core/DeviceType.h>

#include <memory>

#include "core/group/group_core.h"

namespace muster::group {

/// `ProcessGroupBackend::scope` of the backend for tensors on `device`; for the CPU, of the first
/// backend if there is none. Null without such a backend, and on a non-member.
inline std::shared_ptr<void> scope_on(const GroupCore& group, BackendScope kind,
                                      c10::DeviceType device) {
  if (device == c10::DeviceType::CPU)
    return kind == BackendScope::manual_progress ? group.manual_progress() : group.coalesce_sends();
  for (const auto& [type, backend] : group.parts().backends)
    if (type == device) return backend->scope(kind);
  return nullptr;
}

}  // namespace muster::group
