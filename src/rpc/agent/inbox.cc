// SPDX-License-Identifier: BSD-3-Clause
#include "rpc/agent/inbox.h"

#include <sys/mman.h>

#include <c10/core/CPUAllocator.h>
#include <c10/util/SmallVector.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "core/tunables/tunables_fixed.h"

namespace muster::rpc {
namespace {

constexpr std::size_t kMostBytes = std::size_t{512} << 20;     // limit: memory
constexpr std::uintptr_t kHugePage = std::uintptr_t{2} << 20;  // limit: the processor's

// Sanitizers cannot detect a use after free in memory that is recycled here.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kKeeps = false;
#else
constexpr bool kKeeps = true;
#endif

struct SparePiece {
  c10::DataPtr memory;
  std::size_t bytes = 0;
};

struct Spares {
  std::mutex mutex;
  std::vector<SparePiece> pieces;  // the latest last
  std::size_t bytes = 0;
};
Spares& spares() {
  static auto* all = new Spares;  // never destroyed: tensors may be freed last
  return *all;
}

/// Rounds up, so that sizes that differ by less than an eighth share blocks.
std::size_t rounded(std::size_t bytes) {
  const std::size_t step = std::bit_floor(bytes) / 8;
  return (bytes + step - 1) / step * step;
}

/// The whole pages of this size in it.
void advise(void* memory, std::size_t bytes, std::uintptr_t page, int advice) {
  const auto begin = (reinterpret_cast<std::uintptr_t>(memory) + page - 1) & ~(page - 1);
  const auto end = (reinterpret_cast<std::uintptr_t>(memory) + bytes) & ~(page - 1);
  if (end > begin) ::madvise(reinterpret_cast<void*>(begin), end - begin, advice);
}

void keep(SparePiece piece) {
  std::vector<SparePiece> gone;  // freed after the lock is released
  auto& all = spares();
  // In a forked child the lock may be held forever; then the memory is freed at once.
  const std::unique_lock lock(all.mutex, std::try_to_lock);
  if (!lock.owns_lock() || piece.bytes > kMostBytes) return;
  advise(piece.memory.get(), piece.bytes, 4096, MADV_FREE);
  all.bytes += piece.bytes;
  all.pieces.push_back(std::move(piece));
  while (all.pieces.size() > fixed::kInFlight || all.bytes > kMostBytes) {
    all.bytes -= all.pieces.front().bytes;
    gone.push_back(std::move(all.pieces.front()));
    all.pieces.erase(all.pieces.begin());
  }
}

c10::DataPtr reuse(std::size_t bytes) {
  auto& all = spares();
  const std::unique_lock lock(all.mutex, std::try_to_lock);
  if (!lock.owns_lock()) return {};
  const auto found =
      std::find_if(all.pieces.rbegin(), all.pieces.rend(),
                   [bytes](const SparePiece& piece) { return piece.bytes == bytes; });
  if (found == all.pieces.rend()) return {};
  c10::DataPtr memory = std::move(found->memory);
  all.bytes -= bytes;
  all.pieces.erase(std::next(found).base());
  return memory;
}

void let_go(void* context) {
  keep(std::move(*std::unique_ptr<SparePiece>(static_cast<SparePiece*>(context))));
}

}  // namespace

c10::DataPtr allocate_or_reuse(std::size_t bytes) {
  auto* allocator = c10::GetCPUAllocator();
  if (!kKeeps || bytes < fixed::kIoShare) return allocator->allocate(bytes);
  const std::size_t size = rounded(bytes);
  auto piece = std::make_unique<SparePiece>();
  piece->bytes = size;
  piece->memory = reuse(size);
  if (!piece->memory) {
    piece->memory = allocator->allocate(size);
    // Huge pages are mapped and cleared in a third of the time; if the host has none, nothing
    // changes.
    if (size >= 2 * kHugePage) advise(piece->memory.get(), size, kHugePage, MADV_HUGEPAGE);
  }
  void* data = piece->memory.get();
  const auto device = piece->memory.device();
  return {data, piece.release(), &let_go, device};
}

void drop_spare_memory() {
  auto& all = spares();
  const std::lock_guard lock(all.mutex);
  all.pieces.clear();
  all.bytes = 0;
}

namespace {

/// A std::string writes to its memory when it grows. Up to this size (a few heads) a string is
/// allocated before the bytes arrive.
constexpr std::size_t kBelievedBytes = 4 * kHeadBytes;

Status no_memory(const char* what, std::uint64_t bytes) {
  return Status(Code::exhausted,
                std::string("no memory for a ") + what + " of " + std::to_string(bytes) + " bytes");
}

MutableBytes writable(std::string& text) { return std::as_writable_bytes(std::span(text)); }

/// Memory for bytes that a peer has announced. It is not written until they arrive, so an
/// announcement alone costs address space only.
struct PromisedBytes {
  std::unique_ptr<std::byte[]> data;  ///< null: empty, or the allocation failed
  std::size_t size = 0;

  PromisedBytes() = default;
  explicit PromisedBytes(std::size_t size) : data(new (std::nothrow) std::byte[size]), size(size) {}
  MutableBytes bytes() { return {data.get(), size}; }
};

}  // namespace

struct Inbox::InboxSlot {
  transport::TransferRef transfer;
  std::unique_ptr<std::byte[]> buffer;
};

struct Inbox::InboxPeer {
  std::atomic<bool> known{false};   // has a sentinel, or needs none
  transport::TransferRef sentinel;  // under mutex_
};

/// A message with separate parts, until all of them have arrived.
struct Inbox::Inbound {
  int from = -1;
  bool head_only = false;    // the pending part is the long head
  PromisedBytes head_bytes;  // the head's views point here
  PromisedBytes payload;     // sent separately; moved to the message when complete
  MessageHead head;
  RpcMessage message;
  std::vector<TensorIn>
      tensors;  // one per tensor of the head, with memory for those sent separately
  std::vector<transport::TransferRef> transfers;

  bool arrived() const {
    for (const auto& transfer : transfers) {
      if (!transfer->done()) return false;
    }
    return true;
  }
};

namespace {

/// The message of this head, still without its value.
RpcMessage message_of(const MessageHead& head) {
  RpcMessage message;
  message.kind = head.kind;
  message.wants_answer = (head.flags & MessageHead::kWantsAnswer) != 0;
  message.observed = (head.flags & MessageHead::kObserved) != 0;
  message.call = head.call;
  message.time_left = head.time_left;
  message.name.assign(head.name);
  message.note.assign(head.note);
  return message;
}

}  // namespace

Inbox::Inbox(transport::Channel& channel, int self, const CallTable& calls, InboxEvents& events)
    : channel_(channel),
      self_(self),
      calls_(calls),
      events_(events),
      peers_(static_cast<std::size_t>(channel.size())),
      slots_(fixed::kInFlight) {
  peers_[static_cast<std::size_t>(self)].known = true;  // itself: needs no sentinel
  for (InboxSlot& slot : slots_) {
    slot.buffer.reset(new std::byte[kHeadBytes]);
    post_slot(slot);
  }
  spares_.reserve(2 * fixed::kInFlight);
}

Inbox::~Inbox() = default;

bool Inbox::empty() {
  const std::lock_guard lock(mutex_);
  return inbound_.empty();
}

void Inbox::post_slot(InboxSlot& slot) {
  slot.transfer =
      channel_.receive(transport::kAnyMember, kHeadTag, MutableBytes(slot.buffer.get(), kHeadBytes),
                       transport::Fingerprint{}, false);
}

void Inbox::post_slots() {
  for (InboxSlot& slot : slots_) {
    if (!slot.transfer) post_slot(slot);
  }
  unposted_ = 0;
}

void Inbox::contact(int peer) {
  InboxPeer& state = peers_[static_cast<std::size_t>(peer)];
  if (state.known.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex_);
  if (state.known.load()) return;
  state.sentinel = channel_.receive(peer, kSentinelTag, {}, transport::Fingerprint{}, true);
  contacted_.push_back(peer);
  state.known.store(true, std::memory_order_release);
}

/// The head of a received message. Short heads, the usual case, are copied so that the slot keeps
/// its buffer.
struct Inbox::Found {
  static constexpr std::size_t kShort = 256;

  ConstBytes head() const { return {buffer ? buffer.get() : copy.data(), bytes}; }

  int from = -1;
  std::size_t bytes = 0;
  Status status;
  std::unique_ptr<std::byte[]> buffer;  // of longer ones
  std::array<std::byte, kShort> copy{};
};

/// The result of one poll.
struct Inbox::InboxNews {
  c10::SmallVector<Found, 2> found;
  std::vector<std::shared_ptr<Inbound>> arrived;
  std::vector<std::pair<int, Status>> lost;

  bool empty() const { return found.empty() && arrived.empty() && lost.empty(); }
};

/// Under the lock.
void Inbox::collect(InboxNews& news) {
  for (InboxSlot& slot : slots_) {
    if (!slot.transfer || !slot.transfer->done()) continue;
    const Status& status = slot.transfer->status();
    if (!status.ok() && status.code() != Code::mismatch)
      continue;  // the channel has failed; nothing more arrives
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
    InboxPeer& peer = peers_[static_cast<std::size_t>(contacted_[i])];
    if (!peer.sentinel->done()) {
      ++i;
      continue;
    }
    news.lost.emplace_back(contacted_[i], peer.sentinel->status());
    contacted_[i] = contacted_.back();
    contacted_.pop_back();
  }
}

bool Inbox::look() {
  // A message that cannot become a value here (no memory, no such device) must not throw into the
  // thread that happens to poll.
  const auto take = [this](int from, const auto& read) {
    try {
      read();
    } catch (const std::exception& error) {
      events_.on_loss(
          from, Status(Code::internal, std::string("its message cannot be taken: ") + error.what(),
                       {from}));
    }
  };
  InboxNews news;
  {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    collect(news);
    // Deliver first and repost slots only when there is nothing to deliver. Reposting may receive
    // messages that had no slot; messages that a lost peer sent before its end still count.
    while (unposted_ > 0 && (news.empty() || !news.lost.empty())) {
      post_slots();
      collect(news);
    }
    if (unposted_ >= slots_.size() / 2) post_slots();
  }
  if (news.empty()) return false;
  bool returns_buffers = false;
  for (Found& one : news.found) {
    returns_buffers |= one.buffer != nullptr;
    if (!one.status.ok()) {
      for (const int rank : one.status.ranks()) {
        if (rank != self_)
          events_.on_loss(rank, one.status.with_context("it sent what is not a call"));
      }
    } else {
      take(one.from, [&] { receive_head(one.from, one.head()); });
    }
  }
  for (const auto& inbound : news.arrived) take(inbound->from, [&] { finish_stage(inbound); });
  for (const auto& [peer, why] : news.lost) events_.on_loss(peer, why);
  if (!returns_buffers) return true;
  const std::lock_guard lock(mutex_);
  for (Found& one : news.found) {
    if (one.buffer && spares_.size() < 2 * slots_.size()) spares_.push_back(std::move(one.buffer));
  }
  return true;
}

void Inbox::receive_head(int from, ConstBytes bytes) {
  contact(from);
  if (calls_.is_lost(from)) return;
  auto decoded = decode(bytes);
  if (!decoded) return events_.on_loss(from, decoded.status());
  MessageHead& head = *decoded;
  const bool is_long = (head.flags & MessageHead::kLong) != 0;
  const bool apart = is_long || (head.flags & MessageHead::kPayloadApart) != 0 ||
                     std::any_of(head.tensors.begin(), head.tensors.end(),
                                 [](const auto& t) { return (t.flags & TensorHead::kApart) != 0; });
  if (apart) return receive_apart(from, head, bytes);
  RpcMessage message = message_of(head);
  message.value.bytes.assign(head.payload);
  auto& tensors = message.value.tensors;
  for (std::size_t i = 0; i < head.tensors.size(); ++i) {
    if ((head.tensors[i].flags & TensorHead::kUndefined) != 0) {
      tensors.emplace_back();
      continue;
    }
    auto memory = allocate_tensor(head.tensors[i]);
    if (!memory) return events_.on_loss(from, memory.status());
    if (!head.tensor_bytes[i].empty())
      std::memcpy(memory->data.data(), head.tensor_bytes[i].data(), head.tensor_bytes[i].size());
    tensors.push_back(assemble_tensor(head.tensors[i], std::move(*memory)));
  }
  events_.on_message(from, std::move(message));
}

/// Starts a message whose head announces separate parts.
void Inbox::receive_apart(int from, const MessageHead& head, ConstBytes bytes) {
  auto inbound = std::make_shared<Inbound>();
  inbound->from = from;
  if ((head.flags & MessageHead::kLong) == 0) {
    inbound->head_bytes = PromisedBytes(bytes.size());
    if (!inbound->head_bytes.data) return events_.on_loss(from, no_memory("head", bytes.size()));
    std::memcpy(inbound->head_bytes.data.get(), bytes.data(), bytes.size());
    return begin_apart(std::move(inbound));
  }
  inbound->head_only = true;
  inbound->head_bytes = PromisedBytes(head.payload_bytes);  // at most kMaxHeadBytes
  if (!inbound->head_bytes.data)
    return events_.on_loss(from, no_memory("head", head.payload_bytes));
  inbound->transfers.push_back(channel_.receive(from, head.first_tag, inbound->head_bytes.bytes(),
                                                transport::Fingerprint{}, true));
  const std::lock_guard lock(mutex_);
  inbound_.push_back(std::move(inbound));
}

/// Posts the receives of the separate parts, directly into their final memory.
void Inbox::begin_apart(std::shared_ptr<Inbound> inbound) {
  auto decoded = decode(inbound->head_bytes.bytes());
  if (!decoded) return events_.on_loss(inbound->from, decoded.status());
  inbound->head_only = false;
  inbound->transfers.clear();
  inbound->head = std::move(*decoded);
  const MessageHead& head = inbound->head;
  if ((head.flags & MessageHead::kLong) != 0)
    return events_.on_loss(inbound->from, Status(Code::internal, "it announced an announcement"));
  inbound->message = message_of(head);
  std::string& payload = inbound->message.value.bytes;
  const transport::Fingerprint plain;
  auto tag = head.first_tag;
  std::vector<std::pair<std::uint64_t, MutableBytes>> wanted;
  if ((head.flags & MessageHead::kPayloadApart) != 0) {
    if (head.payload_bytes <= kBelievedBytes) {
      payload.resize(head.payload_bytes);
      wanted.emplace_back(tag++, writable(payload));
    } else {
      inbound->payload = PromisedBytes(head.payload_bytes);
      if (!inbound->payload.data)
        return events_.on_loss(inbound->from, no_memory("payload", head.payload_bytes));
      wanted.emplace_back(tag++, inbound->payload.bytes());
    }
  } else {
    payload.assign(head.payload);
  }
  inbound->tensors.resize(head.tensors.size());
  for (std::size_t i = 0; i < head.tensors.size(); ++i) {
    const auto& tensor = head.tensors[i];
    if ((tensor.flags & TensorHead::kUndefined) != 0) continue;
    auto memory = allocate_tensor(tensor);
    if (!memory) return events_.on_loss(inbound->from, memory.status());
    if ((tensor.flags & TensorHead::kApart) != 0) {
      wanted.emplace_back(tag++, memory->data);
    } else if (!head.tensor_bytes[i].empty()) {
      std::memcpy(memory->data.data(), head.tensor_bytes[i].data(), head.tensor_bytes[i].size());
    }
    inbound->tensors[i] = std::move(*memory);
  }
  for (const auto& [under, where] : wanted)
    inbound->transfers.push_back(channel_.receive(inbound->from, under, where, plain, true));
  const std::lock_guard lock(mutex_);
  inbound_.push_back(std::move(inbound));
}

void Inbox::finish_stage(const std::shared_ptr<Inbound>& inbound) {
  for (const auto& transfer : inbound->transfers) {
    const Status& status = transfer->status();
    if (status.ok()) continue;
    if (status.code() == Code::mismatch) events_.on_loss(inbound->from, status);
    return;  // the sender withdrew it or is lost, so no caller waits for it
  }
  if (inbound->head_only) return begin_apart(inbound);
  if (inbound->payload.data) {
    inbound->message.value.bytes.assign(as_text(inbound->payload.bytes()));
    inbound->payload = {};
  }
  auto& tensors = inbound->message.value.tensors;
  for (std::size_t i = 0; i < inbound->tensors.size(); ++i) {
    const auto& head = inbound->head.tensors[i];
    tensors.push_back((head.flags & TensorHead::kUndefined) != 0
                          ? at::Tensor()
                          : assemble_tensor(head, std::move(inbound->tensors[i])));
  }
  events_.on_message(inbound->from, std::move(inbound->message));
}

}  // namespace muster::rpc
