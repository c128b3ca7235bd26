// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/creation/group_creation.h"

#include <utility>

#include "core/group/errors.h"
#include "core/group/group_core.h"

namespace muster::group {

void check_available(const BackendConfig& config) {
  for (const auto& [device, backend] : config.entries()) {
    if (backend.is_available()) continue;
    std::string have;
    for (const auto& name : Backend::known())
      if (Backend(name).is_available()) have += (have.empty() ? "" : ", ") + name;
    const bool is_nccl = backend == Backend::NCCL;
    throw DistBackendError(
        "backend '" + std::string(backend) + "' " + backend.why_unavailable() +
            (is_nccl ? "" : "; use 'native' for CPU tensors and 'nccl' for CUDA tensors") +
            "; this process can use " + have,
        Code::unsupported);
  }
}

Group create_group(World& scope, const std::shared_ptr<Job>& job, NewGroupRequest request,
                   CreationOptions creation) {
  auto name = scope.unique_name(name_of(*job, request.ranks));
  // Only the members know of a creation that they alone make, so they must detect a deadlock.
  auto watch =
      job->creation_deadlocks->begin(request.members_only ? job->store : nullptr,
                                     {job->rank, name + job->era, request.call, request.ranks});
  if (request.members_only) creation.terms = request.call;
  creation.give_up = [&] { return watch.poll(); };
  Group group;
  try {
    group = make_group(job, std::move(name), std::move(request.ranks), std::move(request.config),
                       request.timeout, std::move(creation));
  } catch (const DistError&) {
    const auto verdict = watch.verdict();
    if (watch.stops_default_group()) core_of(scope.world(request.call)).abort(verdict.message());
    check(verdict);
    throw;
  }
  if (group->is_member()) scope.add(group);
  return group;
}

}  // namespace muster::group
