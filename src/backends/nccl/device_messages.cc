// SPDX-License-Identifier: BSD-3-Clause
#include "backends/nccl/device_messages.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <span>
#include <tuple>
#include <utility>

#include "core/base/dtype.h"
#include "core/base/log/log.h"
#include "core/base/threads/thread_start.h"
#include "core/group/errors.h"
#include "core/tunables/tunables.h"
#include "core/wait/callbacks.h"

namespace muster::nccl {
namespace {

constexpr auto kLaunchThread = "the thread that posts and launches messages of NCCL";
constexpr std::uint64_t kNoteTag = 0;  // LinkExchange uses the tags from 1 on

thread_local bool is_launching_thread = false;

void move_to(std::deque<std::shared_ptr<NcclWork>>& queue,
             std::vector<std::shared_ptr<NcclWork>> works) {
  for (auto& work : works) queue.push_back(std::move(work));
}

void take_from(std::deque<std::shared_ptr<NcclWork>>& queue, std::uint32_t count,
               std::vector<std::shared_ptr<NcclWork>>& works) {
  for (; count > 0 && !queue.empty(); --count) {
    works.push_back(std::move(queue.front()));
    queue.pop_front();
  }
}

/// First those of the sends, then those of the receives.
std::vector<MessageSize> sizes_of(const MessagePosts& posts) {
  std::vector<MessageSize> sizes;
  for (const auto* works : {&posts.sends, &posts.receives})
    for (const auto& work : *works) sizes.push_back(work->terms().size);
  return sizes;
}

void append(const std::vector<MessageSize>& sizes, std::size_t sends, std::deque<MessageSize>& sent,
            std::deque<MessageSize>& received) {
  const auto middle = sizes.begin() + static_cast<std::ptrdiff_t>(sends);
  sent.insert(sent.end(), sizes.begin(), middle);
  received.insert(received.end(), middle, sizes.end());
}

std::string words(const MessageSize& size) {
  const auto dtype = size.dtype < kDTypes ? std::string(name_of(static_cast<DType>(size.dtype)))
                                          : "dtype " + std::to_string(size.dtype);
  return std::to_string(size.bytes) + " bytes of " + dtype;
}

/// Takes the messages whose two ends are known off the queues. Returns how the first of them
/// differ; empty: all agree.
std::string compare(std::deque<MessageSize>& sent, int from, std::deque<MessageSize>& received,
                    int to) {
  for (; !sent.empty() && !received.empty(); sent.pop_front(), received.pop_front())
    if (sent.front() != received.front())
      return "rank " + std::to_string(from) + " sends " + words(sent.front()) + ", and rank " +
             std::to_string(to) + " receives " + words(received.front()) +
             "; both tensors must have the same size and dtype";
  return {};
}

/// How long to wait before the device is asked again about inputs that are `late` by so much. A
/// message then begins a sixteenth of that later at most.
Duration pause_after(Duration late) {
  constexpr int kParts = 16;
  return std::min(std::max(late / kParts, tunables().nccl_poll), tunables().nccl_look);
}

bool are_ready(const MessagePosts& posts) {
  const auto is_ready = [](const auto& work) { return work->is_ready(); };
  return std::ranges::all_of(posts.sends, is_ready) &&
         std::ranges::all_of(posts.receives, is_ready);
}

}  // namespace

void PairMessages::launch(const std::vector<std::shared_ptr<NcclWork>>& works,
                          const c10::Stream& stream) {
  try {
    terms_.give_up();
    if (!std::exchange(open_, true)) terms_.open(communicator_);
    NcclWork::launch_together(works, communicator_, stream, terms_.give_up);
  } catch (const std::exception& error) {
    const auto failure = terms_.on_error(error);
    for (const auto& work : works) work->fail(failure);
  }
}

std::shared_ptr<DeviceMessages> DeviceMessages::of(
    c10::Device device, bool high_priority, const std::shared_ptr<transport::Fabric>& fabric) {
  using Key = std::tuple<const void*, c10::DeviceType, c10::DeviceIndex>;
  static std::mutex mutex;
  static auto* const all = new std::map<Key, std::weak_ptr<DeviceMessages>>;
  const std::lock_guard lock(mutex);
  std::erase_if(*all, [](const auto& entry) { return entry.second.expired(); });
  auto& kept = (*all)[{fabric.get(), device.type(), device.index()}];
  auto found = kept.lock();
  if (found == nullptr || found->is_abandoned()) {
    group::check(CallbackExecutor::of_process().prepare());
    kept = found = std::shared_ptr<DeviceMessages>(new DeviceMessages(device, high_priority),
                                                   &destroy_elsewhere);
  }
  if (found->high_priority_ != high_priority)
    log(LogLevel::warning, "messages of all groups on " + device.str() +
                               " (backend nccl) run on one stream, whose priority is " +
                               (high_priority ? "the default one" : "high") +
                               ", as the first group asked");
  return found;
}

DeviceMessages::DeviceMessages(c10::Device device, bool high_priority)
    : stream_(c10::impl::VirtualGuardImpl(device.type())
                  .getStreamFromGlobalPool(device, high_priority)),
      high_priority_(high_priority) {}

DeviceMessages::~DeviceMessages() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

/// A Work may hold the last reference to the program's objects, and these to a group. If it ends on
/// the thread that launched it, that thread cannot wait for its own end.
void DeviceMessages::destroy_elsewhere(DeviceMessages* messages) {
  if (is_launching_thread)
    CallbackExecutor::of_process().run([messages] { delete messages; });
  else
    delete messages;
}

void DeviceMessages::post(const std::shared_ptr<PairMessages>& pair, MessagePosts posts) {
  if (posts.sends.empty() && posts.receives.empty()) return;
  std::exception_ptr failure;
  {
    const std::lock_guard lock(mutex_);
    try {
      pair->terms_.give_up();  // the group may have been dropped, and must not come back
      if (!thread_.joinable())
        thread_ = group::take(start_thread(kLaunchThread, [this] { run(); }));
      return add(pair, std::move(posts));
    } catch (const std::exception& error) {
      failure = pair->terms_.on_error(error);
    }
  }
  // Without the lock: a failure runs what a program hung onto the Work.
  for (const auto* works : {&posts.sends, &posts.receives})
    for (const auto& work : *works) work->fail(failure);
}

void DeviceMessages::add(const std::shared_ptr<PairMessages>& pair, MessagePosts posts) {
  auto& kept = pairs_[pair->terms_.pair];
  if (kept == nullptr) {
    kept = pair;
    await_note(*pair);
  }
  pair->held_.push_back(std::move(posts));
  has_news_ = true;
  changed_.notify_all();
}

bool DeviceMessages::is_holding() const {
  const auto holds = [](const auto& entry) { return !entry.second->held_.empty(); };
  return std::ranges::any_of(pairs_, holds);
}

void DeviceMessages::post_ready() {
  for (const auto& [key, pair] : pairs_) post_ready(*pair);
}

/// The n-th send of a rank meets the n-th receive of its peer, so in each direction no message is
/// posted before an earlier one.
void DeviceMessages::post_ready(PairMessages& pair) {
  bool holds_sends = false, holds_receives = false;
  for (auto& posts : std::exchange(pair.held_, {})) {
    const auto sends = static_cast<std::uint32_t>(posts.sends.size());
    const auto receives = static_cast<std::uint32_t>(posts.receives.size());
    if ((holds_sends && sends > 0) || (holds_receives && receives > 0) || !are_ready(posts)) {
      holds_sends = holds_sends || sends > 0;
      holds_receives = holds_receives || receives > 0;
      pair.held_.push_back(std::move(posts));
      continue;
    }
    const auto sizes = sizes_of(posts);
    for (const auto* works : {&posts.sends, &posts.receives})
      for (const auto& work : *works) work->note_posted();
    move_to(pair.sends_, std::move(posts.sends));
    move_to(pair.receives_, std::move(posts.receives));
    if (pair.leads()) {
      append(sizes, sends, pair.my_sends_, pair.my_receives_);
      if (!agree(pair)) return;
    }
    take(order_.post(pair.terms_.pair, pair.leads(), sends, receives));
    if (!pair.leads()) send_sizes(pair, sizes);
  }
}

void DeviceMessages::take(const Steps& steps) {
  for (const auto& [key, note] : steps.notes)
    if (const auto at = pairs_.find(key); at != pairs_.end()) send_note(*at->second, note);
  for (const auto& round : steps.met) note_met(round);
  due_.insert(due_.end(), steps.rounds.begin(), steps.rounds.end());
  if (!steps.rounds.empty()) changed_.notify_all();
}

/// So that the messages' deadline does not blame the peer.
void DeviceMessages::note_met(const MessageRound& round) {
  const auto at = pairs_.find(round.pair);
  if (at == pairs_.end()) return;
  auto& pair = *at->second;
  for (std::uint32_t i = 0; i < round.sends; ++i) pair.sends_[pair.met_sends_++]->note_met();
  for (std::uint32_t i = 0; i < round.receives; ++i)
    pair.receives_[pair.met_receives_++]->note_met();
}

void DeviceMessages::send_note(const PairMessages& pair, const MessageNote& note) {
  const auto sent = std::make_shared<MessageNote>(note);
  pair.terms_.links->send(pair.terms_.peer, kNoteTag, std::as_bytes(std::span(sent.get(), 1)),
                          DType::uint8, TimePoint::max(), sent);
}

void DeviceMessages::send_sizes(const PairMessages& pair, const std::vector<MessageSize>& sizes) {
  const auto sent = std::make_shared<std::vector<MessageSize>>(sizes);
  pair.terms_.links->send(pair.terms_.peer, kNoteTag, std::as_bytes(std::span(*sent)), DType::uint8,
                          TimePoint::max(), sent);
}

void DeviceMessages::await_sizes(const PairMessages& pair, const MessageNote& note) {
  const auto sizes = std::make_shared<std::vector<MessageSize>>(std::size_t{note.sends} +
                                                                std::size_t{note.receives});
  pair.terms_.links
      ->receive(pair.terms_.peer, kNoteTag, std::as_writable_bytes(std::span(*sizes)), DType::uint8,
                TimePoint::max(), sizes)
      ->when_done(
          [weak = weak_from_this(), key = pair.terms_.pair, note, sizes](const Status& status) {
            const auto messages = weak.lock();
            if (messages != nullptr && status.ok()) messages->on_sizes(key, note, *sizes);
          });
}

void DeviceMessages::await_note(const PairMessages& pair) {
  const auto note = std::make_shared<MessageNote>();
  pair.terms_.links
      ->receive(pair.terms_.peer, kNoteTag, std::as_writable_bytes(std::span(note.get(), 1)),
                DType::uint8, TimePoint::max(), note)
      ->when_done([weak = weak_from_this(), key = pair.terms_.pair, note](const Status& status) {
        const auto messages = weak.lock();
        if (messages != nullptr && status.ok()) messages->on_note(key, *note);
      });
}

void DeviceMessages::on_note(const MessagePair& key, const MessageNote& note) {
  const std::lock_guard lock(mutex_);
  const auto at = pairs_.find(key);
  if (at == pairs_.end()) return;
  if (note.kind == MessageNote::NoteStage::ended) {
    at->second->ended_ = true;
    changed_.notify_all();
    return;
  }
  auto& pair = *at->second;
  if (const auto why = order_.why_refused(key, pair.leads(), note); !why.empty()) {
    const int peer = pair.terms_.peers_job_rank;
    pair.terms_.on_error(DistBackendError(
        "rank " + std::to_string(peer) + " sent a note about messages that cannot be true: " + why,
        Code::internal, {peer}));
    return;
  }
  if (note.kind == MessageNote::NoteStage::posted) return await_sizes(pair, note);
  take(order_.receive(key, note));
  await_note(pair);
}

/// `sizes`: of the messages that a `posted` note is about.
void DeviceMessages::on_sizes(const MessagePair& key, const MessageNote& note,
                              const std::vector<MessageSize>& sizes) {
  const std::lock_guard lock(mutex_);
  const auto at = pairs_.find(key);
  if (at == pairs_.end()) return;
  auto& pair = *at->second;
  append(sizes, note.sends, pair.their_sends_, pair.their_receives_);
  if (!agree(pair)) return;
  take(order_.receive(key, note));
  await_note(pair);
}

/// Whether the ends of the pair's messages agree, as far as both are known. Fails the group if they
/// do not: NCCL would overwrite memory, cut the message, or hang.
bool DeviceMessages::agree(PairMessages& pair) {
  const int low = pair.terms_.my_job_rank, high = pair.terms_.peers_job_rank;
  auto differ = compare(pair.my_sends_, low, pair.their_receives_, high);
  if (differ.empty()) differ = compare(pair.their_sends_, high, pair.my_receives_, low);
  if (differ.empty()) return true;
  pair.terms_.on_error(DistBackendError(differ, Code::mismatch, {low, high}));
  return false;
}

void DeviceMessages::run() {
  is_launching_thread = true;
  const QueriesDuringCapture allowed;
  std::unique_lock lock(mutex_);
  const auto has_work = [this] { return stopping_ || has_news_ || !due_.empty(); };
  auto news = steady_clock().now();
  for (;;) {
    if (is_holding())
      changed_.wait_for(lock, pause_after(steady_clock().now() - news), has_work);
    else
      changed_.wait(lock, has_work);
    if (stopping_) return;
    if (has_work()) news = steady_clock().now();
    has_news_ = false;
    post_ready();
    if (due_.empty()) continue;
    const auto round = due_.front();
    due_.pop_front();
    const auto at = pairs_.find(round.pair);
    if (at == pairs_.end()) continue;
    auto pair = at->second;
    std::vector<std::shared_ptr<NcclWork>> works;
    take_from(pair->sends_, round.sends, works);
    take_from(pair->receives_, round.receives, works);
    pair->met_sends_ -= round.sends;
    pair->met_receives_ -= round.receives;
    launching_ = round.pair.group;
    launching_pair_ = pair;
    lock.unlock();
    pair->launch(works, stream_);
    works.clear();
    lock.lock();
    pair.reset();
    launching_pair_.reset();
    launching_ = 0;
    changed_.notify_all();
  }
}

Status DeviceMessages::end(std::uint32_t group, TimePoint deadline,
                           const NcclCommunicator::GiveUp& give_up) {
  std::unique_lock lock(mutex_);
  const auto is_of_group = [group](const auto& entry) { return entry.first.group == group; };
  for (const auto& entry : pairs_)
    if (is_of_group(entry))
      send_note(*entry.second, MessageNote{.kind = MessageNote::NoteStage::ended});
  const auto missing = [&] {
    std::vector<int> ranks;
    for (const auto& entry : pairs_)
      if (is_of_group(entry) && !entry.second->ended_)
        ranks.push_back(entry.second->terms_.peers_job_rank);
    return ranks;
  };
  for (auto ranks = missing(); !ranks.empty(); ranks = missing()) {
    if (steady_clock().now() >= deadline) {
      std::string names;
      for (const int rank : ranks)
        names += (names.empty() ? "rank " : ", rank ") + std::to_string(rank);
      return Status(Code::timed_out,
                    names +
                        " had messages with this rank and has not ended the group (backend "
                        "nccl); every member must call destroy_process_group",
                    ranks);
    }
    changed_.wait_for(lock, tunables().nccl_look);
    lock.unlock();
    give_up();
    lock.lock();
  }
  return {};
}

void DeviceMessages::drop(std::uint32_t group) {
  std::unique_lock lock(mutex_);
  std::erase_if(pairs_, [group](const auto& entry) { return entry.first.group == group; });
  std::erase_if(due_, [group](const MessageRound& round) { return round.pair.group == group; });
  take(order_.drop(group));
  const auto is_kept = [&] { return launching_pair_->communicator().is_abandoned(); };
  if (changed_.wait_for(lock, tunables().nccl_abort_grace,
                        [&] { return launching_ != group || is_kept(); }) &&
      launching_ != group)
    return;
  if (abandoned_.exchange(true)) return;
  log(LogLevel::error,
      "the thread that launches messages is in NCCL and does not return; it is left alone, and so "
      "are the messages of other groups on its device");
  // The thread may come back to this object at any time, so nothing of it may end.
  static auto* const left = new std::vector<std::shared_ptr<DeviceMessages>>;
  static std::mutex mutex;
  const std::lock_guard hold(mutex);
  left->push_back(shared_from_this());
}

}  // namespace muster::nccl
