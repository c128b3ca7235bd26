/// The collectives of a group of one: copies from inputs to outputs.
#pragma once

#include "core/collective/communicator.h"

namespace muster::collective {

/// `args`: a valid call of a group with one member.
void run_single_rank(const Args& args);

}  // namespace muster::collective
