// SPDX-License-Identifier: BSD-3-Clause
// Includes all that is public, and links it.
#include <muster/checkpoint.h>
#include <muster/device_mesh.h>
#include <muster/distributed.h>
#include <muster/elastic.h>
#include <muster/key_value_store.h>
#include <muster/parallel.h>
#include <muster/pipeline.h>
#include <muster/rpc.h>
#include <muster/tensor_parallel.h>
#include <torch/nn/modules/linear.h>

int main() {
  const auto no_group = [](const auto& use) {
    try {
      use();
    } catch (const muster::DistError&) {
      return true;
    }
    return false;
  };
  torch::nn::Linear net(2, 2);
  const bool refused =
      no_group([] { muster::barrier(); }) && no_group([] { muster::rpc::get_worker_info(); }) &&
      no_group([&] { muster::DistributedDataParallel<torch::nn::Linear> model(net); }) &&
      no_group([] { muster::DeviceMesh::current(); }) &&
      no_group([] { muster::ColumnParallelLinear(2, 2); });
  const auto table = muster::gpipe_table(1, 1);
  if (!no_group([&] { muster::PipelineSchedule schedule(table, {}); })) return 1;
  muster::checkpoint::State state;
  state.add_module("net", *net);
  return refused ? 0 : 1;
}
