// SPDX-License-Identifier: BSD-3-Clause
#include "muster/device_mesh.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <torch/types.h>

#include <mutex>
#include <set>

#include "core/group/testing/ranks.h"
#include "testing/reserved_port.h"

namespace muster {
namespace {

using testing::message_of;
using testing::on_ranks;
using Ranks = std::vector<int>;
using Names = std::vector<std::string>;

int sum_over(const Group& group, int mine) {
  auto tensor = torch::full({1}, mine, at::kInt);
  all_reduce(tensor, {.group = group});
  return tensor.item<int>();
}

// spec: D9 mesh values are ranks of the default group, mesh_dim_names is named: for [[0..3],[4..7]]
// dimension 0 reduces over (0,4)..(3,7), dimension 1 over the rows; D6 get_group by number and name
TEST(DeviceMesh, GroupsRunAlongTheDimensions) {
  on_ranks(8, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2, 4}, {.mesh_dim_names = {"dp", "tp"}});
    EXPECT_EQ(get_process_group_ranks(mesh.get_group(0)), (Ranks{rank % 4, rank % 4 + 4}));
    const int row = rank / 4 * 4;
    EXPECT_EQ(get_process_group_ranks(mesh.get_group("tp")),
              (Ranks{row, row + 1, row + 2, row + 3}));
    EXPECT_EQ(mesh.get_group("dp"), mesh.get_group(0));
    EXPECT_EQ(mesh.get_all_groups(), (std::vector<Group>{mesh.get_group(0), mesh.get_group(1)}));
    EXPECT_EQ(sum_over(mesh.get_group("dp"), 1 << rank), 0b10001 << rank % 4);
    EXPECT_EQ(sum_over(mesh.get_group("tp"), 1 << rank), 0b1111 << row);
  });
}

// spec: D6 get_local_rank, get_coordinate, size, ndim, shape, mesh
TEST(DeviceMesh, DescribesItself) {
  on_ranks(6, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {1, 2, 3}, {.mesh_dim_names = {"pp", "dp", "tp"}});
    EXPECT_EQ(mesh.device_type(), "cpu");
    EXPECT_EQ(mesh.ndim(), 3);
    EXPECT_EQ(mesh.shape(), (std::vector<std::int64_t>{1, 2, 3}));
    EXPECT_EQ(mesh.size(), 6);
    EXPECT_EQ(mesh.size(2), 3);
    EXPECT_EQ(mesh.mesh_dim_names(), (Names{"pp", "dp", "tp"}));
    EXPECT_EQ(mesh.get_rank(), rank);
    EXPECT_EQ(mesh.get_coordinate(), (Ranks{0, rank / 3, rank % 3}));
    EXPECT_EQ(mesh.get_local_rank("tp"), rank % 3);
    EXPECT_EQ(mesh.get_local_rank(1), rank / 3);
    EXPECT_SAME(mesh.mesh(), torch::arange(6, at::kInt).view({1, 2, 3}));
    EXPECT_HAS(message_of<DistError>([&] { mesh.get_group(3); }), "no dimension 3");
    EXPECT_HAS(message_of<DistError>([&] { mesh.get_group("ep"); }),
               "no dimension 'ep'; the names are ('pp', 'dp', 'tp')");
    EXPECT_HAS(message_of<DistError>([&] { mesh.get_group(); }), "which of the 3 dimensions");
  });
}

// spec: D6 a mesh on groups that are there, D5 dimensions on backends of their own
TEST(DeviceMesh, OnGroupsAndBackendsOfItsOwn) {
  on_ranks(4, [](int rank) {
    const auto made = init_device_mesh(
        "cpu", {2, 2},
        {.mesh_dim_names = {"dp", "tp"}, .backend_override = {{.backend = "tcp"}, {}}});
    EXPECT_EQ(get_backend(made.get_group("dp")), "tcp");
    EXPECT_EQ(get_process_group_ranks(made.get_group("dp")), (Ranks{rank % 2, rank % 2 + 2}));
    EXPECT_EQ(get_backend(made.get_group("tp")), "cpu:native");
    const auto again = DeviceMesh::from_groups(made.get_all_groups(), "cpu",
                                               MeshRanks({{0, 1}, {2, 3}}), {"dp", "tp"});
    EXPECT_EQ(again, made);
    EXPECT_EQ(sum_over(again.get_group("dp"), 1 << rank), 0b101 << rank % 2);
    const auto line = made.get_group("tp");
    EXPECT_EQ(DeviceMesh::from_groups({line}, "cpu").get_group(), line);
    EXPECT_HAS(message_of<DistError>([&] {
                 DeviceMesh::from_groups({line}, "cpu", MeshRanks{0, 3});
               }),
               "the group has ranks");
    EXPECT_HAS(message_of<DistError>([&] {
                 DeviceMesh::from_groups({line, line}, "cpu");
               }),
               "need mesh and mesh_dim_names");
    EXPECT_HAS(message_of<DistError>([&] {
                 DeviceMesh("cpu", {0, 1}, {.backend_override = {{}, {}}});
               }),
               "for 2 dimensions");
  });
}

// spec: D5 makes the default group when there is none; D9 init_device_mesh blocks until all have
// joined
TEST(DeviceMesh, MakesTheDefaultGroup) {
  for (const auto* name : {"MUSTER_AGENT_STORE", "TORCHELASTIC_USE_AGENT_STORE"}) ::unsetenv(name);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  ::setenv("MASTER_PORT", std::to_string(testing::reserve_port()).c_str(), 1);
  ::setenv("WORLD_SIZE", "1", 1);
  ::setenv("RANK", "0", 1);
  spawn(
      [](int) {
        EXPECT_FALSE(is_initialized());
        const auto mesh = init_device_mesh("cpu", {1});
        EXPECT_TRUE(is_initialized());
        EXPECT_EQ(mesh.get_group(), default_group());
        destroy_process_group();
      },
      {.nprocs = 1, .mode = SpawnMode::threads});
  for (const auto* name : {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"}) ::unsetenv(name);
}

// spec: D5 unique names, as many as dimensions, a product other than the world size: errors on
// every rank
TEST(DeviceMesh, WrongArgumentsAreNamed) {
  on_ranks(4, [](int) {
    EXPECT_HAS(message_of<DistError>([] {
                 init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"a", "a"}});
               }),
               "'a' twice");
    EXPECT_HAS(message_of<DistError>([] {
                 init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"a"}});
               }),
               "1 names for 2 dimensions");
    EXPECT_HAS(message_of<DistError>([] {
                 init_device_mesh("cpu", {2, 3});
               }),
               "holds 6 ranks; the default group has 4");
    EXPECT_HAS(message_of<DistError>([] { init_device_mesh("cpu", {}); }),
               "the default group has 4");
    EXPECT_HAS(message_of<DistError>([] { init_device_mesh("cpu", {-2, -2}); }), "without ranks");
    EXPECT_HAS(message_of<DistError>([] { init_device_mesh("cpu:0", {4}); }),
               "'cpu:0' is no kind of device");
    EXPECT_HAS(message_of<DistError>([] { init_device_mesh("toaster", {4}); }), "'toaster'");
    EXPECT_HAS(message_of<DistError>([] { DeviceMesh("cpu", {0, 4}); }), "rank 4");
    EXPECT_HAS(message_of<DistError>([] { DeviceMesh("cpu", {0, 1, 1}); }), "rank 1 twice");
    EXPECT_HAS(message_of<DistError>([] { DeviceMesh("cpu", {{0, 1}, {2}}); }), "one length");
    EXPECT_HAS(message_of<DistError>([] {
                 DeviceMesh("cpu", torch::ones({2, 2}));
               }),
               "whole numbers");
    barrier();
  });
}

// spec: D5 shapes that differ between ranks are an error on every rank, also where one of them fits
// the world and the other does not
TEST(DeviceMesh, DifferentShapesAreAnErrorOnEveryRank) {
  on_ranks(4, [](int rank) {
    for (const auto& other : {Ranks{4}, Ranks{3, 2}}) {
      const auto said = message_of<DistError>([&] {
        init_device_mesh("cpu", rank == 2 ? other : Ranks{2, 2});
      });
      EXPECT_HAS(said, "mesh_shape=[2, 2]");
      EXPECT_HAS(said, "rank 2 called init_device_mesh");
    }
    EXPECT_HAS(message_of<DistError>([&] {
                 DeviceMesh("cpu", rank == 1 ? MeshRanks{0, 1, 2, 3} : MeshRanks{3, 2, 1, 0});
               }),
               "[3, 2, 1, 0]");
    barrier();
  });
}

// spec: D6 from any integer array: nested lists, vectors, tensors of other types, of some of the
// ranks, in any order
TEST(DeviceMesh, OfAnyIntegerArray) {
  on_ranks(4, [](int rank) {
    const DeviceMesh nested("cpu", {{3, 1}, {2, 0}},
                            {.mesh_dim_names = {"x", "y"}, .preserve_rank_order = true});
    EXPECT_EQ(get_process_group_ranks(nested.get_group("y")),
              rank % 2 == 1 ? (Ranks{3, 1}) : (Ranks{2, 0}));
    EXPECT_EQ(nested.get_coordinate(), rank == 3   ? (Ranks{0, 0})
                                       : rank == 1 ? (Ranks{0, 1})
                                       : rank == 2 ? (Ranks{1, 0})
                                                   : (Ranks{1, 1}));
    EXPECT_EQ(nested, DeviceMesh("cpu", std::vector<Ranks>{{3, 1}, {2, 0}},
                                 {.mesh_dim_names = {"x", "y"}, .preserve_rank_order = true}));
    EXPECT_EQ(nested.get_local_rank("y"), rank == 0 || rank == 1 ? 1 : 0);
    const DeviceMesh sorted("cpu", {{3, 1}, {2, 0}}, {.mesh_dim_names = {"x", "y"}});
    EXPECT_EQ(get_process_group_ranks(sorted.get_group("y")),
              rank % 2 == 1 ? (Ranks{1, 3}) : (Ranks{0, 2}));
    EXPECT_EQ(sorted.get_local_rank("y"), rank / 2);
    EXPECT_EQ(sorted.get_coordinate(), nested.get_coordinate());
    EXPECT_FALSE(sorted == nested);
    const DeviceMesh of_tensor("cpu", torch::tensor({2, 1}, at::kShort));
    EXPECT_EQ(of_tensor.ndim(), 1);
    const bool inside = rank == 1 || rank == 2;
    EXPECT_EQ(of_tensor.get_coordinate().has_value(), inside);
    if (inside) {
      EXPECT_EQ(sum_over(of_tensor.get_group(), rank), 3);
    } else {
      EXPECT_EQ(get_rank(of_tensor.get_group()), -1);
      EXPECT_HAS(message_of<DistError>([&] { of_tensor.get_local_rank(); }), "not in the mesh");
    }
    const DeviceMesh deep("cpu", {{{0}, {1}}, {{2}, {3}}});
    EXPECT_EQ(deep.shape(), (std::vector<std::int64_t>{2, 2, 1}));
  });
}

// spec: D6 _init_process_groups=false
TEST(DeviceMesh, WithoutGroups) {
  on_ranks(2, [](int rank) {
    if (rank == 0) {
      const DeviceMesh mesh("cpu", {0, 1}, {._init_process_groups = false});
      EXPECT_EQ(mesh.get_local_rank(), 0);
      EXPECT_HAS(message_of<DistError>([&] { mesh.get_group(); }), "without groups");
    }
    barrier();
  });
}

// spec: D6 slicing by names: one, several, in another order
TEST(DeviceMesh, Slices) {
  on_ranks(8, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2, 2, 2}, {.mesh_dim_names = {"pp", "dp", "tp"}});
    const auto tp = mesh["tp"];
    EXPECT_EQ(tp.ndim(), 1);
    EXPECT_EQ(tp.get_group(), mesh.get_group("tp"));
    EXPECT_EQ(tp.get_local_rank(), rank % 2);
    EXPECT_SAME(tp.mesh(), torch::arange(2, at::kInt) + rank / 2 * 2);
    const auto both = mesh[{"dp", "tp"}];
    EXPECT_SAME(both.mesh(), (torch::arange(4, at::kInt) + rank / 4 * 4).view({2, 2}));
    EXPECT_EQ(both.mesh_dim_names(), (Names{"dp", "tp"}));
    EXPECT_EQ(both.get_group("dp"), mesh.get_group("dp"));
    EXPECT_EQ(both["dp"], mesh["dp"]);
    EXPECT_SAME(mesh.slice({"tp", "dp"}).mesh(), both.mesh().t());
    EXPECT_EQ(mesh.slice({"tp", "dp"}).get_coordinate(), (Ranks{rank % 2, rank / 2 % 2}));
    EXPECT_HAS(message_of<DistError>([&] { mesh["ep"]; }), "'ep'");
    EXPECT_HAS(message_of<DistError>([&] { mesh.slice({"tp", "tp"}); }), "twice");
    EXPECT_HAS(message_of<DistError>([&] { both["pp"]; }), "'pp'");
  });
}

// spec: D6 flattening, of the whole mesh and of slices, by name afterwards
TEST(DeviceMesh, Flattens) {
  on_ranks(8, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2, 2, 2}, {.mesh_dim_names = {"pp", "dp", "tp"}});
    const auto flat = mesh[{"pp", "tp"}].flatten();
    const int first = rank / 2 % 2 * 2;
    EXPECT_SAME(flat.mesh(), torch::tensor({first, first + 1, first + 4, first + 5}, at::kInt));
    EXPECT_EQ(get_process_group_ranks(flat.get_group()),
              (Ranks{first, first + 1, first + 4, first + 5}));
    EXPECT_EQ(sum_over(flat.get_group(), 1 << rank), 0b110011 << first);
    EXPECT_EQ(mesh["pp_tp"], flat);
    EXPECT_EQ(mesh["pp_tp"].get_group(), flat.get_group());
    const auto all = mesh.flatten("all");
    EXPECT_EQ(all.get_group(), default_group());
    EXPECT_EQ(all.mesh_dim_names(), Names{"all"});
    EXPECT_HAS(message_of<DistError>([&] { mesh.flatten("tp"); }),
               "'tp' is the name of a dimension");
    EXPECT_EQ(mesh.slice({"pp", "tp"}).flatten().get_group(), flat.get_group());
    EXPECT_HAS(message_of<DistError>([&] {
                 mesh[{"pp", "dp"}].flatten("pp_tp");
               }),
               "other flattened dimensions");
  });
}

// spec: D6 a flattened dimension is one of the mesh's: in slices beside others, get_group and
// get_local_rank by its name, flattening again
TEST(DeviceMesh, FlattenedDimensionsAreDimensions) {
  on_ranks(8, [](int rank) {
    const auto mesh =
        init_device_mesh("cpu", {2, 2, 2}, {.mesh_dim_names = {"rep", "shard", "tp"}});
    const auto dp = mesh[{"rep", "shard"}].flatten("dp");
    EXPECT_EQ(mesh.get_group("dp"), dp.get_group());
    EXPECT_EQ(mesh["tp"].get_group("dp"), dp.get_group());
    EXPECT_EQ(mesh.get_local_rank("dp"), rank / 2);
    EXPECT_EQ(dp.root(), mesh);
    const auto both = mesh[{"dp", "tp"}];
    EXPECT_SAME(both.mesh(), torch::arange(8, at::kInt).view({4, 2}));
    EXPECT_EQ(both.get_coordinate(), (Ranks{rank / 2, rank % 2}));
    EXPECT_EQ(both.get_group("dp"), dp.get_group());
    EXPECT_EQ(both.get_group("tp"), mesh.get_group("tp"));
    EXPECT_EQ(both.get_group(-1), mesh.get_group("tp"));
    EXPECT_EQ(both.flatten("all").get_group(), default_group());
    EXPECT_EQ(mesh.flattened().size(), 2U);
    EXPECT_HAS(message_of<DistError>([&] { mesh[{"dp", "rep"}]; }), "overlap");
    EXPECT_HAS(message_of<DistError>([&] { mesh["tp"]["dp"]; }), "no dimension 'dp'");
  });
}

// spec: D6 a dimension as several, and parts of one mesh as one
TEST(DeviceMesh, UnflattensAndConcatenates) {
  on_ranks(8, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {4, 2}, {.mesh_dim_names = {"dp", "tp"}});
    const auto split = mesh.unflatten("dp", {2, 2}, {"rep", "shard"});
    EXPECT_SAME(split.mesh(), torch::arange(8, at::kInt).view({2, 2, 2}));
    EXPECT_EQ(split.mesh_dim_names(), (Names{"rep", "shard", "tp"}));
    EXPECT_EQ(get_process_group_ranks(split.get_group("rep")), (Ranks{rank % 4, rank % 4 + 4}));
    EXPECT_EQ(sum_over(split.get_group("shard"), 1 << rank), 0b101 << (rank / 4 * 4 + rank % 2));
    EXPECT_EQ(split.get_group("tp"), mesh.get_group("tp"));
    const auto back = DeviceMesh::concatenate({split["rep"], split["tp"]});
    EXPECT_EQ(back, (split[{"rep", "tp"}]));
    EXPECT_EQ(back.get_all_groups(),
              (std::vector<Group>{split.get_group("rep"), split.get_group("tp")}));
    const auto strided = split[{"rep", "tp"}].flatten("strided");
    const auto cut = strided.unflatten(0, {2, 2}, {"a", "b"});
    EXPECT_EQ(cut.get_coordinate(), (Ranks{rank / 4, rank % 2}));
    EXPECT_HAS(message_of<DistError>([&] {
                 mesh.unflatten("dp", {3, 2}, {"a", "b"});
               }),
               "cannot be cut into mesh_sizes [3, 2]");
    EXPECT_HAS(message_of<DistError>([&] {
                 mesh.unflatten("dp", {2, 2}, {"a", "tp"});
               }),
               "'tp' twice");
    EXPECT_HAS(message_of<DistError>([&] {
                 DeviceMesh::concatenate({split, mesh["dp"]});
               }),
               "overlap");
    EXPECT_HAS(message_of<DistError>([&] {
                 DeviceMesh::concatenate({mesh["dp"], DeviceMesh("cpu", {7, 6, 5, 4, 3, 2, 1, 0},
                                                                 {.mesh_dim_names = {"x"}})});
               }),
               "parts of different meshes");
    barrier();
  });
}

// spec: D6 what a mesh is, as plain values and back, with the groups of this process
TEST(DeviceMesh, IsDescribedAndMadeAgain) {
  on_ranks(4, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {2, 2}, {.mesh_dim_names = {"dp", "tp"}});
    const auto all = mesh.flatten("all");
    for (const auto& each : {mesh, mesh["tp"], all}) {
      const auto again = DeviceMesh::from_description(each.describe());
      EXPECT_EQ(again, each);
      EXPECT_EQ(again.get_all_groups(), each.get_all_groups());
      EXPECT_EQ(again.get_coordinate(), each.get_coordinate());
      EXPECT_EQ(again.root()["all"], all);
    }
    auto told = mesh.describe();
    told.root.group_names[0] = told.part.group_names[0] = "none of this name";
    EXPECT_HAS(message_of<DistError>([&] { DeviceMesh::from_description(told).get_group(0); }),
               "read from a pickle");
    const auto lines = mesh.lines("tp");
    ASSERT_EQ(lines.size(), 2U);
    EXPECT_SAME(lines[1].mesh(), torch::tensor({2, 3}, at::kInt));
    EXPECT_EQ(lines[static_cast<std::size_t>(rank / 2)].get_group(), mesh.get_group("tp"));
    EXPECT_FALSE(lines[static_cast<std::size_t>(1 - rank / 2)].get_coordinate().has_value());
    EXPECT_HAS(message_of<DistError>([&] { mesh["tp"].abort(); }), "a part of another");
    barrier();
  });
}

// spec: D6 usable as a scope
TEST(DeviceMesh, IsAScope) {
  on_ranks(2, [](int) {
    const auto outer = init_device_mesh("cpu", {2});
    const auto inner = init_device_mesh("cpu", {2, 1});
    EXPECT_HAS(message_of<DistError>([] { DeviceMesh::current(); }), "scope of no mesh");
    {
      const DeviceMesh::Scope scope(outer);
      EXPECT_EQ(DeviceMesh::current(), outer);
      {
        const DeviceMesh::Scope nested(inner);
        EXPECT_EQ(DeviceMesh::current(), inner);
      }
      EXPECT_EQ(DeviceMesh::current(), outer);
    }
    EXPECT_THROW(DeviceMesh::current(), DistError);
  });
}

}  // namespace
}  // namespace muster
