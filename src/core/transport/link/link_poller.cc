#include "core/transport/link/link_poller.h"

#include <algorithm>
#include <array>
#include <utility>

namespace muster::transport {

Status LinkPoller::open() {
  ready_ = std::make_unique<ReadySet>();
  if (Status status = ready_->open(); !status) return status;
  if (engine_.connector.descriptor() >= 0)
    ready_->add(engine_.connector.descriptor(), ReadySet::kConnector);
  return {};
}

void LinkPoller::add(Link& link) {
  if (!link.has_descriptor() || !ready_) return plain_.push_back(&link);
  end_aside();
  if (link.stream->holds_more()) holding_.push_back(&link);
  watch(link) ? with_descriptor_.push_back(&link) : plain_.push_back(&link);
}

/// False where the system watches no more descriptors (fs.epoll.max_user_watches): the link is then
/// read in every pass.
bool LinkPoller::watch(const Link& link) {
  return ready_->add(link.stream->descriptor(), link.peer());
}

void LinkPoller::remove(Link& link) {
  if (std::erase(with_descriptor_, &link) > 0) {
    ready_->remove(link.stream->descriptor());
  } else {
    // Removed after the pass.
    std::replace(plain_.begin(), plain_.end(), &link, static_cast<Link*>(nullptr));
  }
}

void LinkPoller::poll_for_room(Link& link, bool on) {
  if (!ready_ || !link.has_descriptor() || on == link.flags.polled_for_room) return;
  end_aside();
  // Fails for a link that is not in the set; the watcher then tries to write from time to time.
  if (ready_->want_writable(link.stream->descriptor(), link.peer(), on))
    link.flags.polled_for_room = on;
}

bool LinkPoller::read(Link& link) {
  if (!link.up() || link.flags.in_service) return false;
  link.flags.in_service = true;
  const bool moved = link.read_some();
  link.flags.in_service = false;
  if (!link.ended.ok()) engine_.failures->on_stream_end(link, link.ended);
  return moved;
}

bool LinkPoller::read_holding() {
  bool moved = false;
  for (Link* link : std::exchange(holding_, {})) moved |= read(*link);
  return moved;
}

bool LinkPoller::poll_few() {
  std::array<Link*, kFew> few{};  // a link that ends takes itself out of the list
  std::copy(with_descriptor_.begin(), with_descriptor_.end(), few.begin());
  bool moved = false;
  for (Link* link : few) moved |= link != nullptr && read(*link);
  return moved;
}

bool LinkPoller::poll_plain() {
  bool moved = false;
  for (std::size_t i = 0; i < plain_.size(); ++i) {
    if (plain_[i] != nullptr) moved |= read(*plain_[i]);
  }
  std::erase(plain_, nullptr);
  return moved;
}

void LinkPoller::poll_plain(Link* link) {
  if (link == nullptr || std::find(plain_.begin(), plain_.end(), link) == plain_.end()) return;
  read(*link);
  std::erase(plain_, nullptr);
}

/// Takes the few descriptors that are read in every pass out of the epoll set. Otherwise every
/// message wakes the set, and the set the watcher, at the cost of the sender.
void LinkPoller::set_aside() {
  const auto waits_for_room = [](const Link* link) { return link->flags.polled_for_room; };
  if (aside_ || std::any_of(with_descriptor_.begin(), with_descriptor_.end(), waits_for_room))
    return;
  for (const Link* link : with_descriptor_) ready_->remove(link->stream->descriptor());
  aside_ = true;
}

void LinkPoller::end_aside() {
  if (!std::exchange(aside_, false)) return;
  std::erase_if(with_descriptor_, [this](Link* link) {
    if (watch(*link)) return false;
    plain_.push_back(link);
    return true;
  });
}

}  // namespace muster::transport
