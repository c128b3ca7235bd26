#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <unordered_map>

#include "core/base/process/interruption.h"
#include "core/store/factory.h"
#include "core/store/request_store.h"
#include "core/store/server/store_table.h"

namespace muster::store {
namespace {

/// One table among the threads of a process. Each blocked caller sleeps on its own condition
/// variable, so that a reply wakes only its caller.
class SharedTable {
 public:
  Reply call(const Request& request) {
    std::unique_lock lock(mutex_);
    const StoreTable::Ticket ticket = next_ticket_++;
    Waiter self;
    waiters_.emplace(ticket, &self);
    StoreTable::Answers answers;
    table_.submit(ticket, request, steady_clock().now(), answers);
    deliver(answers);
    const TimePoint deadline = deadline_after(steady_clock(), request.timeout);
    while (!self.answered) {
      const TimePoint until =
          std::min(deadline, deadline_after(steady_clock(), Interruption::look_every()));
      if (until == TimePoint::max()) {
        self.changed.wait(lock);
      } else if (self.changed.wait_until(lock, until) == std::cv_status::timeout) {
        answers.clear();
        const Status interrupted = Interruption::of_thread();
        if (!interrupted && !self.answered) {
          table_.drop(ticket, steady_clock().now(), answers);
          self.reply.status = interrupted;
          self.answered = true;
        }
        table_.expire(steady_clock().now(), answers);
        deliver(answers);
      }
    }
    waiters_.erase(ticket);
    return std::move(self.reply);
  }

 private:
  struct Waiter {
    std::condition_variable changed;
    bool answered = false;
    Reply reply;
  };

  void deliver(StoreTable::Answers& answers) {
    for (auto& answer : answers) {
      Waiter& waiter = *waiters_.at(answer.ticket);
      waiter.reply = std::move(answer.reply);
      waiter.answered = true;
      waiter.changed.notify_one();
    }
  }

  std::mutex mutex_;
  StoreTable table_;
  StoreTable::Ticket next_ticket_ = 0;
  std::unordered_map<StoreTable::Ticket, Waiter*> waiters_;
};

class TableStore final : public RequestStore<Store> {
 public:
  TableStore(std::shared_ptr<SharedTable> table, Duration timeout)
      : RequestStore(timeout), table_(std::move(table)) {}
  Result<std::shared_ptr<Store>> clone() override {
    return std::shared_ptr<Store>(std::make_shared<TableStore>(table_, timeout()));
  }
  const char* kind() const override { return "hash"; }

 protected:
  Reply call(const Request& request) override { return table_->call(request); }

 private:
  std::shared_ptr<SharedTable> table_;
};

}  // namespace

std::shared_ptr<Store> make_hash_store(Duration timeout) {
  return std::make_shared<TableStore>(std::make_shared<SharedTable>(), timeout);
}

}  // namespace muster::store
