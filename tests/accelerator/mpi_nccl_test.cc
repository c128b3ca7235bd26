// SPDX-License-Identifier: BSD-3-Clause
// Groups with backends for the CPU and for a device: MPI, under each mpirun that is installed, and
// NCCL, that is the stand-in on the test device.
#include <gtest/gtest.h>

#include <string>

#include "muster/distributed.h"
#include "testing/mpirun.h"

namespace muster::testing {
namespace {

class MpiAndNccl : public ::testing::TestWithParam<Mpi> {};

void expect_right(Mpi mpi, int ranks, const std::string& arguments) {
  const auto missing = why_missing(mpi, MUSTER_CACHE);
  if (!missing.empty()) GTEST_SKIP() << missing;
  const auto ended =
      mpirun(mpi, MUSTER_CACHE, ranks, "MUSTER_PLUGINS=" MUSTER_MPI_PLUGINS " OMP_NUM_THREADS=1",
             MUSTER_MPI_NCCL_RANK + arguments);
  EXPECT_EQ(ended.code, 0) << ended.output;
  for (int rank = 0; rank < ranks; ++rank)
    EXPECT_NE(ended.output.find("right " + std::to_string(rank)), std::string::npos)
        << "rank " << rank << ":\n"
        << ended.output;
}

// spec: A7 cpu:mpi,cuda:nccl: the tensor's device picks the backend of each call, with both in
// flight; A1 get_backend; A4 A6 what nccl lacks is refused by name, and mpi has it
// spec: B13 pg_options of nccl beside mpi; B10 init after destroy with both; D1 new_group with
// both; D7 split_group with both; F13 a barrier goes to the CPU's backend; G1 objects too
TEST_P(MpiAndNccl, TheDevicePicksTheBackend) { expect_right(GetParam(), 3, ""); }

// spec: A4 A12 every operation, dtype and reduction on backend mpi, for tensors of the CPU and of
// an accelerator: the cells of docs/user/backends.md
TEST_P(MpiAndNccl, MpiHasEveryCellOfThePage) { expect_right(GetParam(), 2, " cells"); }

// spec: A4 an MPI that takes memory of CUDA devices gets a device's tensors themselves where it
// alone moves them; the other calls are staged, and every result is the same
TEST_P(MpiAndNccl, MpiGetsMemoryOfTheDevice) { expect_right(GetParam(), 2, " aware"); }

INSTANTIATE_TEST_SUITE_P(All, MpiAndNccl,
                         ::testing::Values(Mpi::openmpi, Mpi::mpich, Mpi::mpich5, Mpi::impi),
                         [](const auto& mpi) { return name_of(mpi.param); });

// spec: A7 the map of devices to backends
TEST(MpiAndNcclConfig, IsReadByDevice) {
  const auto config = BackendConfig::parse("cpu:mpi,cuda:nccl");
  EXPECT_EQ(config.for_device(at::kCPU), Backend::MPI);
  EXPECT_EQ(config.for_device(at::kCUDA), Backend::NCCL);
  EXPECT_EQ(config.text(), "cpu:mpi,cuda:nccl");
  EXPECT_EQ(config.default_timeout(), std::chrono::minutes(30)) << "nccl is not the only one";
}

}  // namespace
}  // namespace muster::testing
