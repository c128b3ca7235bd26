// SPDX-License-Identifier: BSD-3-Clause
// One call on 8 bytes for each rank, again and again, for instruction counters; OP is all_reduce
// (if nothing is said), broadcast, gather, scatter, all_to_all or ping_pong (a message from rank 0
// to rank 1 and back), BACKEND native or tcp:
//
//   valgrind --tool=callgrind --toggle-collect='measured_call*' bin/muster_one_call RANKS [CALLS]
//       [OP] [BACKEND]
//
//   callgrind_annotate callgrind.out.*
//
// With several ranks these are threads, which valgrind runs one at a time: what waiting costs is
// not what it costs outside.
#include <torch/types.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/distributed.h"

struct Tensors {
  at::Tensor mine;
  muster::BroadcastOptions broadcast{.src = 0};
  muster::GatherOptions gather;
  muster::ScatterOptions scatter;
  std::vector<at::Tensor> from, to;

  Tensors(int rank, int ranks) : mine(at::ones({2})) {
    for (int i = 0; i < ranks; ++i) {
      from.push_back(at::ones({2}));
      to.push_back(at::empty({2}));
    }
    if (rank == 0) {
      gather.gather_list = to;
      scatter.scatter_list = from;
    }
  }
};

[[gnu::noinline]] void measured_call_of_all_reduce(Tensors& with) { muster::all_reduce(with.mine); }
[[gnu::noinline]] void measured_call_of_broadcast(Tensors& with) {
  muster::broadcast(with.mine, with.broadcast);
}
[[gnu::noinline]] void measured_call_of_gather(Tensors& with) {
  muster::gather(with.mine, with.gather);
}
[[gnu::noinline]] void measured_call_of_scatter(Tensors& with) {
  muster::scatter(with.mine, with.scatter);
}
[[gnu::noinline]] void measured_call_of_all_to_all(Tensors& with) {
  muster::all_to_all(with.to, with.from);
}
[[gnu::noinline]] void measured_call_of_ping_pong(Tensors& with) {
  const int rank = muster::get_rank();
  if (rank == 0) muster::send(with.mine, {.dst = 1});
  if (rank < 2) muster::recv(with.mine, {.src = 1 - rank});
  if (rank == 1) muster::send(with.mine, {.dst = 0});
}

constexpr std::pair<std::string_view, void (*)(Tensors&)> kCalls[] = {
    {"all_reduce", measured_call_of_all_reduce}, {"broadcast", measured_call_of_broadcast},
    {"gather", measured_call_of_gather},         {"scatter", measured_call_of_scatter},
    {"all_to_all", measured_call_of_all_to_all}, {"ping_pong", measured_call_of_ping_pong}};

int main(int count, char** words) {
  const int ranks = count > 1 ? std::atoi(words[1]) : 1;
  const int calls = count > 2 ? std::atoi(words[2]) : 1000;
  const std::string_view op = count > 3 ? words[3] : "all_reduce";
  const std::string backend = count > 4 ? words[4] : "native";
  const auto* const known = std::find_if(std::begin(kCalls), std::end(kCalls),
                                         [&](const auto& call) { return call.first == op; });
  if (known == std::end(kCalls)) {
    std::cerr << "one_call: no operation " << op << '\n';
    return 2;
  }
  const auto store = std::make_shared<muster::HashStore>();
  muster::spawn(
      [&](int rank) {
        muster::init_process_group(
            {.backend = backend, .world_size = ranks, .rank = rank, .store = store});
        Tensors tensors(rank, ranks);
        for (int i = 0; i < calls + 100; ++i) {
          tensors.mine.fill_(1);
          known->second(tensors);
        }
        muster::destroy_process_group();
      },
      {.nprocs = ranks, .mode = muster::SpawnMode::threads});
  std::cout << ranks * (calls + 100) << " calls\n";
}
