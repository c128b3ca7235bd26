// SPDX-License-Identifier: BSD-3-Clause
#include "device_room.h"

#include <algorithm>
#include <chrono>
#include <map>

namespace muster::standin {
namespace {

constexpr std::chrono::milliseconds kAbortPoll{1};

}  // namespace

DeviceRoom& DeviceRoom::of(int device) {
  static std::mutex mutex;
  static auto* const rooms = new std::map<int, DeviceRoom>;  // streams outlive static objects
  const std::lock_guard lock(mutex);
  return (*rooms)[device];
}

bool DeviceRoom::enter(int places, const std::function<bool()>& is_aborted) {
  std::unique_lock lock(mutex_);
  const auto mine = ++last_;
  queue_.push_back(mine);
  const auto is_mine = [&] { return queue_.front() == mine && (places == 0 || running_ < places); };
  bool aborted = false;
  while (!is_mine() && !(aborted = is_aborted())) changed_.wait_for(lock, kAbortPoll);
  std::erase(queue_, mine);
  if (!aborted) ++running_;
  changed_.notify_all();
  return !aborted;
}

void DeviceRoom::leave() {
  const std::lock_guard lock(mutex_);
  --running_;
  changed_.notify_all();
}

int DeviceRoom::running() {
  const std::lock_guard lock(mutex_);
  return running_;
}

int DeviceRoom::waiting() {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(queue_.size());
}

}  // namespace muster::standin
