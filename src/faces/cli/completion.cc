// SPDX-License-Identifier: BSD-3-Clause
// `muster completion`: scripts that make a shell complete commands, options and values. They are
// written from the apps of the commands and do not start muster.
#include <fmt/format.h>

#include <algorithm>
#include <iostream>

#include "faces/cli/commands.h"
#include "faces/cli/tree/command_text.h"

namespace muster::cli {
namespace {

std::string joined(const std::vector<std::string>& words) {
  return fmt::format("{}", fmt::join(words, " "));
}

std::vector<std::string> names_of(const std::vector<OptionText>& options, bool only_with_value) {
  std::vector<std::string> names;
  for (const OptionText& option : options) {
    // "[FILE]": the value may be left out, so the next word is none.
    if (only_with_value && (option.value.empty() || option.value.starts_with('['))) continue;
    names.insert(names.end(), option.names.begin(), option.names.end());
  }
  return names;
}

/// The commands without what is for programs, each followed by its subcommands.
std::vector<CommandText> all_commands() {
  std::vector<CommandText> all;
  for (const CommandRow& row : command_rows()) {
    if (row.group.empty()) continue;
    all.push_back(describe(*row.make().app));
    const std::vector<CommandText> subcommands = all.back().subcommands;
    all.insert(all.end(), subcommands.begin(), subcommands.end());
  }
  return all;
}

/// The name without "muster ".
std::string path_of(const CommandText& command) { return command.name.substr(7); }

std::string first_sentence(const std::string& text) {
  return text.substr(0, std::min({text.find(". "), text.find("; "), text.find('\n')}));
}

/// For text between single quotes: each letter of `special` behind a backslash, and `quote` in the
/// place of a single quote.
std::string escaped(const std::string& text, const std::string& special, const std::string& quote) {
  std::string out;
  for (const char letter : text) {
    if (letter == '\'')
      out += quote;
    else if (special.find(letter) != std::string::npos)
      out += std::string("\\") + letter;
    else
      out += letter;
  }
  return out;
}

std::vector<std::string> names_of_subcommands(const CommandText& command) {
  std::vector<std::string> names;
  for (const CommandText& each : command.subcommands) names.push_back(short_name(each));
  return names;
}

// bash

constexpr const char* kBashHead =
    "# bash completion of muster: source it, or put it into\n"
    "# ~/.local/share/bash-completion/completions/muster\n"
    "_muster() {\n"
    "  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}\n"
    "  local command=${COMP_WORDS[1]} at=2 options= takes= words= passes=\n"
    "  COMPREPLY=()\n"
    "  # Bash makes words of their own of = and what follows it.\n"
    "  [[ $word == = ]] && word=\n"
    "  [[ $before == = ]] && before=${COMP_WORDS[COMP_CWORD-2]}\n";

constexpr const char* kBashTail =
    "  if [[ $passes ]]; then\n"
    "    while ((at < COMP_CWORD)); do\n"
    "      # What follows the program is the program's: files are completed.\n"
    "      [[ ${COMP_WORDS[at]} == -?* && ${COMP_WORDS[at]} != -- ]] || return\n"
    "      [[ \" $takes \" == *\" ${COMP_WORDS[at]} \"* ]] && ((++at))\n"
    "      [[ ${COMP_WORDS[at]} == = ]] && ((++at))\n"
    "      ((++at))\n"
    "    done\n"
    "  fi\n"
    "  if [[ $word == -* ]]; then\n"
    "    words=$options\n"
    "  elif [[ \" $takes \" == *\" $before \"* ]]; then\n"
    "    words=\n"
    "  fi\n"
    "  case \"$command $before\" in\n";

void print_bash(const std::vector<CommandText>& commands) {
  std::string top, cases, values;
  for (const CommandText& command : commands) {
    const std::string path = path_of(command);
    if (path.find(' ') == std::string::npos) top += path + " ";
    cases += "    \"" + path + "\") options='" + joined(names_of(command.options, false)) +
             "' takes='" + joined(names_of(command.options, true)) + "'";
    std::vector<std::string> words = names_of_subcommands(command);
    for (const OptionText& each : command.positionals)
      words.insert(words.end(), each.choices.begin(), each.choices.end());
    if (!words.empty()) cases += " words='" + joined(words) + "'";
    if (command.passes_on) cases += " passes=1";
    cases += " ;;\n";
    for (const OptionText& option : command.options) {
      if (option.choices.empty()) continue;
      for (const std::string& name : option.names)
        values += "    \"" + path + " " + name + "\") words='" + joined(option.choices) + "' ;;\n";
    }
  }
  std::string deeper;
  for (const CommandText& command : commands)
    if (!command.subcommands.empty())
      deeper += "  [[ $command == " + path_of(command) +
                " ]] && ((COMP_CWORD > 2)) && command+=\" ${COMP_WORDS[2]}\"\n";
  std::cout << kBashHead << "  if ((COMP_CWORD == 1)); then\n    COMPREPLY=($(compgen -W '" << top
            << "--help --version' -- \"$word\"))\n    return\n  fi\n"
            << deeper << "  case $command in\n"
            << cases << "  esac\n"
            << kBashTail << values
            << "  esac\n  COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n}\n"
               "complete -o default -F _muster muster\n";
}

// zsh

std::string for_zsh(const std::string& text) { return escaped(text, "[]\\", "'\\''"); }

/// The specifications of its names for _arguments: '--op=[operations]:value:(reduce scatter)'.
std::string zsh_option(const OptionText& option) {
  const std::string values = option.choices.empty() ? "_files" : "(" + joined(option.choices) + ")";
  std::string specification;
  for (const std::string& name : option.names) {
    const bool is_long = name.starts_with("--");
    specification += " \\\n        '" + name +
                     (option.value.empty() ? ""
                      : is_long            ? "="
                                           : "+") +
                     "[" + for_zsh(first_sentence(option.text)) + "]";
    if (!option.value.empty())
      specification += (option.value.starts_with('[') ? "::value:" : ":value:") + values;
    specification += "'";
  }
  return specification;
}

void print_zsh(const std::vector<CommandText>& commands) {
  std::string top, cases;
  for (const CommandRow& row : command_rows())
    if (!row.group.empty()) top += "      '" + row.name + ":" + for_zsh(row.summary) + "'\n";
  for (const CommandText& command : commands) {
    std::string arguments;
    for (const OptionText& option : command.options) arguments += zsh_option(option);
    if (command.passes_on) arguments += " \\\n        '(-):program:_files' '*::arguments:_normal'";
    for (const OptionText& each : command.positionals)
      arguments += " \\\n        ':" + each.names[0] + ":" +
                   (each.choices.empty() ? "_files" : "(" + joined(each.choices) + ")") + "'";
    if (!command.subcommands.empty())
      arguments += " \\\n        ':command:(" + joined(names_of_subcommands(command)) + ")'";
    cases += "    '" + path_of(command) + "')\n      _arguments -s" + arguments + " ;;\n";
  }
  std::string deeper;
  for (const CommandText& command : commands)
    if (!command.subcommands.empty())
      deeper += "  if [[ $command == " + path_of(command) +
                " ]] && (( CURRENT > 3 )); then\n    command+=\" $words[3]\"\n    shift words\n"
                "    (( CURRENT-- ))\n  fi\n";
  std::cout << "#compdef muster\n# zsh completion of muster: put it as _muster into a folder of "
               "$fpath, or source it.\n_muster() {\n  local command=$words[2]\n"
               "  if (( CURRENT == 2 )); then\n    local -a commands=(\n"
            << top << "    )\n    _describe command commands\n    return\n  fi\n"
            << deeper << "  shift words\n  (( CURRENT-- ))\n  case $command in\n"
            << cases
            << "  esac\n}\n"
               "if [[ $funcstack[1] == _muster ]]; then\n  _muster \"$@\"\nelse\n"
               "  compdef _muster muster\nfi\n";
}

// fish

std::string for_fish(const std::string& text) { return "'" + escaped(text, "\\", "\\'") + "'"; }

/// The name of a fish function that tells whether the cursor stands before the program of a command
/// that passes words on.
std::string fish_test_of(const CommandText& command) {
  return "__muster_before_program_of_" + path_of(command);
}

constexpr const char* kFishTest =
    "    set -l words (commandline -opc)\n"
    "    set -l at 3\n"
    "    while test $at -le (count $words)\n"
    "        # What follows the program is the program's.\n"
    "        string match -q -- '-?*' $words[$at]; and test $words[$at] != --; or return 1\n"
    "        contains -- $words[$at] $takes; and set at (math $at + 1)\n"
    "        set at (math $at + 1)\n"
    "    end\n"
    "end\n";

void print_fish(const std::vector<CommandText>& commands) {
  std::cout << "# fish completion of muster: put it into ~/.config/fish/completions/muster.fish\n"
               "complete -c muster -n __fish_use_subcommand -f -s h -l help\n"
               "complete -c muster -n __fish_use_subcommand -f -l version\n";
  for (const CommandRow& row : command_rows())
    if (!row.group.empty())
      std::cout << "complete -c muster -n __fish_use_subcommand -f -a " << row.name << " -d "
                << for_fish(row.summary) << "\n";
  for (const CommandText& command : commands) {
    const std::string seen = "__fish_seen_subcommand_from ", path = path_of(command);
    const std::size_t space = path.find(' ');
    std::string when = seen + path.substr(0, space);
    if (space != std::string::npos) when += "; and " + seen + path.substr(space + 1);
    if (command.passes_on) {
      std::cout << "function " << fish_test_of(command) << "\n    set -l takes "
                << joined(names_of(command.options, true)) << "\n"
                << kFishTest;
      when += "; and " + fish_test_of(command);
    }
    const std::string line = "complete -c muster -n '" + when + "'";
    if (!command.subcommands.empty()) {
      const std::string names = joined(names_of_subcommands(command));
      std::cout << "complete -c muster -n '" << when << "; and not " << seen << names << "' -f -a '"
                << names << "'\n";
    }
    for (const OptionText& each : command.positionals)
      if (!each.choices.empty()) std::cout << line << " -f -a '" << joined(each.choices) << "'\n";
    for (const OptionText& option : command.options) {
      std::cout << line;
      for (const std::string& name : option.names)
        std::cout << (name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1));
      if (!option.value.empty() && !option.value.starts_with('[')) std::cout << " -r";
      if (!option.choices.empty()) std::cout << " -f -a '" << joined(option.choices) << "'";
      std::cout << " -d " << for_fish(first_sentence(option.text)) << "\n";
    }
  }
}

}  // namespace

Command completion_command() {
  auto app = make_app("muster completion",
                      "Prints a script by which the shell completes commands, options and values.");
  app->footer(
      "bash: source <(muster completion bash), in ~/.bashrc\n"
      "zsh: source <(muster completion zsh), in ~/.zshrc after compinit\n"
      "fish: muster completion fish > ~/.config/fish/completions/muster.fish");
  auto shell = std::make_shared<std::string>();
  app->add_option("shell", *shell, "bash, zsh or fish")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  return make_command(app, [shell] {
    const auto commands = all_commands();
    if (*shell == "bash") print_bash(commands);
    if (*shell == "zsh") print_zsh(commands);
    if (*shell == "fish") print_fish(commands);
    return 0;
  });
}

}  // namespace muster::cli
