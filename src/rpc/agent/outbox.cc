// SPDX-License-Identifier: BSD-3-Clause
#include "rpc/agent/outbox.h"

#include <algorithm>
#include <utility>

#include "core/group/errors.h"

namespace muster::rpc {
namespace {

ConstBytes bytes_of(const std::string& text) { return as_bytes(text); }

/// Whether only the packed value refers to the tensor, as for a result computed for this message:
/// one handle in the value, at most one held by the code that packed it.
bool is_alone(const at::Tensor& tensor) {
  return tensor.use_count() <= 2 && tensor.storage().use_count() == 1;
}

}  // namespace

bool Outbox::Outbound::sent() const {
  return std::all_of(transfers.begin(), transfers.end(),
                     [](const auto& transfer) { return transfer->done(); });
}

DeviceMapping Outbox::devices_towards(int to) const {
  return [this, to](at::Device device) -> at::Device {
    const auto& peer = workers_.at(to).name();
    if (const auto map = maps_.ours.find(peer); map != maps_.ours.end()) {
      if (const auto found = map->second.find(DeviceName(device)); found != map->second.end())
        return found->second.device();
    }
    // A reply uses the inverse of the caller's map to this worker.
    if (const auto map = maps_.callers.find(peer); map != maps_.callers.end()) {
      for (const auto& [theirs, ours] : map->second) {
        if (ours.device() == device) return theirs.device();
      }
    }
    group::invalid("a tensor on " + device.str() + " cannot go to worker '" + peer +
                   "': no device map of worker '" + workers_.self().name() +
                   "' says where; give device_maps to init_rpc "
                   "(RpcBackendOptions::set_device_map), or move it to the CPU first");
  };
}

Outbox::Outbound Outbox::prepare(int to, RpcMessage message, Copies copies) {
  MessageHead head;
  head.kind = message.kind;
  if (message.wants_answer) head.flags |= MessageHead::kWantsAnswer;
  if (message.observed) head.flags |= MessageHead::kObserved;
  head.call = message.call;
  head.time_left = message.time_left;
  head.name = message.name;
  head.note = message.note;
  Outbound outbound;
  outbound.to = to;
  outbound.call = message.call;
  outbound.payload = std::move(message.value.bytes);
  std::vector<ConstBytes> data;
  auto& tensors = message.value.tensors;
  if (!tensors.empty()) {
    const auto mapping = devices_towards(to);
    outbound.tensors.reserve(tensors.size());
    data.reserve(tensors.size());
    for (auto& tensor : tensors) {
      const bool alone = copies == Copies::where_shared && tensor.defined() &&
                         tensor.layout() == at::kStrided && tensor.is_cpu() && is_alone(tensor);
      auto& out = outbound.tensors.emplace_back(describe_tensor(tensor, mapping));
      out.ours = out.ours || alone;
      head.tensors.push_back(std::move(out.head));
      data.push_back(out.data);
    }
  }
  outbound.first_tag = next_tags_[static_cast<std::size_t>(to)].value.fetch_add(
      tensors.size() + 2, std::memory_order_relaxed);
  head.first_tag = outbound.first_tag + 1;
  outbound.apart = place_parts(head, outbound.payload.size());
  outbound.head = encode(head, bytes_of(outbound.payload), data);
  if (outbound.head.size() > kHeadBytes) {
    outbound.long_head = std::move(outbound.head);
    outbound.head = encode_announcement(head.kind, outbound.long_head.size(), outbound.first_tag);
  }
  if (copies != Copies::none) {
    for (const int part : outbound.apart) {
      if (part != kPayloadPart) make_ours(outbound.tensors[static_cast<std::size_t>(part)]);
    }
  }
  if (outbound.apart.empty()) outbound.tensors.clear();
  return outbound;
}

void Outbox::launch(Outbound given) {
  const int to = given.to;
  inbox_.contact(to);
  const transport::Fingerprint plain;
  auto head = channel_.send(to, kHeadTag, bytes_of(given.head), plain);
  if (given.long_head.empty() && given.apart.empty() && head->done()) return;
  // Memory that is still to be read must not move. The head's does not when the string is moved: no
  // head is short enough for the small-string buffer.
  OutboundRef message;
  try {
    message = std::make_unique<Outbound>(std::move(given));
    message->transfers.push_back(head);
    auto tag = message->first_tag;
    if (!message->long_head.empty())
      message->transfers.push_back(channel_.send(to, tag, bytes_of(message->long_head), plain));
    for (const int part : message->apart) {
      const auto data = part == kPayloadPart
                            ? bytes_of(message->payload)
                            : message->tensors[static_cast<std::size_t>(part)].data;
      message->transfers.push_back(channel_.send(to, ++tag, data, plain));
    }
    const std::lock_guard lock(mutex_);
    messages_.push_back(std::move(message));
    count_.store(messages_.size(), std::memory_order_relaxed);
  } catch (...) {
    channel_.cancel(head);
    if (message && cancel_rest(*message)) return;  // all of it had been sent
    throw;
  }
}

void Outbox::launch_counted(Outbound message) {
  sent_.fetch_add(1, std::memory_order_relaxed);
  try {
    launch(std::move(message));
  } catch (...) {
    sent_.fetch_sub(1, std::memory_order_relaxed);
    throw;
  }
}

/// Returns true if there was nothing left to cancel.
bool Outbox::cancel_rest(const Outbound& message) {
  const std::size_t parts = 1 + (message.long_head.empty() ? 0 : 1) + message.apart.size();
  // Cancel the head first, so that the receiver can attribute the parts that still arrive.
  bool whole = message.transfers.size() == parts;
  for (const auto& transfer : message.transfers) {
    channel_.cancel(transfer);
    whole = whole && transfer->status().ok();
  }
  return whole;
}

void Outbox::clear() {
  std::vector<OutboundRef> rest;
  {
    const std::lock_guard lock(mutex_);
    rest.swap(messages_);
    count_.store(0, std::memory_order_relaxed);
  }
  // The fabric reads the memory until the transfers are done.
  for (const auto& message : rest) cancel_rest(*message);
}

std::vector<Outbox::Refused> Outbox::sweep() {
  std::vector<OutboundRef> sent;
  {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return {};
    for (auto& message : messages_) {
      if (message->sent()) sent.push_back(std::move(message));
    }
    if (sent.empty()) return {};
    std::erase(messages_, nullptr);
    count_.store(messages_.size(), std::memory_order_relaxed);
  }
  std::vector<Refused> refused;
  for (const auto& message : sent) {
    if (!message->is_call) continue;
    // The calls of a lost peer fail elsewhere. This transfer was refused by itself.
    const auto failed = std::find_if(message->transfers.begin(), message->transfers.end(),
                                     [](const auto& t) { return !t->status().ok(); });
    if (failed == message->transfers.end()) continue;
    sent_.fetch_sub(1, std::memory_order_relaxed);
    refused.push_back({message->to, message->call, (*failed)->status()});
  }
  return refused;
}

void Outbox::withdraw(std::uint64_t call) {
  OutboundRef message;
  {
    const std::lock_guard lock(mutex_);
    const auto at = std::find_if(messages_.begin(), messages_.end(),
                                 [&](const auto& m) { return m->is_call && m->call == call; });
    if (at == messages_.end()) return;
    message = std::move(*at);
    messages_.erase(at);
    count_.store(messages_.size(), std::memory_order_relaxed);
  }
  if (!cancel_rest(*message))
    sent_.fetch_sub(1, std::memory_order_relaxed);  // the peer will not handle it
}

}  // namespace muster::rpc
