// SPDX-License-Identifier: BSD-3-Clause
#include "core/collective/region/region_member.h"

#include <atomic>
#include <exception>
#include <string>
#include <utility>

#include "core/base/exception_status.h"
#include "core/base/log/log.h"
#include "core/collective/call.h"
#include "core/shm/segment_layout.h"

namespace muster::collective {

std::size_t RegionGroup::segment_bytes(int members) { return shm::SegmentLayout(members).total; }

std::unique_ptr<RegionGroup> RegionGroup::attach(shm::HostRegion& region, std::uint64_t segment,
                                                 transport::Channel& channel,
                                                 const Selection& selection) {
  return std::make_unique<region::RegionMember>(region, segment, channel, selection,
                                                &shm::Arena::if_made);
}

namespace region {
namespace {

// Orders reads of a peer's own memory before the check whether that peer has aborted.
void fence_reads() {
#if !defined(__SANITIZE_THREAD__)
  std::atomic_thread_fence(std::memory_order_acquire);
#endif
}

}  // namespace

// A member that still watches peers' progress there keeps the segment until the region is gone.
RegionMember::~RegionMember() {
  if (mark_.forked() || parts_.quiescence.watches_writers()) return;
  try {
    if (parts_.leave()) region_.release(offset_);
  } catch (const std::exception& error) {
    log(LogLevel::warning,
        std::string("a group's shared memory is kept until the job's end: ") + error.what());
  }
}

Task<Status> RegionMember::run(const Args& args, const transport::Fingerprint& call) {
  const bool published = inline_.is_published();
  if (parts_.channel.failed() && (!published || !parts_.lines.agreed()))
    co_return parts_.channel.failure();
  const std::uint64_t sequence = parts_.segment.sequence();
  if (call.sequence != sequence + (published ? 0 : 1)) {
    co_return parts_.failure.refuse(
        Status(Code::internal, "call " + std::to_string(call.sequence) +
                                   " was started on a shared region after call " +
                                   std::to_string(sequence)));
  }
  inline_.on_task_started();
  if (!published) parts_.begin_call(call.sequence);
  // Also tells the peers if this task is destroyed before its end.
  struct Guard {
    MemberParts* parts;
    const Args& args;
    ~Guard() {
      if (parts == nullptr) return;
      parts->wait.for_nothing();
      parts->failure.abort();
      parts->quiescence.quarantine(args);
    }
  } guard{&parts_, args};

  Status status;
  try {
    status = co_await run_call(args, call, published);
  } catch (...) {  // including bad_alloc for the coroutine frame
    status = status_of_exception();
  }
  parts_.wait.for_nothing();
  if (status) {
    guard.parts = nullptr;
    co_return status;
  }
  // Only this member knows about an exception so far.
  if (!parts_.channel.failed()) status = parts_.failure.failed_here(args, status);
  parts_.failure.abort();
  static_cast<void>(co_await parts_.quiescence.quiesce_exposed());
  co_return status;
}

Task<Status> RegionMember::run_call(const Args& args, const transport::Fingerprint& call,
                                    bool published) {
  if (parts_.segment.size() == 1) {
    run_single_rank(args);
    co_return Status();
  }
  bool by_shares = false;
  if (!published) {
    parts_.wait.for_room();
    co_await until([&] { return parts_.channel.failed() || parts_.lines.has_room(); });
    if (parts_.channel.failed()) co_return parts_.channel.failure();
    if ((call.flags & kRefused) != 0) {  // publish only the line, which tells readers why no data
                                         // follows
      shm::Line& mine = parts_.segment.my_line();
      mine.location = shm::BufferLocation::nothing;
      mine.bytes = 0;
      parts_.lines.publish(call);
      co_return Status();
    }
    by_shares = (args.op == Op::all_reduce || args.op == Op::reduce) &&
                !parts_.one_shot(args.op, args.inputs[0].size());
  }
  Status status;
  if (by_shares) {
    status = co_await shares_.run(args, call);
  } else {
    status = co_await pull_.run(args, call, published);
  }
  if (!status || !parts_.sources.reads_in_place()) co_return status;
  // A member that failed in this call may have reused its memory during the read. Its cause is on
  // the way.
  fence_reads();
  if (!parts_.segment.peer_aborted()) co_return status;
  co_return co_await parts_.failure.cause();
}

}  // namespace region
}  // namespace muster::collective
