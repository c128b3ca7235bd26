/// The collectives of a group of one: what goes from the inputs to the outputs.
#pragma once

#include "muster/collective/communicator.h"

namespace muster::collective {

/// A valid call of a group with one member.
void run_alone(const Args& args);

}  // namespace muster::collective
