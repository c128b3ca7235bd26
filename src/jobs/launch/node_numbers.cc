// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/launch/node_numbers.h"

namespace muster::launch {

NodeNumbers::Values NodeNumbers::values() const {
  const std::lock_guard held(lock_);
  return values_;
}

std::shared_ptr<store::TcpStore> NodeNumbers::store() const {
  const std::lock_guard held(lock_);
  return store_.lock();
}

void NodeNumbers::begin_job(const std::string& job, const std::string& host) {
  const std::lock_guard held(lock_);
  values_.job = job;
  values_.host = host;
}

void NodeNumbers::begin_epoch(std::int64_t epoch, std::int64_t restarts, int world_size) {
  const std::lock_guard held(lock_);
  values_.epoch = epoch;
  values_.restarts = restarts;
  values_.world_size = world_size;
}

void NodeNumbers::put_worker(int local_rank, const Worker& worker) {
  const std::lock_guard held(lock_);
  values_.workers[local_rank] = worker;
}

void NodeNumbers::end_worker(int local_rank) {
  const std::lock_guard held(lock_);
  if (const auto worker = values_.workers.find(local_rank); worker != values_.workers.end())
    worker->second.ended = true;
}

void NodeNumbers::add_failure() {
  const std::lock_guard held(lock_);
  ++values_.failures;
}

void NodeNumbers::put_commits(std::int64_t commits) {
  const std::lock_guard held(lock_);
  values_.commits = commits;
}

void NodeNumbers::put_store(const std::shared_ptr<store::TcpStore>& store) {
  const std::lock_guard held(lock_);
  store_ = store;
}

}  // namespace muster::launch
