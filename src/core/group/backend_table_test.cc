// SPDX-License-Identifier: BSD-3-Clause
// Every operation of every built-in backend name, and the names that are refused.
#include <memory>
#include <string>
#include <tuple>

#include "core/group/testing/ranks.h"
#include "core/group/world.h"
#include "muster/collectives.h"
#include "testing/needs_all_wings.h"

namespace muster {
namespace {

using testing::message_of;
using testing::on_ranks;

// spec: A12 nccl, mpi and ucc, which this machine lacks, are refused by name at init and in
// new_group; A6
TEST(Backends, AbsentOnesAreRefusedByName) {
  for (const auto& backend : {Backend::NCCL, Backend::MPI, Backend::UCC}) {
    if (backend.is_available()) continue;
    const auto name = std::string(backend);
    EXPECT_HAS(message_of<DistBackendError>([&] {
                 init_process_group({.backend = name,
                                     .world_size = 1,
                                     .rank = 0,
                                     .store = std::make_shared<HashStore>()});
               }),
               "'" + name + "'");
    on_ranks(1, [&](int) {
      EXPECT_HAS(message_of<DistBackendError>([&] { new_group({.backend = "cpu:" + name}); }),
                 "'" + name + "'");
    });
  }
}

// spec: A5 A9 A12 ucc without libucc is refused at init and in new_group, alone and for one device;
// the error says what to install, and what to use instead
TEST(Backends, WhatUccLacksIsSaid) {
  NEEDS_ALL_WINGS();
  if (Backend::UCC.is_available()) GTEST_SKIP() << "libucc is here";
  const auto says_what_to_use = [](const std::string& text) {
    EXPECT_HAS(text, "backend 'ucc' cannot be used: UCC's library cannot be loaded");
    EXPECT_HAS(text, "install UCC 1.9 (Debian's packages are libucc1 and libucc-dev)");
    EXPECT_HAS(text, "use 'native' for CPU tensors and 'nccl' for CUDA tensors");
    EXPECT_HAS(text, "this process can use native, gloo, tcp");
  };
  for (const char* name : {"ucc", "UCC", "cpu:ucc", "cpu:native,cuda:ucc"}) {
    says_what_to_use(message_of<DistBackendError>([&] {
      init_process_group(
          {.backend = name, .world_size = 1, .rank = 0, .store = std::make_shared<HashStore>()});
    }));
    EXPECT_FALSE(is_initialized());
    on_ranks(1, [&](int) {
      says_what_to_use(message_of<DistBackendError>([&] { new_group({.backend = name}); }));
    });
  }
}

using Cell = std::tuple<std::string, std::string>;
class BackendTable : public ::testing::TestWithParam<Cell> {};

void play(const std::string& operation, int rank) {
  const auto ones = [] { return torch::ones({4}); };
  const auto own = torch::full({4}, static_cast<float>(rank));
  auto out = torch::zeros({4});
  if (operation == "send") {
    rank == 0 ? send(torch::full({4}, 9.f), {.dst = 1}) : static_cast<void>(recv(out, {.src = 0}));
    if (rank == 1) {
      EXPECT_SAME(out, torch::full({4}, 9.f));
    }
  } else if (operation == "recv") {
    if (rank == 1) {
      send(ones(), {.dst = 0});
    } else {
      EXPECT_EQ(recv(out), 1);
      EXPECT_SAME(out, ones());
    }
  } else if (operation == "broadcast") {
    out = own.clone();
    broadcast(out, {.src = 1});
    EXPECT_SAME(out, ones());
  } else if (operation == "all_reduce") {
    out = own.clone();
    all_reduce(out);
    EXPECT_SAME(out, ones());
  } else if (operation == "reduce") {
    out = own + 1;
    reduce(out, {.dst = 0});
    if (rank == 0) {
      EXPECT_SAME(out, torch::full({4}, 3.f));
    }
  } else if (operation == "all_gather") {
    TensorList list{torch::empty({4}), torch::empty({4})};
    all_gather(list, own);
    EXPECT_SAME(list[1], ones());
  } else if (operation == "gather") {
    TensorList list;
    if (rank == 1) list = {torch::empty({4}), torch::empty({4})};
    gather(own, {.gather_list = list, .dst = 1});
    if (rank == 1) {
      EXPECT_SAME(list[0], out);
    }
  } else if (operation == "scatter") {
    TensorList list;
    if (rank == 0) list = {ones(), ones() * 2};
    scatter(out, {.scatter_list = list, .src = 0});
    EXPECT_SAME(out, ones() * (rank + 1));
  } else if (operation == "reduce_scatter") {
    reduce_scatter(out, {ones(), ones() * 2});
    EXPECT_SAME(out, ones() * 2 * (rank + 1));
  } else if (operation == "all_to_all") {
    TensorList list{torch::empty({4}), torch::empty({4})};
    all_to_all(list, {own, own + 1});
    EXPECT_SAME(list[1], ones() + rank);
  } else {
    ASSERT_EQ(operation, "barrier");
    barrier();
  }
}

// spec: A12.native one test per cell of the backend tables: every operation on CPU tensors, for
// native and its names; A2.cpu every operation on CPU tensors; A1 gloo is another name, tcp is
// without shared memory
TEST_P(BackendTable, HasTheOperationOnCpuTensors) {
  const auto& [backend, operation] = GetParam();
  on_ranks(
      2, [&operation = operation](int rank) { play(operation, rank); }, backend);
}

INSTANTIATE_TEST_SUITE_P(
    Cells, BackendTable,
    ::testing::Combine(::testing::Values("native", "gloo", "tcp"),
                       ::testing::Values("send", "recv", "broadcast", "all_reduce", "reduce",
                                         "all_gather", "gather", "scatter", "reduce_scatter",
                                         "all_to_all", "barrier")),
    [](const auto& info) { return std::get<0>(info.param) + "_" + std::get<1>(info.param); });

// spec: A12 tensors of a device that no backend of the group serves are refused by name
TEST(Backends, TensorsElsewhereAreRefusedByName) {
  on_ranks(1, [](int) {
    const auto elsewhere = torch::empty({1}, torch::TensorOptions().device(at::kMeta));
    const auto said = message_of<DistBackendError>([&] { all_reduce(elsewhere); });
    EXPECT_HAS(said, "meta");
    EXPECT_HAS(said, "all_reduce");
  });
}

}  // namespace
}  // namespace muster
