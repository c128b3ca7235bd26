// SPDX-License-Identifier: BSD-3-Clause
#include "lab/bench/programs.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>

#include "core/base/descriptor.h"
#include "core/base/environment.h"
#include "core/base/process/shell_word.h"
#include "core/security/own_files.h"
#include "jobs/launch/node/host.h"
#include "jobs/launch/workers/worker_commands.h"

namespace muster::lab {
namespace {

namespace fs = std::filesystem;

fs::path own_folder() { return fs::path(launch::own_program()).parent_path(); }

bool has_torch(const std::string& python) {
  const std::string look =
      "import importlib.util, sys; sys.exit(importlib.util.find_spec(\"torch\") is None)";
  return run_program({python, "-c", look}, Complaints::kept).ok();
}

}  // namespace

Result<std::string> bench_file(const std::string& name) {
  std::vector<fs::path> folders;
  if (const auto given = env_text("MUSTER_BENCH_DIR")) folders.emplace_back(*given);
  folders.emplace_back(MUSTER_BENCH_SOURCES);
  for (const fs::path& folder : folders) {
    std::error_code error;
    if (fs::exists(folder / name, error)) return (folder / name).string();
  }
  return Status(
      Code::invalid_argument,
      name + " is not in " MUSTER_BENCH_SOURCES
             "; say in MUSTER_BENCH_DIR where it is (it stands in bench/ of muster's sources)");
}

Result<std::string> find_python(const std::string& given) {
  const std::string said = given.empty() ? env_text("MUSTER_PYTHON").value_or("") : given;
  std::vector<launch::PythonPlace> places{{"as said", said}};
  if (said.empty())
    places = launch::python_places(launch::inherited_environment(), launch::own_program());
  std::string tried;
  for (const auto& [place, python] : places) {
    if (python.empty()) continue;
    if (has_torch(python)) return python;
    tried += (tried.empty() ? "" : ", ") + python;
  }
  return Status(Code::invalid_argument,
                "no Python with torch was found (tried " + tried +
                    "); pip install torch, or say in MUSTER_PYTHON which Python has it");
}

std::vector<std::pair<std::string, std::string>> variables_to_import_muster(
    const std::string& package) {
  const fs::path folder =
      package.empty() ? own_folder().parent_path() / "python" : fs::path(package);
  if (package.empty() && !is_trusted_place((folder / "muster").string())) return {};
  const auto others = env_text("PYTHONPATH");
  return {{"PYTHONPATH", folder.string() + (others ? ":" + *others : "")}};
}

Result<std::string> run_program(const std::vector<std::string>& words, Complaints complaints,
                                const std::vector<std::pair<std::string, std::string>>& variables) {
  std::string command = variables.empty() ? "" : "env ";
  for (const auto& [name, value] : variables) command += shell_word(name + "=" + value) + " ";
  for (const std::string& word : words) command += shell_word(word) + " ";
  FILE* pipe = ::popen((command + (complaints == Complaints::kept ? "2>&1" : "")).c_str(), "re");
  if (pipe == nullptr)
    return Status(Code::exhausted, "cannot run " + command + ": " + errno_text(errno));
  std::string said;
  char bytes[4096];
  while (const std::size_t n = std::fread(bytes, 1, sizeof bytes, pipe)) said.append(bytes, n);
  if (::pclose(pipe) != 0)
    return Status(Code::invalid_argument, command + "failed" + (said.empty() ? "" : ": " + said));
  return said;
}

}  // namespace muster::lab
