// SPDX-License-Identifier: BSD-3-Clause
/// backends/mpi/: groups over an MPI library that is found when it is first needed.
///
/// Folder: `library.h`, what muster needs of MPI; `plugin/`, the same in terms of mpi.h, one shared
/// library per flavour; this loader; `rendezvous.h`, the job that MPI itself knows;
/// `communicator.h`. Free of torch. Tests: `ctest -R '^mpi'`.
///
/// Which library: `MUSTER_MPI_LIBRARY`; else the MPI that the process has loaded; else that of the
/// launcher (its folder, or its variables); else the first of the known names.
#pragma once

#include <cstdint>
#include <string>

#include "backends/mpi/library.h"
#include "muster/status.h"

namespace muster::mpi {

/// Loads the library and the plugin for it, once per process; does not initialise MPI.
/// Code::unsupported says what was looked for and what to install or set. Thread-safe.
Result<Library*> load();

/// The file of the loaded library; empty before `load` has succeeded.
const std::string& library_path();

/// MPI of this process, initialised.
struct MpiWorld {
  Library* library = nullptr;
  int rank = 0;
  int size = 1;
  std::int64_t last_tag = 0;
};

/// Loads and initialises, once per process. MPI is finalised when the process exits, unless the
/// program had initialised it itself or `leave_unfinalized` was called. Code::unsupported if the
/// program initialised MPI below MPI_THREAD_SERIALIZED. Thread-safe.
Result<MpiWorld> start();

/// A call of MPI may go on, here or elsewhere, that nobody can end: MPI_Finalize would wait for it
/// for ever. Thread-safe.
void leave_unfinalized();

}  // namespace muster::mpi
