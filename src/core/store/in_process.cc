// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <unordered_map>

#include "core/base/process/interruption.h"
#include "core/store/factory.h"
#include "core/store/request.h"
#include "core/store/server/store_table.h"
#include "muster/key_value_store.h"

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

  std::mutex mutex_;  // guards all below, and the waiters on their threads' stacks
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

namespace {

class PrefixedStore final : public Store {
 public:
  PrefixedStore(std::string prefix, std::shared_ptr<Store> store)
      : prefix_(std::move(prefix) + "/"), store_(std::move(store)) {}

  Status set(std::string_view key, std::string_view value) override {
    return store_->set(under(key), value);
  }
  Result<std::string> get(std::string_view key, Timeout timeout) override {
    return store_->get(under(key), timeout);
  }
  Result<std::int64_t> add(std::string_view key, std::int64_t amount) override {
    return store_->add(under(key), amount);
  }
  Result<std::string> compare_set(std::string_view key, std::string_view expected,
                                  std::string_view desired) override {
    return store_->compare_set(under(key), expected, desired);
  }
  Status wait(std::span<const std::string> keys, Timeout timeout) override {
    return store_->wait(under(keys), timeout);
  }
  Result<std::int64_t> num_keys() override {
    const auto keys = list_keys();
    if (!keys) return keys.status();
    return static_cast<std::int64_t>(keys->size());
  }
  Result<bool> delete_key(std::string_view key) override { return store_->delete_key(under(key)); }
  Result<bool> check(std::span<const std::string> keys) override {
    return store_->check(under(keys));
  }
  Status append(std::string_view key, std::string_view value) override {
    return store_->append(under(key), value);
  }
  Result<std::vector<std::string>> multi_get(std::span<const std::string> keys,
                                             Timeout timeout) override {
    return store_->multi_get(under(keys), timeout);
  }
  Status multi_set(std::span<const std::string> keys,
                   std::span<const std::string> values) override {
    return store_->multi_set(under(keys), values);
  }
  Status queue_push(std::string_view key, std::string_view value) override {
    return store_->queue_push(under(key), value);
  }
  Result<std::string> queue_pop(std::string_view key, bool block, Timeout timeout) override {
    return store_->queue_pop(under(key), block, timeout);
  }
  Result<std::int64_t> queue_len(std::string_view key) override {
    return store_->queue_len(under(key));
  }
  Result<std::vector<std::string>> list_keys() override {
    auto all = store_->list_keys();
    if (!all) return all;
    std::vector<std::string> mine;
    for (const std::string& key : *all) {
      if (key.starts_with(prefix_)) mine.push_back(key.substr(prefix_.size()));
    }
    return mine;
  }
  Status barrier(std::string_view key, int members, Timeout timeout) override {
    return store_->barrier(under(key), members, timeout);
  }
  Result<std::vector<std::string>> all_gather(std::string_view key, int index, int members,
                                              std::string_view value, Timeout timeout) override {
    return store_->all_gather(under(key), index, members, value, timeout);
  }

  Result<std::shared_ptr<Store>> clone() override {
    auto inner = store_->clone();
    if (!inner) return inner;
    return make_prefix_store(prefix_.substr(0, prefix_.size() - 1), *inner);
  }
  Duration timeout() const override { return store_->timeout(); }
  void set_timeout(Duration timeout) override { store_->set_timeout(timeout); }
  const char* kind() const override { return "prefix"; }

  const std::shared_ptr<Store>& underlying() const { return store_; }

 private:
  std::string under(std::string_view key) const { return prefix_ + std::string(key); }
  std::vector<std::string> under(std::span<const std::string> keys) const {
    std::vector<std::string> all;
    all.reserve(keys.size());
    for (const std::string& key : keys) all.push_back(under(key));
    return all;
  }

  std::string prefix_;
  std::shared_ptr<Store> store_;
};

}  // namespace

std::shared_ptr<Store> make_prefix_store(std::string prefix, std::shared_ptr<Store> store) {
  return std::make_shared<PrefixedStore>(std::move(prefix), std::move(store));
}

std::shared_ptr<Store> underlying_store(const Store& store) {
  const auto* prefix = dynamic_cast<const PrefixedStore*>(&store);
  return prefix == nullptr ? nullptr : prefix->underlying();
}

}  // namespace muster::store
