// SPDX-License-Identifier: BSD-3-Clause
// muster run --standalone --nproc-per-node 4 hello
#include <muster/distributed.h>
#include <torch/types.h>

#include <iostream>

int main() {
  muster::init_process_group();
  auto tensor = torch::tensor({muster::get_rank() + 1});
  muster::all_reduce(tensor);
  std::cout << "rank " + std::to_string(muster::get_rank()) + ": the ranks' sum is " +
                   std::to_string(tensor.item<int>()) + "\n";
  muster::destroy_process_group();
}
