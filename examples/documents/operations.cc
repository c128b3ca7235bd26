// SPDX-License-Identifier: BSD-3-Clause
#include <torch/types.h>

#include "programs.h"

namespace documents {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

Tensor number(double value) { return torch::tensor({value}, torch::kFloat32); }

Tensors zeros() {
  Tensors made;
  for (int rank = 0; rank < 4; ++rank) made.push_back(torch::zeros({1}));
  return made;
}

template <class What>
void has(int rank, const std::string& name, const What& what) {
  say("Rank  " + std::to_string(rank) + "  has " + name + "  " + text_of(what));
}

void group(int rank) {
  const auto pair = muster::new_group({{0, 1}});
  auto tensor = number(1);
  muster::all_reduce(tensor, {.op = muster::ReduceOp::SUM, .group = pair});
  has(rank, "data", tensor);
}

void send(int rank) {
  auto tensor = number(0);
  if (rank == 0) muster::send(tensor += 1, {.dst = 1});
  if (rank == 1) muster::recv(tensor, {.src = 0});
  has(rank, "data", tensor);
}

void isend(int rank) {
  auto tensor = number(0);
  muster::WorkRef request;
  if (rank == 0) {
    request = muster::isend(tensor += 1, {.dst = 1});
    say("Rank 0 started sending");
  } else if (rank == 1) {
    request = muster::irecv(tensor, {.src = 0});
    say("Rank 1 started receiving");
  }
  if (request) request->wait();
  has(rank, "data", tensor);
}

void broadcast(int rank) {
  auto tensor = number(rank == 0 ? 1 : 0);
  muster::broadcast(tensor, {.src = 0});
  has(rank, "data", tensor);
}

void reduce(int rank) {
  auto tensor = number(rank);
  muster::reduce(tensor, {.dst = 0, .op = muster::ReduceOp::SUM});
  has(rank, "data", tensor);
}

void all_reduce(int rank) {
  auto tensor = number(rank);
  muster::all_reduce(tensor, {.op = muster::ReduceOp::SUM});
  has(rank, "data", tensor);
}

void gather(int rank) {
  const auto tensor = number(rank);
  const auto list = rank == 0 ? zeros() : Tensors();
  muster::gather(tensor, {.gather_list = list, .dst = 0});
  has(rank, "data", tensor);
  has(rank, "list", list);
}

void all_gather(int rank) {
  const auto tensor = number(rank);
  const auto list = zeros();
  muster::all_gather(list, tensor);
  has(rank, "data", tensor);
  has(rank, "list", list);
}

void scatter(int rank) {
  auto tensor = number(0);
  Tensors list;
  for (int other = 0; other < 4 && rank == 0; ++other) list.push_back(number(other));
  muster::scatter(tensor, {.scatter_list = list});
  has(rank, "list", list);
  has(rank, "data", tensor);
}

void all_to_all(int rank) {
  Tensors input;
  for (int other = 0; other < 4; ++other) input.push_back(number(rank * 4 + other));
  const auto output = zeros();
  muster::all_to_all(output, input);
  has(rank, "input list", input);
  has(rank, "output list", output);
}

}  // namespace

Programs operations() {
  const std::map<std::string, void (*)(int)> all{{"group", group},     {"send", send},
                                                 {"isend", isend},     {"broadcast", broadcast},
                                                 {"reduce", reduce},   {"all_reduce", all_reduce},
                                                 {"gather", gather},   {"all_gather", all_gather},
                                                 {"scatter", scatter}, {"all_to_all", all_to_all}};
  Programs programs;
  for (const auto& [name, run] : all) programs.emplace(name, on_threads(4, run));
  return programs;
}

}  // namespace documents
