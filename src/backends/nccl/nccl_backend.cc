// SPDX-License-Identifier: BSD-3-Clause
#include "backends/nccl/nccl_backend.h"

#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <span>

#include "backends/nccl/link_exchange.h"
#include "backends/nccl/message_batch.h"
#include "core/base/log/log.h"
#include "core/collective/call.h"
#include "core/group/call/call.h"
#include "core/group/call/dense_tensor.h"
#include "core/group/creation/backend_registry.h"
#include "core/group/errors.h"
#include "core/tunables/tunables.h"
#include "muster/debug_level.h"

namespace muster::nccl {
namespace {

template <class Bytes>
collective::SliceList<Bytes> sizes_of(const Slices& slices) {
  collective::SliceList<Bytes> spans;
  for (const auto& slice : slices) {
    std::size_t bytes = 0;
    for (const auto& tensor : slice) bytes += tensor.nbytes();
    // Only the lengths are read.
    spans.push_back(Bytes(static_cast<typename Bytes::pointer>(nullptr), bytes));
  }
  return spans;
}

transport::Fingerprint fingerprint(const Call& call, std::size_t lane) {
  auto args = call.args;
  args.inputs = sizes_of<ConstBytes>(call.inputs());
  args.outputs = sizes_of<MutableBytes>(call.outputs());
  auto fingerprint = collective::fingerprint_of(args, call.number());
  fingerprint.digest ^= lane << 48;  // members on other devices would wait for each other
  // The engine has one name for all types of a width that it does not reduce itself.
  if (collective::info(call.op()).reduces && !is_reducible(args.dtype))
    fingerprint.digest ^= static_cast<std::uint64_t>(call.dtype()) << 40;
  return fingerprint;
}

}  // namespace

NcclBackend::NcclBackend(std::shared_ptr<const NcclLibrary> library,
                         std::shared_ptr<const NcclSettings> settings,
                         group::OwnBackendOptions options,
                         std::shared_ptr<collective::Communicator> links, Environment environment)
    : library_(std::move(library)),
      options_(std::move(options)),
      links_(std::move(links)),
      exchange_(links_, options_.members, environment.may_share_devices),
      environment_(environment),
      settings_(std::move(settings)) {
  watch_ = std::make_shared<CallWatch>(CallWatch::WatchTerms{
      .group_name = options_.communicator.name,
      .first_ranks = options_.members,
      .links = links_,
      .peer_traces = options_.communicator.peer_traces,
      .traced_apart_as =
          options_.communicator.name + " on " + c10::DeviceTypeName(library_->device(), true),
      .failure = failure_,
      .handling = environment_.handling,
      .stop_communicators = [this] { return stop_communicators(); },
      .async_error = [this] { return async_error(); }});
}

/// The watch's thread uses the lanes, so it ends first. The lanes' threads use the watch, so it is
/// destroyed after them.
NcclBackend::~NcclBackend() {
  if (!failure_->failed()) failure_->set(Status(Code::aborted, "the group was dropped"));
  watch_->stop();
  watch_->fail_rest(abort_communicators());
  drop_lanes();
}

const BackendCapabilities& NcclBackend::capabilities() const {
  static constexpr BackendCapabilities kHas{.name = "nccl", .scaled_sums = true};
  return kHas;
}

bool NcclBackend::supports(Op, at::ScalarType, c10::DeviceType device, std::string* why) const {
  if (device == library_->device()) return true;
  if (why != nullptr)
    *why = "it has tensors on " + c10::DeviceTypeName(library_->device(), true) + " only, not on " +
           c10::DeviceTypeName(device, true);
  return false;
}

std::string NcclBackend::why_not(const Call& call) {
  if (call.is_message()) {
    if (call.args.root == kAnyRank) return "NCCL cannot receive from any rank; name the source";
    if (call.args.tag != 0)
      return "NCCL has no tags, and the tag is " + std::to_string(call.args.tag) + "; leave it out";
  }
  if (call.barrier_device()) {
    const auto device = *call.barrier_device();
    const auto devices = c10::impl::VirtualGuardImpl(device.type()).deviceCount();
    if (device.index() < 0 || device.index() >= devices)
      return "there is no " + device.str() + "; this process sees " + std::to_string(devices) +
             " of that kind";
  }
  if (!collective::info(call.op()).reduces) return {};
  return why_not_reduced(*library_, call.args.reduce, call.dtype(), device_of(call).index());
}

NcclCommunicator::GiveUp NcclBackend::give_up() const {
  return [failure = failure_] {
    if (failure->failed()) throw_backend_error(failure->why());
  };
}

std::unique_lock<std::timed_mutex> NcclBackend::hold_order() {
  std::unique_lock order(order_, std::defer_lock);
  while (!order.try_lock_for(tunables().nccl_look)) throw_if_failed();
  return order;
}

void NcclBackend::throw_if_failed() const {
  if (!failure_->failed()) watch_->fail_if_links_failed();  // a member may have died
  if (!failure_->failed()) return;
  failure_->show();
  throw_backend_error(failure_->why());
}

WorkRef NcclBackend::submit(BackendCall& given) {
  auto& call = static_cast<Call&>(given);
  if (call.is_refused()) return refuse(call.op(), call.number());
  throw_if_failed();
  return call.is_message() ? submit_message(call) : submit_collective(call);
}

/// The other members must hear of it: they may have made the call.
WorkRef NcclBackend::refuse(Op op, std::uint64_t number) {
  const auto order = hold_order();
  if (!failure_->failed())
    watch_->enter(collective::refusal_of(op, number), nullptr,
                  deadline_after(steady_clock(), options_.timeout));
  return nullptr;
}

c10::Device NcclBackend::device_of(const Call& call) {
  if (call.barrier_device()) return *call.barrier_device();
  for (const auto* side : {&call.inputs(), &call.outputs()})
    for (const auto& slice : *side)
      for (const auto& tensor : slice) return tensor.device();
  const std::lock_guard lock(lanes_mutex_);
  return !devices_.empty() ? devices_.front()
                           : c10::impl::VirtualGuardImpl(library_->device()).getDevice();
}

std::shared_ptr<NcclWork> NcclBackend::make_work(Call& call, NcclTransferPlan plan,
                                                 c10::Device device) {
  NcclWork::NcclWorkTerms terms;
  terms.name = std::string(call.name());
  terms.number = call.number();
  terms.timeout = call.record.deadline == TimePoint::max()
                      ? call.group().timeout()
                      : call.record.deadline - call.record.begun;
  terms.deadline = call.record.deadline;
  terms.blocking_wait = environment_.blocking_wait;
  terms.is_async = call.is_async();
  if (call.op() == Op::recv) terms.source = call.group().global_rank_of(call.args.root);
  if (!call.is_message()) terms.callbacks = callbacks_;
  if (call.is_message()) {
    terms.is_async = true;  // on the stream of messages; `wait` orders the caller's behind it
    const auto peer = options_.members[static_cast<std::size_t>(call.args.root)];
    terms.other_end = "rank " + std::to_string(peer) + " had not called the matching " +
                      (call.op() == Op::send ? "recv" : "send");
    terms.size.dtype = static_cast<std::uint64_t>(group::to_dtype(call.dtype()));
    for (const auto* side : {&plan.inputs, &plan.outputs})
      for (const auto& slice : *side)
        for (const auto& tensor : slice) terms.size.bytes += tensor.nbytes();
  }
  return std::make_shared<NcclWork>(std::move(plan), std::move(terms), device, failure_);
}

WorkRef NcclBackend::submit_collective(Call& call) {
  if (const auto why = why_not(call); !why.empty()) {
    refuse(call.op(), call.number());
    throw DistBackendError("backend 'nccl' cannot do " + std::string(call.name()) + ": " + why,
                           Code::unsupported);
  }
  const bool is_barrier = call.op() == Op::barrier;
  const auto device = device_of(call);
  NcclTransferPlan plan{.op = call.op(),
                        .reduce = call.args.reduce,
                        .factor = call.args.factor,
                        .dtype = call.dtype(),
                        .rank = links_->rank(),
                        .size = links_->size(),
                        .root = call.args.root,
                        .inputs = call.inputs(),
                        .outputs = call.outputs()};
  if (is_barrier) {
    const auto token = at::zeros({1}, at::TensorOptions(at::kByte).device(device));
    plan.op = Op::all_reduce;
    plan.dtype = at::kByte;
    plan.inputs = plan.outputs = Slices{Slice{token}};
  }
  std::shared_ptr<NcclWork> work;
  {
    const auto order = hold_order();
    const auto number = lane_number(device);
    auto& lane = group_lane(number);
    work = make_work(call, std::move(plan), device);
    const auto entry = watch_->enter(fingerprint(call, number), work, call.record.deadline);
    if (get_debug_level() == DebugLevel::DETAIL) watch_->wait_for_agreement(entry);
    lane.submit(work);
  }
  return finish(call, work, is_barrier);
}

WorkRef NcclBackend::submit_message(Call& call) {
  if (const auto why = why_not(call); !why.empty())
    throw DistBackendError("backend 'nccl' cannot do " + std::string(call.name()) + ": " + why,
                           Code::unsupported);
  const bool sends = call.op() == Op::send;
  const int me = links_->rank(), peer = call.args.root;
  const auto device = device_of(call);
  messages_with(device, peer);
  const auto work = make_work(call,
                              {.op = call.op(),
                               .dtype = call.dtype(),
                               .rank = me < peer ? 0 : 1,
                               .size = 2,
                               .root = me < peer ? 1 : 0,
                               .inputs = call.inputs(),
                               .outputs = call.outputs()},
                              device);
  watch_->watch(work);
  auto* const batch = MessageBatch::of(this);
  if (batch != nullptr && call.is_async()) {
    batch->add(peer, sends, work);
  } else {
    if (batch != nullptr) batch->post();
    MessagePosts posts;
    (sends ? posts.sends : posts.receives).push_back(work);
    post(peer, std::move(posts));
  }
  call.finish();
  if (call.is_async()) return work;
  work->wait();
  return nullptr;
}

std::shared_ptr<void> NcclBackend::scope(BackendScope kind) {
  if (kind != BackendScope::coalesce_sends || MessageBatch::of(this) != nullptr) return nullptr;
  return std::make_shared<MessageBatch>(
      this, [this](int peer, MessagePosts posts) { post(peer, std::move(posts)); });
}

void NcclBackend::post(int peer, MessagePosts posts) {
  PeerMessages messages;
  {
    const std::lock_guard lock(lanes_mutex_);
    if (const auto at = messages_.find(peer); at != messages_.end()) messages = at->second;
  }
  if (messages.device != nullptr) return messages.device->post(messages.pair, std::move(posts));
  // Another thread has closed the group since.
  const auto error = std::make_exception_ptr(
      DistBackendError("group " + options_.communicator.name +
                           " (backend nccl) was destroyed before its messages "
                           "were posted",
                       Code::aborted));
  for (const auto* works : {&posts.sends, &posts.receives})
    for (const auto& work : *works) work->fail(error);
}

WorkRef NcclBackend::finish(Call& call, const std::shared_ptr<NcclWork>& work, bool blocks) {
  call.finish();
  if (call.is_async()) return work;
  work->wait_until_launched();
  if ((blocks || environment_.blocking_wait) && !work->is_captured()) work->wait_until_done({});
  return nullptr;
}

std::size_t NcclBackend::lane_number(c10::Device device) {
  const std::lock_guard lock(lanes_mutex_);
  const auto at = std::ranges::find(devices_, device);
  const auto number = static_cast<std::size_t>(at - devices_.begin());
  if (at == devices_.end()) devices_.push_back(device);
  return number;
}

Lane& NcclBackend::group_lane(std::size_t number) {
  const std::lock_guard lock(lanes_mutex_);
  if (number == group_lanes_.size())
    group_lanes_.push_back(make_lane(
        devices_[number],
        [exchange = exchange_, links = links_, number, ranks_per_id = environment_.ranks_per_id](
            NcclCommunicator& communicator, const auto& give_up) {
          communicator.open(exchange.group_ids(communicator, number, ranks_per_id, give_up),
                            links->size(), links->rank(), give_up);
        }));
  return *group_lanes_[number];
}

NcclBackend::PeerMessages NcclBackend::messages_with(c10::Device device, int peer) {
  const std::lock_guard lock(lanes_mutex_);
  auto& kept = messages_[peer];
  if (kept.pair == nullptr) {
    const int me = links_->rank();
    kept.device = DeviceMessages::of(device, settings_->is_high_priority(), options_.fabric);
    kept.pair = std::make_shared<PairMessages>(
        PairMessages::PairTerms{
            .pair = {links_->channel().id(), std::min(me, peer), std::max(me, peer)},
            .me = me,
            .peer = peer,
            .my_job_rank = options_.members[static_cast<std::size_t>(me)],
            .peers_job_rank = options_.members[static_cast<std::size_t>(peer)],
            .links = links_,
            .give_up = give_up(),
            .open =
                [exchange = exchange_, me, peer,
                 give_up = give_up()](NcclCommunicator& communicator) {
                  communicator.open(exchange.pair_ids(communicator, peer, give_up), 2,
                                    me < peer ? 0 : 1, give_up);
                },
            .on_error = fail_by(words_of_messages(peer))},
        library_, device, settings_);
  }
  if (const auto began = kept.pair->communicator().device(); began != device)
    throw DistBackendError("messages between two ranks of group " + options_.communicator.name +
                               " (backend nccl) began on " + began.str() +
                               ", and this tensor is on " + device.str() +
                               "; create another group for that device",
                           Code::unsupported);
  return kept;
}

Lane* NcclBackend::first_lane() {
  const std::lock_guard lock(lanes_mutex_);
  return group_lanes_.empty() ? nullptr : group_lanes_.front().get();
}

std::unique_ptr<Lane> NcclBackend::make_lane(c10::Device device, Lane::Opening opening) {
  return std::make_unique<Lane>(library_, device, settings_, std::move(opening), give_up(),
                                fail_by());
}

Lane::OnError NcclBackend::fail_by(const std::string& of) const {
  return [watch = watch_, failure = failure_, of,
          group = options_.communicator.name](const std::exception& error) {
    const auto* known = dynamic_cast<const DistError*>(&error);
    if (const auto* found = dynamic_cast<const AsyncError*>(&error))
      watch->fail_as_reported(of + found->explanation());
    else
      watch->fail(Status(known != nullptr ? known->code() : Code::internal,
                         "group " + group + " (backend nccl): " + error.what(),
                         known != nullptr ? known->ranks() : std::vector<int>{}));
    const auto why = failure->why();
    return std::make_exception_ptr(DistBackendError(why.message(), why.code(), why.ranks()));
  };
}

void NcclBackend::connect(c10::Device device) {
  if (device.type() != library_->device()) return;
  const auto order = hold_order();
  group_lane(lane_number(device)).open();
}

void NcclBackend::adopt(std::shared_ptr<NcclCommunicator> opened) {
  const std::lock_guard lock(lanes_mutex_);
  devices_.push_back(opened->device());
  group_lanes_.push_back(make_lane(
      opened->device(),
      [opened](NcclCommunicator& communicator, const auto&) { communicator.take(*opened); }));
  group_lanes_.back()->open();
}

std::string NcclBackend::async_error() {
  const std::lock_guard lock(lanes_mutex_);
  for (const auto& lane : group_lanes_)
    if (auto error = lane->async_error(); !error.empty()) return error;
  for (const auto& [peer, messages] : messages_) {
    if (messages.pair == nullptr) continue;
    if (auto error = messages.pair->communicator().async_error(); !error.empty())
      return words_of_messages(peer) + error;
  }
  return {};
}

std::string NcclBackend::words_of_messages(int peer) const {
  return "messages with rank " + std::to_string(options_.members[static_cast<std::size_t>(peer)]) +
         ": ";
}

std::vector<NcclCommunicator*> NcclBackend::lane_communicators() {
  const std::lock_guard lock(lanes_mutex_);
  std::vector<NcclCommunicator*> all;
  for (const auto& lane : group_lanes_) all.push_back(&lane->communicator());
  return all;
}

std::vector<NcclCommunicator*> NcclBackend::message_communicators() {
  const std::lock_guard lock(lanes_mutex_);
  std::map<MessagePair, NcclCommunicator*> ordered;
  const int me = links_->rank();
  for (const auto& [peer, messages] : messages_)
    if (messages.pair != nullptr)
      ordered[{0, std::min(me, peer), std::max(me, peer)}] = &messages.pair->communicator();
  std::vector<NcclCommunicator*> all;
  for (const auto& [pair, communicator] : ordered) all.push_back(communicator);
  return all;
}

/// A collective may be behind a message on a stream of the program, and a message behind a
/// collective for want of room: neither the revokes nor an abort can be the first to end. They have
/// their limits in common, and a thread that NCCL keeps in a message uses these up: so the revokes
/// begin first.
bool NcclBackend::stop_communicators() {
  bool stopped;
  if (!library_->can_revoke()) {
    stopped = abort_communicators();
  } else {
    const auto limits = NcclCommunicator::AbortLimits::from_now();
    const auto lanes = lane_communicators();
    std::vector<std::function<bool()>> revokes;
    for (auto* const communicator : lanes) revokes.push_back(communicator->begin_revoke(limits));
    const auto wait_for_messages = NcclCommunicator::begin_abort(message_communicators(), limits);
    std::vector<NcclCommunicator*> aborted;
    for (std::size_t i = 0; i < lanes.size(); ++i)
      if (!revokes[i]()) aborted.push_back(lanes[i]);
    const auto wait_for_the_rest = NcclCommunicator::begin_abort(aborted, limits);
    stopped = wait_for_messages();
    stopped = wait_for_the_rest() && stopped;
  }
  drop_messages();
  return stopped;
}

/// A round that the group's members will not settle any more would hold up other groups' messages.
void NcclBackend::drop_messages() {
  for (const auto& device : devices_of_messages()) device->drop(links_->channel().id());
}

bool NcclBackend::abort_communicators() {
  auto all = lane_communicators();
  const auto messages = message_communicators();
  all.insert(all.end(), messages.begin(), messages.end());
  return NcclCommunicator::abort_together(all);
}

std::vector<std::shared_ptr<DeviceMessages>> NcclBackend::devices_of_messages() {
  const std::lock_guard lock(lanes_mutex_);
  std::vector<std::shared_ptr<DeviceMessages>> devices;
  for (const auto& [peer, messages] : messages_)
    if (messages.device != nullptr && std::ranges::find(devices, messages.device) == devices.end())
      devices.push_back(messages.device);
  return devices;
}

void NcclBackend::drop_lanes() {
  drop_messages();
  const std::lock_guard lock(lanes_mutex_);
  messages_.clear();
  // A thread that NCCL keeps may come back to its lane at any time.
  for (auto& lane : group_lanes_)
    if (lane->communicator().is_abandoned()) static_cast<void>(lane.release());
  group_lanes_.clear();
}

BackendState NcclBackend::state() const {
  if (failure_->failed()) return {failure_->why(), failure_->was_shown(), 0};
  return {links_->failure(), failure_->was_shown(), 0};
}

/// On the links, where an outstanding receive would keep them from closing.
Status NcclBackend::end_messages(TimePoint deadline) {
  try {
    for (const auto& device : devices_of_messages())
      if (auto status =
              device->end(links_->channel().id(), deadline, [this] { throw_if_failed(); });
          !status.ok())
        return status;
    return {};
  } catch (const DistError& error) {
    return Status(error.code(), error.what(), error.ranks());
  }
}

Status NcclBackend::close(TimePoint deadline) {
  auto status = watch_->drain(deadline, CallWatch::DrainScope::everything);
  if (status.ok()) status = end_messages(deadline);
  if (status.ok()) status = links_->close(deadline);
  watch_->stop();  // it would take what destroy throws for a call's timeout, and end the process
  if (!status.ok()) {
    failure_->set(status);
    links_->abort(status.message());  // members that wait for this one's calls
  }
  if (failure_->failed()) watch_->fail_rest(abort_communicators());
  drop_lanes();
  return status;
}

void NcclBackend::abort(const std::string& reason) {
  watch_->fail(
      Status(Code::aborted, "group " + options_.communicator.name + " (backend nccl): " + reason));
}

}  // namespace muster::nccl
