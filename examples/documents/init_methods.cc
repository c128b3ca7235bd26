// SPDX-License-Identifier: BSD-3-Clause
#include <cstdlib>

#include "programs.h"

namespace documents {
namespace {

void meet(const std::string& how, muster::InitProcessGroupOptions options) {
  options.backend = "gloo";
  options.world_size = 4;
  muster::init_process_group(options);
  muster::barrier();
  std::vector<int> ranks(4);
  muster::all_gather_object(ranks, muster::get_rank());
  if (muster::get_rank() == 0) say(how + ": " + text_of(ranks));
  muster::destroy_process_group();
}

/// One of four processes, which get a --rank each, the --address (host:port) of rank 0, and a
/// --file that all of them see.
void ways_to_meet(const Arguments& arguments) {
  const int rank = std::stoi(option(arguments, "rank", variable("RANK", "0")));
  const auto address = option(arguments, "address");
  const auto file = "file://" + option(arguments, "file");

  // Use address of one of the machines
  meet("tcp", {.init_method = "tcp://" + address, .rank = rank});

  // rank should always be specified
  meet("file", {.init_method = file, .rank = rank});

  const auto colon = address.rfind(':');
  setenv("MASTER_ADDR", address.substr(0, colon).c_str(), 1);
  setenv("MASTER_PORT", address.substr(colon + 1).c_str(), 1);
  meet("env", {.rank = rank});

  // Rank will be assigned automatically if unspecified
  meet("file, ranks assigned", {.init_method = file, .group_name = "jobs"});

  // or a multicast address - rank will be assigned automatically if unspecified
  if (const auto multicast = option(arguments, "multicast"); !multicast.empty())
    meet("multicast", {.init_method = "tcp://" + multicast});
}

}  // namespace

Programs init_methods() { return {{"init_methods", ways_to_meet}}; }

}  // namespace documents
