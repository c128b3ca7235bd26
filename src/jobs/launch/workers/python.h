/// Chooses the Python that runs Python programs.
#pragma once

#include <string>
#include <vector>

#include "jobs/launch/workers/worker_environment.h"
#include "muster/status.h"

namespace muster::launch {

/// One place where a Python may be.
struct PythonPlace {
  std::string name;    ///< "MUSTER_PYTHON", "python3 on PATH"
  std::string python;  ///< empty: there is none
};

/// In order of precedence: PYTHON_EXEC, MUSTER_PYTHON, the virtual environment in which
/// `own_program` is installed, the activated one (VIRTUAL_ENV, or CONDA_PREFIX unless it is conda's
/// "base"), the `.venv` of the source tree in which `own_program` was built, and python3 on PATH.
/// The value of a variable is not checked: a wrong path must be an error and not select another
/// Python. Places that nobody has named count only where no other user can write
/// (`core/security/trusted_place.h`).
std::vector<PythonPlace> python_places(const Environment& environment,
                                       const std::string& own_program);

/// The first Python that exists. Code::invalid_argument with `describe(places)` if there is none.
Result<std::string> first_python(const std::vector<PythonPlace>& places);

/// "PYTHON_EXEC (none), ..., python3 on PATH (/usr/bin/python3)".
std::string describe(const std::vector<PythonPlace>& places);

/// Advice for a program whose standard error ended with `tail`, if a module was missing: which
/// Python ran it, why that one, and where the module may be. Empty for other failures.
std::string explain_missing_module(const std::string& last_words,
                                   const std::vector<PythonPlace>& places,
                                   const std::string& own_program);

}  // namespace muster::launch
