// SPDX-License-Identifier: BSD-3-Clause
#include "backends/carried/communicator.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <thread>

#include "backends/carried/call.h"
#include "backends/carried/fingerprint_exchange.h"
#include "backends/carried/library.h"
#include "backends/carried/messages.h"
#include "backends/carried/poller.h"
#include "core/base/exception_status.h"
#include "core/base/keep_forever.h"
#include "core/base/log/log.h"
#include "core/collective/call.h"
#include "core/collective/communicator.h"
#include "core/collective/control.h"
#include "core/collective/device_memory.h"
#include "core/collective/point_to_point.h"
#include "core/collective/queue/driver.h"
#include "core/collective/queue/queued_communicator.h"
#include "core/tunables/tunables.h"
#include "core/wait/spin_wait.h"

namespace muster::carried {
namespace {

using collective::Args;
using collective::CallRecord;
using collective::Completion;
using collective::Control;
using collective::Driver;
using collective::Finished;
using collective::GroupContext;
using collective::Op;
using collective::PendingRef;
using transport::Fingerprint;

/// How often a thread that waits looks at other things than MPI.
constexpr auto kLookInterval = std::chrono::milliseconds(1);  // limit: delay of a diagnosis
/// So long members look for different calls of theirs before an error of MPI's is the cause.
constexpr auto kErrorGrace = std::chrono::milliseconds(500);  // limit: delay of an error
constexpr auto kIdleCallbackInterval =
    std::chrono::milliseconds(500);  // limit: delay of a callback

/// A collective. A started one is shared; a blocking one lives on its thread's stack.
class CarriedOperation final : public Completion {
 public:
  explicit CarriedOperation(std::shared_ptr<Driver> driver) : driver_(std::move(driver)) {}

  bool done() const override {
    if (published()) return true;
    if (const auto driver = this->driver()) driver->advance();
    return published();
  }
  Status wait(TimePoint deadline) override {
    if (published()) return status();
    const auto driver = this->driver();
    if (driver != nullptr && !driver->drive_until([this] { return published(); }, deadline))
      return Status(Code::timed_out, "the wait for " +
                                         collective::fingerprint_rules().describe(fingerprint_) +
                                         " timed out; the call itself is still outstanding");
    return status();
  }

 private:
  friend class CarriedCommunicator;
  std::shared_ptr<Driver> driver() const {
    const std::lock_guard guard(const_cast<std::mutex&>(lock_));
    return driver_;
  }

  // Under Completion's lock. Set for a started call, until it has ended.
  std::shared_ptr<Driver> driver_;
  // Set while a started call is in the queue, which owns it. A blocking call belongs to its thread,
  // which may return once it sees the result: so nothing follows `publish_unshared`.
  std::shared_ptr<CarriedOperation> self_;
  std::shared_ptr<void> owner_;
  Args owned_;
  const Args* args_ = nullptr;
  Fingerprint fingerprint_;
  TimePoint created_at_, deadline_;
  std::unique_ptr<CarriedCall> call_;
  std::unique_ptr<FingerprintExchange> exchange_;  // where calls are compared first
  bool begun_ = false;
  Status error_;  // MPI's
  TimePoint error_at_;
  collective::Reminders reminders_;
};

/// `lock_` guards the queue, all of its operations (but for `driver_`), the spare calls and the
/// control messages. A thread that polls only tries it: the holder advances the queue for all. It
/// is taken before an operation's own lock and that of `messages_`, never after. Notices of
/// collectives run under it.
class CarriedCommunicator final : public collective::QueuedCommunicator,
                                  public collective::TakesDeviceMemory,
                                  public std::enable_shared_from_this<CarriedCommunicator> {
 public:
  CarriedCommunicator(GroupContext group, CarryingLibrary carrying, std::unique_ptr<Comm> comm)
      : QueuedCommunicator(std::move(group)),
        carrying_(std::move(carrying)),
        library_(*carrying_.library),
        in_child_(", which " + carrying_.name + " does not know; call it in its parent"),
        comm_(std::move(comm)),
        topology_(local_ranks(), group_.fabric->cores()),
        tags_(carrying_.last_tag),
        messages_(group_, library_, *comm_, tags_, carrying_.on_abandoned),
        channel_messages_(group_),
        control_(group_) {
    if (group_.size() > 1) control_.listen();
  }
  ~CarriedCommunicator() override = default;

  bool shares_memory() const override { return false; }
  bool keeps_memory() const override { return abandoned_.load() || messages_.has_abandoned(); }
  bool takes_device_memory(const Args& args) const override {
    return library_.takes_device_memory() && is_left_to_library(args, rank());
  }
  std::uint64_t sequence() const override { return sequence_.load(std::memory_order_relaxed); }

  Status run(const Args& args, CallRecord& record) override;
  PendingRef start(Args args, CallRecord& record, std::shared_ptr<void> owner) override;
  std::shared_ptr<void> manual_progress() override { return nullptr; }
  std::shared_ptr<void> on_idle(std::function<void()> callback) override;
  std::uint64_t refuse(Op op) override;
  void abort(const std::string& reason) override;
  Status close(TimePoint deadline) override;

  void advance() override;
  void check_deadlines(TimePoint now) override;
  bool busy() override {
    return queued_.load() > 0 || !messages_.empty() || !channel_messages_.empty();
  }
  bool has_driver() override { return waiting_threads_.load() > 0; }
  TimePoint next_deadline() override;
  bool drive_until(const std::function<bool()>& done, TimePoint limit) override;
  void poll_between_compute() override { advance(); }
  void notify_progress_thread() override {}

  bool is_drained() override {
    return queued_.load() == 0 && messages_.sends_done() && channel_messages_.sends_done();
  }
  bool with_control(const std::function<void(Control&)>& work) override;
  void cancel_receives(const std::string& why) override {
    messages_.cancel_receives(why);
    channel_messages_.cancel_receives(why);
  }

 private:
  std::size_t local_ranks() const;
  Status check(const Args& args) const;
  Status run_message(const Args& args, CallRecord& record);
  PendingRef start_message(const Args& args, CallRecord& record, std::shared_ptr<void> owner);
  // Under lock_.
  void enqueue(CarriedOperation& operation, const Args& args);
  void advance_queue();
  bool begin(CarriedOperation& operation);
  void note_error(CarriedOperation& operation, Status status);
  void report_waiting(const CarriedOperation& operation);
  void finish_front(const Status& status);
  void fail_queue();
  std::string deadline_text(const CarriedOperation& late, TimePoint now,
                            const trace::PeerReport& known) const;
  // These take lock_.
  void remind(TimePoint now);
  void drop(CarriedOperation& operation);

  const CarryingLibrary carrying_;
  CallLibrary& library_;
  const std::string in_child_;  // what a call there is told
  const std::unique_ptr<Comm> comm_;
  const Topology topology_;
  const CarriedTags tags_;
  Messages messages_;
  collective::PointToPoint channel_messages_;  // with tags that MPI does not carry
  collective::IdleCallbacks idle_callbacks_;
  std::atomic<std::uint64_t> sequence_{0};  // written under lock_
  std::atomic<std::size_t> queued_{0};      // size of queue_, written under lock_
  std::atomic<int> waiting_threads_{0};
  std::atomic<bool> abandoned_{false};  // MPI may use a failed call's memory for ever
  std::mutex lock_;                     // guards the following
  Control control_;
  std::uint64_t refused_ = 0;  // the latest refused call that not all are known to be refused
  std::deque<CarriedOperation*> queue_;  // in the order of the calls, in which they begin and end
  std::vector<std::unique_ptr<CarriedCall>> spare_calls_;
};

std::size_t CarriedCommunicator::local_ranks() const {
  const auto hosts = group_.fabric->hosts();
  const int mine = hosts[static_cast<std::size_t>(group_.job_rank())];
  return static_cast<std::size_t>(std::count(hosts.begin(), hosts.end(), mine));
}

Status CarriedCommunicator::check(const Args& args) const {
  Status valid = QueuedCommunicator::check(args, in_child_);
  return valid.ok() ? check_counts(library_, args) : valid;
}

/// Numbers the call and begins it if it can be.
void CarriedCommunicator::enqueue(CarriedOperation& operation, const Args& args) {
  operation.args_ = &args;
  operation.fingerprint_ = collective::fingerprint_of(args, sequence_.load() + 1);
  if (spare_calls_.empty()) {
    operation.call_ = std::make_unique<CarriedCall>(library_, *comm_, rank(), size(), tags_);
  } else {
    operation.call_ = std::move(spare_calls_.back());
    spare_calls_.pop_back();
  }
  queue_.push_back(&operation);
  queued_.store(queue_.size());
  sequence_.store(operation.fingerprint_.sequence);
  if (size() > 1) control_.begin(operation.fingerprint_);
  if (size() > 1 && (carrying_.compares_calls || get_debug_level() == DebugLevel::DETAIL))
    operation.exchange_ = std::make_unique<FingerprintExchange>(group_, operation.fingerprint_);
  advance_queue();
}

/// Whether MPI has the operation, or has refused it.
bool CarriedCommunicator::begin(CarriedOperation& operation) {
  if (operation.begun_) return true;
  // If another member made the call that this one was refused, MPI would take this one for it.
  if (refused_ != 0) {
    group_.fabric->poll();
    control_.poll();
    if (!control_.all_refused(refused_)) return false;
    refused_ = 0;
  }
  if (operation.exchange_ != nullptr && !operation.exchange_->poll()) return false;
  operation.begun_ = true;
  if (Status status = operation.call_->begin(*operation.args_, operation.fingerprint_.sequence);
      !status.ok())
    note_error(operation, std::move(status));
  return true;
}

/// MPI may have failed because members make different calls: they tell each other first.
void CarriedCommunicator::note_error(CarriedOperation& operation, Status status) {
  operation.error_ = std::move(status);
  operation.error_at_ = group_.now();
  if (size() > 1) report_waiting(operation);
}

void CarriedCommunicator::advance_queue() {
  if (control_.news()) control_.poll();
  for (CarriedOperation* const operation : queue_) {
    if (group_.channel->failed() || !begin(*operation)) break;
  }
  while (!queue_.empty() && !group_.channel->failed()) {
    CarriedOperation& front = *queue_.front();
    if (!front.begun_) return;
    if (front.error_.ok()) {
      auto status = front.call_->test();
      if (!status) return;
      if (status->ok()) {
        finish_front({});
        continue;
      }
      note_error(front, std::move(*status));
    }
    if (size() > 1 && group_.now() - front.error_at_ < kErrorGrace) return;
    group_.channel->fail(front.error_.with_context(group_.call_text(front.fingerprint_)));
  }
  if (group_.channel->failed()) fail_queue();
}

/// Another member may have a call in MPI that never ends, and MPI_Finalize would wait for it.
void CarriedCommunicator::fail_queue() {
  carrying_.on_abandoned();
  while (!queue_.empty()) {
    CarriedOperation& front = *queue_.front();
    const bool runs = front.begun_ && front.error_.ok() && front.call_->active();
    const auto status = runs ? front.call_->test() : std::nullopt;  // it may just have ended
    finish_front(status && status->ok() ? Status() : group_.channel->failure());
  }
}

/// If MPI may still use the call's memory, it is kept for ever: the call's buffers, and the
/// caller's memory if the operation owns it. Under the lock.
void CarriedCommunicator::finish_front(const Status& status) {
  CarriedOperation& operation = *queue_.front();
  queue_.pop_front();
  queued_.store(queue_.size());
  std::shared_ptr<CarriedOperation> self = std::move(operation.self_);
  std::shared_ptr<Driver> driver;
  std::shared_ptr<void> owner;
  if (operation.call_->active()) {
    abandoned_.store(true);
    keep_forever(std::shared_ptr<CarriedCall>(std::move(operation.call_)));
    if (self != nullptr) keep_forever(operation.owner_);
  } else {
    spare_calls_.push_back(std::move(operation.call_));
  }
  operation.exchange_ = nullptr;
  if (self == nullptr) return operation.publish_unshared(status);
  {
    const std::lock_guard guard(operation.lock_);
    driver = std::move(operation.driver_);
    owner = std::move(operation.owner_);
  }
  const auto notices = operation.publish(status);
  for (const auto& notice : notices) notice(operation.status());
}

void CarriedCommunicator::advance() {
  const auto self = shared_from_this();  // a notice may drop the last other owner
  guarded([this] {
    {
      const std::unique_lock guard(lock_, std::try_to_lock);
      if (guard.owns_lock()) advance_queue();
    }
    messages_.sweep();
    if (!channel_messages_.empty()) group_.fabric->poll();
    channel_messages_.sweep();
  });
}

bool CarriedCommunicator::drive_until(const std::function<bool()>& done, TimePoint limit) {
  struct DrivingThreads {
    explicit DrivingThreads(std::atomic<int>& threads) : threads_(threads) {
      threads_.fetch_add(1);
    }
    ~DrivingThreads() { threads_.fetch_sub(1); }
    std::atomic<int>& threads_;
  };
  const DrivingThreads waiting(waiting_threads_);
  const auto now = [this] { return group_.now(); };
  SpinWait spin(SpinBudget::before_sleep(topology_));
  TimePoint next_look{}, next_callbacks = TimePoint::max();
  for (int polls = 1;; ++polls) {
    advance();
    if (done()) return true;
    if (take_progress()) spin.restart();
    const bool sleeps = !spin.pause(now);
    if (sleeps) std::this_thread::sleep_for(tunables().mpi_poll);
    if (!sleeps && polls % fixed::kClockPolls != 0) continue;
    const TimePoint time = now();
    if (next_look == TimePoint() && time < limit) next_look = time + kLookInterval;
    if (time < next_look) continue;
    next_look = time + kLookInterval;
    group_.fabric->poll();
    check_deadlines(time);
    remind(time);
    if (next_callbacks == TimePoint::max()) next_callbacks = time + kIdleCallbackInterval;
    if (time >= next_callbacks) {
      idle_callbacks_.run();
      next_callbacks = time + kIdleCallbackInterval;
    }
    if (time >= limit) return done();
  }
}

Status CarriedCommunicator::run(const Args& args, CallRecord& record) {
  if (Status fine = check(args); !fine) return fine;
  if (collective::is_message(args.op)) return run_message(args, record);
  record.arm();
  CarriedOperation operation(nullptr);
  operation.created_at_ = record.begun == TimePoint() ? group_.now() : record.begun;
  operation.deadline_ = record.deadline;
  try {
    {
      const std::lock_guard guard(lock_);
      enqueue(operation, args);
    }
    record.on_started(operation.fingerprint_.sequence);
    if (!operation.published())
      drive_until([&operation] { return operation.published(); }, TimePoint::max());
  } catch (...) {  // the operation's memory is this thread's
    Status why = group_.fail_by_exception(&operation.fingerprint_);
    drop(operation);
    return why;
  }
  return operation.status();
}

/// Called by a thread that stops waiting for `operation`, after the group has failed.
void CarriedCommunicator::drop(CarriedOperation& operation) {
  const std::lock_guard guard(lock_);
  if (std::find(queue_.begin(), queue_.end(), &operation) != queue_.end()) fail_queue();
}

PendingRef CarriedCommunicator::start(Args args, CallRecord& record, std::shared_ptr<void> owner) {
  if (Status valid = check(args); !valid) return std::make_shared<Finished>(std::move(valid));
  const Op op = args.op;
  if (Status ready = CarriedPoller::of_process().prepare(); !ready) return fail_start(op, ready);
  try {
    if (collective::is_message(op)) return start_message(args, record, std::move(owner));
    record.arm();
    const auto operation = std::make_shared<CarriedOperation>(shared_from_this());
    operation->created_at_ = group_.now();
    operation->deadline_ = record.deadline;
    operation->owned_ = std::move(args);
    operation->owner_ = std::move(owner);
    {
      const std::lock_guard guard(lock_);
      operation->self_ = operation;
      enqueue(*operation, operation->owned_);
    }
    record.on_started(operation->fingerprint_.sequence);
    if (!operation->published()) CarriedPoller::of_process().watch(shared_from_this());
    return operation;
  } catch (...) {
    return fail_start(op, status_of_exception());
  }
}

PendingRef CarriedCommunicator::start_message(const Args& args, CallRecord& record,
                                              std::shared_ptr<void> owner) {
  record.on_started(0);
  PendingRef message;
  if (tags_.carries(args.tag)) {
    message = messages_.start(shared_from_this(), args, record.deadline, std::move(owner));
  } else {
    message = channel_messages_.start(shared_from_this(), args, record, std::move(owner));
  }
  if (busy()) CarriedPoller::of_process().watch(shared_from_this());
  return message;
}

Status CarriedCommunicator::run_message(const Args& args, CallRecord& record) {
  record.on_started(0);
  if (tags_.carries(args.tag))
    return messages_.start(shared_from_this(), args, record.deadline, nullptr)
        ->wait(TimePoint::max());
  return channel_messages_.start(shared_from_this(), args, record, nullptr)->wait(TimePoint::max());
}

std::shared_ptr<void> CarriedCommunicator::on_idle(std::function<void()> callback) {
  return collective::idle_scope(shared_from_this(), idle_callbacks_, std::move(callback));
}

std::uint64_t CarriedCommunicator::refuse(Op op) {
  if (is_over() || size() == 1) return 0;
  const std::lock_guard guard(lock_);
  const Fingerprint refusal = collective::refusal_of(op, sequence_.load() + 1);
  sequence_.store(refusal.sequence);
  refused_ = refusal.sequence;
  control_.begin(refusal);
  control_.report_refused();
  return refusal.sequence;
}

void CarriedCommunicator::abort(const std::string& reason) {
  if (!is_forked()) fail_by_abort(reason);
}

bool CarriedCommunicator::with_control(const std::function<void(Control&)>& work) {
  const std::unique_lock guard(lock_, std::try_to_lock);
  if (!guard.owns_lock()) return false;
  control_.poll();
  work(control_);
  return true;
}

Status CarriedCommunicator::close(TimePoint deadline) {
  if (!begin_close()) return {};
  collective::CommunicatorClose closing(group_, *this, *this);
  Status status = closing.run(deadline);
  drive_until([this] { return !busy(); }, TimePoint::max());
  CarriedPoller::of_process().forget(*this);
  with_control([](Control& control) { control.cancel(); });
  if (!status.ok() || !closing.all_closed()) carrying_.on_abandoned();
  if (status.ok() && closing.all_closed()) {  // freeing it is a call of all members
    if (const int code = comm_->free(); code != 0)
      status = failed(library_, "freeing its communicator", code);
  }
  return status.ok() ? status : status.with_context("closing " + group_.here());
}

TimePoint CarriedCommunicator::next_deadline() {
  const std::lock_guard guard(lock_);
  TimePoint earliest = std::min(messages_.next_deadline(), channel_messages_.next_deadline());
  for (const CarriedOperation* operation : queue_)
    earliest = std::min(earliest, operation->deadline_);
  return earliest;
}

void CarriedCommunicator::check_deadlines(TimePoint now) {
  messages_.check_deadlines(now);
  channel_messages_.check_deadlines(now);
  if (queued_.load() == 0) return;
  const std::unique_lock guard(lock_, std::try_to_lock);
  if (!guard.owns_lock() || group_.channel->failed()) return;
  const auto late = std::find_if(
      queue_.begin(), queue_.end(),
      [now](const CarriedOperation* operation) { return operation->deadline_ <= now; });
  if (late == queue_.end()) return;
  trace::PeerReport known;
  if (group_.peer_traces)
    known = trace::report_peers(group_.peer_traces->look(), group_.name,
                                (*late)->fingerprint_.sequence, members(), group_.job_rank(), {});
  group_.channel->fail(Status(Code::timed_out, deadline_text(**late, now, known), known.missing));
}

std::string CarriedCommunicator::deadline_text(const CarriedOperation& late, TimePoint now,
                                               const trace::PeerReport& known) const {
  std::string text =
      "rank " + std::to_string(group_.job_rank()) + " waited " + describe(now - late.created_at_);
  if (!known.missing.empty()) text += " for " + collective::describe_ranks(known.missing);
  text += " in " + collective::fingerprint_rules().describe(late.fingerprint_) + ", call " +
          std::to_string(late.fingerprint_.sequence) + " of " + group_.text();
  if (!known.text.empty()) text += ": " + known.text;
  return text + ". " + carrying_.name +
         " cannot cancel a call, so the group cannot be used any more: destroy it and make "
         "another; if the other ranks are only slow, give the call or the group a longer timeout";
}

/// A member that waits tells the first member in which call, and the first tells all: if another
/// is in a different call, or closes, the group fails with both named.
void CarriedCommunicator::remind(TimePoint now) {
  if (size() == 1 || queued_.load() == 0) return;
  const std::unique_lock guard(lock_, std::try_to_lock);
  if (!guard.owns_lock() || queue_.empty() || group_.channel->failed()) return;
  control_.all_sent();
  CarriedOperation& front = *queue_.front();
  if (front.reminders_.due(front.created_at_, now)) report_waiting(front);
}

void CarriedCommunicator::report_waiting(const CarriedOperation& operation) {
  if (rank() != 0) return control_.report_waiting(0, operation.fingerprint_);
  for (int member = 1; member < size(); ++member)
    control_.report_waiting(member, operation.fingerprint_);
}

}  // namespace

std::shared_ptr<collective::Communicator> communicator_over(CarryingLibrary carrying,
                                                            GroupContext group,
                                                            std::unique_ptr<Comm> comm) {
  return std::make_shared<CarriedCommunicator>(std::move(group), std::move(carrying),
                                               std::move(comm));
}

}  // namespace muster::carried
