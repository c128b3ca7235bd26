// SPDX-License-Identifier: BSD-3-Clause
#include "muster/point_to_point.h"

#include <ATen/core/ivalue.h>

#include "core/group/backends/native.h"
#include "core/group/group_core.h"
#include "core/group/testing/ranks.h"

namespace muster {
namespace {

using testing::message_of;
using testing::on_ranks;
using testing::values;

// spec: E1.order send and recv, order of one tag between two ranks
TEST(PointToPoint, MessagesOfOneTagKeepTheirOrder) {
  on_ranks(2, [](int rank) {
    for (int i = 0; i < 50; ++i) {
      auto tensor = torch::full({i + 1}, rank == 0 ? i : -1, torch::kInt64);
      if (rank == 0) {
        send(tensor, {.dst = 1});
      } else {
        EXPECT_EQ(recv(tensor, {.src = 0}), 0);
        EXPECT_SAME(tensor, torch::full({i + 1}, i, torch::kInt64));
      }
    }
  });
}

// spec: E1.tags isend and irecv, different tags may overtake
TEST(PointToPoint, TagsOvertakeEachOther) {
  on_ranks(2, [](int rank) {
    if (rank == 0) {
      auto first = isend(torch::full({3}, 1), {.dst = 1, .tag = 10});
      auto second = isend(torch::full({3}, 2), {.dst = 1, .tag = 20});
      EXPECT_TRUE(first->wait());
      EXPECT_TRUE(second->wait());
    } else {
      auto tensor = torch::zeros({3}, torch::kInt64);
      auto other = torch::zeros({3}, torch::kInt64);
      recv(tensor, {.src = 0, .tag = 20});
      auto work = irecv(other, {.src = 0, .tag = 10});
      EXPECT_TRUE(work->wait());
      EXPECT_EQ(tensor[0].item<int>(), 2);
      EXPECT_EQ(other[0].item<int>(), 1);
    }
  });
}

// spec: E1.self peer is self, tag, E7 keywords
TEST(PointToPoint, WrongArgumentsAreNamed) {
  on_ranks(2, [](int rank) {
    const auto tensor = torch::zeros({1});
    EXPECT_HAS(message_of<DistError>([&] { send(tensor, {.dst = rank}); }), "this process itself");
    EXPECT_HAS(message_of<DistError>([&] { recv(tensor, {.src = rank}); }), "this process itself");
    EXPECT_HAS(message_of<DistError>([&] { isend(tensor, {.dst = rank}); }), "this process itself");
    EXPECT_HAS(message_of<DistError>([&] { irecv(tensor, {.src = rank}); }), "this process itself");
    EXPECT_HAS(message_of<DistError>([&] { send(tensor, {.dst = 2}); }), "rank 2");
    EXPECT_HAS(message_of<DistError>([&] { send(tensor, {}); }), "dst");
    EXPECT_HAS(message_of<DistError>([&] { send(tensor, {.dst = 1 - rank, .tag = -1}); }),
               "tag -1");
    EXPECT_HAS(message_of<DistError>([&] { send(at::Tensor(), {.dst = 1 - rank}); }), "undefined");
    EXPECT_HAS(message_of<DistError>([&] {
                 P2POp(isend, tensor, rank);
                 batch_isend_irecv({P2POp(isend, tensor, rank)});
               }),
               "this process itself");
  });
}

// spec: E2 recv from any rank returns the sender; E7 recv always returns the sender, irecv may omit
// src
TEST(PointToPoint, ReceivesFromAnyRank) {
  on_ranks(4, [](int rank) {
    auto tensor = torch::zeros({2}, torch::kInt64);
    if (rank != 0) {
      send(torch::full({2}, rank), {.dst = 0});
      return;
    }
    std::set<int> senders;
    for (int i = 0; i < 2; ++i) {
      const int sender = recv(tensor);
      EXPECT_EQ(tensor[1].item<int>(), sender);
      senders.insert(sender);
    }
    auto work = irecv(tensor);
    work->wait();
    EXPECT_EQ(tensor[1].item<int>(), work->source_rank());
    senders.insert(work->source_rank());
    EXPECT_EQ(senders, (std::set<int>{1, 2, 3}));
  });
}

// spec: E2 -1 for a non-member; E7 isend and irecv give none to a non-member, peers are ranks of
// the default group, group_src
TEST(PointToPoint, PeersOfAGroupAreRanksOfTheDefaultGroup) {
  on_ranks(3, [](int rank) {
    const auto group = new_group({.ranks = std::vector<int>{2, 1}});
    auto tensor = torch::zeros({1}, torch::kInt64);
    if (rank == 0) {
      EXPECT_EQ(recv(tensor, {.src = 1, .group = group}), -1);
      EXPECT_EQ(irecv(tensor, {.src = 1, .group = group}), nullptr);
      EXPECT_EQ(isend(tensor, {.dst = 1, .group = group}), nullptr);
      EXPECT_TRUE(batch_isend_irecv({P2POp(isend, tensor, 1, group)}).empty());
    } else if (rank == 1) {
      send(torch::full({1}, 11), {.dst = 2, .group = group});
      EXPECT_EQ(recv(tensor, {.group = group, .group_src = 1}), 2);
      EXPECT_EQ(tensor.item<int>(), 22);
    } else {
      EXPECT_EQ(recv(tensor, {.src = 1, .group = group}), 1);
      EXPECT_EQ(tensor.item<int>(), 11);
      send(torch::full({1}, 22), {.group = group, .group_dst = 0});
      EXPECT_HAS(message_of<DistError>([&] { send(tensor, {.dst = 0, .group = group}); }),
                 "rank 0");
      EXPECT_HAS(
          message_of<DistError>([&] { send(tensor, {.dst = 1, .group = group, .group_dst = 0}); }),
          "exclude each other");
    }
  });
}

// spec: E3 is_completed after wait, get_future, wait with a timeout
TEST(Work, TellsWhenItIsDone) {
  on_ranks(2, [](int rank) {
    auto tensor = torch::zeros({4});
    if (rank == 0) {
      auto work = irecv(tensor, {.src = 1});
      EXPECT_FALSE(work->is_completed());
      EXPECT_HAS(message_of<DistBackendError>([&] { work->wait(std::chrono::milliseconds(20)); }),
                 "20 ms");
      auto future = work->get_future();
      send(tensor, {.dst = 1});  // now the peer may reply
      EXPECT_TRUE(work->wait());
      EXPECT_TRUE(work->is_completed());
      EXPECT_TRUE(work->is_success());
      EXPECT_EQ(work->exception(), nullptr);
      future->wait();
      EXPECT_FALSE(future->hasError());
      EXPECT_SAME(future->value().toTensorVector().at(0), torch::full({4}, 7.0));
      EXPECT_SAME(work->result().at(0), torch::full({4}, 7.0));
      EXPECT_TRUE(work->get_future()->completed());
    } else {
      recv(tensor, {.src = 0});
      send(torch::full({4}, 7.0), {.dst = 0});
    }
  });
}

// spec: E3 a failed Work throws at wait
TEST(Work, ThrowsItsFailureAtWait) {
  on_ranks(2, [](int rank) {
    if (rank == 0) {
      auto work = irecv(torch::zeros({4}), {.src = 1});
      EXPECT_HAS(message_of<DistBackendError>([&] { work->wait(); }), "irecv");
      EXPECT_TRUE(work->is_completed());
      EXPECT_FALSE(work->is_success());
      EXPECT_NE(work->exception(), nullptr);
      EXPECT_TRUE(work->get_future()->hasError());
    } else {
      send(torch::zeros({5}), {.dst = 0});
    }
  });
}

// spec: E3 a dropped Work goes on
TEST(Work, GoesOnWhenDropped) {
  on_ranks(2, [](int rank) {
    auto tensor = torch::zeros({1 << 18}, torch::kInt32);
    if (rank == 0) {
      isend(torch::full({1 << 18}, 9, torch::kInt32), {.dst = 1});
      barrier();
    } else {
      recv(tensor, {.src = 0});
      EXPECT_EQ(tensor.eq(9).sum().item<int>(), 1 << 18);
      barrier();
    }
  });
}

// spec: E4 bytes, dtype
TEST(PointToPoint, ReceiverSeesWhatDoesNotFit) {
  on_ranks(2, [](int rank) {
    if (rank == 0) {
      send(torch::zeros({6}), {.dst = 1, .tag = 1});
      send(torch::zeros({4}, torch::kInt32), {.dst = 1, .tag = 2});
      send(torch::full({4}, 5.0), {.dst = 1, .tag = 3});
    } else {
      const auto size =
          message_of<DistBackendError>([] { recv(torch::zeros({4}), {.src = 0, .tag = 1}); });
      EXPECT_HAS(size, "24 bytes");
      EXPECT_HAS(size, "16");
      const auto dtype =
          message_of<DistBackendError>([] { recv(torch::zeros({4}), {.src = 0, .tag = 2}); });
      EXPECT_HAS(dtype, "int32");
      EXPECT_HAS(dtype, "float32");
      auto fits = torch::zeros({4});
      recv(fits, {.src = 0, .tag = 3});  // the group stays usable
      EXPECT_SAME(fits, torch::full({4}, 5.0));
    }
  });
}

// spec: E5 any mix and order; E7 one Work per op, P2POp(op, tensor, peer, group, tag)
TEST(Batch, RingInBothDirectionsNeverDeadlocks) {
  for (const std::int64_t elements : {std::int64_t{1}, std::int64_t{300000}}) {
    on_ranks(4, [elements](int rank) {
      const int next = (rank + 1) % 4, before = (rank + 3) % 4;
      auto from_next = torch::zeros({elements}, torch::kInt64);
      auto from_before = torch::zeros({elements}, torch::kInt64);
      const auto mine = torch::full({elements}, rank, torch::kInt64);
      std::vector<P2POp> operations;
      if (rank % 2 == 0) {
        operations = {P2POp(isend, mine, next, nullptr, 1), P2POp(isend, mine, before, nullptr, 2),
                      P2POp(irecv, from_before, before, nullptr, 1),
                      P2POp(irecv, from_next, next, nullptr, 2)};
      } else {
        operations = {P2POp(irecv, from_next, next, nullptr, 2),
                      P2POp(isend, mine, before, nullptr, 2), P2POp(isend, mine, next, nullptr, 1),
                      P2POp(irecv, from_before, before, nullptr, 1)};
      }
      const auto works = batch_isend_irecv(operations);
      ASSERT_EQ(works.size(), 4u);
      for (const auto& work : works) work->wait();
      EXPECT_SAME(from_next, torch::full({elements}, next, torch::kInt64));
      EXPECT_SAME(from_before, torch::full({elements}, before, torch::kInt64));
    });
  }
}

// A batch's messages to one peer are sent in one or few writes.
TEST(Batch, SmallMessagesToAPeerTravelTogether) {
  on_ranks(2, [](int rank) {
    constexpr int kMessages = 20;
    const auto group = default_group();
    const auto& backend =
        dynamic_cast<const group::NativeBackend&>(*core_of(group).parts().backends.front().second);
    const auto& fabric = backend.communicator()->channel().fabric();
    const int peer = 1 - rank;
    std::vector<at::Tensor> in, out;
    std::vector<P2POp> operations;
    for (int i = 0; i < kMessages; ++i) {
      in.push_back(torch::full({i}, i + rank));
      out.push_back(torch::full({i}, -1));
      operations.push_back(P2POp(irecv, out.back(), peer));
    }
    for (int i = 0; i < kMessages; ++i)
      operations.push_back(P2POp(isend, in[static_cast<std::size_t>(i)], peer));
    auto token = torch::zeros({1});
    for (const int sender : {0, 1})
      rank == sender ? send(token, {.dst = peer})
                     : void(recv(token, {.src = peer}));  // the link is connected
    const auto before = fabric.traffic();
    const auto works = batch_isend_irecv(operations);
    const auto after = fabric.traffic();
    EXPECT_EQ(after.messages - before.messages, static_cast<std::uint64_t>(kMessages));
    EXPECT_LE(after.writes - before.writes, 3u);
    for (const auto& work : works) work->wait();
    for (int i = 0; i < kMessages; ++i)
      EXPECT_SAME(out[static_cast<std::size_t>(i)], torch::full({i}, i + peer));
  });
}

// spec: E5 a subset of the ranks
TEST(Batch, SomeRanksOnly) {
  on_ranks(3, [](int rank) {
    if (rank == 1) return;
    auto tensor = torch::zeros({2}, torch::kInt64);
    const int peer = 2 - rank;
    for (const auto& work : batch_isend_irecv(
             {P2POp(irecv, tensor, peer), P2POp(isend, torch::full({2}, rank), peer)}))
      work->wait();
    EXPECT_SAME(tensor, torch::full({2}, peer));
  });
}

// spec: E6 non-contiguous tensors in messages
TEST(PointToPoint, TensorsNeedNotBeContiguous) {
  on_ranks(2, [](int rank) {
    const auto table = values(0, {4, 6});
    if (rank == 0) {
      send(table.t(), {.dst = 1});
      send(table.slice(1, 0, 6, 2), {.dst = 1});
      send(torch::complex(table, table * 2).conj(), {.dst = 1});
    } else {
      auto whole = torch::zeros({4, 6});
      recv(whole.t(), {.src = 0});
      EXPECT_SAME(whole, table);
      auto wide = torch::full({4, 6}, -1.0);
      recv(wide.slice(1, 1, 6, 2), {.src = 0});
      EXPECT_SAME(wide.slice(1, 1, 6, 2), table.slice(1, 0, 6, 2));
      EXPECT_TRUE(wide.slice(1, 0, 6, 2).eq(-1).all().item<bool>());
      auto complex = torch::zeros({4, 6}, torch::kComplexFloat);
      recv(complex, {.src = 0});
      EXPECT_SAME(complex, torch::complex(table, table * -2));
    }
  });
}

// spec: F15 messages of every torch dtype
TEST(PointToPoint, EveryDtypeTravels) {
  on_ranks(2, [](int rank) {
    auto dtypes = testing::kReducible;
    dtypes.insert(dtypes.end(), testing::kMovable.begin(), testing::kMovable.end());
    for (const auto dtype : dtypes) {
      const auto bytes =
          torch::arange(static_cast<std::int64_t>(c10::elementSize(dtype)) * 5, torch::kInt64)
              .to(torch::kUInt8);
      auto tensor = torch::zeros({5}, dtype);
      if (rank == 0) {
        send(bytes.view(dtype), {.dst = 1});
      } else {
        recv(tensor, {.src = 0});
        EXPECT_SAME(tensor.view(torch::kUInt8), bytes);
      }
    }
  });
}

// Tags from 2^62 on are reserved for the groups' own messages.
TEST(PointToPoint, TagsOfTheGroupsAreRefused) {
  on_ranks(2, [](int rank) {
    constexpr std::int64_t kFirst = std::int64_t{1} << 62;
    const int other = 1 - rank;
    for (auto tensor : {torch::zeros({4}), torch::zeros({4, 2}).t()}) {
      for (const std::int64_t tag : {kFirst, kFirst + 5}) {
        const auto said = "needs a tag below 2^62 and got " + std::to_string(tag);
        EXPECT_HAS(message_of<DistError>([&] { send(tensor, {.dst = other, .tag = tag}); }), said);
        EXPECT_HAS(message_of<DistError>([&] { recv(tensor, {.src = other, .tag = tag}); }), said);
        EXPECT_HAS(message_of<DistError>([&] { recv(tensor, {.tag = tag}); }), said);
        EXPECT_HAS(message_of<DistError>([&] { isend(tensor, {.dst = other, .tag = tag}); }), said);
      }
      tensor.fill_(rank);
      if (rank == 0) {
        send(tensor, {.dst = 1, .tag = kFirst - 1});
      } else {
        recv(tensor, {.src = 0, .tag = kFirst - 1});
        EXPECT_SAME(tensor, torch::zeros_like(tensor));
      }
    }
  });
}

}  // namespace
}  // namespace muster
