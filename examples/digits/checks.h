// SPDX-License-Identifier: BSD-3-Clause
/// The example's checks of its own run. Every rank calls each check and gets the same verdict.
#pragma once

#include <string>

#include "network.h"

struct Check {
  bool holds;
  std::string figure;  ///< a sentence with the number that was found
};

/// All ranks hold the same weights, bit for bit.
Check same_bits_everywhere(const Network& network);
/// Trains in float64, twice for 20 steps: all ranks together, and rank 0 alone on the whole
/// batches. After each step the weights must agree within 1e-5.
Check like_one_process(const Dataset& train, std::int64_t batch);
/// Rank 0 saves, all load: the weights must be what they were.
Check survives_checkpoint(Network& network);
/// At least 97 of 100 held-out images are recognised.
Check recognises(Network& network, const Dataset& held_out);
