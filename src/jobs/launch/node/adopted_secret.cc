// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/node/adopted_secret.h"

#include <stdlib.h>
#include <unistd.h>

#include <string>

#include "core/base/environment.h"

namespace muster::launch {

bool has_given_secret() {
  return env_text("MUSTER_SECRET") || env_text("MUSTER_SECRET_FD") ||
         env_text("MUSTER_SECRET_FILE");
}

Status adopt_secret(const Secret& secret) {
  auto sealed = secret.sealed();
  if (!sealed) return sealed.status();
  wipe_env("MUSTER_SECRET");
  ::unsetenv("MUSTER_SECRET_FILE");
  ::unsetenv("MUSTER_INSECURE");
  // The descriptor stays open until the process ends.
  const std::string place = std::to_string(::getpid()) + ":" + std::to_string(sealed->release());
  ::setenv("MUSTER_SECRET_FD", place.c_str(), 1);
  return {};
}

}  // namespace muster::launch
