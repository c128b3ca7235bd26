// SPDX-License-Identifier: BSD-3-Clause
// The stand-in keeps NCCL's rules. Each test has the sentence that it holds the stand-in to. Pages
// without another address are below https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/.
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include "nccl_model.h"
#include "testing/rank_processes.h"

namespace muster::testing {
namespace {

using nccl::ErrorCode;
using nccl::NcclReduction;
using nccl::Type;

constexpr ErrorCode kInvalidArgument = 4, kInvalidUsage = 5, kRemoteError = 6;
constexpr int kRanks = 2;

/// The memory of one call on each rank, which outlives its kernels if it is declared before its
/// communicator.
struct Values {
  float in[kRanks] = {1, 2};
  float out[kRanks] = {0, 0};
};

ErrorCode sum(Values& values, const ModelComm& comm, int rank, const ModelStream& stream) {
  return model().all_reduce(&values.in[rank], &values.out[rank], 1, Type::float32,
                            NcclReduction::sum, comm.of(rank), stream.handle());
}
/// Has the sum on its stream, too.
ErrorCode begin_sum(Values& values, const ModelComm& comm, int rank, const ModelStream& stream) {
  return comm.settle(rank, sum(values, comm, rank, stream));
}
ErrorCode send(Values& values, const ModelComm& comm, int rank, const ModelStream& stream) {
  return model().send(&values.in[rank], 1, Type::float32, 1 - rank, comm.of(rank), stream.handle());
}
/// Ends the calling thread's group and has its kernel on its streams.
void end_group(const ModelComm& comm, int rank) { comm.settle(rank, model().group_end()); }

ErrorCode receive(Values& values, const ModelComm& comm, int rank, const ModelStream& stream) {
  return model().recv(&values.out[rank], 1, Type::float32, 1 - rank, comm.of(rank),
                      stream.handle());
}

/// Has kernels begin and end on two other devices, after which whatever could have gone on has.
void pass_some_time() {
  Values values;
  const ModelComm comm;
  const ModelStream streams[kRanks] = {{2, 9}, {3, 9}};
  for (int i = 0; i < 10; ++i) {
    for (int rank = 0; rank < kRanks; ++rank) begin_sum(values, comm, rank, streams[rank]);
    EXPECT_TRUE(comes_true([&] { return streams[0].is_done() && streams[1].is_done(); }));
  }
}

// usage/streams.html: "NCCL calls are associated to a stream which is passed as the last argument
// of the collective communication function."
TEST(NcclModel, KernelsKeepTheOrderOfTheirStreamAlone) {
  Values first, second;
  const ModelComm a, b;
  const ModelStream mine(0, 1), theirs(1, 1), free(1, 2);
  begin_sum(first, a, 0, mine);
  begin_sum(second, b, 0, mine);
  begin_sum(second, b, 1, theirs);
  ASSERT_TRUE(comes_true([] { return running_on(0) == 1 && running_on(1) == 1; }));
  pass_some_time();
  EXPECT_FALSE(theirs.is_done()) << "the kernel of rank 0 is behind another one";
  begin_sum(first, a, 1, free);
  EXPECT_TRUE(comes_true([&] { return mine.is_done() && theirs.is_done() && free.is_done(); }));
  EXPECT_EQ(first.out[1], 3);
  EXPECT_EQ(second.out[0], 3);
}

/// Two communicators on two streams of each device. Each rank's first kernel is on the device
/// before the second is issued. Returns whether the kernels end.
bool ends_with_room(int places, bool same_order) {
  const Variable room("NCCL_STANDIN_ROOM", std::to_string(places));
  Values first, second;
  ModelComm a, b;
  const ModelStream streams[kRanks][2] = {{{0, 1}, {0, 2}}, {{1, 1}, {1, 2}}};
  const auto issue = [&](int rank, bool is_a) {
    const auto& stream = streams[rank][is_a ? 0 : 1];
    is_a ? begin_sum(first, a, rank, stream) : begin_sum(second, b, rank, stream);
  };
  const auto are_done = [&] {
    for (const auto& of_rank : streams)
      for (const auto& stream : of_rank)
        if (!stream.is_done()) return false;
    return true;
  };
  issue(0, true);
  EXPECT_TRUE(comes_true([] { return running_on(0) == 1; }));
  issue(0, false);
  issue(1, same_order);
  // It has its place now, or has ended.
  const auto& issued = streams[1][same_order ? 0 : 1];
  EXPECT_TRUE(comes_true([&] { return running_on(1) == 1 || issued.is_done(); }));
  issue(1, !same_order);
  const auto is_stuck = [] {
    return running_on(0) == 1 && waiting_on(0) == 1 && running_on(1) == 1 && waiting_on(1) == 1;
  };
  EXPECT_TRUE(comes_true([&] { return are_done() || (!same_order && is_stuck()); }));
  if (!are_done()) pass_some_time();
  const bool ended = are_done();
  model().group_start();
  for (int rank = 0; rank < kRanks; ++rank) a.abort(rank), b.abort(rank);
  model().group_end();
  EXPECT_TRUE(comes_true(are_done));
  EXPECT_EQ(running_on(0) + running_on(1) + waiting_on(0) + waiting_on(1), 0);
  return ended;
}

// usage/communicators.html: "Thus to remain deadlock free, users must ensure the order of host-side
// launches matches for all devices."
TEST(NcclModel, AnotherOrderOnTwoRanksHangs) {
  EXPECT_FALSE(ends_with_room(1, false));
  EXPECT_TRUE(ends_with_room(1, true));
}

// The same page of NCCL 2.25 (.../archives/nccl_2251/): "Launching multiple communication
// operations (on different streams) might work provided they can fit within the GPU".
TEST(NcclModel, AnotherOrderWorksIfThereIsRoom) { EXPECT_TRUE(ends_with_room(2, false)); }

// usage/p2p.html: "Point-to-point calls within a group will be blocking until that group of calls
// completes"; https://github.com/NVIDIA/nccl/issues/783: "send(x1) is allowed to block until the
// corresponding recv() is called."
TEST(NcclModel, ASendEndsWhenItIsReceived) {
  Values values;
  const ModelComm comm;
  const ModelStream streams[kRanks] = {{0, 1}, {1, 1}};
  for (int rank = 0; rank < kRanks; ++rank) {
    comm.settle(rank, send(values, comm, rank, streams[rank]));
    comm.settle(rank, receive(values, comm, rank, streams[rank]));
  }
  EXPECT_TRUE(comes_true([] { return running_on(0) == 1 && running_on(1) == 1; }));
  pass_some_time();
  EXPECT_EQ(running_on(0) + running_on(1), 2) << "both wait in their send";
  for (const auto& stream : streams) EXPECT_FALSE(stream.is_done());
}

// usage/p2p.html: "It is therefore important to merge calls that need to progress concurrently to
// avoid deadlocks."; usage/groups.html: "a single NCCL launch".
TEST(NcclModel, AGroupIsOneKernel) {
  const Variable room("NCCL_STANDIN_ROOM", "1");
  const int before = standin_calls("kernels");
  Values values;
  const ModelComm comm;
  const ModelStream streams[kRanks] = {{0, 1}, {1, 1}};
  for (int rank = 0; rank < kRanks; ++rank) {
    model().group_start();
    send(values, comm, rank, streams[rank]);
    model().group_start();
    receive(values, comm, rank, streams[rank]);
    model().group_end();
    EXPECT_EQ(standin_calls("kernels") - before, rank) << "started as a whole by the last end";
    end_group(comm, rank);
  }
  EXPECT_TRUE(comes_true([&] { return streams[0].is_done() && streams[1].is_done(); }));
  EXPECT_EQ(values.out[0], 2);
  EXPECT_EQ(values.out[1], 1);
  EXPECT_EQ(standin_calls("kernels") - before, kRanks);
}

// usage/p2p.html: "The only exception is point-to-point calls within a group targeting the same
// peer, which are executed in order."
TEST(NcclModel, MessagesWithOnePeerKeepTheirOrder) {
  float sent[3] = {5, 6, 7}, got[3] = {};
  const ModelComm comm;
  const ModelStream streams[kRanks] = {{0, 1}, {1, 1}};
  model().group_start();
  for (const auto& value : sent)
    model().send(&value, 1, Type::float32, 1, comm.of(0), streams[0].handle());
  end_group(comm, 0);
  model().group_start();
  for (auto& value : got)
    model().recv(&value, 1, Type::float32, 0, comm.of(1), streams[1].handle());
  end_group(comm, 1);
  EXPECT_TRUE(comes_true([&] { return streams[1].is_done(); }));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(got[i], sent[i]);
  EXPECT_TRUE(comes_true([&] { return streams[0].is_done(); }));
}

// usage/streams.html: "This will enforce a stream dependency of all streams before the NCCL kernel
// starts and block all streams until the NCCL kernel completes."
TEST(NcclModel, AGroupHoldsAllItsStreams) {
  Values first, second;
  const ModelComm comm;
  const ModelStream one(0, 1), other(0, 2), peer(1, 1);
  model().group_start();
  sum(first, comm, 0, one);
  sum(second, comm, 0, other);
  end_group(comm, 0);
  ASSERT_TRUE(comes_true([] { return running_on(0) == 1; }));
  pass_some_time();
  EXPECT_FALSE(one.is_done());
  EXPECT_FALSE(other.is_done());
  model().group_start();
  sum(first, comm, 1, peer);
  sum(second, comm, 1, peer);
  end_group(comm, 1);
  EXPECT_TRUE(comes_true([&] { return one.is_done() && other.is_done() && peer.is_done(); }));
  EXPECT_EQ(second.out[0], 3);
}

// usage/groups.html: "if it returns ncclInProgress, it means NCCL kernels are being issued to
// streams in the background. It is users' responsibility to make sure the state of the communicator
// changes into ncclSuccess before calling related CUDA calls".
// A call meanwhile is refused: "Attempt to use communicator before the previous operation returned
// ncclSuccess" (ncclCommEnsureReady, src/misc/argcheck.cc of NCCL).
TEST(NcclModel, WhatIsInProgressIsNotOnItsStreamYet) {
  const Variable looks("NCCL_STANDIN_IN_PROGRESS", "3");
  Values values;
  const ModelComm comm;
  const ModelStream streams[kRanks] = {{0, 1}, {1, 1}};
  ASSERT_TRUE(comm.is_connected());
  const auto before = streams[0].length();
  EXPECT_EQ(sum(values, comm, 0, streams[0]), nccl::kInProgress);
  EXPECT_EQ(streams[0].length(), before);
  EXPECT_EQ(sum(values, comm, 0, streams[0]), kInvalidArgument);
  for (int i = 0; i < 2; ++i) EXPECT_EQ(comm.state(0), nccl::kInProgress);
  EXPECT_EQ(comm.state(0), nccl::kSuccess);
  EXPECT_EQ(streams[0].length(), before + 1);
  sum(values, comm, 1, streams[1]);
  EXPECT_TRUE(comm.is_connected());
  EXPECT_TRUE(comes_true([&] { return streams[0].is_done() && streams[1].is_done(); }));
  EXPECT_EQ(values.out[0], 3);
}

// api/comms.html: ncclCommAbort "aborts any uncompleted operations before destroying the
// communicator".
TEST(NcclModel, AnAbortEndsWhatIsInFlight) {
  const Variable alone("NCCL_STANDIN_ABORT_TOGETHER", "0");
  Values values;
  ModelComm comm;
  const ModelStream stream(0, 1);
  begin_sum(values, comm, 0, stream);
  ASSERT_TRUE(comes_true([] { return running_on(0) == 1; }));
  comm.abort(0);
  EXPECT_TRUE(comes_true([&] { return stream.is_done(); }));
  EXPECT_EQ(running_on(0), 0);
}

// api/comms.html: "Launching new collectives on a revoked communicator returns ncclInvalidUsage."
TEST(NcclModel, ARevokedCommunicatorRefusesCalls) {
  Values values;
  const ModelComm comm;
  const ModelStream stream(0, 1);
  begin_sum(values, comm, 0, stream);
  EXPECT_EQ(model().comm_revoke(comm.of(0), 0), nccl::kInProgress);
  EXPECT_TRUE(comes_true([&] { return comm.state(0) == nccl::kSuccess && stream.is_done(); }));
  EXPECT_EQ(sum(values, comm, 0, stream), kInvalidUsage);
}

// NCCL 2.30, src/init.cc: "Multiple Ranks are using the same GPU/Partition. Set
// NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this configuration."
TEST(NcclModel, TwoRanksOnOneDeviceAreRefused) {
  const ModelComm shared(false, {3, 3});
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(shared.state(rank), kInvalidUsage);
  const Variable meant("NCCL_MULTI_RANK_GPU_ENABLE", "1");
  const ModelComm allowed(true, {3, 3});
  EXPECT_EQ(allowed.state(0), nccl::kSuccess);
}

// usage/communicators.html: "ncclCommAbort can be called at any point, during initialization,
// communication or finalizing the communicator."
TEST(NcclModel, AnInitThatHangsCanBeAborted) {
  const Variable absent("NCCL_STANDIN_INIT_ABSENT", "1");
  ModelComm comm(false);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(comm.state(0), nccl::kInProgress);
  comm.abort(0);
}

// usage/communicators.html: "Operations experiencing an asynchronous error will usually not
// progress and never complete. When an asynchronous error happens, the operation should be aborted
// and the communicator destroyed using ncclCommAbort."
TEST(NcclModel, AnAsynchronousErrorStays) {
  const Variable error("NCCL_STANDIN_ASYNC_ERROR", "0:1"), hang("NCCL_STANDIN_HANG", "0:1"),
      alone("NCCL_STANDIN_ABORT_TOGETHER", "0");
  Values values;
  ModelComm comm;
  const ModelStream stream(0, 1);
  sum(values, comm, 0, stream);
  EXPECT_TRUE(comes_true([&] { return comm.state(0) == kRemoteError; }));
  EXPECT_FALSE(stream.is_done());
  EXPECT_EQ(sum(values, comm, 0, stream), kRemoteError);
  comm.abort(0);
  EXPECT_TRUE(comes_true([&] { return stream.is_done(); }));
}

// api/comms.html: "All active ranks are required to call this function in order to abort the NCCL
// communicator successfully."
TEST(NcclModel, AnAbortEndsWhenAllRanksAbort) {
  Values values;
  ModelComm comm;
  const ModelStream stream(0, 1);
  begin_sum(values, comm, 0, stream);
  std::atomic<bool> returned{false};
  std::thread first([&] {
    comm.abort(0);
    returned = true;
  });
  EXPECT_TRUE(comes_true([&] { return stream.is_done(); }));
  pass_some_time();
  EXPECT_FALSE(returned);
  comm.abort(1);
  first.join();
}

// Grouped, aborts of several communicators are one: the order within a group does not matter.
TEST(NcclModel, GroupedAbortsMayDifferInOrder) {
  ModelComm a, b;
  const auto abort = [](ModelComm& first, ModelComm& second, int rank) {
    model().group_start();
    first.abort(rank);
    second.abort(rank);
    model().group_end();
  };
  std::thread other([&] { abort(b, a, 1); });
  abort(a, b, 0);
  other.join();
}

// usage/threadsafety.html: "it is not allowed to issue NCCL operations to a single communicator in
// parallel with multiple threads".
TEST(NcclModel, TwoThreadsOnOneCommunicatorAreNoted) {
  Values values, others;
  const ModelComm comm;
  const ModelStream stream(0, 1);
  model().group_start();
  sum(values, comm, 0, stream);
  std::thread([&] { sum(others, comm, 0, stream); }).join();
  model().group_end();
  EXPECT_HAS(nccl_violation(), "two threads");
}

/// Sends the memory of a tensor to rank 1 that is freed before its kernel runs. Returns what comes.
std::vector<unsigned char> sent_of_freed(bool is_recorded) {
  std::vector<unsigned char> got(64);
  const ModelComm comm;
  const ModelStream side(0, 1), receiver(1, 1);
  std::atomic<bool> is_freed{false};
  deferred::Timeline::get().run(side.stream(), [&] {
    while (!is_freed) std::this_thread::yield();
  });
  deferred::reuses_memory = true;
  {
    const c10::DeviceGuard on(device_of(0));
    const auto tensor = torch::full({64}, 7, at::TensorOptions(at::kByte).device(device_of(0)));
    const auto& data = tensor.storage().data_ptr();
    if (is_recorded)
      c10::impl::VirtualGuardImpl(deferred::kType).recordDataPtrOnStream(data, side.stream());
    comm.settle(0, model().send(tensor.data_ptr(), 64, Type::uint8, 1, comm.of(0), side.handle()));
  }
  is_freed = true;
  deferred::reuses_memory = false;
  comm.settle(1, model().recv(got.data(), 64, Type::uint8, 0, comm.of(1), receiver.handle()));
  EXPECT_TRUE(comes_true([&] { return side.is_done() && receiver.is_done(); }));
  return got;
}

// https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html: "the memory is
// not reused for another tensor until all current work queued on stream are complete at the time
// of deletion."
TEST(NcclModel, FreedMemoryIsUsedAgain) {
  EXPECT_EQ(sent_of_freed(false), std::vector<unsigned char>(64, deferred::kReused));
  EXPECT_EQ(sent_of_freed(true), std::vector<unsigned char>(64, 7));
}

// usage/p2p.html: "the count and datatype passed to ncclSend and ncclRecv must match", or so it is
// used; the stand-in notes it.
TEST(NcclModel, AMessageOfAnotherSizeIsNoted) {
  float sent[2] = {5, 6}, got[2] = {};
  nccl_violation();
  {
    const ModelComm comm;
    const ModelStream streams[kRanks] = {{0, 1}, {1, 1}};
    comm.settle(0, model().send(sent, 2, Type::float32, 1, comm.of(0), streams[0].handle()));
    comm.settle(1, model().recv(got, 1, Type::float32, 0, comm.of(1), streams[1].handle()));
    EXPECT_TRUE(comes_true([&] { return streams[1].is_done(); }));
  }
  EXPECT_HAS(nccl_violation(), "another size");
}

// usage/streams.html: an operation runs in the order of its stream, so its input may be changed
// only behind it there.
TEST(NcclModel, AnInputThatChangesIsNoted) {
  nccl_violation();
  // The kernel must have read its input before that changes, which nothing tells.
  EXPECT_TRUE(comes_true([] {
    Values values;
    {
      const ModelComm comm;
      const ModelStream streams[kRanks] = {{0, 1}, {1, 1}};
      begin_sum(values, comm, 0, streams[0]);
      EXPECT_TRUE(comes_true([] { return running_on(0) == 1; }));
      pass_some_time();
      values.in[0] = 7;
      begin_sum(values, comm, 1, streams[1]);
      EXPECT_TRUE(comes_true([&] { return streams[0].is_done() && streams[1].is_done(); }));
    }
    return nccl_violation().find("changed while it ran") != std::string::npos;
  }));
}

// As FreedMemoryIsUsedAgain, for what is written.
TEST(NcclModel, WritesToFreedMemoryAreNoticed) {
  deferred::reuses_memory = true;
  void* memory = nullptr;
  {
    const c10::DeviceGuard on(device_of(0));
    memory = torch::zeros({64}, at::TensorOptions(at::kByte).device(device_of(0))).data_ptr();
  }
  deferred::reuses_memory = false;
  EXPECT_FALSE(deferred::ReusedMemory::get().was_written());
  static_cast<unsigned char*>(memory)[3] = 1;
  EXPECT_TRUE(deferred::ReusedMemory::get().was_written());
}

// A suite of its own, which ctest runs in a process of its own: it forks.
// api/types.html, ncclRemoteError: "A call failed possibly due to a network error or a remote
// process exiting prematurely."
TEST(NcclModelProcesses, ADeadPeerIsAnAsynchronousError) {
  const Variable sees("NCCL_STANDIN_SEES_DEATH", "1");
  nccl::UniqueId id{};
  model().get_unique_id(&id);
  SharedCounter ready;
  RankProcesses ranks(kRanks, [&](int rank) -> std::string {
    const c10::DeviceGuard on(device_of(rank));
    nccl::Config config;
    config.blocking = 0;
    nccl::CommHandle comm = nullptr;
    model().comm_init_rank_config(&comm, kRanks, id, rank, &config);
    ErrorCode state = nccl::kInProgress;
    const auto is = [&](ErrorCode wanted) {
      model().comm_get_async_error(comm, &state);
      return state == wanted;
    };
    if (!comes_true([&] { return is(nccl::kSuccess); })) return "NOT CONNECTED";
    const ModelStream stream(rank, 1);
    float in = 1, out = 0;
    if (rank == 0)
      model().all_reduce(&in, &out, 1, Type::float32, NcclReduction::sum, comm, stream.handle());
    ready.add(1);
    if (rank == 1)
      for (;;) ::pause();
    if (!comes_true([&] { return is(kRemoteError); })) return "NOT TOLD";
    if (stream.is_done()) return "NOT HELD";
    model().comm_abort(comm);
    return comes_true([&] { return stream.is_done(); }) ? "TOLD" : "NOT ENDED";
  });
  ASSERT_TRUE(ready.wait_for(kRanks, kMustHappen));
  ranks.kill(1, SIGKILL);
  EXPECT_EQ(ranks.join(kMustHappen).front().report, "TOLD");
}

}  // namespace
}  // namespace muster::testing
