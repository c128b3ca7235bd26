/// What comes: heads, what follows them, and to whom it belongs.
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "muster/base/log.h"
#include "muster/rpc/agent_parts.h"
#include "muster/rpc/errors.h"

namespace muster::rpc {
namespace {

/// Whether the thread's settings are those that a worker's thread has: what runs on it must not
/// depend on who waits on it.
bool thread_is_plain() { return at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled(); }

/// Text clears its memory when it grows: so much of it, a few heads' worth, is taken on the word of
/// the sender.
constexpr std::size_t kBelievedBytes = 4 * kHeadBytes;

Status no_memory(const char* what, std::uint64_t bytes) {
  return Status(Code::exhausted,
                std::string("no memory for a ") + what + " of " + std::to_string(bytes) + " bytes");
}

MutableBytes writable(std::string& text) { return std::as_writable_bytes(std::span(text)); }

}  // namespace

void Agent::post_slot(Slot& slot) {
  slot.transfer =
      channel_.receive(transport::kAnyMember, kHeadTag, MutableBytes(slot.buffer.get(), kHeadBytes),
                       transport::Fingerprint{}, false);
}

void Agent::post_slots() {
  for (Slot& slot : slots_) {
    if (!slot.transfer) post_slot(slot);
  }
  unposted_ = 0;
}

/// From here on this worker learns of the peer's end.
void Agent::contact(int peer) {
  Peer& state = peers_[static_cast<std::size_t>(peer)];
  if (state.known.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(look_mutex_);
  if (state.known.load()) return;
  state.sentinel = channel_.receive(peer, kSentinelTag, {}, transport::Fingerprint{}, true);
  contacted_.push_back(peer);
  state.known.store(true, std::memory_order_release);
}

bool Agent::progress() {
  const bool moved = look();
  if (outbound_count_.load(std::memory_order_relaxed) > 0) sweep_outbound();
  if (held_back_count_.load(std::memory_order_relaxed) > 0) sweep_held_back();
  if (next_expiry_.load(std::memory_order_relaxed) != TimePoint::max().time_since_epoch().count())
    expire_calls(clock().now());
  return moved;
}

void Agent::sweep_held_back() {
  std::vector<std::function<bool()>> held;
  {
    const std::unique_lock lock(serving_mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return;
    held.swap(held_back_);
    held_back_count_.store(0);
  }
  std::erase_if(held, [](const auto& sent) { return sent(); });
  if (held.empty()) return;
  const std::lock_guard lock(serving_mutex_);
  for (auto& one : held) held_back_.push_back(std::move(one));
  held_back_count_.store(held_back_.size());
}

/// A message's head that has come. Most are short: they leave the slot's buffer where it is.
struct Agent::Found {
  static constexpr std::size_t kShort = 256;

  ConstBytes head() const { return {buffer ? buffer.get() : copy.data(), bytes}; }

  int from = -1;
  std::size_t bytes = 0;
  Status status;
  std::unique_ptr<std::byte[]> buffer;  // of longer ones
  std::array<std::byte, kShort> copy{};
};

/// What one look has found.
struct Agent::News {
  c10::SmallVector<Found, 2> found;
  std::vector<std::shared_ptr<Inbound>> arrived;
  std::vector<std::pair<int, Status>> lost;

  bool empty() const { return found.empty() && arrived.empty() && lost.empty(); }
};

/// Under the lock.
void Agent::collect(News& news) {
  for (Slot& slot : slots_) {
    if (!slot.transfer || !slot.transfer->done()) continue;
    const Status& status = slot.transfer->status();
    if (!status.ok() && status.code() != Code::mismatch)
      continue;  // the channel is no more: nothing will come
    Found& one = news.found.emplace_back();
    one.from = slot.transfer->source();
    one.bytes = slot.transfer->bytes();
    one.status = status;
    slot.transfer = nullptr;
    ++unposted_;
    if (one.bytes <= Found::kShort) {
      std::memcpy(one.copy.data(), slot.buffer.get(), one.bytes);
      continue;
    }
    one.buffer = std::move(slot.buffer);
    if (spares_.empty()) {
      slot.buffer.reset(new std::byte[kHeadBytes]);
    } else {
      slot.buffer = std::move(spares_.back());
      spares_.pop_back();
    }
  }
  for (std::size_t i = 0; i < inbound_.size();) {
    if (!inbound_[i]->arrived()) {
      ++i;
      continue;
    }
    news.arrived.push_back(std::move(inbound_[i]));
    inbound_[i] = std::move(inbound_.back());
    inbound_.pop_back();
  }
  for (std::size_t i = 0; i < contacted_.size();) {
    Peer& peer = peers_[static_cast<std::size_t>(contacted_[i])];
    if (!peer.sentinel->done()) {
      ++i;
      continue;
    }
    news.lost.emplace_back(contacted_[i], peer.sentinel->status());
    contacted_[i] = contacted_.back();
    contacted_.pop_back();
  }
}

/// Takes what has come and hands it on, outside of the lock.
bool Agent::look() {
  // What cannot become a value here (no memory, no such device) must not end whoever waits.
  const auto take = [this](int from, const auto& read) {
    try {
      read();
    } catch (const std::exception& error) {
      lose(from, Status(Code::internal, std::string("its message cannot be taken: ") + error.what(),
                        {from}));
    }
  };
  News news;
  {
    const std::unique_lock lock(look_mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    collect(news);
    // Whoever is answered goes on first; slots are posted again by who finds nothing to do. That
    // may bring what had no slot, and what a lost peer has said before its end counts.
    while (unposted_ > 0 && (news.empty() || !news.lost.empty())) {
      post_slots();
      collect(news);
    }
    if (unposted_ >= slots_.size() / 2) post_slots();
  }
  if (news.empty()) return false;
  bool lent = false;
  for (Found& one : news.found) {
    lent |= one.buffer != nullptr;
    if (!one.status.ok()) {
      for (const int rank : one.status.ranks()) {
        if (rank != id_) lose(rank, one.status.with_context("it sent what is not a call"));
      }
    } else {
      take(one.from, [&] { receive_head(one.from, one.head()); });
    }
  }
  for (const auto& inbound : news.arrived) take(inbound->from, [&] { finish_stage(inbound); });
  for (const auto& [peer, why] : news.lost) lose(peer, why);
  if (!lent) return true;
  const std::lock_guard lock(look_mutex_);
  for (Found& one : news.found) {
    if (one.buffer && spares_.size() < 2 * slots_.size()) spares_.push_back(std::move(one.buffer));
  }
  return true;
}

// ---- from heads to messages
// ------------------------------------------------------------------------------------------

void Agent::receive_head(int from, ConstBytes bytes) {
  contact(from);
  if (peers_[static_cast<std::size_t>(from)].gone.load(std::memory_order_acquire)) return;
  auto decoded = decode(bytes);
  if (!decoded) return lose(from, decoded.status());
  Head& head = *decoded;
  const bool is_long = (head.flags & Head::kLong) != 0;
  const bool apart = is_long || (head.flags & Head::kPayloadApart) != 0 ||
                     std::any_of(head.tensors.begin(), head.tensors.end(),
                                 [](const auto& t) { return (t.flags & TensorHead::kApart) != 0; });
  if (apart) {
    auto inbound = std::make_shared<Inbound>();
    inbound->from = from;
    if (!is_long) {
      inbound->head_bytes = PromisedBytes(bytes.size());
      std::memcpy(inbound->head_bytes.data.get(), bytes.data(), bytes.size());
      return begin_apart(std::move(inbound));
    }
    inbound->head_only = true;
    inbound->head_bytes = PromisedBytes(head.payload_bytes);  // at most kMaxHeadBytes
    if (!inbound->head_bytes.data) return lose(from, no_memory("head", head.payload_bytes));
    inbound->transfers.push_back(channel_.receive(from, head.first_tag, inbound->head_bytes.bytes(),
                                                  transport::Fingerprint{}, true));
    const std::lock_guard lock(look_mutex_);
    inbound_.push_back(std::move(inbound));
    return;
  }
  Parcel parcel;
  for (std::size_t i = 0; i < head.tensors.size(); ++i) {
    if ((head.tensors[i].flags & TensorHead::kUndefined) != 0) {
      parcel.value.tensors.emplace_back();
      continue;
    }
    auto memory = allocate_tensor(head.tensors[i]);
    if (!memory) return lose(from, memory.status());
    if (!head.tensor_bytes[i].empty())
      std::memcpy(memory->data.data(), head.tensor_bytes[i].data(), head.tensor_bytes[i].size());
    parcel.value.tensors.push_back(assemble_tensor(head.tensors[i], std::move(*memory)));
  }
  parcel.name.assign(head.name);
  parcel.note.assign(head.note);
  parcel.value.bytes.assign(head.payload);
  dispatch(from, head, std::move(parcel));
}

/// Posts the receives of what travels apart, straight into the memory that it is for.
void Agent::begin_apart(std::shared_ptr<Inbound> inbound) {
  auto decoded = decode(inbound->head_bytes.bytes());
  if (!decoded) return lose(inbound->from, decoded.status());
  inbound->head_only = false;
  inbound->transfers.clear();
  inbound->head = std::move(*decoded);
  const Head& head = inbound->head;
  if ((head.flags & Head::kLong) != 0)
    return lose(inbound->from, Status(Code::internal, "it announced an announcement"));
  Parcel& parcel = inbound->parcel;
  parcel.name.assign(head.name);
  parcel.note.assign(head.note);
  const transport::Fingerprint plain;
  auto tag = head.first_tag;
  std::vector<std::pair<std::uint64_t, MutableBytes>> wanted;
  if ((head.flags & Head::kPayloadApart) != 0) {
    if (head.payload_bytes <= kBelievedBytes) {
      parcel.value.bytes.resize(head.payload_bytes);
      wanted.emplace_back(tag++, writable(parcel.value.bytes));
    } else {
      inbound->payload = PromisedBytes(head.payload_bytes);
      if (!inbound->payload.data)
        return lose(inbound->from, no_memory("payload", head.payload_bytes));
      wanted.emplace_back(tag++, inbound->payload.bytes());
    }
  } else {
    parcel.value.bytes.assign(head.payload);
  }
  inbound->tensors.resize(head.tensors.size());
  for (std::size_t i = 0; i < head.tensors.size(); ++i) {
    const auto& tensor = head.tensors[i];
    if ((tensor.flags & TensorHead::kUndefined) != 0) continue;
    auto memory = allocate_tensor(tensor);
    if (!memory) return lose(inbound->from, memory.status());
    if ((tensor.flags & TensorHead::kApart) != 0) {
      wanted.emplace_back(tag++, memory->data);
    } else if (!head.tensor_bytes[i].empty()) {
      std::memcpy(memory->data.data(), head.tensor_bytes[i].data(), head.tensor_bytes[i].size());
    }
    inbound->tensors[i] = std::move(*memory);
  }
  for (const auto& [under, where] : wanted)
    inbound->transfers.push_back(channel_.receive(inbound->from, under, where, plain, true));
  const std::lock_guard lock(look_mutex_);
  inbound_.push_back(std::move(inbound));
}

void Agent::finish_stage(const std::shared_ptr<Inbound>& inbound) {
  for (const auto& transfer : inbound->transfers) {
    const Status& status = transfer->status();
    if (status.ok()) continue;
    if (status.code() == Code::mismatch) lose(inbound->from, status);
    return;  // its sender took it back, or is gone: nobody waits for it
  }
  if (inbound->head_only) return begin_apart(inbound);
  if (inbound->payload.data) {
    inbound->parcel.value.bytes.assign(as_text(inbound->payload.bytes()));
    inbound->payload = {};
  }
  auto& tensors = inbound->parcel.value.tensors;
  for (std::size_t i = 0; i < inbound->tensors.size(); ++i) {
    const auto& head = inbound->head.tensors[i];
    tensors.push_back((head.flags & TensorHead::kUndefined) != 0
                          ? at::Tensor()
                          : assemble_tensor(head, std::move(inbound->tensors[i])));
  }
  dispatch(inbound->from, inbound->head, std::move(inbound->parcel));
}

void Agent::dispatch(int from, const Head& head, Parcel parcel) {
  switch (head.kind) {
    case Kind::reply:
    case Kind::error: return take_answer(from, head, std::move(parcel));
    case Kind::cancel: return take_cancel(from, head.call);
    default: return take_request(from, head, std::move(parcel));
  }
}

// ---- requests
// --------------------------------------------------------------------------------------------------------

void Agent::take_request(int from, const Head& head, Parcel parcel) {
  Request request;
  request.from = from;
  request.kind = head.kind;
  request.parcel = std::move(parcel);
  if (head.time_left >= 0) request.deadline = deadline_after(clock(), Duration(head.time_left));
  request.passage = std::make_shared<Passage>(this, from);
  std::shared_ptr<Answering> answering;
  if ((head.flags & Head::kWantsAnswer) != 0) {
    answering = std::make_shared<Answering>(shared_from_this(), from, head.call, request.passage);
    request.responder = answering;
  }
  const Handler* handler =
      handlers_[static_cast<std::size_t>(head.kind)].load(std::memory_order_acquire);
  if (handler == nullptr) {
    if (answering)
      answering->fail(std::make_exception_ptr(DistError(
          "nobody there handles messages of kind " + std::to_string(static_cast<int>(head.kind)),
          Code::unsupported)));
    handled_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  const bool observed = (head.flags & Head::kObserved) != 0;
  if (handler->is_short && thread_is_plain() && handler->is_short(request)) {
    inline_runs_.fetch_add(1, std::memory_order_relaxed);
    return run_handler(*handler, std::move(request), observed, answering && head.time_left == 0);
  }
  if (answering) {
    answering->set_listed();
    const std::lock_guard lock(serving_mutex_);
    serving_[{from, head.call}] = answering;
  }
  // Shared, since a task must be copyable.
  auto shared = std::make_shared<Request>(std::move(request));
  answering.reset();
  run_later([this, handler, shared, observed] {
    const auto& responder = shared->responder;
    const bool unwanted =
        responder && (responder->cancelled() || clock().now() >= shared->deadline);
    run_handler(*handler, std::move(*shared), observed, unwanted);
  });
}

/// `unwanted`: nobody waits for the answer any more.
void Agent::run_handler(const Handler& handler, Request request, bool observed, bool unwanted) {
  const bool counts = request.kind != Kind::closing;
  const auto responder = std::static_pointer_cast<Answering>(request.responder);
  std::shared_ptr<Observer::Scope> scope;
  try {
    if (unwanted) {
      responder->forget();
    } else {
      if (observed && observer_) {
        scope = observer_->request_arrives(request.from, request.parcel);
        if (scope && responder) responder->set_scope(scope);
        if (scope) scope->enter();
      }
      handler.run(std::move(request));
    }
  } catch (...) {
    if (responder) {
      responder->fail(std::current_exception());
    } else {
      log(LogLevel::error, "worker '" + self().name() +
                               "': a message that wants no answer failed: " +
                               describe_exception(std::current_exception()).text);
    }
  }
  if (scope) scope->leave();
  if (counts) handled_.fetch_add(1, std::memory_order_relaxed);
}

void Agent::take_cancel(int from, std::uint64_t call) {
  std::shared_ptr<Answering> answering;
  {
    const std::lock_guard lock(serving_mutex_);
    if (const auto found = serving_.find({from, call}); found != serving_.end())
      answering = found->second.lock();
  }
  if (answering) answering->cancel();
}

// ---- answers
// ---------------------------------------------------------------------------------------------------------

void Agent::take_answer(int from, const Head& head, Parcel parcel) {
  auto pending = take_pending(head.call, from);
  if (!pending) return;  // given up meanwhile
  Answer answer;
  answer.passage = std::make_shared<Passage>(this, from);
  if (head.kind == Kind::error) {
    auto error = decode_error(parcel.value.bytes);
    if (!error) {
      answer.error = loss_error(from, pending->name, error.status());
    } else {
      answer.error = remote_exception(workers_[static_cast<std::size_t>(from)].name(), from,
                                      pending->name, std::move(*error));
    }
  } else {
    try {
      if ((head.flags & Head::kObserved) != 0 && observer_) observer_->reply_arrives(from, parcel);
    } catch (...) {
      answer.error = std::current_exception();
    }
    answer.parcel = std::move(parcel);
    if (pending->passage) pending->passage->arrived = true;
  }
  pending->completion(std::move(answer));
  fabric_->wake();
}

}  // namespace muster::rpc
