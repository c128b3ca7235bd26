/// Checkpoints of sharded models in one include: saved by any number of ranks, loaded by any other.
#pragma once

#include "muster/checkpoint/checkpoint.h"
#include "muster/checkpoint/state.h"
