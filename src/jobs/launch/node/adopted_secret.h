// SPDX-License-Identifier: BSD-3-Clause
/// A secret that came to this process by another way than its environment.
#pragma once

#include "core/security/secret.h"
#include "muster/status.h"

namespace muster::launch {

/// Whether the user has given this process a secret, or a launcher has. It need not be readable.
bool has_given_secret();

/// Makes it the secret of this process, for as long as it lives: MUSTER_SECRET_FD names it, and
/// what the environment said of another one, or of none, is removed. Not while other threads use
/// the environment.
Status adopt_secret(const Secret& secret);

}  // namespace muster::launch
