/// The one table of environment variables: every variable that muster reads, its default and what
/// it does. `muster environment` prints it, `docs/user/environment.md` is printed from it, and
/// `tools/check_environment` refuses a variable that is read without a row.
///
/// To add a variable: read it by `core/base/env.h`, write its row in `environment_table.cc`, then
/// `muster environment --markdown > docs/user/environment.md`.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace muster {

struct EnvironmentVariable {
  std::string_view name;      ///< several that belong together: "RANK, WORLD_SIZE"
  std::string_view standard;  ///< what holds if it is unset; empty: nothing
  std::string_view meaning;   ///< a sentence or two
};

struct EnvironmentSection {
  std::string_view title;
  std::span<const EnvironmentVariable> variables;
};

std::span<const EnvironmentSection> environment_sections();
/// The table as docs/user/environment.md.
std::string environment_page();

}  // namespace muster
