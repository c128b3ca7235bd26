// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/group_context.h"

#include <cxxabi.h>

#include "core/base/exception_status.h"
#include "core/base/time/task.h"
#include "core/collective/op.h"

namespace muster::collective {

std::string GroupContext::call_text(const transport::Fingerprint& call) const {
  return fingerprint_rules().describe(call) + ", call " + std::to_string(call.sequence) + " of " +
         here();
}

Status GroupContext::fail_by_exception(const transport::Fingerprint* call) const {
  const auto fail = [&](const Status& thrown) noexcept {
    try {
      const std::string where = call != nullptr ? call_text(*call) : here();
      channel->fail(
          Status(thrown.code(), where + " failed there: " + thrown.message(), {job_rank()}));
      return channel->failure();
    } catch (...) {
      return thrown;
    }
  };
  try {
    return fail(status_of_exception());
  } catch (const abi::__forced_unwind&) {  // the others wait for the call that this thread was in
    static_cast<void>(fail(task_detail::thread_ended()));
    throw;
  }
}

}  // namespace muster::collective
