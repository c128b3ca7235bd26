// SPDX-License-Identifier: BSD-3-Clause
/// `muster run --rdzv-conf`, and times of options.
#pragma once

#include <string>

#include "jobs/launch/options.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::cli {

/// A number of seconds; errors name the option.
Result<Duration> parse_seconds(const std::string& option, const std::string& word);

/// KEY=VALUE,...: torchrun's keys with torchrun's meaning, and ours.
Status take_rendezvous_conf(const std::string& text, launch::RunOptions& options);

}  // namespace muster::cli
