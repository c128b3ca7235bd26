/// A worker's error file: torch's `@record` writes an exception as JSON to the path in
/// TORCHELASTIC_ERROR_FILE.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace muster::launch {

struct WorkerError {
  std::string message;  ///< "ValueError: no such file"
  std::string stack;    ///< lines of the traceback; may be empty
};

/// Parses the text of such a file, in either form that torch has used; empty if it is invalid.
std::optional<WorkerError> parse_error_file(std::string_view text);
/// Reads and parses the file, at most 1 MiB of it; empty if it does not exist.
std::optional<WorkerError> read_error_file(const std::string& path);

}  // namespace muster::launch
