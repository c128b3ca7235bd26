// SPDX-License-Identifier: BSD-3-Clause
#include "backends/nccl/lane.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "core/base/threads/thread_start.h"
#include "core/group/errors.h"
#include "core/tunables/tunables.h"

namespace muster::nccl {
namespace {

constexpr auto kLaneThread = "the thread that opens a communicator of NCCL";

}  // namespace

Lane::Lane(std::shared_ptr<const NcclLibrary> library, c10::Device device,
           const std::shared_ptr<const NcclSettings>& settings, Opening opening,
           NcclCommunicator::GiveUp give_up, OnError on_error)
    : communicator_(std::move(library), device, settings),
      stream_(c10::impl::VirtualGuardImpl(device.type())
                  .getStreamFromGlobalPool(device, settings->is_high_priority())),
      opening_(std::move(opening)),
      give_up_(std::move(give_up)),
      on_error_(std::move(on_error)) {}

Lane::~Lane() {
  if (opener_.joinable()) opener_.join();
}

void Lane::launch(NcclWork& work) {
  try {
    work.launch(communicator_, stream_, give_up_);
  } catch (const std::exception& error) {
    work.fail(on_error_(error));
  }
}

void Lane::open() {
  const std::lock_guard lock(mutex_);
  if (!open_ && !opener_.joinable())
    opener_ = group::take(start_thread(kLaneThread, [this] { open_and_launch(); }));
}

void Lane::submit(std::shared_ptr<NcclWork> work) {
  const std::lock_guard lock(mutex_);
  if (open_) {
    launch(*work);
    return;
  }
  waiting_.push_back(std::move(work));
  if (!opener_.joinable())
    opener_ = group::take(start_thread(kLaneThread, [this] { open_and_launch(); }));
}

void Lane::open_and_launch() {
  try {
    opening_(communicator_, give_up_);
  } catch (const std::exception& error) {
    const auto failure = on_error_(error);
    const std::lock_guard lock(mutex_);
    open_ = true;  // later calls are failed by the communicator, which is not there
    for (const auto& work : waiting_) work->fail(failure);
    waiting_.clear();
    return;
  }
  for (;;) {
    std::shared_ptr<NcclWork> work;
    {
      const std::lock_guard lock(mutex_);
      if (waiting_.empty()) {
        open_ = true;
        return;
      }
      work = waiting_.front();
    }
    launch(*work);
    const std::lock_guard lock(mutex_);
    waiting_.pop_front();
  }
}

NcclCommunicator& Lane::opened(const NcclCommunicator::GiveUp& give_up) {
  open();
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (open_) return communicator_;
    }
    give_up();
    std::this_thread::sleep_for(tunables().nccl_poll);
  }
}

std::string Lane::async_error() { return communicator_.async_error(); }

}  // namespace muster::nccl
