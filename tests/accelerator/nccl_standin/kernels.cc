// SPDX-License-Identifier: BSD-3-Clause
#include "kernels.h"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "device_room.h"

namespace muster::standin {
namespace {

std::mutex counts_mutex;  // guards the following two
std::map<std::string, int> counts;
std::string first_violation;

/// Threads that do not come back from NCCL. Never destroyed: they outlive static objects.
struct KeptThreads {
  static KeptThreads& get() {
    static auto* const threads = new KeptThreads;
    return *threads;
  }
  void keep() {
    std::unique_lock lock(mutex);
    ++kept;
    released.wait(lock, [this, mine = releases] { return releases != mine; });
    --kept;
  }
  std::mutex mutex;  // guards the following
  std::condition_variable released;
  int kept = 0, releases = 0;
};

/// Streams that wait for each other: of one kernel that several streams have.
struct StreamMeeting {
  std::mutex mutex;  // guards the following
  std::condition_variable changed;
  int awaited = 0;  // other streams that have not reached the kernel
  bool done = false;
};

/// A function call, before the group ends.
struct Operation {
  Comm* comm;
  Stream* stream;
  bool is_message;
  NcclTransfer message;       // of a message
  std::function<void()> run;  // of a collective
};

thread_local int group_depth = 0;
thread_local std::vector<Operation> group;
thread_local std::vector<Comm*> aborting;

/// Which thread has a group open with calls on a communicator, and on a device.
class IssuingThreads {
 public:
  static IssuingThreads& get() {
    static IssuingThreads threads;
    return threads;
  }
  /// NCCL: "it is not allowed to issue NCCL operations to a single communicator in parallel with
  /// multiple threads; it is not safe to issue NCCL operations in parallel to independent
  /// communicators located on the same device with multiple threads".
  /// https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/threadsafety.html
  void enter(const Operation& operation) {
    const std::lock_guard lock(mutex_);
    const auto me = std::this_thread::get_id();
    if (comms_.emplace(operation.comm, me).first->second != me)
      note_violation("two threads issue operations to communicator " + operation.comm->name);
    if (operation.stream == nullptr) return;
    const int device = operation.stream->device;
    if (devices_.emplace(device, me).first->second != me)
      note_violation("two threads issue operations on device " + std::to_string(device));
  }
  void leave() {
    const std::lock_guard lock(mutex_);
    const auto is_mine = [me = std::this_thread::get_id()](const auto& entry) {
      return entry.second == me;
    };
    std::erase_if(comms_, is_mine);
    std::erase_if(devices_, is_mine);
  }

 private:
  std::mutex mutex_;
  std::map<Comm*, std::thread::id> comms_;
  std::map<int, std::thread::id> devices_;
};

}  // namespace

/// All operations of one group on one communicator.
struct StandinKernel {
  Comm* comm;
  std::vector<Stream*> streams = {};
  std::vector<NcclTransfer> messages = {};
  std::vector<std::function<void()>> collectives = {};
  int number = 0;
  std::shared_ptr<StreamMeeting> meeting = std::make_shared<StreamMeeting>();

  /// A hash of what the messages send.
  std::size_t sent_bytes() const {
    std::size_t hash = 0;
    for (const auto& message : messages)
      if (message.sends)
        hash = hash * 31 + std::hash<std::string_view>()(
                               {reinterpret_cast<const char*>(message.data), message.bytes});
    return hash;
  }
  void carry_out() {
    const int rank = comm->boxes.rank();
    if (comm->deaf.hits(rank, number)) KeptThreads::get().keep();
    if (comm->hang.hits(rank, number)) {
      if (comm->error.hits(rank, number)) comm->has_error = true;
      comm->wait_until([this] { return comm->is_aborted(); });
    }
    if (comm->late.hits(rank, number))
      comm->wait_for_abort(std::chrono::milliseconds(comm->late.value));
    if (comm->is_aborted()) return;
    const auto before = sent_bytes();
    if (!messages.empty()) comm->exchange(messages);
    if (!comm->is_aborted() && sent_bytes() != before)
      note_violation("the memory of a message changed while it was sent");
    for (const auto& collective : collectives) collective();
    if (comm->error.hits(rank, number)) comm->has_error = true;
  }
};

namespace {

/// The communicator may be freed as soon as no kernel is counted as running.
void finish(std::unique_ptr<StandinKernel> kernel) {
  const auto meeting = kernel->meeting;
  Comm& comm = *kernel->comm;
  kernel.reset();
  comm.change([&] {
    ++comm.finished;
    --comm.running;
  });
  const std::lock_guard lock(meeting->mutex);
  meeting->done = true;
  meeting->changed.notify_all();
}

/// On the kernel's first stream.
void run_kernel(void* argument) {
  std::unique_ptr<StandinKernel> kernel(static_cast<StandinKernel*>(argument));
  Comm& comm = *kernel->comm;
  {
    auto& meeting = *kernel->meeting;
    std::unique_lock lock(meeting.mutex);
    while (meeting.awaited > 0 && !comm.is_aborted())
      meeting.changed.wait_for(lock, std::chrono::milliseconds(1));
  }
  comm.wait_until([&] { return comm.finished == kernel->number - 1 || comm.is_aborted(); });
  Stream* const stream = kernel->streams.front();
  if (stream == nullptr) {
    kernel->carry_out();
  } else if (auto& room = DeviceRoom::of(stream->device);
             room.enter(comm.places, [&] { return comm.is_aborted(); })) {
    kernel->carry_out();
    room.leave();
  }
  finish(std::move(kernel));
}

/// On each of its other streams.
void meet_kernel(void* argument) {
  const std::unique_ptr<std::shared_ptr<StreamMeeting>> held(
      static_cast<std::shared_ptr<StreamMeeting>*>(argument));
  auto& meeting = **held;
  std::unique_lock lock(meeting.mutex);
  --meeting.awaited;
  meeting.changed.notify_all();
  meeting.changed.wait(lock, [&] { return meeting.done; });
}

void issue(StandinKernel* kernel) {
  const auto streams = kernel->streams;
  const auto meeting = kernel->meeting;
  meeting->awaited = static_cast<int>(streams.size()) - 1;
  if (streams.front() == nullptr)
    run_kernel(kernel);
  else
    streams.front()->run(streams.front(), &run_kernel, kernel);
  for (std::size_t i = 1; i < streams.size(); ++i)
    streams[i]->run(streams[i], &meet_kernel, new std::shared_ptr<StreamMeeting>(meeting));
}

void drop_unissued(Comm& comm) {
  std::vector<StandinKernel*> kernels;
  {
    const std::lock_guard lock(comm.mutex);
    kernels.swap(comm.unissued);
  }
  for (auto* kernel : kernels) finish(std::unique_ptr<StandinKernel>(kernel));
}

/// One kernel for each communicator, in the order in which the group named them.
std::vector<std::unique_ptr<StandinKernel>> fuse(std::vector<Operation> operations) {
  std::vector<std::unique_ptr<StandinKernel>> kernels;
  for (auto& operation : operations) {
    auto at = std::ranges::find_if(
        kernels, [&](const auto& kernel) { return kernel->comm == operation.comm; });
    if (at == kernels.end()) {
      kernels.push_back(std::make_unique<StandinKernel>(StandinKernel{operation.comm}));
      at = kernels.end() - 1;
    }
    auto& kernel = **at;
    if (std::ranges::find(kernel.streams, operation.stream) == kernel.streams.end())
      kernel.streams.push_back(operation.stream);
    if (operation.is_message)
      kernel.messages.push_back(operation.message);
    else
      kernel.collectives.push_back(std::move(operation.run));
  }
  return kernels;
}

ErrorCode submit(std::unique_ptr<StandinKernel> kernel) {
  Comm& comm = *kernel->comm;
  if (comm.revoked) {
    last_error() = "the communicator was revoked";
    return kInvalidUsage;
  }
  if (comm.has_error) return kRemoteError;  // as NCCL refuses calls then
  count("kernels");
  kernel->number = ++comm.operations;
  ++comm.running;
  if (comm.kept.hits(comm.boxes.rank(), kernel->number)) {
    KeptThreads::get().keep();
    finish(std::move(kernel));
    return kRemoteError;
  }
  if (comm.looks_in_progress == 0) {
    issue(kernel.release());
    return nccl::kSuccess;
  }
  const std::lock_guard lock(comm.mutex);
  comm.looks_left = comm.looks_in_progress;
  comm.unissued.push_back(kernel.release());
  return nccl::kInProgress;
}

/// NCCL: "All active ranks are required to call this function in order to abort the NCCL
/// communicator successfully."
/// https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/comms.html#ncclcommabort
void free_aborted(const std::vector<Comm*>& comms) {
  for (Comm* const comm : comms) {
    comm->change([=] { comm->aborted = true; });
    drop_unissued(*comm);
    comm->wait_until([=] { return comm->running == 0; });
    comm->boxes.leave();
  }
  for (Comm* const comm : comms) {
    while (comm->aborts_together && !comm->boxes.have_others_left())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    delete comm;
  }
}

ErrorCode enqueue(Operation operation) {
  if (operation.comm == nullptr) {
    last_error() = "the communicator is null";
    return kInvalidUsage;
  }
  if (is_busy(*operation.comm)) {
    last_error() = "the previous operation of the communicator has not returned ncclSuccess";
    return kInvalidArgument;
  }
  IssuingThreads::get().enter(operation);
  group.push_back(std::move(operation));
  if (group_depth > 0) return nccl::kSuccess;
  begin_group();
  return end_group();
}

}  // namespace

std::string& last_error() {
  static thread_local std::string text;
  return text;
}

void count(const char* what) {
  const std::lock_guard lock(counts_mutex);
  ++counts[what];
}

int counted(const std::string& what) {
  const std::lock_guard lock(counts_mutex);
  return counts[what];
}

void release_kept_threads() {
  auto& threads = KeptThreads::get();
  const std::lock_guard lock(threads.mutex);
  ++threads.releases;
  threads.released.notify_all();
}

int kept_threads() {
  auto& threads = KeptThreads::get();
  const std::lock_guard lock(threads.mutex);
  return threads.kept;
}

void note_violation(const std::string& text) {
  const std::lock_guard lock(counts_mutex);
  if (first_violation.empty()) first_violation = text;
}

std::string violation() {
  const std::lock_guard lock(counts_mutex);
  return std::exchange(first_violation, {});
}

ErrorCode enqueue_collective(nccl::CommHandle handle, nccl::StreamHandle stream,
                             std::function<void(Comm&)> body) {
  Comm* const comm = comm_of(handle);
  return enqueue({comm, static_cast<Stream*>(stream), false, {}, [comm, body = std::move(body)] {
                    body(*comm);
                  }});
}

ErrorCode enqueue_message(nccl::CommHandle handle, nccl::StreamHandle stream,
                          const NcclTransfer& message) {
  return enqueue({comm_of(handle), static_cast<Stream*>(stream), true, message, {}});
}

void begin_group() { ++group_depth; }

ErrorCode end_group() {
  if (--group_depth > 0) return nccl::kSuccess;
  ErrorCode result = nccl::kSuccess;
  for (auto& kernel : fuse(std::exchange(group, {}))) {
    const auto code = submit(std::move(kernel));
    if (result == nccl::kSuccess || (result == nccl::kInProgress && code != nccl::kSuccess))
      result = code;
  }
  IssuingThreads::get().leave();
  free_aborted(std::exchange(aborting, {}));
  return result;
}

/// NCCL's ncclCommEnsureReady: "Attempt to use communicator before the previous operation returned
/// ncclSuccess" is ncclInvalidArgument. It looks, too.
bool is_busy(Comm& comm) {
  if (comm.has_error || comm.aborted) return false;
  if (comm.revoked) return comm.running > 0;
  return !comm.boxes.all_here() || comm.dividing || look_for_progress(comm);
}

bool look_for_progress(Comm& comm) {
  std::vector<StandinKernel*> kernels;
  {
    const std::lock_guard lock(comm.mutex);
    if (comm.looks_left > 0) {
      --comm.looks_left;
      return true;
    }
    kernels.swap(comm.unissued);
  }
  for (auto* kernel : kernels) issue(kernel);
  return false;
}

void revoke_comm(Comm& comm) {
  comm.change([&] { comm.revoked = true; });
  drop_unissued(comm);
}

void abort_comm(Comm* comm) {
  if (group_depth == 0) return free_aborted({comm});
  comm->change([=] { comm->aborted = true; });
  aborting.push_back(comm);
}

void destroy_comm(Comm* comm) {
  while (look_for_progress(*comm)) {
  }
  comm->wait_until([=] { return comm->running == 0; });
  comm->boxes.leave();
  delete comm;
}

}  // namespace muster::standin
