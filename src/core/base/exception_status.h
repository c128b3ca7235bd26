// SPDX-License-Identifier: BSD-3-Clause
/// A thrown exception as a Status, for the few places where the torch-free half meets exceptions.
#pragma once

#include "muster/status.h"

namespace muster {

/// Converts the exception that is being handled; call it within a catch block. Code::exhausted for
/// what the system refuses (memory, threads, descriptors), Code::internal for anything else, with
/// its text. Allocates nothing if there is no memory left. The unwinding of a thread that is being
/// ended (pthread_cancel, pthread_exit) is no exception: it goes on.
Status status_of_exception();

}  // namespace muster
