// One call of all_reduce on 8 bytes, again and again, for instruction counters:
//
//   valgrind --tool=callgrind --toggle-collect='measured_call*' --callgrind-out-file=calls.out bin/muster_one_call RANKS [CALLS]
//   callgrind_annotate calls.out
//
// With several ranks these are threads, which valgrind runs one at a time: what waiting costs is not what it costs outside.
#include <torch/types.h>

#include <cstdlib>
#include <iostream>
#include <memory>

#include "muster/distributed.h"

[[gnu::noinline]] void measured_call(at::Tensor& tensor) { muster::all_reduce(tensor); }

int main(int count, char** words) {
  const int ranks = count > 1 ? std::atoi(words[1]) : 1;
  const int calls = count > 2 ? std::atoi(words[2]) : 1000;
  const auto store = std::make_shared<muster::HashStore>();
  muster::spawn(
      [&](int rank) {
        muster::init_process_group({.world_size = ranks, .rank = rank, .store = store});
        auto tensor = at::ones({2});
        for (int i = 0; i < 100; ++i) muster::all_reduce(tensor);
        for (int i = 0; i < calls; ++i) {
          tensor.fill_(1);
          measured_call(tensor);
        }
        muster::destroy_process_group();
      },
      {.nprocs = ranks, .mode = muster::SpawnMode::threads});
  std::cout << ranks * calls << " calls\n";
}
