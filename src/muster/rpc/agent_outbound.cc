/// What leaves: requests and answers as messages of the channel.
#include <algorithm>

#include "muster/rpc/agent_parts.h"
#include "muster/rpc/errors.h"

namespace muster::rpc {
namespace {

ConstBytes bytes_of(const std::string& text) { return as_bytes(text); }

/// Whether the packed value is the only one that has it: what was computed for this message (one
/// handle in the value, at most one with whoever packed it).
bool is_alone(const at::Tensor& tensor) {
  return tensor.use_count() <= 2 && tensor.storage().use_count() == 1;
}

}  // namespace

DeviceMapping Agent::devices_towards(int to) const {
  return [this, to](at::Device device) -> at::Device {
    const auto& peer = workers_[static_cast<std::size_t>(to)].name();
    if (const auto map = options_.device_maps.find(peer); map != options_.device_maps.end()) {
      if (const auto found = map->second.find(DeviceName(device)); found != map->second.end())
        return found->second.device();
    }
    // Its own map to us, backwards.
    if (const auto map = options_.maps_of_callers.find(peer);
        map != options_.maps_of_callers.end()) {
      for (const auto& [theirs, ours] : map->second) {
        if (ours.device() == device) return theirs.device();
      }
    }
    group::invalid("a tensor on " + device.str() + " cannot go to worker '" + peer +
                   "': no device map of worker '" + self().name() +
                   "' says where; give device_maps to init_rpc "
                   "(RpcBackendOptions::set_device_map), or move it to the CPU first");
  };
}

Agent::Outbound Agent::prepare(int to, Head head, Parcel parcel, Copies copies) {
  Outbound message;
  message.to = to;
  message.call = head.call;
  message.payload = std::move(parcel.value.bytes);
  head.name = parcel.name;
  head.note = parcel.note;
  std::vector<ConstBytes> data;
  auto& tensors = parcel.value.tensors;
  if (!tensors.empty()) {
    const auto mapping = devices_towards(to);
    message.tensors.reserve(tensors.size());
    data.reserve(tensors.size());
    for (auto& tensor : tensors) {
      const bool alone = copies == Copies::where_shared && tensor.defined() &&
                         tensor.layout() == at::kStrided && tensor.is_cpu() && is_alone(tensor);
      auto& out = message.tensors.emplace_back(describe_tensor(tensor, mapping));
      out.ours = out.ours || alone;
      head.tensors.push_back(std::move(out.head));
      data.push_back(out.data);
    }
  }
  message.first_tag = head.first_tag = peers_[static_cast<std::size_t>(to)].next_tag.fetch_add(
      tensors.size() + 2, std::memory_order_relaxed);
  message.encoded = encode(std::move(head), bytes_of(message.payload), data);
  if (copies != Copies::none) {
    for (const int part : message.encoded.apart) {
      if (part != EncodedMessage::kPayload)
        make_ours(message.tensors[static_cast<std::size_t>(part)]);
    }
  }
  if (message.encoded.apart.empty()) message.tensors.clear();
  return message;
}

void Agent::launch(Outbound given) {
  const int to = given.to;
  contact(to);
  const transport::Fingerprint plain;
  auto head = channel_.send(to, kHeadTag, bytes_of(given.encoded.head), plain);
  if (given.encoded.long_head.empty() && given.encoded.apart.empty() && head->done()) return;
  // What is still to be read must stay where it is. The head does: no head is short enough for its
  // text to lie within the string.
  auto message = std::make_unique<Outbound>(std::move(given));
  const auto& encoded = message->encoded;
  message->transfers.push_back(std::move(head));
  auto tag = message->first_tag;
  if (!encoded.long_head.empty())
    message->transfers.push_back(channel_.send(to, tag++, bytes_of(encoded.long_head), plain));
  for (const int part : encoded.apart) {
    const auto data = part == EncodedMessage::kPayload
                          ? bytes_of(message->payload)
                          : message->tensors[static_cast<std::size_t>(part)].data;
    message->transfers.push_back(channel_.send(to, tag++, data, plain));
  }
  const std::lock_guard lock(outbound_mutex_);
  outbound_.push_back(std::move(message));
  outbound_count_.store(outbound_.size(), std::memory_order_relaxed);
}

void Agent::sweep_outbound() {
  std::vector<std::unique_ptr<Outbound>> sent;
  {
    const std::unique_lock lock(outbound_mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return;
    for (auto& message : outbound_) {
      if (message->sent()) sent.push_back(std::move(message));
    }
    if (sent.empty()) return;
    std::erase(outbound_, nullptr);
    outbound_count_.store(outbound_.size(), std::memory_order_relaxed);
  }
  for (const auto& message : sent) {
    if (!message->is_call) continue;
    // A lost peer fails its calls by itself; this one was refused alone.
    const auto failed = std::find_if(message->transfers.begin(), message->transfers.end(),
                                     [](const auto& t) { return !t->status().ok(); });
    if (failed == message->transfers.end()) continue;
    sent_.fetch_sub(1, std::memory_order_relaxed);
    if (auto pending = take_pending(message->call, message->to)) {
      Answer answer;
      answer.error = loss_error(message->to, pending->name, (*failed)->status());
      pending->completion(std::move(answer));
    }
  }
}

/// What is still to be sent of a call that was given up is not read any more afterwards.
void Agent::withdraw(std::uint64_t call) {
  std::unique_ptr<Outbound> message;
  {
    const std::lock_guard lock(outbound_mutex_);
    const auto at = std::find_if(outbound_.begin(), outbound_.end(),
                                 [&](const auto& m) { return m->is_call && m->call == call; });
    if (at == outbound_.end()) return;
    message = std::move(*at);
    outbound_.erase(at);
    outbound_count_.store(outbound_.size(), std::memory_order_relaxed);
  }
  // Its head goes first, so that what follows of it has somewhere to end.
  bool whole = true;
  for (const auto& transfer : message->transfers) {
    channel_.cancel(transfer);
    whole = whole && transfer->status().ok();
  }
  if (!whole) sent_.fetch_sub(1, std::memory_order_relaxed);  // nobody will handle it
}

void Agent::post(Call message) {
  const Use use(*this);
  if (!use) return;
  Passage passage(this, message.to);
  Parcel parcel;
  parcel.name = std::move(message.name);
  if (message.fill) message.fill(parcel.value, passage);
  Head head;
  head.kind = message.kind;
  if (message.kind != Kind::closing && message.kind != Kind::cancel)
    sent_.fetch_add(1, std::memory_order_relaxed);
  auto outbound = prepare(message.to, std::move(head), std::move(parcel), Copies::all);
  outbound.passage = passage.take();
  if (!peers_[static_cast<std::size_t>(message.to)].gone.load(std::memory_order_acquire))
    launch(std::move(outbound));
}

// ---- answers
// ---------------------------------------------------------------------------------------------------------

Agent::Answering::~Answering() {
  if (answered_.load()) return;
  send_error(std::make_exception_ptr(
      DistError("the function there was given up without an answer", Code::aborted)));
}

void Agent::Answering::finish() {
  if (listed_) {
    const std::lock_guard lock(agent_->serving_mutex_);
    agent_->serving_.erase({from_, call_});
  }
  agent_->unanswered_.fetch_sub(1, std::memory_order_relaxed);
}

bool Agent::Answering::ready() const {
  return std::all_of(arguments_->before_answer.begin(), arguments_->before_answer.end(),
                     [](const auto& holds) { return holds(); });
}

void Agent::Answering::reply(const std::function<void(Value&, Passage&)>& fill) {
  if (answered_.exchange(true)) throw DistError("a call was answered twice");
  const Use use(*agent_);
  if (!use) return finish();
  Outbound message;
  try {
    Passage passage(agent_.get(), from_);
    Parcel parcel;
    fill(parcel.value, passage);
    Head head;
    head.kind = Kind::reply;
    head.call = call_;
    if (scope_ && agent_->observer_) {
      agent_->observer_->reply_leaves(from_, parcel, scope_);
      head.flags |= Head::kObserved;
    }
    message = agent_->prepare(from_, std::move(head), std::move(parcel), Copies::where_shared);
    passage.arrived = true;
    message.passage = passage.take();
  } catch (...) {
    send_error(std::current_exception());
    return;
  }
  if (ready()) {
    agent_->launch(std::move(message));
    finish();
    return;
  }
  auto held = std::make_shared<Outbound>(std::move(message));
  const std::lock_guard lock(agent_->serving_mutex_);
  agent_->held_back_.push_back([self = shared_from_this(), held] {
    if (!self->ready()) return false;
    self->agent_->launch(std::move(*held));
    self->finish();
    return true;
  });
  agent_->held_back_count_.store(agent_->held_back_.size());
}

void Agent::Answering::fail(std::exception_ptr error) {
  if (answered_.exchange(true)) return;
  send_error(error);
}

void Agent::Answering::send_error(const std::exception_ptr& error) noexcept {
  const Use use(*agent_);
  if (use) {
    try {
      Head head;
      head.kind = Kind::error;
      head.call = call_;
      Parcel parcel;
      parcel.value.bytes = encode_error(describe_exception(error));
      agent_->launch(
          agent_->prepare(from_, std::move(head), std::move(parcel), Copies::where_shared));
    } catch (...) {
      // Without memory for an error there is nothing to be said.
    }
  }
  finish();
}

}  // namespace muster::rpc
