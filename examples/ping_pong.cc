// SPDX-License-Identifier: BSD-3-Clause
// muster run --standalone --nproc-per-node 2 ping_pong
#include <muster/distributed.h>
#include <torch/types.h>

#include <iostream>

int main() {
  muster::init_process_group();
  const int me = muster::get_rank();
  auto ball = torch::zeros({1}, torch::kInt64);
  for (int hit = 0; hit < 10 && me < 2; ++hit) {
    if (hit % 2 == me)
      muster::send(ball += 1, {.dst = 1 - me});
    else
      muster::recv(ball, {.src = 1 - me});
  }
  if (me < 2)
    std::cout << "rank " + std::to_string(me) + " saw the ball hit " +
                     std::to_string(ball.item<int>()) + " times\n";
  muster::destroy_process_group();
}
