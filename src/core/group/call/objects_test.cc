// SPDX-License-Identifier: BSD-3-Clause
#include "muster/objects.h"

#include <atomic>
#include <cereal/types/map.hpp>

#include "core/group/testing/ranks.h"
#include "testing/needs_all_wings.h"

namespace muster {
namespace {

using testing::message_of;
using testing::on_ranks;

struct Point {
  double x = 0;
  std::string label;
  bool operator==(const Point&) const = default;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(x, label);
  }
};

/// Cannot be serialised when `broken`.
struct Fragile {
  bool broken = false;
  template <class Archive>
  void save(Archive& archive) const {
    if (broken) throw std::runtime_error("this object is made of glass");
    archive(broken);
  }
  template <class Archive>
  void load(Archive& archive) {
    archive(broken);
  }
};

// spec: G1 broadcast_object_list, any type with a serialize function; G3 src defaults to 0, device
TEST(Objects, BroadcastGivesTheRootsListToAll) {
  on_ranks(3, [](int rank) {
    const std::vector<Point> wanted{{1.5, "foo"}, {12, ""}, {-3, std::string(100000, 'x')}};
    auto objects = rank == 0 ? wanted : std::vector<Point>(3);
    broadcast_object_list(objects);
    EXPECT_EQ(objects, wanted);
    std::vector<std::map<int, std::string>> maps(1);
    if (rank == 2) maps[0] = {{1, "one"}, {2, "two"}};
    broadcast_object_list(maps, {.src = 2, .device = at::kCPU});
    EXPECT_EQ(maps[0].at(2), "two");
    std::vector<std::string> none;
    broadcast_object_list(none);
    EXPECT_TRUE(none.empty());
  });
}

// spec: G1 all_gather_object, gather_object; G3 gather dst defaults to 0, the list is None or empty
// off dst
TEST(Objects, GathersObjectsOfAnySize) {
  on_ranks(4, [](int rank) {
    const auto mine = [](int of) {
      return std::string(static_cast<std::size_t>(of * of * 1000), static_cast<char>('a' + of));
    };
    std::vector<std::string> all(4, "old");
    all_gather_object(all, mine(rank));
    for (int from = 0; from < 4; ++from) EXPECT_EQ(all[from], mine(from));

    std::vector<std::string> gathered(rank == 0 ? 4 : 0, "old");
    gather_object(mine(rank), rank == 3 ? nullptr : &gathered);
    for (int from = 0; rank == 0 && from < 4; ++from) EXPECT_EQ(gathered[from], mine(from));
    EXPECT_EQ(gathered.size(), rank == 0 ? 4u : 0u);
    std::vector<int> ranks(rank == 2 ? 4 : 0);
    gather_object(rank * 11, &ranks, {.dst = 2});
    EXPECT_EQ(ranks, rank == 2 ? (std::vector<int>{0, 11, 22, 33}) : std::vector<int>{});
  });
}

// spec: G1 scatter_object_list; G3 src defaults to 0, only element 0 is written, off src the input
// may be none or any list
TEST(Objects, ScatterWritesTheFirstEntry) {
  on_ranks(3, [](int rank) {
    const std::vector<Point> parts{{0, "zero"}, {1, std::string(5000, 'y')}, {2, ""}};
    std::vector<Point> output{{-1, "old"}, {-2, "kept"}};
    scatter_object_list(output, rank == 0 ? parts : std::vector<Point>{});
    EXPECT_EQ(output[0], parts[static_cast<std::size_t>(rank)]);
    EXPECT_EQ(output[1], (Point{-2, "kept"}));
    output = {{}};
    scatter_object_list(output, rank == 1 ? parts : std::vector<Point>(7), {.src = 1});
    EXPECT_EQ(output[0], parts[static_cast<std::size_t>(rank)]);
  });
}

// spec: G1 send_object_list, recv_object_list, from a rank and from any
TEST(Objects, ListsTravelBetweenTwoRanks) {
  on_ranks(3, [](int rank) {
    std::vector<Point> list(2);
    if (rank == 0) {
      EXPECT_EQ(recv_object_list(list, {.src = 2}), 2);
      EXPECT_EQ(list[1], (Point{2, "b"}));
      std::set<int> senders;
      for (int i = 0; i < 2; ++i) senders.insert(recv_object_list(list));
      EXPECT_EQ(senders, (std::set<int>{1, 2}));
    } else {
      if (rank == 2) send_object_list(std::vector<Point>{{1, "a"}, {2, "b"}}, {.dst = 0});
      send_object_list(std::vector<Point>{{1.0 * rank, "c"}, {2, "d"}}, {.dst = 0});
    }
  });
}

// spec: G2 lists of the wrong length are errors, on every rank
TEST(Objects, ListsOfTheWrongLengthAreErrorsOnEveryRank) {
  std::atomic<int> named{0};
  on_ranks(3, [&](int rank) {
    const auto expect = [&](auto call, const char* part, const char* other) {
      const auto text = message_of<DistError>(call);
      EXPECT_HAS(text, part);
      EXPECT_HAS(text, other);
      ++named;
    };
    const auto wrong = [&](std::size_t right, std::size_t other) {
      return rank == 1 ? other : right;
    };
    std::vector<int> list(wrong(3, 4), 7);
    expect([&] { broadcast_object_list(list); }, "length 3", "length 4");
    expect([&] { all_gather_object(list, rank); }, "length 4", "must have 3");
    std::vector<int> gathered(rank == 0 ? 2 : 0, 7);
    expect([&] { gather_object(rank, &gathered); }, "length 2", "must have 3");
    std::vector<int> misplaced(rank == 1 ? 3 : 0, 7);
    expect([&] { gather_object(rank, rank == 0 ? &list : &misplaced); }, "dst alone", "3 entries");
    std::vector<int> output(wrong(1, 0), 7);
    expect([&] { scatter_object_list(output, {1, 2, 3}); }, "scatter_object_output_list", "empty");
    std::vector<int> one{7};
    expect([&] { scatter_object_list(one, {1, 2}); }, "length 2", "must have 3");
    EXPECT_EQ(one[0], 7);
    EXPECT_EQ(list, std::vector<int>(wrong(3, 4), 7));  // nothing was written
    std::vector<int> fine(3);
    all_gather_object(fine, rank);  // and the group stays usable
    EXPECT_EQ(fine, (std::vector<int>{0, 1, 2}));
  });
  EXPECT_EQ(named.load(), 18);
}

// spec: G2 lists of the wrong length between two ranks are named by the receiver
TEST(Objects, ReceiverNamesAListOfAnotherLength) {
  on_ranks(2, [](int rank) {
    if (rank == 0) {
      send_object_list(std::vector<int>{1, 2}, {.dst = 1});
      send_object_list(std::vector<std::string>{"text"}, {.dst = 1});
      send_object_list(std::vector<int>{5}, {.dst = 1});
      return;
    }
    std::vector<int> list{7};
    const auto text = message_of<DistError>([&] { recv_object_list(list, {.src = 0}); });
    EXPECT_HAS(text, "2 objects");
    EXPECT_HAS(text, "has 1");
    EXPECT_HAS(message_of<DistError>([&] { recv_object_list(list); }), "another type");
    EXPECT_EQ(list, std::vector<int>{7});
    EXPECT_EQ(recv_object_list(list), 0);  // the next message is received
    EXPECT_EQ(list, std::vector<int>{5});
  });
}

// Differing roots, types and calls, and objects that cannot be serialised, are reported on every
// rank, and the group stays usable.
TEST(Objects, DifferentCallsAreNamedOnEveryRank) {
  std::atomic<int> named{0};
  on_ranks(3, [&](int rank) {
    std::vector<int> list(3);
    std::vector<double> other(3);
    const auto expect = [&](auto call, const char* part) {
      EXPECT_HAS(message_of<DistError>(call), part);
      ++named;
    };
    expect([&] { broadcast_object_list(list, {.src = rank == 2 ? 1 : 0}); }, "root 1");
    expect([&] { rank == 0 ? all_gather_object(list, 1) : all_gather_object(other, 1.0); },
           "another type");
    expect([&] { rank == 1 ? all_gather_object(list, 1) : broadcast_object_list(list); },
           "rank 1 called all_gather_object");
    expect([&] { broadcast_object_list(list, {.src = rank == 2 ? 9 : 0}); }, "rank 9");
    std::vector<Fragile> fragile(3);
    expect([&] { all_gather_object(fragile, Fragile{rank == 1}); }, "made of glass");
    all_gather_object(list, rank);
    EXPECT_EQ(list, (std::vector<int>{0, 1, 2}));
  });
  EXPECT_EQ(named.load(), 15);
}

// spec: G2 non-members' lists stay untouched; G1 in a group, by its ranks
TEST(Objects, NonMembersListsStayUntouched) {
  on_ranks(3, [](int rank) {
    const auto group = new_group({.ranks = std::vector<int>{1, 2}});
    std::vector<int> list{40 + rank, 50 + rank};
    broadcast_object_list(list, {.src = 2, .group = group});
    EXPECT_EQ(list, rank == 0 ? (std::vector<int>{40, 50}) : (std::vector<int>{42, 52}));
    list = {-1, -1};
    all_gather_object(list, rank, {.group = group});
    EXPECT_EQ(list, rank == 0 ? (std::vector<int>{-1, -1}) : (std::vector<int>{1, 2}));
    list = {-1, -1};
    gather_object(rank, rank == 1 ? nullptr : &list, {.group = group, .group_dst = 1});
    EXPECT_EQ(list, rank == 2 ? (std::vector<int>{1, 2}) : (std::vector<int>{-1, -1}));
    list = {-1, -1};
    scatter_object_list(list, {8, 9}, {.src = 1, .group = group});
    EXPECT_EQ(list, (std::vector<int>{rank == 0 ? -1 : 7 + rank, -1}));
    if (rank == 1) send_object_list(std::vector<int>{3, 4}, {.dst = 2, .group = group});
    if (rank == 0) send_object_list(std::vector<int>{3, 4}, {.dst = 2, .group = group});
    list = {-1, -1};
    if (rank != 1) {
      EXPECT_EQ(recv_object_list(list, {.group = group}), rank == 0 ? -1 : 1);
    }
    EXPECT_EQ(list, rank == 2 ? (std::vector<int>{3, 4}) : (std::vector<int>{-1, -1}));
  });
}

// spec: G1 objects between processes, with links and with shared memory
TEST(Objects, TravelBetweenProcesses) {
  NEEDS_ALL_WINGS();
  for (const char* backend : {"native", "tcp"}) {
    const auto path =
        ::testing::TempDir() + "muster-objects-" + std::to_string(::getpid()) + "-" + backend;
    spawn(
        [&](int rank) {
          init_process_group(
              {.backend = backend, .init_method = "file://" + path, .world_size = 2, .rank = rank});
          std::vector<Point> all(2);
          all_gather_object(all, Point{1.0 * rank, std::string(300000, 'p')});
          if (all[1].x != 1.0 || all[0].label.size() != 300000)
            throw std::runtime_error("the objects came wrong");
          destroy_process_group();
        },
        {.nprocs = 2});
  }
}

// Bytes that do not decode as this type are an error, whatever sizes they claim.
TEST(Objects, BytesThatAreNoObjectAreRefused) {
  const auto bytes = group::pack_object(std::vector<std::string>{"a", "b"});
  EXPECT_EQ(group::unpack_object<std::vector<std::string>>(bytes, "call").at(1), "b");
  for (std::size_t length = 0; length < bytes.size(); ++length)
    EXPECT_THROW(group::unpack_object<std::vector<std::string>>(
                     std::string_view(bytes).substr(0, length), "call"),
                 DistError)
        << length;
  EXPECT_THROW(group::unpack_object<std::vector<std::string>>(bytes + "more", "call"), DistError);
}

}  // namespace
}  // namespace muster
