// SPDX-License-Identifier: BSD-3-Clause
// Communicators of NCCL that are made of others: of parts of a group, of its survivors, and with
// ranks that join it.
#include <c10/core/impl/VirtualGuardImpl.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backends/nccl/link_exchange.h"
#include "backends/nccl/nccl_backend.h"
#include "core/base/log/log.h"
#include "core/group/errors.h"

namespace muster::nccl {
namespace {

/// Throws once the deadline has passed.
void throw_if_late(TimePoint deadline, const std::string& what) {
  if (steady_clock().now() >= deadline)
    throw DistBackendError(what + " was not done within its timeout", Code::timed_out);
}

}  // namespace

std::shared_ptr<NcclCommunicator> NcclBackend::split(int part, int key,
                                                     std::shared_ptr<const NcclSettings> settings,
                                                     TimePoint deadline) {
  throw_if_failed();
  if (library_->functions().comm_split == nullptr) return nullptr;
  const auto order = hold_order();
  Lane* const lane = first_lane();
  if (lane == nullptr) return nullptr;  // on every member: none has called a collective yet
  if (const auto status = watch_->drain(deadline, CallWatch::DrainScope::collectives); !status.ok())
    throw_backend_error(status);
  const auto give_up = [&] {
    throw_if_failed();
    throw_if_late(deadline, "splitting group " + options_.communicator.name + " (backend nccl)");
  };
  auto made = std::make_shared<NcclCommunicator>(library_, lane->device(), std::move(settings));
  made->open_by_split(lane->opened(give_up), part, key, give_up);
  return made;
}

std::shared_ptr<NcclCommunicator> NcclBackend::shrink(const std::vector<int>& excluded,
                                                      NcclBackend& survivors, TimePoint deadline) {
  if (excluded.empty()) return nullptr;  // NCCL shrinks by one rank at least
  watch_->wait_until_ended(deadline);
  Lane* const lane = first_lane();
  if (!survivors.exchange_.all_say(lane != nullptr && lane->communicator().can_shrink(), deadline))
    return nullptr;
  auto made = std::make_shared<NcclCommunicator>(library_, lane->device(), survivors.settings_);
  std::string refused;
  try {
    made->open_by_shrink(lane->communicator(), excluded, [&] {
      survivors.throw_if_failed();
      throw_if_late(deadline, "shrinking group " + options_.communicator.name);
    });
  } catch (const DistError& error) {
    refused = error.what();
    log(LogLevel::info, refused + "; the survivors connect anew");
  }
  if (survivors.exchange_.all_say(refused.empty(), deadline)) return made;
  made->abort();
  return nullptr;
}

std::shared_ptr<NcclCommunicator> NcclBackend::grow(NcclBackend* old, TimePoint deadline) {
  using Readiness = GrowthOffer::Readiness;
  GrowthOffer mine;
  std::unique_lock<std::timed_mutex> order;
  Lane* lane = nullptr;
  Status failed;
  if (old != nullptr) {
    try {
      order = old->hold_order();
      old->throw_if_failed();
      failed = old->watch_->drain(deadline, CallWatch::DrainScope::collectives);
    } catch (const DistError& error) {
      failed = Status(error.code(), error.what(), error.ranks());
    }
    lane = old->first_lane();
    mine.parent = old->links_->channel().id();  // the same on its members, of no other group
    mine.members = old->links_->size();
    if (lane == nullptr) mine.readiness = Readiness::cannot;
  }
  const auto missing = library_->need("ncclCommGrow");
  if (!missing.ok()) mine.readiness = Readiness::cannot;
  if (!failed.ok()) mine.readiness = Readiness::failed;
  const auto offers = exchange_.gather(mine, deadline);
  if (!failed.ok()) throw_backend_error(failed);
  const bool can = can_grow(offers, options_.members, options_.communicator.name);
  if (!missing.ok()) log(LogLevel::info, missing.message() + "; all ranks connect anew");
  return can ? grow_by_nccl(old, lane, deadline) : nullptr;
}

std::shared_ptr<NcclCommunicator> NcclBackend::grow_by_nccl(NcclBackend* old, Lane* lane,
                                                            TimePoint deadline) {
  const auto give_up = [&] {
    throw_if_failed();
    if (old != nullptr) old->throw_if_failed();
    throw_if_late(deadline, "growing group " + options_.communicator.name + " (backend nccl)");
  };
  auto* const parent = lane != nullptr ? &lane->opened(give_up) : nullptr;
  const auto device = parent != nullptr
                          ? parent->device()
                          : options_.device_id.value_or(
                                c10::impl::VirtualGuardImpl(library_->device()).getDevice());
  exchange_.refuse_shared(*library_, device, deadline);
  const auto made = std::make_shared<NcclCommunicator>(library_, device, settings_);
  std::string refused;
  // Whether `step`, taken here if `is_due`, has worked on all ranks.
  const auto all_take = [&](bool is_due, const std::function<void()>& step) {
    try {
      if (is_due) step();
    } catch (const DistError& error) {
      if (error.code() == Code::timed_out || failure_->failed()) throw;
      refused = error.what();
    }
    return exchange_.all_say(refused.empty(), deadline);
  };
  const bool is_first = links_->rank() == 0, joins = parent == nullptr;
  UniqueId id{};
  if (all_take(is_first, [&] { id = parent->growth_id(); })) {
    id = exchange_.from_first(id, deadline);
    const auto begin = [&] {
      made->begin_growth(*parent, links_->size(), is_first ? &id : nullptr);
    };
    const auto join = [&] { made->begin_joining(id, links_->size(), links_->rank()); };
    const auto finish = [&] { made->finish_growth(parent, give_up); };
    if (all_take(!joins, begin) && all_take(joins, join) && all_take(true, finish)) return made;
  }
  if (!refused.empty()) log(LogLevel::info, refused + "; all ranks connect anew");
  made->abort();
  return nullptr;
}

}  // namespace muster::nccl
