// SPDX-License-Identifier: BSD-3-Clause
// Messages on backend nccl, on devices with little room (nccl_standin/device_room.h): whatever the
// order of the calls, no kernel waits for ever for the room of one that waits for it.
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "core/group/scopes.h"
#include "nccl_ranks.h"

namespace muster::testing {
namespace {

using deferred::on_device;

constexpr std::int64_t kElements = 20'000;  // more than a mailbox of the stand-in holds

at::Tensor message(int from, int to) {
  return torch::arange(kElements, at::kFloat) + static_cast<float>(1000 * from + to);
}

/// A message of this rank that is under way.
struct Flying {
  WorkRef work;
  at::Tensor tensor;  // empty memory for one that is received
  int from = -1;      // of one that is received
};

Flying send_to(int rank, int peer) {
  const auto tensor = on_device(message(rank, peer), rank);
  return {isend(tensor, {.dst = peer}), tensor};
}
Flying receive_from(int rank, int peer) {
  const auto tensor = on_device(torch::zeros({kElements}), rank);
  return {irecv(tensor, {.src = peer}), tensor, peer};
}

void expect_arrived(int rank, const std::vector<Flying>& messages) {
  for (const auto& one : messages) one.work->wait();
  for (const auto& one : messages)
    if (one.from >= 0) EXPECT_SAME(one.tensor.cpu(), message(one.from, rank));
}

// spec: E1 on nccl two ranks may both send before they receive: NCCL may keep a send waiting until
// its receive, so the two belong in one group
TEST(NcclMessages, BothRanksMaySendFirst) {
  for (const char* places : {"1", "2"}) {
    const Variable room("NCCL_STANDIN_ROOM", places);
    on_nccl_ranks(2, [](int rank) {
      std::vector<Flying> messages;
      for (int i = 0; i < 3; ++i) {
        messages.push_back(send_to(rank, 1 - rank));
        messages.push_back(receive_from(rank, 1 - rank));
      }
      expect_arrived(rank, messages);
    });
  }
}

// spec: E1 a ring, and ranks that call in orders which no order of kernels on one stream satisfies
TEST(NcclMessages, NoOrderOfCallsDeadlocks) {
  const Variable room("NCCL_STANDIN_ROOM", "1");
  on_nccl_ranks(4, [](int rank) {
    expect_arrived(rank, {send_to(rank, (rank + 1) % 4), receive_from(rank, (rank + 3) % 4)});
  });
  on_nccl_ranks(3, [](int rank) {
    if (rank == 0) expect_arrived(rank, {send_to(0, 1), send_to(0, 2)});
    if (rank == 1) expect_arrived(rank, {receive_from(1, 2), receive_from(1, 0)});
    if (rank == 2) expect_arrived(rank, {receive_from(2, 0), send_to(2, 1)});
  });
}

// spec: E5 a batch with all peers on nccl, receives first
TEST(NcclMessages, ABatchWithAllPeers) {
  const Variable room("NCCL_STANDIN_ROOM", "1");
  on_nccl_ranks(5, [](int rank) {
    for (int round = 0; round < 3; ++round) {
      std::vector<P2POp> ops;
      std::vector<Flying> messages;
      for (int step = 1; step < 5; ++step) {
        const int peer = (rank + step) % 5;
        messages.push_back({nullptr, on_device(torch::zeros({kElements}), rank), peer});
        ops.push_back({irecv, messages.back().tensor, peer});
        ops.push_back({isend, on_device(message(rank, peer), rank), peer});
      }
      for (const auto& work : batch_isend_irecv(ops)) work->wait();
      for (const auto& one : messages) EXPECT_SAME(one.tensor.cpu(), message(one.from, rank));
    }
  });
}

// spec: E5 what a batch has for one peer becomes one kernel
TEST(NcclMessages, ABatchIsOneKernelPerPeer) {
  on_nccl_ranks(2, [](int rank) {
    const auto exchange = [&] {
      const auto got = on_device(torch::zeros({4, kElements}), rank);
      std::vector<P2POp> ops;
      for (int i = 0; i < 4; ++i) {
        ops.push_back({isend, on_device(message(rank, 1 - rank), rank), 1 - rank});
        ops.push_back({irecv, got[i], 1 - rank});
      }
      for (const auto& work : batch_isend_irecv(ops)) work->wait();
      EXPECT_SAME(got[3].cpu(), message(1 - rank, rank));
      barrier();
    };
    exchange();
    const int before = standin_calls("kernels");
    barrier();
    exchange();
    EXPECT_EQ(standin_calls("kernels") - before, 2) << "one on each rank";
    barrier();
  });
}

// spec: E1 a message may overtake a collective, and the other way round
TEST(NcclMessages, MessagesOvertakeCollectives) {
  const Variable room("NCCL_STANDIN_ROOM", "2");
  on_nccl_ranks(2, [](int rank) {
    for (int i = 0; i < 20; ++i) {
      const auto sum = on_device(torch::full({kElements}, rank + 1.0F), rank);
      if (rank == 0) {
        const auto sent = send_to(0, 1);
        all_reduce(sum);
        expect_arrived(0, {sent});
      } else {
        all_reduce(sum);
        expect_arrived(1, {receive_from(1, 0)});
      }
      EXPECT_SAME(sum.cpu(), torch::full({kElements}, 3.0F));
    }
  });
}

// spec: E1 a message whose input waits for a collective holds up no later message, for which
// another rank waits before it makes that collective
TEST(NcclMessages, ALateInputHoldsUpNoOtherMessage) {
  const Variable room("NCCL_STANDIN_ROOM", "2");
  on_nccl_ranks(2, [](int rank) {
    const auto other = new_group();
    const auto sum = on_device(torch::full({4}, rank + 1.0F), rank);
    all_reduce(sum);  // connects the ranks
    const auto first = on_device(rank == 0 ? message(0, 1) : torch::zeros({kElements}), rank);
    const auto second = on_device(rank == 1 ? message(1, 0) : torch::zeros({kElements}), rank);
    std::vector<Flying> messages;
    if (rank == 0) {
      all_reduce(sum, {.async_op = true})->wait();  // the stream now waits for rank 1
      messages.push_back({isend(first, {.dst = 1}), first});
    } else {
      messages.push_back({irecv(first, {.src = 0}), first, 0});
    }
    barrier();  // of the CPU's backend
    {
      const c10::StreamGuard on(deferred::stream_of(static_cast<c10::DeviceIndex>(rank), 7));
      if (rank == 0)
        messages.push_back({irecv(second, {.src = 1, .group = other}), second, 1});
      else
        messages.push_back({isend(second, {.dst = 0, .group = other}), second});
    }
    if (rank == 1) {
      messages.back().work->wait();
      all_reduce(sum);
    }
    expect_arrived(rank, messages);
    EXPECT_SAME(sum.cpu(), torch::full({4}, 6.0F));
  });
}

// spec: E1 B4 a message that its peer never posts ends at the deadline, naming the peer
TEST(NcclMessages, AMissingPeerIsNamed) {
  on_failing_ranks(2, [](int rank) {
    if (rank == 0) {
      const auto tensor = on_device(message(0, 1), 0);
      const auto text =
          text_of([&] { send(tensor, {.dst = 1, .timeout = std::chrono::milliseconds(300)}); });
      // In two texts: of the watch, or of the call itself if the watch is late.
      EXPECT_HAS(text, "rank 1 had not called the matching recv");
      EXPECT_HAS(text, "300 ms");
    }
    told([&] { all_reduce(some(rank)); });
  });
}

// spec: E1 A3 a message of another size or dtype than its receive fails on both ends, which name
// both, before NCCL overwrites, cuts or hangs
TEST(NcclMessages, ADifferentSizeOrDtypeIsNamedOnBothEnds) {
  for (const int from : {0, 1}) {
    for (const auto dtype : {at::kFloat, at::kInt}) {
      on_failing_ranks(2, [&](int rank) {
        const auto sent = torch::zeros({dtype == at::kFloat ? 8 : 4}),
                   got = torch::zeros({4}, torch::TensorOptions(dtype));
        const auto tensor = on_device(rank == from ? sent : got, rank);
        const auto work =
            rank == from ? isend(tensor, {.dst = 1 - from}) : irecv(tensor, {.src = from});
        EXPECT_HAS(told([&] { work->wait(); }),
                   "rank " + std::to_string(from) + " sends " +
                       (dtype == at::kFloat ? "32" : "16") + " bytes of float32, and rank " +
                       std::to_string(1 - from) + " receives 16 bytes of " +
                       (dtype == at::kFloat ? "float32" : "int32"));
      });
    }
  }
}

// spec: A3 messages of a captured graph leave the stream of other messages alone, which would
// become part of the graph or break its capture
TEST(NcclMessages, ACapturedMessageLeavesOthersAlone) {
  on_nccl_ranks(2, [](int rank) {
    const auto device = static_cast<c10::DeviceIndex>(rank);
    const auto other = new_group();
    const auto memory = [&](const at::Tensor& sent) {
      return on_device(rank == 0 ? sent : torch::zeros_like(sent), rank);
    };
    const auto plain = memory(message(0, 1)), captured = memory(message(0, 1) * 2);
    c10::impl::VirtualGuardImpl(deferred::kType).synchronizeDevice(device);
    const auto send = [&](const at::Tensor& tensor, const Group& group) {
      return rank == 0 ? isend(tensor, {.dst = 1, .group = group})
                       : irecv(tensor, {.src = 0, .group = group});
    };
    WorkRef first;
    if (rank == 1) first = send(plain, other);
    {
      const c10::StreamGuard on(deferred::stream_of(device, 7));
      deferred::Captures::get().begin(deferred::stream_of(device, 7));
      send(captured, default_group())->wait();
    }
    barrier();  // of the CPU's backend: both have launched it
    if (rank == 0) first = send(plain, other);
    first->wait();
    deferred::Captures::get().end(device);
    EXPECT_SAME(plain.cpu(), message(0, 1));
    c10::impl::VirtualGuardImpl(deferred::kType).synchronizeDevice(device);
    EXPECT_SAME(deferred::now(captured), message(0, 1) * 2);
  });
}

// spec: E3 a callback of a message's future may wait for another message of the device
TEST(NcclMessages, ACallbackMayWaitForAnotherMessage) {
  RankLatch begun(1);
  on_nccl_ranks(2, [&](int rank) {
    const auto tensors = on_device(torch::zeros({2, kElements}), rank);
    if (rank == 1) {
      isend(tensors[0], {.dst = 0})->wait();
      begun.wait();
      isend(tensors[1], {.dst = 0})->wait();
      return;
    }
    RankLatch done(1);
    std::string error = "none was run";
    const auto first = irecv(tensors[0], {.src = 1}), second = irecv(tensors[1], {.src = 1});
    first->get_future()->addCallback([&](c10::ivalue::Future&) {
      begun.count_down();
      error = text_of([&] { second->wait(); });
      done.count_down();
    });
    done.wait();
    EXPECT_EQ(error, "");
  });
}

// spec: E5 messages that are held back while the group ends fail by name when they are posted
TEST(NcclMessages, ABatchOutlivesItsGroup) {
  RankLatch made(2);
  on_failing_ranks(2, [&](int rank) {
    const auto group = default_group();
    auto batch = group::scope_on(core_of(group), BackendScope::coalesce_sends, deferred::kType);
    const auto work = isend(some(rank), {.dst = 1 - rank});
    made.count_down();
    made.wait();
    core_of(group).abort("enough of it");
    text_of([] { destroy_process_group(); });
    batch.reset();
    EXPECT_NE(work->exception(), nullptr);
    init_process_group({.world_size = 1, .rank = 0, .store = std::make_shared<HashStore>()});
  });
}

// spec: B10 E1 a member that has had messages and does not end the group is named by those that do
TEST(NcclMessages, AMemberThatDoesNotEndTheGroupIsNamed) {
  const Variable alone("NCCL_STANDIN_ABORT_TOGETHER", "0");  // nor does it abort
  RankLatch done(1);
  on_failing_ranks(2, [&](int rank) {
    // Rank 1 waits for this even if rank 0 throws before.
    const std::shared_ptr<void> last(nullptr, [&](void*) {
      if (rank == 0) done.count_down();
    });
    const auto group = new_group({.timeout = std::chrono::seconds(2)});
    const auto tensor = some(rank);
    (rank == 0 ? isend(tensor, {.dst = 1, .group = group, .timeout = kMustHappen})
               : irecv(tensor, {.src = 0, .group = group, .timeout = kMustHappen}))
        ->wait();
    tensor.cpu();
    if (rank == 1) return done.wait();
    EXPECT_HAS(text_of([&] { destroy_process_group(group); }),
               "rank 1 had messages with this rank and has not ended the group");
  });
}

// spec: B10 E1 a message that its peer has not posted when its group ends with an error fails then,
// whatever its own timeout
TEST(NcclMessages, AMessageThatIsLeftAtTheEndFails) {
  RankLatch done(1);
  on_failing_ranks(2, [&](int rank) {
    const auto group = new_group({.timeout = std::chrono::seconds(2)});
    if (rank == 1) return done.wait();
    const auto work = isend(some(0), {.dst = 1, .group = group, .timeout = kMustHappen * 10});
    EXPECT_HAS(text_of([&] { destroy_process_group(group); }), "isend");
    EXPECT_NE(work->exception(), nullptr);
    EXPECT_HAS(text_of([&] { work->wait(std::chrono::milliseconds(1)); }), "was not done when");
    done.count_down();
  });
}

// spec: B4.env E1 with TORCH_NCCL_ASYNC_ERROR_HANDLING=0, which fails no call at its deadline,
// send, recv and wait of a message whose peer never comes end by themselves, naming the peer
TEST(NcclMessages, AMissingPeerIsNamedWithoutErrorHandling) {
  const Variable handling("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0");
  for (const char* blocks : {"0", "1"}) {
    const Variable blocking("TORCH_NCCL_BLOCKING_WAIT", blocks);
    RankLatch done(1);
    on_failing_ranks(2, [&](int rank) {
      if (rank == 1) return done.wait();
      constexpr auto kShort = std::chrono::milliseconds(300);
      const auto tensor = some(0);
      const std::string names = "was not begun within its timeout, 300 ms: rank 1 had not called ";
      EXPECT_HAS(text_of([&] { send(tensor, {.dst = 1, .timeout = kShort}); }),
                 "send (backend nccl) " + names + "the matching recv");
      EXPECT_HAS(text_of([&] { recv(tensor, {.src = 1, .timeout = kShort}); }),
                 "recv (backend nccl) " + names + "the matching send");
      EXPECT_HAS(text_of([&] { isend(tensor, {.dst = 1, .timeout = kShort})->wait(); }), names);
      core_of(default_group()).abort("that is all");  // or destroy waits for the messages
      done.count_down();
    });
  }
}

}  // namespace
}  // namespace muster::testing
