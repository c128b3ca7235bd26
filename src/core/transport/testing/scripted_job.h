// SPDX-License-Identifier: BSD-3-Clause
/// For tests: one real fabric whose peers are played by the test, frame by frame and byte by byte,
/// on a clock that only the test moves.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/transport/fabric.h"
#include "core/transport/link/link_protocol.h"

namespace muster::transport {

class ManualClock final : public Clock {
 public:
  TimePoint now() const override { return now_; }
  void advance(Duration by) { now_ += by; }

 private:
  TimePoint now_{std::chrono::seconds(1000)};
};

/// A frame as the test writes or reads it.
struct Frame {
  FrameHeader header;
  std::string payload;

  std::string bytes() const {
    FrameHeader whole = header;
    whole.length = static_cast<std::uint32_t>(payload.size());
    return std::string(reinterpret_cast<const char*>(&whole), sizeof whole) + payload;
  }
};

inline Frame frame_of(FrameKind kind, std::uint32_t channel = 0) {
  Frame frame;
  frame.header.kind = kind;
  frame.header.channel = channel;
  return frame;
}
inline Frame eager(std::string payload, std::uint64_t tag = 0, std::uint32_t channel = 0,
                   Fingerprint call = {}) {
  Frame frame = frame_of(FrameKind::eager, channel);
  frame.header.tag = tag;
  frame.header.call = call;
  frame.payload = std::move(payload);
  return frame;
}
inline Frame request(std::uint64_t message, std::uint64_t bytes, std::uint64_t tag = 0,
                     std::uint32_t channel = 0, Fingerprint call = {}) {
  Frame frame = frame_of(FrameKind::request, channel);
  frame.header.message = message;
  frame.header.amount = bytes;
  frame.header.tag = tag;
  frame.header.call = call;
  return frame;
}
inline Frame fragment(std::uint64_t message, std::uint64_t at, std::string payload,
                      std::uint32_t channel = 0) {
  Frame frame = frame_of(FrameKind::data, channel);
  frame.header.message = message;
  frame.header.amount = at;
  frame.payload = std::move(payload);
  return frame;
}

/// Cuts a byte stream into frames; what is no whole frame stays in `bytes`.
inline std::vector<Frame> take_frames(std::string& bytes) {
  std::vector<Frame> frames;
  while (bytes.size() >= sizeof(FrameHeader)) {
    Frame frame;
    std::memcpy(&frame.header, bytes.data(), sizeof frame.header);
    if (bytes.size() < sizeof frame.header + frame.header.length) break;
    frame.payload = bytes.substr(sizeof frame.header, frame.header.length);
    bytes.erase(0, sizeof frame.header + frame.header.length);
    frames.push_back(std::move(frame));
  }
  return frames;
}

/// Both directions of the stream to one peer.
struct ScriptedWire {
  std::string to_fabric;
  std::string from_fabric;
  std::size_t room = SIZE_MAX;          ///< what the fabric may still write
  std::size_t chunk = SIZE_MAX;         ///< most bytes of one read
  bool ended = false;                   ///< after to_fabric has been read
  bool closed = false;                  ///< by the fabric
  int writes = 0;                       ///< that took something
  std::vector<SendPosition> positions;  ///< what the kernel says of its connections
  bool in_memory = false;               ///< what is there can be looked at
  std::size_t turn = SIZE_MAX;          ///< after so much of it the memory goes on elsewhere
};

class ScriptedStream final : public ByteStream {
 public:
  explicit ScriptedStream(std::shared_ptr<ScriptedWire> wire) : wire_(std::move(wire)) {}
  ~ScriptedStream() override { wire_->closed = true; }
  Result<std::size_t> write(std::span<const ConstBytes> pieces) override {
    if (wire_->ended) return Status(Code::network, "broken pipe");
    std::size_t total = 0;
    for (const ConstBytes piece : pieces) {
      const std::size_t take = std::min(piece.size(), wire_->room);
      wire_->from_fabric.append(as_text(piece.first(take)));
      wire_->room -= take;
      total += take;
    }
    wire_->writes += total > 0 ? 1 : 0;
    return total;
  }
  Result<std::size_t> read(std::span<const MutableBytes> pieces) override {
    std::size_t total = 0;
    for (const MutableBytes piece : pieces) {
      const std::size_t take =
          std::min({piece.size(), wire_->to_fabric.size(), wire_->chunk - total});
      std::memcpy(piece.data(), wire_->to_fabric.data(), take);
      wire_->to_fabric.erase(0, take);
      total += take;
    }
    if (total == 0 && wire_->ended) return Status(Code::closed, "end of stream");
    return total;
  }
  std::array<ConstBytes, 2> look() override {
    if (!wire_->in_memory) return {};
    const ConstBytes there = as_bytes(wire_->to_fabric);
    const std::size_t front = std::min(there.size(), wire_->turn);
    return {there.first(front), there.subspan(front)};
  }
  void drop(std::size_t bytes) override { wire_->to_fabric.erase(0, bytes); }
  int descriptor() const override { return -1; }
  const char* kind() const override { return "scripted"; }
  std::vector<SendPosition> send_positions() const override { return wire_->positions; }

 private:
  std::shared_ptr<ScriptedWire> wire_;
};

/// The state that the scripted connector shares with the test.
struct ScriptedNet {
  std::deque<std::function<void(ConnectorEvents&)>> news;
  std::map<int, int> connects;            ///< how often the fabric has asked for a stream, by peer
  std::map<int, ProcessState> processes;  ///< what the kernel says; others are unknown
  shm::Mailbox mailbox;
  shm::HostRegion* region = nullptr;  ///< to be set before the fabric is made
};

class ScriptedConnector final : public Connector {
 public:
  ScriptedConnector(std::shared_ptr<ScriptedNet> net, std::vector<int> hosts)
      : net_(std::move(net)), hosts_(std::move(hosts)) {}
  Result<std::string> own_address(TimePoint) override { return std::string(); }
  Result<std::string> meet(std::span<const std::string>, TimePoint) override {
    return std::string();
  }
  Status settle(std::span<const std::string>, ConnectorEvents& events) override {
    events_ = &events;
    return {};
  }
  std::vector<int> hosts() const override { return hosts_; }
  shm::HostRegion* region() override { return net_->region; }
  shm::Mailbox& mailbox() override { return net_->mailbox; }
  void connect(int peer, TimePoint) override { ++net_->connects[peer]; }
  bool poll(TimePoint) override {
    const bool any = !net_->news.empty();
    while (!net_->news.empty()) {
      auto tell = std::move(net_->news.front());
      net_->news.pop_front();
      tell(*events_);
    }
    return any;
  }
  int descriptor() const override { return -1; }
  ProcessState process_state(int rank) override {
    const auto known = net_->processes.find(rank);
    return known == net_->processes.end() ? ProcessState::unknown : known->second;
  }
  TimePoint next_timer() const override { return TimePoint::max(); }

 private:
  std::shared_ptr<ScriptedNet> net_;
  std::vector<int> hosts_;
  ConnectorEvents* events_ = nullptr;
};

/// Rank `me` of `ranks`, each on a host of its own.
struct ScriptedJob {
  explicit ScriptedJob(int ranks = 2, int me = 0, const FingerprintRules* rules = nullptr,
                       std::vector<int> hosts = {}, Duration heartbeat_limit = kHeartbeatLimit,
                       shm::HostRegion* region = nullptr) {
    net->region = region;
    if (hosts.empty()) {
      for (int r = 0; r < ranks; ++r) hosts.push_back(r);
    }
    FabricOptions options;
    options.rank = me;
    options.world_size = ranks;
    options.clock = &clock;
    options.threads = false;
    options.rules = rules;
    options.heartbeat_limit = heartbeat_limit;
    options.on_silence = [this](const Silence& silence) {
      const char* const steps[] = {" suspected", " over", " verdict"};
      silences.push_back(std::to_string(silence.rank) + steps[static_cast<int>(silence.step)]);
    };
    auto made = Fabric::create(options, std::make_unique<ScriptedConnector>(net, hosts),
                               [ranks](const std::string&, const std::string& mine) {
                                 return Result<std::vector<std::string>>(std::vector<std::string>(
                                     static_cast<std::size_t>(ranks), mine));
                               });
    EXPECT_TRUE(made.ok());
    fabric = std::move(*made);
  }

  Channel& channel() { return fabric->bootstrap(); }
  /// Opens the stream to a peer.
  ScriptedWire& wire(int peer) {
    auto& wire = wires[peer];
    if (!wire) {
      wire = std::make_shared<ScriptedWire>();
      net->news.push_back([peer, wire](ConnectorEvents& events) {
        events.on_stream(peer, std::make_unique<ScriptedStream>(wire));
      });
      settle();
    }
    return *wire;
  }
  /// Polls until nothing moves any more.
  void settle() {
    while (fabric->poll()) {
    }
  }
  void advance(Duration by) {
    clock.advance(by);
    settle();
  }
  void say(int peer, const Frame& frame) {
    wire(peer).to_fabric += frame.bytes();
    settle();
  }
  void end(int peer) {
    wire(peer).ended = true;
    settle();
  }
  /// The frames that the fabric has sent to a peer since the last call, without heartbeats.
  std::vector<Frame> heard(int peer) {
    settle();
    auto frames = take_frames(wire(peer).from_fabric);
    std::erase_if(frames, [](const Frame& frame) {
      return frame.header.kind == FrameKind::ping || frame.header.kind == FrameKind::pong;
    });
    return frames;
  }

  ManualClock clock;
  std::shared_ptr<ScriptedNet> net = std::make_shared<ScriptedNet>();
  std::map<int, std::shared_ptr<ScriptedWire>> wires;
  std::vector<std::string> silences;  ///< that the fabric has told of, as "1 suspected"
  std::unique_ptr<Fabric> fabric;
};

/// The credit that the fabric returns to a peer.
struct GivenCredit {
  std::size_t bytes = 0;
  std::uint64_t envelopes = 0;

  /// Since the last call; it has sent nothing else.
  void hear(ScriptedJob& job, int peer) {
    for (const Frame& frame : job.heard(peer)) {
      EXPECT_EQ(frame.header.kind, FrameKind::credit);
      bytes += frame.header.amount;
      envelopes += frame.header.tag;
    }
  }
};

inline std::vector<FrameKind> kinds(const std::vector<Frame>& frames) {
  std::vector<FrameKind> all;
  for (const Frame& frame : frames) all.push_back(frame.header.kind);
  return all;
}

}  // namespace muster::transport
