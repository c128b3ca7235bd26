// SPDX-License-Identifier: BSD-3-Clause
/// A folder that goes away with its test.
#pragma once

#include <cstdlib>
#include <string>

#include "core/base/process/temporary_folder.h"

namespace muster::testing {

class ScratchFolder {
 public:
  ScratchFolder() {
    if (folder_.path().empty()) std::abort();
  }
  const std::string& path() const { return folder_.path(); }
  /// A path in it; nothing is made there.
  std::string file(const std::string& name) const { return path() + "/" + name; }

 private:
  const TemporaryFolder folder_{"muster-test-"};
};

}  // namespace muster::testing
