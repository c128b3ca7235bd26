// SPDX-License-Identifier: BSD-3-Clause
// The system refuses memory or threads in the middle of a call, or an exception is thrown there: an
// error of the call, on every member.
#include <cstdlib>
#include <new>
#include <stdexcept>

#include "core/base/threads/thread_start.h"
#include "core/collective/testing/communicator_job.h"

namespace {

// Number of the next aligned allocations to refuse; a call's scratch memory is one.
std::atomic<int> refused_scratch{0};

}  // namespace

[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t alignment) {
  for (int left = refused_scratch.load(); left > 0;)
    if (refused_scratch.compare_exchange_weak(left, left - 1)) throw std::bad_alloc();
  const auto grain = static_cast<std::size_t>(alignment);
  void* const memory = std::aligned_alloc(grain, (bytes + grain - 1) / grain * grain);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace muster::collective {
namespace {

using namespace communicator_test;

/// The status of each rank: all must name the same culprit, which is a member.
class RankStatuses {
 public:
  explicit RankStatuses(int ranks) : statuses_(static_cast<std::size_t>(ranks)) {}
  void note(int rank, Status status) {
    statuses_[static_cast<std::size_t>(rank)] = std::move(status);
  }
  void expect(Code code, const std::string& operation, const std::string& text = {}) const {
    for (const Status& status : statuses_) {
      EXPECT_EQ(status.code(), code) << status.message();
      ASSERT_EQ(status.ranks().size(), 1u) << status.message();
      EXPECT_EQ(status.ranks(), statuses_.front().ranks());
      EXPECT_TRUE(contains(status.message(), "rank " + std::to_string(status.ranks().front())))
          << status.message();
      EXPECT_TRUE(contains(status.message(), operation)) << status.message();
      EXPECT_TRUE(contains(status.message(), text)) << status.message();
    }
  }

 private:
  std::vector<Status> statuses_;
};

Args gather(const Values& in, Values& out, const Communicator& group) {
  Args args;
  args.op = Op::all_gather;
  args.dtype = DType::int64;
  args.inputs = {bytes(in)};
  for (int member = 0; member < group.size(); ++member)
    args.outputs.push_back(
        bytes(out).subspan(static_cast<std::size_t>(member) * bytes(in).size(), bytes(in).size()));
  return args;
}

// spec: H7 no memory for a call's scratch: an error of the call on every member, which names the
// one that has none
TEST(Thrown, NoScratchMemoryIsAnErrorOfTheCall) {
  constexpr int kRanks = 4;
  for (const std::size_t elements : {std::size_t{1}, std::size_t{100}, std::size_t{300'000}}) {
    for (const Op op : {Op::all_reduce, Op::reduce, Op::all_gather}) {
      for (const bool started : {false, true}) {
        SCOPED_TRACE(std::string(info(op).name) + " of " + std::to_string(elements) +
                     (started ? ", started" : ""));
        if (op == Op::all_gather && elements > 100)
          continue;  // this case receives directly into
                     // the outputs
        RankStatuses statuses(kRanks);
        std::barrier armed(kRanks);
        with_group(
            kRanks, Wire::loopback,
            [&](int rank, Communicator& group) {
              const Values in(elements, 1);
              Values out(elements * kRanks);
              Args args = all_reduce(in, out);
              args.outputs = {bytes(out).first(bytes(in).size())};
              args.op = op;
              args.root = op == Op::reduce ? 0 : -1;
              if (op == Op::all_gather) args = gather(in, out, group);
              armed.arrive_and_wait();
              if (rank == 0) refused_scratch = 1;
              armed.arrive_and_wait();
              Status status = started ? group.start(args, soon())->wait(TimePoint::max())
                                      : group.run(args, soon());
              Values one(1);
              if (status.ok())
                status = group.run(all_reduce({1}, one),
                                   soon());  // it had all its data, and learns of the failure now
              statuses.note(rank, status);
              armed.arrive_and_wait();
            },
            false);
        EXPECT_EQ(refused_scratch.exchange(0), 0) << "nobody has asked for scratch memory";
        statuses.expect(Code::exhausted, std::string(info(op).name), "memory");
      }
    }
  }
}

// spec: H7 no thread for what is started: an error of the call on every member, and nothing of it
// stays behind
TEST(Thrown, NoProgressThreadIsAnErrorOfTheCall) {
  for (const Wire wire : {Wire::loopback, Wire::region}) {
    for (const Op op : {Op::all_reduce, Op::send, Op::recv}) {
      SCOPED_TRACE(info(op).name);
      RankStatuses statuses(2);
      with_group(2, wire, [&](int rank, Communicator& group) {
        Values out(1);
        if (rank == 0) {
          const NoNewThreads refused;
          const auto owner = std::make_shared<Values>(1, 1);
          const PendingRef call =
              op == Op::all_reduce ? group.start(all_reduce(*owner, *owner), soon(), owner)
              : op == Op::send
                  ? group.send(1, 3, bytes(std::as_const(*owner)), DType::int64, soon(), owner)
                  : group.receive(1, 3, bytes(*owner), DType::int64, soon(), owner);
          EXPECT_TRUE(call->done());
          statuses.note(rank, call->wait(soon()));
          EXPECT_EQ(owner.use_count(), 1);
          EXPECT_FALSE(group.start(all_reduce({1}, out), soon())->wait(soon()).ok());
        } else {
          statuses.note(rank, group.run(all_reduce({1}, out), soon()));
        }
      });
      statuses.expect(Code::exhausted, std::string(info(op).name), "thread");
    }
  }
}

// spec: E3 what a started call works on is held until the call has ended, even if no one else holds
// it
TEST(Thrown, ACallHoldsItsBuffers) {
  for (const Wire wire : {Wire::loopback, Wire::region, Wire::tcp}) {
    std::barrier gate(2);
    with_group(2, wire, [&](int rank, Communicator& group) {
      auto owner = std::make_shared<Values>(2, rank);
      const std::weak_ptr<Values> known = owner;
      PendingRef call =
          rank == 0 ? group.start(all_reduce(*owner, *owner), soon(), owner) : nullptr;
      PendingRef message =
          rank == 0 ? group.receive(1, 3, bytes(*owner), DType::int64, soon(), owner) : nullptr;
      owner.reset();
      if (rank == 0) {
        EXPECT_FALSE(known.expired());
      }
      gate.arrive_and_wait();
      Values out(2);
      if (rank == 1) {
        EXPECT_TRUE(group.run(all_reduce({1, 2}, out), soon()).ok());
        EXPECT_TRUE(
            group.send(0, 3, bytes(std::as_const(out)), DType::int64, soon())->wait(soon()).ok());
      } else {
        EXPECT_TRUE(call->wait(soon()).ok());
        EXPECT_TRUE(message->wait(soon()).ok());
        while (!known.expired())
          std::this_thread::yield();  // the thread that saw the end may still hold it
      }
      EXPECT_TRUE(group.close(soon()).ok());
    });
  }
}

// spec: H7 what is thrown while a thread waits in a call is the call's error, and nobody works on
// its memory when it returns
TEST(Thrown, AnExceptionInAWaitFailsTheGroup) {
  for (const Wire wire : {Wire::loopback, Wire::region}) {
    RankStatuses statuses(2);
    std::barrier gate(2);
    with_group(2, wire, [&](int rank, Communicator& group) {
      Values out(1);
      if (rank == 0) {
        const auto looking = group.on_idle([] { throw std::runtime_error("out of the look"); });
        statuses.note(rank, group.run(all_reduce({1}, out), soon()));
        gate.arrive_and_wait();
      } else {
        gate.arrive_and_wait();
        Status status = group.run(all_reduce({1}, out), soon());
        if (status.ok())
          status = group.run(all_reduce({1}, out), soon());  // it had all its data, and learns of
                                                             // the failure now
        statuses.note(rank, status);
      }
    });
    statuses.expect(Code::internal, "all_reduce", "out of the look");
  }
}

// spec: H7 a thread that is ended in a call (pthread_exit, pthread_cancel) ends the group, also for
// a thread of its rank that waits in another call, beside it
TEST(Thrown, AThreadTerminatedInACallFailsTheGroup) {
  for (const Wire wire : {Wire::loopback, Wire::region}) {
    RankStatuses statuses(2);
    std::barrier gate(2);
    with_group(2, wire, [&](int rank, Communicator& group) {
      Values out(1), beside(1);
      const auto learn = [&](Values& values) {
        Status status;
        while (status.ok())  // a call that has all its data may still succeed
          status = group.run(all_reduce({1}, values), soon());
        statuses.note(rank, status);
      };
      if (rank == 0) {
        std::thread waits([&] { learn(beside); });
        std::thread([&] {
          const auto looking = group.on_idle([] { pthread_exit(nullptr); });
          ADD_FAILURE() << group.run(all_reduce({1}, out), soon()).message();
        }).join();
        gate.arrive_and_wait();
        waits.join();
      } else {
        gate.arrive_and_wait();
        learn(out);
      }
    });
    statuses.expect(Code::aborted, "", "has been ended");
  }
}

}  // namespace
}  // namespace muster::collective
