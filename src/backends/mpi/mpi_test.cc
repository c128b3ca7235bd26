// SPDX-License-Identifier: BSD-3-Clause
// Backend mpi under each MPI that is installed: its mpirun starts muster_mpi_test_rank, whose ranks
// check themselves.
#include <gtest/gtest.h>

#include <iostream>

#include "backends/carried/call.h"
#include "testing/budget.h"
#include "testing/mpirun.h"
#include "testing/seed.h"

namespace muster::mpi {
namespace {

using carried::CarriedReduction;
using carried::carrier_of;
using carried::Element;
using testing::Mpi;

class OnMpi : public ::testing::TestWithParam<Mpi> {
 protected:
  void SetUp() override {
    if (testing::kSanitized) GTEST_SKIP() << "the MPI libraries are not instrumented";
    if (const std::string missing = testing::why_missing(GetParam(), MUSTER_CACHE);
        !missing.empty())
      GTEST_SKIP() << missing;
  }
  /// `options`: of mpirun. `killed`: a rank that does not come to its end.
  static void run(int ranks, const std::string& arguments, const std::string& options = "",
                  int killed = -1) {
    const auto ended =
        testing::mpirun(GetParam(), MUSTER_CACHE, ranks, "MUSTER_PLUGINS=" MUSTER_MPI_PLUGINS,
                        options + " " MUSTER_MPI_TEST_RANK " " + arguments);
    // After a failed group ranks leave without MPI_Finalize, which mpirun may call a failure.
    for (int rank = 0; rank < ranks; ++rank)
      if (rank != killed) {
        EXPECT_NE(ended.output.find("right " + std::to_string(rank)), std::string::npos)
            << "rank " << rank << " of mpirun's, which ended with " << ended.code << ":\n"
            << ended.output << "replay with MUSTER_TEST_SEED=" << testing::test_seed();
      }
    std::cout << ended.output;
  }
};

// spec: A4.open_mpi[openmpi] A4.mpich[mpich] A4.intel_mpi[impi] A4.abi[mpich5] every operation,
// over the MPI library found on the machine; no reduce-op silently replaced
// spec: F2 F3 F4 F5 F7 F8 F9 F11 F12 F13 on mpi: every operation, uneven and empty slices, in place
// spec: F14 every reduce op on mpi; F15 every dtype; F16 zero elements, one rank; F19 PREMUL_SUM,
// AVG
TEST_P(OnMpi, EveryCellMatchesTheDirectComputation) {
  const double budget = testing::test_budget(1.5, 60).count();
  for (const int ranks : {1, 2, 3, 5}) run(ranks, "suite " + std::to_string(budget));
}

// spec: A4 messages; E1 order of one tag; E2 from any rank; E4 a wrong size or dtype is named
TEST_P(OnMpi, MessagesCome) { run(3, "messages"); }

// spec: A4 started calls, groups of some ranks, several threads; D3 on mpi
TEST_P(OnMpi, CallsEndInOrder) { run(3, "calls"); }

// spec: F18 on mpi at DETAIL, and where members wait in different calls; a skipped call at close
// spec: A4.deadline a deadline fails the group by name, and another group goes on
TEST_P(OnMpi, FailuresAreNamed) { run(3, "failures"); }

// spec: F18 on mpi, sums of several MiB that do not match in size or operation: every rank is told,
// and nothing is written beside the tensors or after their end
TEST_P(OnMpi, LargeSumsThatDoNotMatchAreNamed) { run(3, "mismatches"); }

// Other launchers may end all ranks with one.
class OnOpenMpi : public OnMpi {};

// spec: A4 kill -9 of a rank: the others name it before the deadline, and live, in sums made of
// messages (3 ranks) and in MPI's own (5)
TEST_P(OnOpenMpi, AKilledRankIsNamed) {
  for (const int ranks : {3, 5}) run(ranks, "killed", "--enable-recovery", 1);
}

INSTANTIATE_TEST_SUITE_P(All, OnMpi,
                         ::testing::Values(Mpi::openmpi, Mpi::mpich, Mpi::mpich5, Mpi::impi),
                         [](const auto& mpi) { return testing::name_of(mpi.param); });

INSTANTIATE_TEST_SUITE_P(All, OnOpenMpi, ::testing::Values(Mpi::openmpi),
                         [](const auto& mpi) { return testing::name_of(mpi.param); });

TEST(Carriers, ReductionsGoByTypesThatMpiHas) {
  EXPECT_TRUE(carrier_of(DType::bfloat16, collective::Reduce::sum).widens);
  EXPECT_EQ(carrier_of(DType::complex64, collective::Reduce::sum).per_element, 2);
  EXPECT_EQ(carrier_of(DType::boolean, collective::Reduce::avg).op, CarriedReduction::band);
  EXPECT_EQ(carrier_of(DType::boolean, collective::Reduce::sum).op, CarriedReduction::bor);
  EXPECT_EQ(carrier_of(DType::raw16).element, Element::uint16);
  EXPECT_EQ(carrier_of(DType::complex128).per_element, 2);
}

}  // namespace
}  // namespace muster::mpi
