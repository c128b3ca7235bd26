/// Words for the errors of system calls.
#pragma once

#include <string>

namespace muster {

/// Text of an errno value, thread-safe: "connection refused (ECONNREFUSED)".
std::string errno_text(int error);

}  // namespace muster
