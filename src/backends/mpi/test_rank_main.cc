// A rank of the tests of backend mpi: mpi_test.cc starts it by each MPI's mpirun.
#include "backends/mpi/communicator.h"
#include "backends/mpi/loader.h"
#include "backends/mpi/rendezvous.h"
#include "backends/mpi/testing/rank_suites.h"

int main(int count, char** words) {
  using namespace muster::mpi;
  return test::run({.name = "MPI",
                    .join = &rendezvous_of_world,
                    .create = &create,
                    .text = [] { return (*load())->version() + " in " + library_path(); }},
                   {words + 1, words + count});
}
