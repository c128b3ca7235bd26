// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <array>
#include <string>

#include "core/security/handshake.h"
#include "core/store/request.h"
#include "testing/sim_job.h"

namespace muster::testing {
namespace {

constexpr std::size_t kReadAtOnce = 16 * 1024;
/// The client waits this much longer than the deadline: the server's error names what is missing.
constexpr Duration kGrace = std::chrono::seconds(1);

Handshake::Hello hello() {
  Handshake::Hello hello;
  hello.role = Handshake::Role::store;
  hello.job = "simulated";
  hello.build = store::kStoreBuild;
  return hello;
}

/// One rank's client: blocking, one request at a time, like the real one over its socket.
class SimStore final : public store::RequestStore<store::Store> {
 public:
  SimStore(SimJob& job, int rank, Duration timeout)
      : RequestStore(timeout), job_(job), rank_(rank) {}

  const char* kind() const override { return "sim"; }
  Result<std::shared_ptr<Store>> clone() override {
    return Status(Code::unsupported, "a simulated rank has one connection to its store");
  }

 protected:
  store::Reply call(const store::Request& request) override {
    const TimePoint deadline =
        deadline_after(job_, request.timeout < Duration::zero() ? timeout() : request.timeout) +
        kGrace;
    if (Status greeted = greet(deadline); !greeted) return {greeted, 0, {}};
    const std::uint64_t id = next_id_++;
    std::string frame = store::encode_head(request, id);
    for (const std::string_view value : request.values) frame += value;
    if (Status sent = send(frame, deadline); !sent) return {sent, 0, {}};
    for (;;) {
      while (const auto next = frames_.next()) {
        auto reply = store::decode_reply(*next);
        if (!reply) return {reply.status(), 0, {}};
        if (reply->id == id) return std::move(reply->reply);
      }
      auto bytes = receive(deadline);
      if (!bytes) return {bytes.status(), 0, {}};
      frames_.feed(as_bytes(*bytes));
    }
  }

 private:
  Status greet(TimePoint deadline) {
    if (stream_) return {};
    stream_ = job_.reach_store(rank_);
    Handshake handshake(Handshake::Side::connector, hello(), SimJob::secret());
    while (!handshake.done()) {
      if (Status sent = send(handshake.take_output(), deadline); !sent) return sent;
      auto bytes = receive(deadline);
      if (!bytes) return bytes.status();
      const std::size_t taken = handshake.feed(as_bytes(*bytes));
      if (handshake.failed()) return handshake.failure();
      frames_.feed(as_bytes(std::string_view(*bytes).substr(taken)));
    }
    return {};
  }

  Status send(std::string_view text, TimePoint deadline) {
    while (!text.empty()) {
      const ConstBytes piece = as_bytes(text);
      auto wrote = stream_->write(std::span(&piece, 1));
      if (!wrote) return wrote.status();
      text.remove_prefix(*wrote);
      if (*wrote > 0) continue;
      if (Status in_time = pause(deadline); !in_time) return in_time;
    }
    return {};
  }

  Result<std::string> receive(TimePoint deadline) {
    std::array<std::byte, kReadAtOnce> buffer;
    for (;;) {
      const MutableBytes piece(buffer);
      auto got = stream_->read(std::span(&piece, 1));
      if (!got) return got.status();
      if (*got > 0) return std::string(as_text(ConstBytes(buffer).first(*got)));
      if (Status in_time = pause(deadline); !in_time) return in_time;
    }
  }

  Status pause(TimePoint deadline) {
    if (job_.now() >= deadline)
      return Status(Code::timed_out,
                    "the simulated store does not answer rank " + std::to_string(rank_));
    job_.idle(rank_, deadline);
    return {};
  }

  SimJob& job_;
  int rank_;
  std::unique_ptr<ByteStream> stream_;
  store::RequestFrames frames_;
  std::uint64_t next_id_ = 1;
};

}  // namespace

const Secret& SimJob::secret() {
  static const Secret secret = Secret::given("the secret of simulated jobs");
  return secret;
}

std::unique_ptr<ByteStream> SimJob::reach_store(int rank) {
  auto stream = stream_between(rank, store_place());
  serving_[static_cast<std::size_t>(rank)] = stream_between(store_place(), rank);
  server_.on_open(static_cast<std::uint64_t>(rank) + 1, "rank " + std::to_string(rank),
                  store::StoreServer::ListenerWay::unix_socket, now_);
  return stream;
}

TimePoint SimJob::store_event() const {
  return std::min(next_arrival(store_place(), store_looked_), server_.next_timer());
}

void SimJob::serve_store() {
  store_looked_ = now_;
  if (server_.next_timer() <= now_) server_.on_time(now_);
  std::array<std::byte, kReadAtOnce> buffer;
  for (std::size_t rank = 0; rank < serving_.size(); ++rank) {
    auto& stream = serving_[rank];
    const store::StoreServer::Connection connection = rank + 1;
    while (stream) {
      const MutableBytes piece(buffer);
      auto got = stream->read(std::span(&piece, 1));
      if (got && *got == 0) break;
      if (got) {
        server_.on_bytes(connection, ConstBytes(buffer).first(*got), now_);
      } else {
        server_.on_closed(connection, now_);
        stream.reset();
      }
    }
  }
  for (std::size_t rank = 0; rank < serving_.size(); ++rank) {
    const store::StoreServer::Connection connection = rank + 1;
    while (serving_[rank]) {
      const auto output = server_.output(connection, 8);
      if (output.empty()) break;
      auto wrote = serving_[rank]->write(output);
      if (!wrote || *wrote == 0) break;
      server_.on_written(connection, *wrote, now_);
    }
  }
  for (const store::StoreServer::Connection connection : server_.take_changed()) {
    auto& stream = serving_[connection - 1];
    if (!stream || !server_.wants_close(connection)) continue;
    stream.reset();
    server_.on_closed(connection, now_);
  }
}

std::shared_ptr<store::Store> make_sim_store(SimJob& job, int rank, Duration timeout) {
  return std::make_shared<SimStore>(job, rank, timeout);
}

}  // namespace muster::testing
