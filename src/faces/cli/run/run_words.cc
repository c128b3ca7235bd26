// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/run/run_words.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <string_view>

#include "core/base/log/log.h"
#include "faces/cli/tree/suggestion.h"
#include "jobs/launch/workers/worker_commands.h"

namespace muster::cli {
namespace {

/// Options of torchrun that muster does not have, and why.
const std::map<std::string, std::string> kRefused = {
    {"--duplicate-stdout-filters", "write the logs with --tee 1 and filter the files"},
    {"--duplicate-stderr-filters", "write the logs with --tee 2 and filter the files"},
    {"--logs-specs", "it names a class of a Python launcher; see --log-dir, --redirects and --tee"},
    {"--virtual-local-rank", "let the program choose its device by LOCAL_RANK"},
    {"--print-completion", "muster completion bash prints it"},
};

}  // namespace

std::optional<std::string> refusal_of(const std::vector<std::string>& rest) {
  if (rest.empty()) return std::nullopt;
  std::string name = rest.front().substr(0, rest.front().find('='));
  std::replace(name.begin(), name.end(), '_', '-');
  const auto refused = kRefused.find(name);
  if (refused == kRefused.end()) return std::nullopt;
  return name + " of torchrun is not supported: " + refused->second;
}

bool was_given(const CLI::App& app, const std::string& name) {
  const CLI::Option* option = app.get_option_no_throw(name);
  return option != nullptr && option->count() > 0;
}

void warn_of_misspelt_variables(const CLI::App& app) {
  constexpr std::string_view kPrefix = "PET_";
  std::vector<std::string> known = {"N_PROC_PER_NODE"};
  for (const CLI::Option* option : app.get_options({}))
    if (option->get_envname().starts_with(kPrefix))
      known.push_back(option->get_envname().substr(kPrefix.size()));
  for (const auto& [name, value] : launch::inherited_environment()) {
    if (!name.starts_with(kPrefix)) continue;
    const std::string word = name.substr(kPrefix.size());
    if (std::find(known.begin(), known.end(), word) != known.end()) continue;
    if (const std::string meant = closest_word(word, known); !meant.empty())
      log(LogLevel::warning, name + " in the environment sets no option and is ignored; did you " +
                                 "mean " + std::string(kPrefix) + meant + "?");
  }
}

std::string spellings(const std::string& names) {
  std::string result;
  std::istringstream parts(names);
  for (std::string name; std::getline(parts, name, ',');) {
    result += (result.empty() ? "" : ",") + name;
    std::string other = name;
    std::replace(other.begin() + std::min<std::ptrdiff_t>(2, std::ssize(other)), other.end(), '-',
                 '_');
    if (name.starts_with("--") && other != name) result += "," + other;
  }
  return result;
}

void replace_np(const CLI::App& app, std::vector<std::string>& words) {
  for (std::size_t at = 0; at < words.size() && words[at].starts_with("-"); ++at) {
    if (words[at] == "--") return;
    std::string& word = words[at];
    if (word == "-np" || word.starts_with("-np="))
      word = "-n" + word.substr(std::min(word.size(), std::size_t{4}));
    const CLI::Option* option = app.get_option_no_throw(words[at]);
    if (option != nullptr && option->get_items_expected_min() > 0) ++at;
  }
}

}  // namespace muster::cli
