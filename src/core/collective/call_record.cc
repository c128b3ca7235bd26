#include "core/collective/call_record.h"

#include <string>

namespace muster::collective {

void CallRecord::log_start() noexcept {
  if (logs_calls() && !group.empty()) {
    try {
      std::string line = "group " + std::string(group) + ": " + std::string(name);
      if (traced.sequence != 0) line += " #" + std::to_string(traced.sequence);
      log(LogLevel::trace, line);
    } catch (const std::bad_alloc&) {  // skip the log line
    }
  }
  if (when_started != nullptr) (*when_started)();
}

}  // namespace muster::collective
