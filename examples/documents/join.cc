// SPDX-License-Identifier: BSD-3-Clause
#include <muster/join.h>
#include <muster/parallel.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include "programs.h"

namespace documents {
namespace {

constexpr int kInputs = 5;

/// Rank 1 gets one more input than rank 0.
void uneven_inputs(int rank) {
  muster::DistributedDataParallel model(torch::nn::Linear(1, 1));
  int inputs = 0;
  muster::Join join({&model});
  join.run([&] {
    for (; inputs < kInputs + rank; ++inputs) model(torch::ones({1})).sum().backward();
  });
  say("Rank " + std::to_string(rank) + " has exhausted all " + std::to_string(inputs) +
      " of its inputs!");
}

}  // namespace

Programs join() { return {{"join", on_threads(2, uneven_inputs)}}; }

}  // namespace documents
