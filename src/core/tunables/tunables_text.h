// SPDX-License-Identifier: BSD-3-Clause
/// Values of tunables as people write and read them: `40 us`, `64 KiB`, `never`. The page of all
/// tunables (`tunables_page`) is made here too.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/tunables/tunables.h"

namespace muster {

/// Empty if the text is no value of this unit, or too large for one.
std::optional<std::int64_t> value_of_text(Tunable::Unit unit, std::string_view text);
/// How a value of this unit is written, for error messages.
std::string example_of(Tunable::Unit unit);

}  // namespace muster
