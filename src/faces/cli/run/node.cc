// SPDX-License-Identifier: BSD-3-Clause
#include <unistd.h>

#include <iostream>

#include "faces/cli/commands.h"
#include "faces/cli/parse.h"
#include "jobs/launch/hosts/node_order.h"

namespace muster::cli {
namespace {

constexpr int kCannotStart = 126;  // as for a program that cannot be executed

int run_node() {
  const auto complain = [](const Status& status) {
    std::cerr << "muster node: " << status.message() << std::endl;
    return kCannotStart;
  };
  const auto order = launch::read_node_order(STDIN_FILENO);
  if (!order) return complain(order.status());
  if (const Status taken = launch::take_order(*order); !taken) return complain(taken);
  if (const Status follows = launch::follow_launcher(); !follows) return complain(follows);
  return run_command().run(order->words);
}

}  // namespace

Command node_command() {
  return make_command(make_app("muster node", "A node of a job of muster run --hosts."), run_node);
}

}  // namespace muster::cli
