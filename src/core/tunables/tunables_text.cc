// SPDX-License-Identifier: BSD-3-Clause
#include "core/tunables/tunables_text.h"

#include <utility>

#include "core/tunables/tuning_file.h"

namespace muster {
namespace {

constexpr std::pair<std::string_view, std::int64_t> kTimeUnits[] = {
    {"s", 1000 * 1000 * 1000}, {"ms", 1000 * 1000}, {"us", 1000}, {"ns", 1}};

std::optional<std::int64_t> time_of_text(std::string_view text) {
  const std::size_t unit = text.find_first_not_of("0123456789");
  if (unit == std::string_view::npos) return std::nullopt;
  const auto number = number_of_text(text.substr(0, unit));
  for (const auto& [name, nanoseconds] : kTimeUnits) {
    if (trimmed(text.substr(unit)) != name) continue;
    if (!number || *number > static_cast<std::uint64_t>(INT64_MAX / nanoseconds))
      return std::nullopt;
    return static_cast<std::int64_t>(*number) * nanoseconds;
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::int64_t> value_of_text(Tunable::Unit unit, std::string_view text) {
  if (unit == Tunable::Unit::time) return time_of_text(text);
  if (unit == Tunable::Unit::bytes && text == "never") return Tunable::kNever;
  const auto value = unit == Tunable::Unit::bytes ? size_of_text(text) : number_of_text(text);
  if (!value || *value > std::uint64_t{1} << 40) return std::nullopt;
  return static_cast<std::int64_t>(*value);
}

std::string example_of(Tunable::Unit unit) {
  if (unit == Tunable::Unit::time) return "a time, as in 40 us or 1 ms";
  return unit == Tunable::Unit::bytes ? "a size, as in 65536, 64 KiB or never"
                                      : "a whole number, as in 8";
}

std::string text_of(const Tunable& row, std::int64_t value) {
  if (row.unit == Tunable::Unit::count) return std::to_string(value);
  if (row.unit == Tunable::Unit::bytes)
    return value == Tunable::kNever ? "never" : text_of_size(static_cast<std::uint64_t>(value));
  for (const auto& [name, nanoseconds] : kTimeUnits)
    if (value % nanoseconds == 0)
      return std::to_string(value / nanoseconds) + " " + std::string(name);
  return "";
}

std::string tunables_page() {
  std::string page =
      "# Tunables\n\n"
      "Every performance number of muster, printed by `muster tunables --markdown`. Override one "
      "by\n`MUSTER_TUNE=\"link_spin=20us,small_call=64 KiB\"` or by a line `link_spin = 20 us` of "
      "the\n[tuning file](performance.md#tuning-file), on all ranks alike; read when the "
      "process starts. `muster tunables`\nprints the values in force.\n\n"
      "Scope: *local* numbers concern one rank. For *agreed* numbers the first member's value "
      "counts "
      "for a\ngroup. *Fixed* numbers are part of a layout or of what members send each other, and "
      "cannot be\noverridden.\n\n"
      "| name | default | scope | what it decides | measured by |\n| --- | --- | --- | --- | --- "
      "|\n";
  for (const Tunable& row : tunable_rows()) {
    std::string value = text_of(row, row.value);
    if (row.amd != Tunable::kSame) value += "; AMD: " + text_of(row, row.amd);
    if (row.arm != Tunable::kSame) value += "; Arm: " + text_of(row, row.arm);
    if (row.oversubscribed != Tunable::kSame)
      value += "; shared cores: " + text_of(row, row.oversubscribed);
    constexpr std::string_view kScopes[] = {"local", "agreed", "fixed"};
    page += "| " + std::string(row.name) + " | " + value + " | " +
            std::string(kScopes[static_cast<int>(row.scope)]) + " | " + std::string(row.reason) +
            " | `" + std::string(row.bench) + "` |\n";
  }
  return page;
}

}  // namespace muster
