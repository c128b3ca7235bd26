/// Which Python runs what is written in Python.
#pragma once

#include <string>
#include <vector>

#include "muster/launch/worker_environment.h"
#include "muster/status.h"

namespace muster::launch {

/// One place where a Python may be.
struct PythonPlace {
  std::string name;    ///< "MUSTER_PYTHON", "python3 on PATH"
  std::string python;  ///< empty: there is none
};

/// In the order in which they are taken: what PYTHON_EXEC says, what MUSTER_PYTHON says, the
/// virtual environment that `own_program` is installed in, the activated one (VIRTUAL_ENV, or
/// CONDA_PREFIX but for conda's "base"), the `.venv` of the source tree that `own_program` was
/// built in, and python3 on PATH. What a variable says is not looked at: a wrong path shall be an
/// error rather than another Python.
std::vector<PythonPlace> python_places(const Environment& environment,
                                       const std::string& own_program);

/// The first Python that there is. Code::invalid_argument with `describe(places)` where there is
/// none.
Result<std::string> first_python(const std::vector<PythonPlace>& places);

/// "PYTHON_EXEC (none), ..., python3 on PATH (/usr/bin/python3)".
std::string describe(const std::vector<PythonPlace>& places);

/// What to say of a program that ended with these last words because a module was missing: which
/// Python ran it, why that one, and where the module may be. Empty for other ends.
std::string explain_missing_module(const std::string& last_words,
                                   const std::vector<PythonPlace>& places,
                                   const std::string& own_program);

}  // namespace muster::launch
