// SPDX-License-Identifier: BSD-3-Clause
// A rank of the tests of backend mpi: mpi_test.cc starts it by each MPI's mpirun.
#include "backends/carried/testing/rank_suites.h"
#include "backends/mpi/communicator.h"
#include "backends/mpi/loader.h"
#include "backends/mpi/rendezvous.h"

int main(int count, char** words) {
  using namespace muster;
  return carried::test::run(
      {.name = "MPI",
       .join = &mpi::rendezvous_of_world,
       .create = &mpi::create,
       .text = [] { return (*mpi::load())->version() + " in " + mpi::library_path(); }},
      {words + 1, words + count});
}
