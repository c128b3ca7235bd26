// SPDX-License-Identifier: BSD-3-Clause
// Loads a backend from a plugin library and uses it: use_ledger <library>.
#include <torch/types.h>

#include <cstdio>

#include "muster/distributed.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s <plugin library>\n", argv[0]);
    return 2;
  }
  muster::load_backend_plugin(argv[1]);
  muster::init_process_group({.backend = "ledger"});
  auto tensor = torch::full({3}, muster::get_rank() + 1);
  muster::all_reduce(tensor);
  if (muster::get_rank() == 0)
    std::printf("%s over %d ranks: the sum is %ld\n", muster::get_backend().c_str(),
                muster::get_world_size(), tensor[0].item<long>());
  try {
    muster::reduce(tensor, {.dst = 0});
  } catch (const muster::DistBackendError& error) {
    if (muster::get_rank() == 0) std::printf("%s\n", error.what());
  }
  muster::destroy_process_group();
  return 0;
}
