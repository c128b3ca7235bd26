// SPDX-License-Identifier: BSD-3-Clause
/// Channels between ranks that one thread runs: a message stays where it was sent from until it is
/// received, and all messages are recorded.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/transport/channel/channel.h"

namespace muster::collective {

class MemoryTransfer final : public transport::Transfer {
 public:
  MemoryTransfer(MutableBytes to, int peer) : to_(to) { peer_ = peer; }
  void finish(ConstBytes data) {
    if (data.size() != to_.size())
      status_ = Status(Code::mismatch, std::to_string(data.size()) + " bytes came for " +
                                           std::to_string(to_.size()));
    if (status_.ok()) std::copy(data.begin(), data.end(), to_.begin());
    done_.store(true);
  }

 private:
  MutableBytes to_;
};

/// The messages that were sent and not received, the posted receives, and a log of all messages. A
/// send completes, and its memory is read, when it is received.
struct Wires {
  struct Message {
    ConstBytes data;
    std::shared_ptr<MemoryTransfer> sent;
    void hand_to(MemoryTransfer& receiver) const {
      receiver.finish(data);
      sent->finish({});
    }
  };
  using Place = std::tuple<int, int, std::uint64_t>;  // from, to, tag
  std::map<Place, std::deque<Message>> messages;
  std::map<Place, std::deque<std::shared_ptr<MemoryTransfer>>> receives;
  std::map<std::pair<int, int>, std::vector<std::size_t>> sent;  // sizes, by (from, to)
  std::map<std::pair<int, int>, std::size_t>
      uncalled;  // those with data that were sent before a receive was posted
  std::map<std::pair<int, int>, std::size_t>
      called;  // receives from there that were posted when an empty message was sent back
  std::set<std::pair<int, int>> received_first;  // the rank posted that before any send to the peer
};

class MemoryChannel final : public transport::Channel {
 public:
  MemoryChannel(Wires& wires, int rank, int size)
      : wires_(wires), rank_(rank), members_(static_cast<std::size_t>(size)) {
    std::iota(members_.begin(), members_.end(), 0);
  }
  std::uint32_t id() const override { return 1; }
  std::span<const int> members() const override { return members_; }
  int rank() const override { return rank_; }
  transport::Fabric& fabric() override { std::abort(); }
  transport::TransferRef send(int member, std::uint64_t tag, ConstBytes data,
                              const transport::Fingerprint&) override {
    const Wires::Message message{data, std::make_shared<MemoryTransfer>(MutableBytes(), member)};
    wires_.sent[{rank_, member}].push_back(data.size());
    if (data.empty()) wires_.called[{member, rank_}] = wires_.receives[{member, rank_, 0}].size();
    auto& awaited = wires_.receives[{rank_, member, tag}];
    if (awaited.empty()) {
      wires_.uncalled[{rank_, member}] += data.empty() ? 0 : 1;
      wires_.messages[{rank_, member, tag}].push_back(message);
    } else {
      message.hand_to(*awaited.front());
      awaited.pop_front();
    }
    return message.sent;
  }
  transport::TransferRef receive(int member, std::uint64_t tag, MutableBytes data,
                                 const transport::Fingerprint&, bool) override {
    if (!wires_.sent.contains({rank_, member})) wires_.received_first.emplace(rank_, member);
    auto transfer = std::make_shared<MemoryTransfer>(data, member);
    auto& come = wires_.messages[{member, rank_, tag}];
    if (come.empty()) {
      wires_.receives[{member, rank_, tag}].push_back(transfer);
    } else {
      come.front().hand_to(*transfer);
      come.pop_front();
    }
    return transfer;
  }
  void cancel(const transport::TransferRef&) override {}
  void begin(const transport::Fingerprint&) override {}
  void compare(int, const transport::Fingerprint&) override {}
  Status failure() const override { return {}; }
  void fail(Status cause) override { ADD_FAILURE() << cause.message(); }
  std::vector<int> awaited() const override { return {}; }

 private:
  Wires& wires_;
  const int rank_;
  std::vector<int> members_;
};

}  // namespace muster::collective
