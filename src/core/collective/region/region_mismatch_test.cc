// SPDX-License-Identifier: BSD-3-Clause
// Members whose calls over shared memory differ learn it, at this call or at the next.
#include <string>
#include <vector>

#include "core/collective/testing/region_job.h"

namespace muster::collective::region {
namespace {

// The sender waits for windows that its root will never drain.
TEST(RegionFailure, ASenderOfAReduceSeesThatItsRootCallsSomethingElse) {
  Random random(1);
  RegionJob job(2);
  CallShape shape = shape_of(Op::broadcast, 1 << 20, 0);
  shape.root = 0;
  TestCall broadcast(shape, 2, 1, random);
  shape.op = Op::reduce;
  TestCall reduce(shape, 2, 1, random);
  auto root = job.run(0, broadcast.args(0), broadcast.fingerprint(0));
  EXPECT_FALSE(root.step());
  auto giver = job.run(1, reduce.args(1), reduce.fingerprint(1));
  ASSERT_TRUE(giver.step());
  EXPECT_EQ(giver.result().code(), Code::mismatch);
  EXPECT_EQ(job.channels[0]->failure().code(), Code::mismatch);
}

// A sender that does not wait, in a reduce or a gather, sees the mismatch at its next call, when it
// waits for the windows of the previous one.
TEST(RegionFailure, ASenderThatIsDoneSeesItAtItsNextCall) {
  for (const Op op : {Op::reduce, Op::gather}) {
    SCOPED_TRACE(info(op).name);
    Random random(1);
    RegionJob job(2);
    CallShape shape = shape_of(Op::broadcast, 4, 0);
    shape.root = 0;
    TestCall broadcast(shape, 2, 1, random);
    shape = shape_of(op, 32 * 1024, 0);  // as many windows as there are
    shape.root = 0;
    TestCall first(shape, 2, 1, random);
    TestCall second(shape, 2, 2, random);
    auto root = job.run(0, broadcast.args(0), broadcast.fingerprint(0));
    ASSERT_TRUE(root.step());
    auto giver = job.run(1, first.args(1), first.fingerprint(1));
    ASSERT_TRUE(giver.step());
    EXPECT_TRUE(giver.result().ok());
    auto again = job.run(1, second.args(1), second.fingerprint(1));
    ASSERT_TRUE(again.step());
    EXPECT_EQ(again.result().code(), Code::mismatch);
    EXPECT_EQ(job.channels[0]->failure().code(), Code::mismatch);
  }
}

// spec: F18 ranks that call different collectives learn it, both calls named
TEST(RegionFailure, DifferentCallsAreNamed) {
  Random random(1);
  RegionJob job(3);
  TestCall sum(shape_of(Op::all_reduce, 100, 0), 3, 1, random);
  TestCall barrier(shape_of(Op::barrier, 0, 0), 3, 1, random);
  std::vector<Task<Status>> tasks;
  tasks.push_back(job.run(0, sum.args(0), sum.fingerprint(0)));
  tasks.push_back(job.run(1, barrier.args(1), barrier.fingerprint(1)));
  tasks.push_back(job.run(2, sum.args(2), sum.fingerprint(2)));
  ASSERT_TRUE(finish(tasks));
  for (auto& task : tasks) {
    const Status status = task.result();
    EXPECT_EQ(status.code(), Code::mismatch);
    EXPECT_NE(status.message().find("all_reduce(SUM, float32, 100 elements)"), std::string::npos)
        << status.message();
    EXPECT_NE(status.message().find("barrier()"), std::string::npos) << status.message();
  }
}

// spec: F18 a rank that had already returned learns it at its next call: two roots of a small
// broadcast wait for nobody
TEST(RegionFailure, DifferentCallsThatHaveReturnedAreNamedLater) {
  Random random(1);
  RegionJob job(2);
  CallShape shape = shape_of(Op::broadcast, 4, 0);
  TestCall first(shape, 2, 1, random);
  shape.root = 1;
  TestCall second(shape, 2, 1, random);
  std::vector<Task<Status>> tasks;
  tasks.push_back(job.run(0, first.args(0), first.fingerprint(0)));
  tasks.push_back(job.run(1, second.args(1), second.fingerprint(1)));
  ASSERT_TRUE(finish(tasks, 1));
  EXPECT_TRUE(tasks[0].result().ok());
  EXPECT_TRUE(tasks[1].result().ok());
  TestCall barrier(shape_of(Op::barrier, 0, 0), 2, 2, random);
  tasks = start(job, barrier);
  ASSERT_TRUE(finish(tasks));
  for (auto& task : tasks) {
    const Status status = task.result();
    EXPECT_EQ(status.code(), Code::mismatch);
    EXPECT_NE(status.message().find("root 0"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("root 1"), std::string::npos) << status.message();
  }
}

// spec: F11 splits that do not meet between two ranks are an error that names both and the bytes
TEST(RegionFailure, SizesThatDoNotMeetAreNamed) {
  for (const std::size_t count : {4, 2000, 300'000}) {
    Random random(1);
    RegionJob job(2);
    TestCall small(shape_of(Op::all_to_all, count, 0.5), 2, 1, random);
    TestCall large(shape_of(Op::all_to_all, count + 1, 0.5), 2, 1, random);
    std::vector<Task<Status>> tasks;
    tasks.push_back(job.run(0, small.args(0), small.fingerprint(0)));
    tasks.push_back(job.run(1, large.args(1), large.fingerprint(1)));
    ASSERT_TRUE(finish(tasks));
    const Status status = tasks[0].result();
    EXPECT_EQ(status.code(), Code::mismatch);
    EXPECT_NE(status.message().find(std::to_string(4 * count) + " bytes"), std::string::npos)
        << status.message();
    EXPECT_NE(status.message().find(std::to_string(4 * count + 4)), std::string::npos)
        << status.message();
    EXPECT_EQ(status.ranks().size(), 2u);
    EXPECT_EQ(tasks[1].result().code(), Code::mismatch);
  }
}

}  // namespace
}  // namespace muster::collective::region
