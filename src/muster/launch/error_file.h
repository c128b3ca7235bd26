/// What a worker leaves in its error file: torch's `@record` writes the exception there, as JSON,
/// to the path in TORCHELASTIC_ERROR_FILE.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace muster::launch {

struct WorkerError {
  std::string message;  ///< "ValueError: no such file"
  std::string stack;    ///< lines of the traceback; may be empty
};

/// Of the text of such a file, in either form that torch has used; nothing where it is none.
std::optional<WorkerError> parse_error_file(std::string_view text);
/// Of the file, of which at most 1 MiB is read; nothing where there is none.
std::optional<WorkerError> read_error_file(const std::string& path);

}  // namespace muster::launch
