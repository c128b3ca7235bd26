#include "jobs/launch/workers/python.h"

#include <unistd.h>

#include <filesystem>

#include "core/security/trusted_place.h"
#include "jobs/launch/workers/worker.h"

namespace muster::launch {
namespace {

namespace fs = std::filesystem;

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

/// Empty if it cannot be executed.
std::string executable(const fs::path& program) {
  return ::access(program.c_str(), X_OK) == 0 ? program.string() : std::string();
}

/// The Python of a virtual environment; empty if `folder` is none.
std::string python_in(const fs::path& folder) {
  return is_there(folder / "pyvenv.cfg") ? executable(folder / "bin/python3") : std::string();
}

std::string variable(const Environment& environment, const char* name) {
  const auto found = environment.find(name);
  return found == environment.end() ? std::string() : found->second;
}

/// As `python_in`, for a folder that nobody has named: another user may have laid it.
std::string found_python_in(const fs::path& folder) {
  const std::string python = python_in(folder);
  const bool trusted = !python.empty() && is_trusted_place((folder / "pyvenv.cfg").string()) &&
                       is_trusted_place(python);
  return trusted ? python : std::string();
}

/// The source tree of <tree>/build/<preset>/bin/<program>; empty for any other layout.
std::string python_of_tree(const fs::path& own_program) {
  const fs::path tree = own_program.parent_path().parent_path().parent_path().parent_path();
  return is_there(tree / "tools/setup") && is_trusted_place((tree / "tools/setup").string())
             ? found_python_in(tree / ".venv")
             : std::string();
}

bool lacks(const std::string& last_words, const std::string& module) {
  const std::string said = "No module named '" + module;
  return last_words.find(said + "'") != std::string::npos ||
         last_words.find(said + ".") != std::string::npos;
}

}  // namespace

std::vector<PythonPlace> python_places(const Environment& environment,
                                       const std::string& own_program) {
  const std::string active = variable(environment, "VIRTUAL_ENV"),
                    conda = variable(environment, "CONDA_PREFIX");
  const bool chosen = !conda.empty() && variable(environment, "CONDA_DEFAULT_ENV") != "base";
  const auto on_path = find_program("python3");
  return {{"PYTHON_EXEC", variable(environment, "PYTHON_EXEC")},
          {"MUSTER_PYTHON", variable(environment, "MUSTER_PYTHON")},
          {"the virtual environment of this command",
           found_python_in(fs::path(own_program).parent_path().parent_path())},
          {"VIRTUAL_ENV", active.empty() ? std::string() : python_in(active)},
          {"CONDA_PREFIX", chosen ? executable(fs::path(conda) / "bin/python3") : std::string()},
          {".venv of the source tree around this command", python_of_tree(own_program)},
          {"python3 on PATH", on_path ? *on_path : std::string()}};
}

Result<std::string> first_python(const std::vector<PythonPlace>& places) {
  for (const PythonPlace& place : places) {
    if (!place.python.empty()) return place.python;
  }
  return Status(Code::invalid_argument,
                "there is no Python; looked at, in this order: " + describe(places) +
                    "; install python3, or say in MUSTER_PYTHON which one to take");
}

std::string describe(const std::vector<PythonPlace>& places) {
  std::string text;
  for (const PythonPlace& place : places)
    text += (text.empty() ? "" : ", ") + place.name + " (" +
            (place.python.empty() ? "none" : place.python) + ")";
  return text;
}

std::string explain_missing_module(const std::string& last_words,
                                   const std::vector<PythonPlace>& places,
                                   const std::string& own_program) {
  const auto python = first_python(places);
  const bool torch = lacks(last_words, "torch"), muster = lacks(last_words, "muster");
  if (!python || (!torch && !muster)) return {};
  std::string text = *python + " ran the program, the first of " + describe(places);
  if (torch) return text + "; say in MUSTER_PYTHON which Python has torch";
  const fs::path built = fs::path(own_program).parent_path().parent_path() / "python";
  text += "; install muster there (pip install --no-build-isolation .)";
  return is_trusted_place((built / "muster").string())
             ? text + ", or set PYTHONPATH=" + built.string()
             : text;
}

}  // namespace muster::launch
