// SPDX-License-Identifier: BSD-3-Clause
/// Notifies the jobs of this process if it ends without closing them.
///
/// The process's jobs are the fabrics of `join_fabric`. Once there is one, the process tells all of
/// them, before it is gone, that their rank has failed and why: on `std::terminate` (whose earlier
/// handler is called afterwards) and on an exit with a status other than 0. Death by a signal, and
/// `_exit`, are seen by the others alone.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/transport/fabric.h"

namespace muster::transport {

/// Records why the process has failed, before it ends: "ValueError: bad batch (train.py:33)". The
/// first reason counts. `earlier`: the ranks whose failure led to this one, as `Fabric::fail_rank`
/// takes them. The other ranks are notified only when the process ends. Thread-safe.
void note_process_failure(std::string why, std::vector<int> earlier = {});

/// Records an exception that may end the process. It becomes the reason if the exit status is not 0
/// and no other reason was noted. The latest counts. Thread-safe.
void note_process_exception(std::string what, std::vector<int> earlier = {});

/// Records an exception that ended one of the process's threads; the process continues. If it later
/// ends with a status other than 0, the exception is given as the reason. If it just ends, the
/// ranks that need it are told. Only the first one counts. Thread-safe.
void note_process_trouble(std::string what);

/// Called when the process ends: tells all its jobs the recorded failure, else `unless_noted`; if
/// that is empty, sends nothing. Blocks for at most a second for each job. Thread-safe.
void tell_process_failure(const std::string& unless_noted = {});

/// Called when the process ends: its jobs, as they are closed, give the recorded trouble, if any.
/// Thread-safe, does not block.
void leave_process_jobs();

/// For `join_fabric`.
void follow_process_failure(const std::shared_ptr<Fabric>& fabric);

}  // namespace muster::transport
