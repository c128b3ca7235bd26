// SPDX-License-Identifier: BSD-3-Clause
#include "core/tunables/tuning_file.h"

#include <charconv>
#include <fstream>
#include <sstream>
#include <utility>

#include "core/base/environment.h"

namespace muster {

std::string tuning_path() {
  if (const auto given = env_text("MUSTER_TUNING")) return *given == "off" ? "" : *given;
  if (const auto settings = env_text("XDG_CONFIG_HOME")) return *settings + "/muster/tuning";
  if (const auto home = env_text("HOME")) return *home + "/.config/muster/tuning";
  return "";
}

Result<std::optional<std::string>> read_tuning_file() {
  const std::string path = tuning_path();
  if (path.empty()) return std::optional<std::string>();
  std::ifstream file(path);
  if (file) {
    std::ostringstream text;
    text << file.rdbuf();
    return std::optional<std::string>(text.str());
  }
  if (!env_text("MUSTER_TUNING")) return std::optional<std::string>();
  return Status(Code::invalid_argument,
                "MUSTER_TUNING names " + path +
                    ", which cannot be read; write it with muster bench --tune, or unset "
                    "the variable");
}

Status wrong_tuning_line(const std::string& name, int line, const std::string& what) {
  return Status(Code::invalid_argument,
                name + ", line " + std::to_string(line) + ": " + what +
                    "; mend the line, or remove the file and let muster bench --tune write it "
                    "anew");
}

Result<std::vector<TuningLine>> tuning_lines(std::string_view text, const std::string& name) {
  std::vector<TuningLine> lines;
  int number = 0;
  bool versioned = false;
  const auto quoted = [](std::string_view word) { return "\"" + std::string(word) + "\""; };
  for (const std::string_view whole : parts_of(text, '\n')) {
    ++number;
    const auto line = trimmed(whole.substr(0, whole.find('#')));
    if (line.empty()) continue;
    const std::size_t sign = line.find('=');
    const auto key = trimmed(line.substr(0, sign));
    const auto value =
        sign == std::string_view::npos ? std::string_view() : trimmed(line.substr(sign + 1));
    if (key.empty() || value.empty() || key.ends_with('<'))
      return wrong_tuning_line(name, number, quoted(line) + " is not KEY = VALUE");
    if (key == "version") {
      if (value != std::to_string(kTuningVersion)) {
        return wrong_tuning_line(name, number,
                                 "version " + std::string(value) +
                                     " of the file is not known; this muster reads version " +
                                     std::to_string(kTuningVersion));
      }
      versioned = true;
      continue;
    }
    if (!versioned)
      return wrong_tuning_line(name, number,
                               "the first line that is no comment should be \"version = " +
                                   std::to_string(kTuningVersion) + "\"");
    lines.push_back({number, key, value});
  }
  return lines;
}

std::string_view trimmed(std::string_view text) {
  const auto begin = text.find_first_not_of(" \t\r");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

std::vector<std::string_view> parts_of(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (std::size_t begin = 0;;) {
    const std::size_t end = text.find(separator, begin);
    parts.push_back(trimmed(text.substr(begin, end == std::string_view::npos ? end : end - begin)));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

std::optional<std::uint64_t> number_of_text(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty()) return std::nullopt;
  return value;
}

std::optional<std::uint64_t> size_of_text(std::string_view text) {
  for (const auto& [unit, shift] : {std::pair<std::string_view, int>{"KiB", 10}, {"MiB", 20}}) {
    if (!text.ends_with(unit)) continue;
    const auto value = number_of_text(trimmed(text.substr(0, text.size() - unit.size())));
    if (!value || *value > UINT64_MAX >> (shift + 1)) return std::nullopt;
    return *value << shift;
  }
  return number_of_text(text);
}

std::string text_of_size(std::uint64_t bytes) {
  if (bytes != 0 && bytes % (1u << 20) == 0) return std::to_string(bytes >> 20) + " MiB";
  if (bytes != 0 && bytes % 1024 == 0) return std::to_string(bytes >> 10) + " KiB";
  return std::to_string(bytes);
}

}  // namespace muster
