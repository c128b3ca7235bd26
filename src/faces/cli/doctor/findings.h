// SPDX-License-Identifier: BSD-3-Clause
/// What `muster doctor` finds, line by line, and its verdict.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace muster::cli {

class Findings {
 public:
  /// As JSON everything is printed by `conclude`, else each line as it comes.
  explicit Findings(bool as_json) : as_json_(as_json) {}
  void say(const std::string& what, const std::string& text) { add(what, text, true); }
  /// Something that is in the way of a job.
  void warn(const std::string& what, const std::string& text) { add(what, text, false); }
  /// As JSON, beside the lines: what they say, for programs.
  void attach(const std::string& name, nlohmann::json value) { attached_[name] = std::move(value); }
  void judge(bool good, const std::string& what, const std::string& text) { add(what, text, good); }
  /// Prints the verdict; the exit code.
  int conclude() const;

 private:
  void add(const std::string& what, const std::string& text, bool good);

  bool as_json_;
  nlohmann::json lines_ = nlohmann::json::array();
  nlohmann::json attached_ = nlohmann::json::object();
  std::vector<std::string> troubles_;
};

/// The Python that `muster run` would take, and torch and muster in it.
void look_at_programs(Findings& findings);
/// System, processor, memory and limits.
void look_at_machine(Findings& findings);

}  // namespace muster::cli
