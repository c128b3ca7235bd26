/// The folder that a checkpoint's name means.
#pragma once

#include <string>

#include "muster/status.h"

namespace muster::shards {

/// A path of this machine's file systems, without slashes at its end: "~/run" begins in the home
/// folder, "file:///run" is "/run". Refuses an empty name and names of other stores (s3://bucket).
Result<std::string> local_path(const std::string& name);

}  // namespace muster::shards
