// SPDX-License-Identifier: BSD-3-Clause
#include "faces/compat/torch_store.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/store/factory.h"
#include "core/store/request.h"
#include "faces/compat/torch_error.h"

namespace muster::compat {
namespace {

using Bytes = std::vector<std::uint8_t>;
using store::Reply;
using store::Request;
using store::StoreOp;
using store::Value;

/// torch takes milliseconds, and no negative ones.
std::chrono::milliseconds limit_of(Duration timeout) {
  constexpr auto kLongest = std::chrono::hours(24 * 365);
  if (timeout < Duration::zero() || timeout > kLongest) return kLongest;
  return std::max(std::chrono::ceil<std::chrono::milliseconds>(timeout),
                  std::chrono::milliseconds(1));  // limit: zero would mean none
}

Bytes bytes_of(std::string_view text) { return {text.begin(), text.end()}; }
Value value_of(const Bytes& bytes) {
  return std::make_shared<const std::string>(bytes.begin(), bytes.end());
}
Reply reply_of(std::vector<Value> values) { return {{}, 0, std::move(values)}; }
Reply failure(Code code, std::string text) { return {Status(code, std::move(text)), 0, {}}; }

/// Names the members that did not arrive at a rendezvous that ended with `error`; `keys`: the key
/// that each would have written. Success if all had arrived.
Status absent(c10d::Store& store, const std::vector<std::string>& keys, Duration timeout,
              const std::exception& error) {
  std::vector<int> missing;
  for (std::size_t member = 0; member < keys.size(); ++member) {
    if (!store.check({keys[member]})) missing.push_back(static_cast<int>(member));
  }
  if (missing.empty()) return {};
  return Status(Code::timed_out,
                store::named_ranks(missing) + " did not come within " + describe(timeout) + " (" +
                    text_of(error) + ")",
                missing);
}

/// Null if the store wraps another kind.
c10::intrusive_ptr<c10d::TCPStore> tcp_below(c10::intrusive_ptr<c10d::Store> store) {
  while (auto* prefix = dynamic_cast<c10d::PrefixStore*>(store.get()))
    store = prefix->getUnderlyingStore();
  return c10::dynamic_intrusive_pointer_cast<c10d::TCPStore>(store);
}

/// The host that serves the store decides on which of its addresses a rank listens; empty if
/// unknown.
class TorchStore : public store::RequestStore<store::TcpStore> {
 public:
  TorchStore(c10::intrusive_ptr<c10d::Store> store, Duration timeout)
      : RequestStore(timeout), store_(std::move(store)) {
    if (const auto tcp = tcp_below(store_)) {
      host_ = tcp->getHost();
      port_ = tcp->getPort();
    }
  }

  const std::string& host() const override { return host_; }
  std::uint16_t port() const override { return port_; }
  Status register_member(const std::string&, int, int) override {
    return Status(Code::unsupported, "torch's stores keep no account of ranks");
  }
  Result<std::unique_ptr<store::ServerConnection>> connect(TimePoint) override {
    return Status(Code::unsupported, "torch's stores make no further connections");
  }

  Result<std::shared_ptr<store::Store>> clone() override {
    try {
      return std::shared_ptr<store::Store>(
          std::make_shared<TorchStore>(store_->clone(), timeout()));
    } catch (const std::exception& error) {
      return Status(Code::store, "torch's store cannot be cloned: " + text_of(error));
    }
  }
  const char* kind() const override { return "torch"; }

 protected:
  Reply call(const Request& request) override {
    const auto begin = steady_clock().now();
    try {
      return carry_out(request);
    } catch (const std::exception& error) {
      const bool late =
          request.timeout >= Duration::zero() && steady_clock().now() - begin >= request.timeout;
      return failure(late ? Code::timed_out : Code::store,
                     std::string(name_of(request.op)) + "(" + store::quoted(request.keys) +
                         ") on torch's store: " +
                         (late ? "not there after " + describe(request.timeout) : text_of(error)));
    }
  }

 private:
  static std::string text(std::string_view view) { return std::string(view); }
  static std::vector<std::string> texts(const std::vector<std::string_view>& views) {
    return {views.begin(), views.end()};
  }

  Reply carry_out(const Request& request) {
    const std::string key = request.keys.empty() ? std::string() : text(request.keys[0]);
    switch (request.op) {
      case StoreOp::set: store_->set(key, bytes_of(request.values[0])); return {};
      case StoreOp::get:
        store_->wait({key}, limit_of(request.timeout));
        return reply_of({value_of(store_->get(key))});
      case StoreOp::add: return {{}, store_->add(key, request.number), {}};
      case StoreOp::compare_set:
        return reply_of({value_of(
            store_->compareSet(key, bytes_of(request.values[0]), bytes_of(request.values[1])))});
      case StoreOp::wait: store_->wait(texts(request.keys), limit_of(request.timeout)); return {};
      case StoreOp::num_keys: return {{}, store_->getNumKeys(), {}};
      case StoreOp::delete_key: return {{}, store_->deleteKey(key) ? 1 : 0, {}};
      case StoreOp::check: return {{}, store_->check(texts(request.keys)) ? 1 : 0, {}};
      case StoreOp::append: store_->append(key, bytes_of(request.values[0])); return {};
      case StoreOp::multi_get: return read(texts(request.keys), request.timeout);
      case StoreOp::multi_set: write(texts(request.keys), request.values); return {};
      case StoreOp::barrier: return meet(request, key);
      case StoreOp::all_gather: return gather(request, key);
      default:
        return failure(Code::unsupported, "torch's stores have no " + text(name_of(request.op)));
    }
  }

  Reply read(const std::vector<std::string>& keys, Duration timeout) {
    store_->wait(keys, limit_of(timeout));
    std::vector<Value> values;
    if (store_->hasExtendedApi()) {
      for (const auto& bytes : store_->multiGet(keys)) values.push_back(value_of(bytes));
    } else {
      for (const auto& key : keys) values.push_back(value_of(store_->get(key)));
    }
    return reply_of(std::move(values));
  }

  void write(const std::vector<std::string>& keys, const std::vector<std::string_view>& texts) {
    std::vector<Bytes> values;
    for (const auto& each : texts) values.push_back(bytes_of(each));
    if (store_->hasExtendedApi()) return store_->multiSet(keys, values);
    for (std::size_t i = 0; i < keys.size(); ++i) store_->set(keys[i], values[i]);
  }

  /// The number of this rendezvous under `key`; every member takes part in all of them.
  std::string meeting(const std::string& key) {
    const std::lock_guard lock(mutex_);
    return key + "/" + std::to_string(meetings_[key]++) + "/";
  }

  Reply gather(const Request& request, const std::string& key) {
    const auto prefix = meeting(key);
    std::vector<std::string> keys;
    for (int member = 0; member < request.members; ++member)
      keys.push_back(prefix + std::to_string(member));
    store_->set(keys[static_cast<std::size_t>(request.index)], bytes_of(request.values[0]));
    try {
      return read(keys, request.timeout);
    } catch (const std::exception& error) {
      auto status = absent(*store_, keys, request.timeout, error);
      if (status.ok()) throw;
      return {std::move(status), 0, {}};
    }
  }

  Reply meet(const Request& request, const std::string& key) {
    const auto prefix = meeting(key);
    if (store_->add(prefix + "count", 1) == request.members) store_->set(prefix + "all", Bytes{1});
    store_->wait({prefix + "all"}, limit_of(request.timeout));
    return {};
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  std::string host_;
  std::uint16_t port_ = 0;
  std::mutex mutex_;
  std::map<std::string, std::uint64_t> meetings_;
};

std::string cannot_join(int rank, int world_size) {
  return "rank " + std::to_string(rank) + " of " + std::to_string(world_size) +
         " cannot join the job on torch's store";
}

/// The n-th init on one store. It begins when rank 0 arrives. It ends when all ranks have arrived,
/// or when a later rank 0 finds it unfinished because its own rank 0 has died. The end mark stays,
/// so no rank mistakes an earlier init for this one.
class Init {
 public:
  Init(c10d::Store& store, std::int64_t number)
      : store_(store), name_(kPrefix + std::to_string(number)) {}
  /// Begins `more` inits; returns the number of the latest.
  static std::int64_t count(c10d::Store& store, int more) {
    return store.add(std::string(kPrefix) + "count", more);
  }

  const std::string& name() const { return name_; }
  std::vector<std::string> places(int world_size) const {
    std::vector<std::string> keys;
    for (int rank = 0; rank < world_size; ++rank) keys.push_back(place(rank));
    return keys;
  }
  void take_place(int rank) { store_.set(place(rank), Bytes{1}); }
  void wait_for_rank_zero(Duration timeout) { store_.wait({place(0)}, limit_of(timeout)); }
  void wait_for_all(int world_size, Duration timeout) {
    store_.wait(places(world_size), limit_of(timeout));
  }

  bool has_ended() { return store_.check({end()}); }
  void put_end(bool complete) { store_.set(end(), Bytes{complete}); }
  /// Whether it is complete.
  bool wait_for_end(Duration timeout) {
    store_.wait({end()}, limit_of(timeout));
    return store_.get(end()) == Bytes{true};
  }

 private:
  static constexpr const char* kPrefix = "muster/init/";
  std::string place(int rank) const { return name_ + "/" + std::to_string(rank); }
  std::string end() const { return name_ + "/end"; }

  c10d::Store& store_;
  const std::string name_;
};

/// Rank 0's part. Sets `number` to the current init, even if it throws.
void lead(c10d::Store& store, int world_size, TimePoint deadline, std::int64_t& number) {
  number = Init::count(store, 1);
  for (auto earlier = number - 1; earlier > 0; --earlier) {
    Init lost(store, earlier);
    if (lost.has_ended()) break;
    lost.take_place(0);
    lost.put_end(false);
  }
  Init init(store, number);
  init.take_place(0);
  init.wait_for_all(world_size, time_left(steady_clock(), deadline));
  init.put_end(true);
}

void follow(c10d::Store& store, int rank, TimePoint deadline, std::int64_t& number) {
  for (number = std::max<std::int64_t>(Init::count(store, 0), 1);; ++number) {
    Init init(store, number);
    init.wait_for_rank_zero(time_left(steady_clock(), deadline));
    if (init.has_ended()) continue;
    init.take_place(rank);
    if (init.wait_for_end(time_left(steady_clock(), deadline))) return;
  }
}

/// Counts how many inits each rank has begun on this store. Written before any rank waits: rank 0
/// may still wait for another rank in torch's own rendezvous, and no rank has a place before rank 0
/// arrives.
class Begun {
 public:
  Begun(c10d::Store& store, int rank)
      : store_(store), rank_(rank), mine_(store.add(key(rank), 1)) {}
  /// The ranks that have begun fewer than this one, rank 0 aside.
  std::vector<int> behind(int world_size) {
    std::vector<int> ranks;
    for (int rank = 1; rank < world_size; ++rank) {
      if (rank != rank_ && store_.add(key(rank), 0) < mine_) ranks.push_back(rank);
    }
    return ranks;
  }

 private:
  static std::string key(int rank) { return "muster/begun/" + std::to_string(rank); }

  c10d::Store& store_;
  const int rank_;
  const std::int64_t mine_;
};

/// Why an init that rank 0 has not begun failed. Success if that is unknown.
Status absent_with_rank_zero(Begun& begun, int world_size, Duration timeout,
                             const std::exception& error) {
  const auto ranks = begun.behind(world_size);
  if (ranks.empty()) return {};
  return Status(Code::timed_out,
                store::named_ranks(ranks) + " did not come within " + describe(timeout) +
                    ", nor did rank 0, whose store may wait for all to come (" + text_of(error) +
                    ")",
                ranks);
}

}  // namespace

Result<std::shared_ptr<store::Store>> meet_on(const c10::intrusive_ptr<c10d::Store>& store,
                                              int rank, int world_size, Duration timeout) {
  const auto deadline = deadline_after(steady_clock(), timeout);
  std::int64_t number = 0;
  try {
    Begun begun(*store, rank);
    try {
      rank == 0 ? lead(*store, world_size, deadline, number)
                : follow(*store, rank, deadline, number);
      return adapt_store(
          c10::make_intrusive<c10d::PrefixStore>(Init(*store, number).name(), store));
    } catch (const std::exception& error) {
      if (steady_clock().now() < deadline || number == 0) throw;
      // Without rank 0 no other rank takes a place.
      const Init init(*store, number);
      auto status = absent(*store, init.places(1), timeout, error);
      if (!status.ok()) {
        if (auto others = absent_with_rank_zero(begun, world_size, timeout, error); !others.ok())
          status = std::move(others);
      }
      if (status.ok()) status = absent(*store, init.places(world_size), timeout, error);
      if (status.ok()) throw;
      return status.with_context(cannot_join(rank, world_size));
    }
  } catch (const std::exception& error) {
    return Status(Code::store, cannot_join(rank, world_size) + ": " + text_of(error));
  }
}

std::shared_ptr<store::Store> adapt_store(c10::intrusive_ptr<c10d::Store> store, Duration timeout) {
  return std::make_shared<TorchStore>(std::move(store), timeout);
}

}  // namespace muster::compat
