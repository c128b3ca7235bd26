// SPDX-License-Identifier: BSD-3-Clause
// A rank of the tests of backend ucc, whose variables give it a rank and a store: what the ranks of
// backend mpi's tests do, over the UCC that MUSTER_UCC_LIBRARY names.
#include "backends/carried/testing/rank_suites.h"
#include "backends/ucc/communicator.h"
#include "backends/ucc/library.h"
#include "core/rendezvous/rendezvous.h"

int main(int count, char** words) {
  using namespace muster;
  return carried::test::run({.name = "UCC",
                             .join = &store::rendezvous,
                             .create = &ucc::create,
                             .text = [] { return (*ucc::UccLibrary::of_process())->version(); },
                             .wrong_size = "sent a message of int64 of",
                             .compares_calls = true},
                            {words + 1, words + count});
}
