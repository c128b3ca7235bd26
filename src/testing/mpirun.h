// SPDX-License-Identifier: BSD-3-Clause
/// Starting ranks by the mpirun of an MPI that is installed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "testing/shell.h"

namespace muster::testing {

/// Those that backend mpi is tested with: two of Debian, two of PyPI (`MUSTER_MPIS=ON
/// tools/setup`).
enum class Mpi : std::uint8_t { openmpi, mpich, mpich5, impi };

inline std::string name_of(Mpi mpi) {
  static constexpr const char* kNames[] = {"openmpi", "mpich", "mpich5", "impi"};
  return kNames[static_cast<int>(mpi)];
}

/// The program that starts ranks. `cache`: the source tree's .cache, where those of PyPI are.
inline std::string mpirun_of(Mpi mpi, const std::string& cache) {
  switch (mpi) {
    case Mpi::openmpi: return "/usr/bin/mpirun.openmpi";
    case Mpi::mpich: return "/usr/bin/mpirun.mpich";
    case Mpi::mpich5: return cache + "/mpich/bin/mpirun";
    case Mpi::impi: return cache + "/impi/bin/mpiexec.hydra";
  }
  return {};
}

/// Why no ranks can be started; empty if they can.
inline std::string why_missing(Mpi mpi, const std::string& cache) {
  const std::string program = mpirun_of(mpi, cache);
  std::error_code error;
  if (std::filesystem::exists(program, error)) return {};
  return program + " is not installed; MUSTER_MPIS=ON tools/setup installs it";
}

/// Runs `command` on so many ranks to its end, or kills it after 100 s. `variables`: "A=1 B=2".
inline Ended mpirun(Mpi mpi, const std::string& cache, int ranks, const std::string& variables,
                    const std::string& command) {
  std::string line = "env -u MASTER_ADDR -u RANK -u WORLD_SIZE " + variables;
  if (mpi == Mpi::impi)
    line += " I_MPI_ROOT=" + cache +
            "/impi I_MPI_HYDRA_IFACE=lo I_MPI_FABRICS=shm I_MPI_PIN=0 I_MPI_THREAD_YIELD=2";
  line += " timeout -k 5 100 " + mpirun_of(mpi, cache);
  if (mpi == Mpi::openmpi)
    line += " --allow-run-as-root --oversubscribe --bind-to none --mca mpi_yield_when_idle 1";
  return run_shell(line + " -n " + std::to_string(ranks) + " " + command);
}

}  // namespace muster::testing
