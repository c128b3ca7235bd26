// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/creation/creation_deadlock.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "core/base/bytes.h"

namespace muster::group {
namespace {

constexpr Duration kPublishAfter = std::chrono::seconds(1);
constexpr Duration kDetectInterval = std::chrono::milliseconds(500);  // limit: delay of a diagnosis
/// Time without change after which creations count as stuck.
constexpr Duration kSettleTime = std::chrono::seconds(4);
constexpr std::uint32_t kMaxMembers = 1u << 20;
/// The first character of a verdict.
constexpr char kStopsDefaultGroup = '!', kKeepsDefaultGroup = ' ';

std::string key_of(int rank) { return "creation/" + std::to_string(rank); }
std::string verdict_key(const std::string& name) { return "creation/stuck/" + name; }

std::string listed(const std::vector<int>& ranks) {
  std::string out;
  for (const int rank : ranks) out += (out.empty() ? "" : ", ") + std::to_string(rank);
  return out;
}

std::string encode(const std::vector<WaitingCreation>& creations) {
  ByteWriter out;
  for (const auto& creation : creations) {
    out.put_text(creation.name)
        .put_text(creation.call)
        .put(static_cast<std::uint8_t>(creation.in_default_group ? 1 : 0));
    out.put(static_cast<std::uint32_t>(creation.members.size()));
    for (const int member : creation.members) out.put(static_cast<std::int32_t>(member));
  }
  return out.take();
}

std::vector<WaitingCreation> decode(int rank, const std::string& bytes) {
  std::vector<WaitingCreation> creations;
  ByteReader in(bytes);
  while (in.ok() && in.left() > 0) {
    WaitingCreation creation;
    creation.rank = rank;
    creation.name = std::string(in.get_text());
    creation.call = std::string(in.get_text());
    creation.in_default_group = in.get<std::uint8_t>() != 0;
    const auto members = in.get<std::uint32_t>();
    if (!in.ok() || members > kMaxMembers) break;
    for (std::uint32_t i = 0; i < members && in.ok(); ++i)
      creation.members.push_back(in.get<std::int32_t>());
    if (in.ok()) creations.push_back(std::move(creation));
  }
  return creations;
}

}  // namespace

std::vector<WaitingCreation> stuck_creations(const std::vector<WaitingCreation>& waiting) {
  std::map<std::string, const WaitingCreation*> candidates;
  std::map<int, std::set<std::string>> of_rank;
  for (const auto& creation : waiting) {
    candidates.emplace(creation.name, &creation);
    of_rank[creation.rank].insert(creation.name);
  }
  // Starts with all creations and repeatedly removes those that may continue, until none is left to
  // remove.
  const auto is_stuck = [&](const WaitingCreation& creation) {
    return std::any_of(creation.members.begin(), creation.members.end(), [&](int member) {
      const auto at = of_rank.find(member);
      if (at == of_rank.end() || at->second.count(creation.name) > 0) return false;
      return std::all_of(at->second.begin(), at->second.end(),
                         [&](const std::string& name) { return candidates.count(name) > 0; });
    });
  };
  for (bool changed = true; changed;) {
    changed = false;
    for (auto at = candidates.begin(); at != candidates.end();) {
      const bool keep = is_stuck(*at->second);
      changed = changed || !keep;
      at = keep ? std::next(at) : candidates.erase(at);
    }
  }
  std::vector<WaitingCreation> stuck;
  for (const auto& creation : waiting)
    if (candidates.count(creation.name) > 0) stuck.push_back(creation);
  return stuck;
}

std::string describe_stuck(const std::vector<WaitingCreation>& stuck) {
  std::map<std::string, std::vector<int>> calls;
  for (const auto& creation : stuck) calls[creation.call].push_back(creation.rank);
  std::string text =
      "the members of overlapping groups make them in different orders and wait for each other: ";
  bool first = true;
  for (const auto& [call, ranks] : calls) {
    text += (first ? "" : ", ") + std::string(ranks.size() == 1 ? "rank " : "ranks ") +
            listed(ranks) + (ranks.size() == 1 ? " waits in " : " wait in ") + call;
    first = false;
  }
  return text + "; make the groups in one order on all ranks";
}

CreationDeadlockDetector::Creation CreationDeadlockDetector::begin(
    std::shared_ptr<store::Store> store, WaitingCreation mine) {
  return Creation(*this, std::move(store), std::move(mine));
}

CreationDeadlockDetector::Creation::Creation(CreationDeadlockDetector& detector,
                                             std::shared_ptr<store::Store> store,
                                             WaitingCreation mine)
    : detector_(detector),
      store_(std::move(store)),
      mine_(std::move(mine)),
      next_poll_(steady_clock().now() + kPublishAfter) {}

CreationDeadlockDetector::Creation::~Creation() {
  if (!published_) return;
  const std::lock_guard lock(detector_.mutex_);
  std::erase(detector_.mine_, mine_);
  static_cast<void>(store_->set(key_of(mine_.rank), encode(detector_.mine_)));
}

Status CreationDeadlockDetector::Creation::publish() {
  const std::lock_guard lock(detector_.mutex_);
  detector_.mine_.push_back(mine_);
  published_ = true;
  return store_->set(key_of(mine_.rank), encode(detector_.mine_));
}

/// The creations in which these ranks, and all ranks they may have to wait for, are waiting. An
/// unresponsive store yields none.
std::vector<WaitingCreation> CreationDeadlockDetector::Creation::waiting_of(
    std::vector<int> to_ask) {
  std::vector<WaitingCreation> all;
  std::set<int> asked;
  while (!to_ask.empty()) {
    const int rank = to_ask.back();
    to_ask.pop_back();
    if (!asked.insert(rank).second) continue;
    const std::string key = key_of(rank);
    const auto exists = store_->check({&key, 1});
    if (!exists.ok() || !*exists) continue;
    const auto bytes = store_->get(key);
    if (!bytes.ok()) continue;
    for (auto& creation : decode(rank, *bytes)) {
      to_ask.insert(to_ask.end(), creation.members.begin(), creation.members.end());
      all.push_back(std::move(creation));
    }
  }
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
    return std::tie(a.rank, a.name) < std::tie(b.rank, b.name);
  });
  return all;
}

Status CreationDeadlockDetector::Creation::verdict() {
  if (store_ == nullptr) return {};
  const std::string key = verdict_key(mine_.name);
  const auto exists = store_->check({&key, 1});
  if (!exists.ok() || !*exists) return {};
  const auto text = store_->get(key);
  if (!text.ok() || text->empty()) return {};
  stops_default_group_ = text->front() == kStopsDefaultGroup;
  return Status(Code::mismatch, text->substr(1));
}

Status CreationDeadlockDetector::Creation::poll() {
  const TimePoint now = steady_clock().now();
  if (store_ == nullptr || now < next_poll_) return {};
  Status found = detect();
  next_poll_ = steady_clock().now() + kDetectInterval;
  return found;
}

Status CreationDeadlockDetector::Creation::detect() {
  if (!published_) {
    static_cast<void>(publish());
    return {};
  }
  if (Status failure = verdict(); !failure.ok()) return failure;
  auto stuck = stuck_creations(waiting_of(mine_.members));
  const bool includes_mine = std::any_of(stuck.begin(), stuck.end(), [this](const auto& creation) {
    return creation.name == mine_.name;
  });
  const TimePoint now = steady_clock().now();
  if (!includes_mine || stuck != stuck_) {
    stuck_ = includes_mine ? std::move(stuck) : std::vector<WaitingCreation>();
    stuck_since_ = now;
    return {};
  }
  if (now - stuck_since_ < kSettleTime) return {};
  // Other ranks may be blocked behind these creations without being waited for here. They must be
  // told too, before these creations fail.
  std::vector<int> all(static_cast<std::size_t>(detector_.world_size_));
  std::iota(all.begin(), all.end(), 0);
  stuck = stuck_creations(waiting_of(std::move(all)));
  const std::string text = describe_stuck(stuck);
  stops_default_group_ = std::ranges::any_of(stuck, &WaitingCreation::in_default_group);
  const std::string verdict_text =
      (stops_default_group_ ? kStopsDefaultGroup : kKeepsDefaultGroup) + text;
  for (const auto& creation : stuck)
    static_cast<void>(store_->set(verdict_key(creation.name), verdict_text));
  return Status(Code::mismatch, text);
}

}  // namespace muster::group
