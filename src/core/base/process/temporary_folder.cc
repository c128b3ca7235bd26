// SPDX-License-Identifier: BSD-3-Clause
#include "core/base/process/temporary_folder.h"

#include <errno.h>
#include <stdlib.h>

#include <filesystem>
#include <system_error>
#include <utility>

#include "core/base/descriptor.h"

namespace muster {

Result<std::string> make_temporary_folder(const std::string& prefix) {
  std::error_code error;
  const auto place = std::filesystem::temp_directory_path(error);
  if (error)
    return Status(Code::invalid_argument,
                  "there is no folder for temporary files (TMPDIR): " + error.message());
  std::string name = (place / (prefix + "XXXXXX")).string();
  if (::mkdtemp(name.data()) == nullptr)
    return Status(Code::invalid_argument, "cannot make " + name + ": " + errno_text(errno));
  return name;
}

TemporaryFolder::TemporaryFolder(const std::string& prefix) {
  if (auto made = make_temporary_folder(prefix)) path_ = std::move(*made);
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  if (!path_.empty() && !mark_.forked()) std::filesystem::remove_all(path_, ignored);
}

}  // namespace muster
