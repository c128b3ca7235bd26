// SPDX-License-Identifier: BSD-3-Clause
#include "core/store/etcd/etcd_store.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <set>

#include "core/store/etcd/client.h"
#include "core/store/factory.h"
#include "core/store/request.h"

namespace muster::store {
namespace etcd {
namespace {

// etcd takes 128 operations in one transaction and 1.5 MiB in one request.
constexpr std::size_t kKeysRead = 64;                          // limit: etcd's transactions
constexpr std::size_t kKeysWritten = 60;                       // limit: etcd's transactions
constexpr std::size_t kBytesWritten = std::size_t{640} << 10;  // limit: etcd's requests

Reply failure(Code code, std::string message) { return {Status(code, std::move(message)), 0, {}}; }
Reply failure(const Status& status, const Request& request) {
  const std::string what = std::string(name_of(request.op)) +
                           (request.keys.empty() ? "" : "(" + quoted(request.keys) + ")");
  return {status.with_context(what), 0, {}};
}
Value shared(std::string text) { return std::make_shared<const std::string>(std::move(text)); }

/// How long after a request's own deadline etcd's answers are still waited for.
Duration grace(Duration timeout) {
  return std::clamp<Duration>(timeout / 10, std::chrono::seconds(2), std::chrono::seconds(10));
}

/// The value under a key, and the write that stored it.
struct CurrentValue {
  std::int64_t mod_revision = 0;  // 0: nothing
  std::string value;
};

/// Shared by all users of one store object.
struct Cluster {
  Cluster(std::shared_ptr<EtcdClient> with, std::string root)
      : client(std::move(with)), keys{root}, writer(client, root), lease(*client) {}
  const std::shared_ptr<EtcdClient> client;
  const Keys keys;
  Writer writer;
  LiveLease lease;
};

class EtcdBackedStore final : public RequestStore<Store> {
 public:
  EtcdBackedStore(std::shared_ptr<Cluster> cluster, Duration timeout)
      : RequestStore(timeout), cluster_(std::move(cluster)) {}
  Result<std::shared_ptr<Store>> clone() override {
    return std::shared_ptr<Store>(std::make_shared<EtcdBackedStore>(cluster_, timeout()));
  }
  const char* kind() const override { return "etcd"; }

 protected:
  Reply call(const Request& request) override {
    switch (request.op) {
      case StoreOp::get:
      case StoreOp::wait:
      case StoreOp::multi_get: return read(request);
      case StoreOp::queue_pop: return pop(request);
      case StoreOp::barrier:
      case StoreOp::all_gather: return meet(request);
      case StoreOp::set:
      case StoreOp::multi_set: return write(request);
      case StoreOp::add:
      case StoreOp::append:
      case StoreOp::compare_set: return change(request);
      case StoreOp::check: return check_keys(request);
      case StoreOp::num_keys:
      case StoreOp::list_keys: return list(request);
      case StoreOp::delete_key: return erase_key(request);
      case StoreOp::queue_push: return push(request);
      case StoreOp::queue_len: return length(request);
      default:
        return failure(Code::internal,
                       "the etcd store was asked to execute " + std::string(name_of(request.op)));
    }
  }

 private:
  EtcdClient& client() { return *cluster_->client; }
  Writer& writer() { return cluster_->writer; }
  const Keys& keys() const { return cluster_->keys; }
  TimePoint deadline() const { return deadline_after(steady_clock(), timeout()); }
  static TimePoint later(TimePoint deadline, Duration timeout) {
    return timeout >= Duration::zero() && deadline < TimePoint::max() - grace(timeout)
               ? deadline + grace(timeout)
               : TimePoint::max();
  }

  Reply meet(const Request& request) {
    const TimePoint until = deadline_after(steady_clock(), request.timeout);
    return EtcdMeeting(request, keys(), writer(), cluster_->lease)
        .run(until, later(until, request.timeout));
  }

  // ---- reading

  /// Which of `names` are not there.
  Result<std::set<std::string_view>> missing_of(std::span<const std::string_view> names,
                                                TimePoint until) {
    std::set<std::string_view> missing;
    for (std::size_t begin = 0; begin < names.size(); begin += kKeysRead) {
      const auto part = names.subspan(begin, std::min(kKeysRead, names.size() - begin));
      Txn txn;
      for (const std::string_view name : part)
        txn.then.push_back(KeyRange{.key = keys().user(name), .count_only = true});
      const auto reply = client().txn(txn, until);
      if (!reply) return reply.status();
      if (reply->replies.size() != part.size()) return too_few();
      for (std::size_t i = 0; i < part.size(); ++i)
        if (reply->replies[i].count == 0) missing.insert(part[i]);
    }
    return missing;
  }

  /// The values of `names`; Code::closed if one is gone or has just been replaced.
  Result<std::vector<Value>> values_of(std::span<const std::string_view> names, TimePoint until) {
    std::vector<Value> values;
    for (std::size_t begin = 0; begin < names.size(); begin += kKeysRead) {
      const auto part = names.subspan(begin, std::min(kKeysRead, names.size() - begin));
      Txn txn;
      for (const std::string_view name : part)
        txn.then.push_back(KeyRange{.key = keys().user(name)});
      auto reply = client().txn(txn, until);
      if (!reply) return reply.status();
      if (reply->replies.size() != part.size()) return too_few();
      for (auto& each : reply->replies) {
        if (each.values.empty()) return Status(Code::closed, "the key has been deleted");
        const KeyValue& stored = each.values[0];
        auto value = writer().restore(keys().pieces(stored.key), stored.value, until);
        if (!value) return value.status();
        values.push_back(shared(std::move(*value)));
      }
    }
    return values;
  }

  Reply read(const Request& request) {
    const TimePoint begin = steady_clock().now();
    const TimePoint until = deadline_after(steady_clock(), request.timeout);
    const TimePoint hard = later(until, request.timeout);
    if (request.keys.empty()) return {};
    while (true) {
      if (request.op != StoreOp::wait) {  // most often all are there
        auto values = values_of(request.keys, hard);
        if (values) return {{}, 0, std::move(*values)};
        if (values.status().code() != Code::closed) return failure(values.status(), request);
      }
      std::set<std::string_view> missing;
      const Status come = await(request, missing, until, hard);
      if (come.ok() && request.op == StoreOp::wait) return {};
      if (come.ok()) continue;
      if (come.code() != Code::timed_out || missing.empty()) return failure(come, request);
      return {timeout_of(request, missing, steady_clock().now() - begin), 0, {}};
    }
  }

  /// Watches until no key of the request is missing.
  Status await(const Request& request, std::set<std::string_view>& missing, TimePoint until,
               TimePoint hard) {
    std::vector<std::string_view> awaited;
    const auto read = [&](std::span<const std::string_view> names) -> Status {
      auto found = missing_of(names, hard);
      if (!found) return found.status();
      missing = std::move(*found);
      return {};
    };
    if (Status looked = read(request.keys); !looked || missing.empty()) return looked;
    awaited.assign(missing.begin(), missing.end());
    Status trouble;
    EtcdClient::WatchOptions options{.key = keys().user(awaited.front()), .deadline = until};
    if (awaited.size() > 1) options.range_end = keys().user(awaited.back()) + '\0';
    options.on_open = [&] {
      trouble = read(awaited);
      return !trouble || missing.empty();
    };
    options.on_events = [&](const std::vector<Event>& events) {
      for (const Event& event : events) {
        const auto name = std::string_view(event.value.key).substr(keys().users().size());
        const auto known = std::lower_bound(awaited.begin(), awaited.end(), name);
        if (known == awaited.end() || *known != name) continue;
        if (event.deleted)
          missing.insert(*known);
        else
          missing.erase(*known);
      }
      return missing.empty();
    };
    const Status watched = client().watch(options);
    return trouble.ok() ? watched : trouble;
  }

  static Status timeout_of(const Request& request, const std::set<std::string_view>& missing,
                           Duration waited) {
    if (request.op == StoreOp::get)
      return Status(Code::timed_out, "get(" + quoted(request.keys[0]) +
                                         "): nobody set this key within " + describe(waited));
    const std::vector<std::string_view> names(missing.begin(), missing.end());
    return Status(Code::timed_out,
                  std::string(name_of(request.op)) + ": " + std::to_string(names.size()) + " of " +
                      std::to_string(request.keys.size()) + " keys are still missing after " +
                      describe(waited) + ": " + quoted(names));
  }

  Reply check_keys(const Request& request) {
    const auto missing = missing_of(request.keys, deadline());
    if (!missing) return failure(missing.status(), request);
    return {{}, missing->empty() ? 1 : 0, {}};
  }

  Reply list(const Request& request) {
    const std::string prefix = keys().users();
    const bool count = request.op == StoreOp::num_keys;
    Txn txn;
    txn.then.push_back(KeyRange{
        .key = prefix, .range_end = prefix_end(prefix), .keys_only = !count, .count_only = count});
    const auto reply = client().txn(txn, deadline());
    if (!reply) return failure(reply.status(), request);
    if (reply->replies.size() != 1) return failure(too_few(), request);
    Reply all{{}, reply->replies[0].count, {}};
    for (const KeyValue& each : reply->replies[0].values)
      all.values.push_back(shared(each.key.substr(prefix.size())));
    return all;
  }

  // ---- writing

  /// One value on its way to a key.
  struct Placed {
    std::string key;
    Writer::Long stored;
  };
  Result<Placed> place(std::string key, std::string_view value, TimePoint until) {
    auto stored = writer().prepare(keys().pieces(key), value, until);
    if (!stored) return stored.status();
    return Placed{std::move(key), std::move(*stored)};
  }
  /// Adds to a transaction what puts the value there and removes the pieces of the one before.
  void put(const Placed& placed, Txn& txn) const {
    const Writer::Long& stored = placed.stored;
    txn.then.push_back(Put{.key = placed.key, .value = stored.stored});
    const std::string all = keys().pieces(placed.key);
    if (stored.pieces.empty()) {
      txn.then.push_back(Delete{.key = all, .range_end = prefix_end(all)});
      return;
    }
    txn.when.push_back({.key = stored.first, .relation = Compare::Relation::greater, .number = 0});
    txn.then.push_back(Delete{.key = all, .range_end = stored.pieces});
    txn.then.push_back(Delete{.key = prefix_end(stored.pieces), .range_end = prefix_end(all)});
  }

  Reply write(const Request& request) {
    const TimePoint until = deadline();
    std::map<std::string, std::string_view>
        last;  // of a key that comes twice the last value counts
    for (std::size_t i = 0; i < request.keys.size(); ++i)
      last[keys().user(request.keys[i])] = request.values[i];
    for (auto next = last.begin(); next != last.end();) {
      const auto begin = next;
      Txn txn;
      std::size_t bytes = 0, count = 0;
      for (; next != last.end() && count < kKeysWritten && (count == 0 || bytes < kBytesWritten);
           ++next, ++count) {
        const auto placed = place(next->first, next->second, until);
        if (!placed) return failure(placed.status(), request);
        put(*placed, txn);
        bytes += 4 * next->first.size() + placed->stored.stored.size();
      }
      const auto written = writer().commit(std::move(txn), until);
      if (!written) return failure(written.status(), request);
      if (!written->done) next = begin;  // another client has removed the pieces: retry
    }
    return {};
  }

  Result<CurrentValue> current_of(const OperationReply& reply, TimePoint until) {
    if (reply.values.empty()) return CurrentValue{};
    const KeyValue& stored = reply.values[0];
    auto value = writer().restore(keys().pieces(stored.key), stored.value, until);
    if (!value) return value.status();
    return CurrentValue{stored.mod_revision, std::move(*value)};
  }

  /// The outcome of a change: the new value to be written, or the reply without writing.
  struct KeyChange {
    std::optional<std::string> next;
    Reply reply;
  };
  static KeyChange changed(const Request& request, const CurrentValue& current) {
    const bool there = current.mod_revision != 0;
    if (request.op == StoreOp::append) {
      if (request.values[0].size() > kMaxValueBytes - current.value.size())
        return {{},
                failure(Code::exhausted, "append(" + quoted(request.keys[0]) +
                                             "): the value would grow beyond the limit of " +
                                             std::to_string(kMaxValueBytes) + " bytes")};
      return {current.value + std::string(request.values[0]), {}};
    }
    if (request.op == StoreOp::compare_set) {
      const std::string_view expected = request.values[0];
      if (there ? current.value != expected : !expected.empty())
        return {{}, {{}, 0, {shared(there ? current.value : std::string(expected))}}};
      return {std::string(request.values[1]), {{}, 1, {shared(std::string(request.values[1]))}}};
    }
    return added(request, current);
  }
  static KeyChange added(const Request& request, const CurrentValue& current) {
    std::int64_t sum = request.number;
    if (current.mod_revision != 0) {
      const std::string& text = current.value;
      std::int64_t before = 0;
      const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), before);
      if (error != std::errc() || stop != text.data() + text.size()) {
        return {
            {},
            failure(Code::store, "add(" + quoted(request.keys[0]) + "): the value stored there, " +
                                     quoted(text) + ", is not a whole number")};
      }
      if (__builtin_add_overflow(before, request.number, &sum)) {
        return {{},
                failure(Code::store, "add(" + quoted(request.keys[0]) + "): " + text + " + " +
                                         std::to_string(request.number) +
                                         " does not fit into 64 bits")};
      }
    }
    return {std::to_string(sum), {{}, sum, {}}};
  }

  /// Reads, computes and writes, on the condition that no client has written in between. The first
  /// attempt guesses the current value, so an uncontended change costs one or two requests.
  Reply change(const Request& request) {
    const TimePoint until = deadline();
    const std::string key = keys().user(request.keys[0]);
    CurrentValue current;
    constexpr std::size_t kShort = std::size_t{256} << 10;  // limit: etcd's requests
    bool guessed = request.op == StoreOp::compare_set && !request.values[0].empty() &&
                   request.values[0].size() <= kShort;
    if (guessed) {
      current.mod_revision = -1;
      current.value = request.values[0];
    }
    while (true) {
      KeyChange change = changed(request, current);
      if (!change.next) return std::move(change.reply);
      const auto placed = place(key, *change.next, until);
      if (!placed) return failure(placed.status(), request);
      Txn txn;
      if (guessed)
        txn.when.push_back(
            {.key = key, .target = Compare::EtcdTarget::value, .value = "v" + current.value});
      else
        txn.when.push_back({.key = key,
                            .target = Compare::EtcdTarget::mod_revision,
                            .number = current.mod_revision});
      put(*placed, txn);
      txn.otherwise.push_back(KeyRange{.key = key});
      auto written = writer().commit(std::move(txn), until);
      if (!written) return failure(written.status(), request);
      if (written->done) return std::move(change.reply);
      auto found = current_of(written->replies[0], until);
      if (!found && found.status().code() == Code::closed) {  // replaced while it was read
        current = {};
        guessed = false;
        continue;
      }
      if (!found) return failure(found.status(), request);
      current = std::move(*found);
      guessed = false;
    }
  }

  Reply erase_key(const Request& request) {
    const std::string key = keys().user(request.keys[0]), pieces = keys().pieces(key);
    Txn txn;
    txn.when.push_back({.key = key, .relation = Compare::Relation::greater, .number = 0});
    txn.then.push_back(Delete{.key = key});
    txn.then.push_back(Delete{.key = pieces, .range_end = prefix_end(pieces)});
    const auto written = writer().commit(std::move(txn), deadline());
    if (!written) return failure(written.status(), request);
    return {{}, written->done ? 1 : 0, {}};
  }

  // ---- queues: one key for each value, in order of creation

  Reply push(const Request& request) {
    const TimePoint until = deadline();
    while (true) {
      const auto placed =
          place(keys().queue(request.keys[0]) + random_name(), request.values[0], until);
      if (!placed) return failure(placed.status(), request);
      Txn txn;
      put(*placed, txn);
      const auto written = writer().commit(std::move(txn), until);
      if (!written) return failure(written.status(), request);
      if (written->done) return {};
    }
  }

  Reply length(const Request& request) {
    const std::string prefix = keys().queue(request.keys[0]);
    Txn txn;
    txn.then.push_back(
        KeyRange{.key = prefix, .range_end = prefix_end(prefix), .count_only = true});
    const auto reply = client().txn(txn, deadline());
    if (!reply) return failure(reply.status(), request);
    if (reply->replies.size() != 1) return failure(too_few(), request);
    return {{}, reply->replies[0].count, {}};
  }

  Reply pop(const Request& request) {
    const TimePoint begin = steady_clock().now();
    const bool block = request.number != 0;
    const Duration limit = block ? request.timeout : timeout();
    const TimePoint until = deadline_after(steady_clock(), limit), hard = later(until, limit);
    const std::string prefix = keys().queue(request.keys[0]);
    Result<std::string> popped = none();
    const auto look = [&] {  // true: there is an answer
      popped = oldest_entry(prefix, hard);
      return popped.ok() || popped.status().code() != Code::closed;
    };
    if (!look() && !block)
      return failure(Code::store, "queue_pop(" + quoted(request.keys[0]) + "): the queue is empty");
    while (!popped && popped.status().code() == Code::closed) {
      const Status come =
          client().watch({.key = prefix,
                          .range_end = prefix_end(prefix),
                          .deadline = until,
                          .on_open = look,
                          .on_events = [&](const std::vector<Event>& events) {
                            return std::any_of(events.begin(), events.end(),
                                               [](const Event& event) { return !event.deleted; }) &&
                                   look();
                          }});
      if (come.ok()) continue;
      if (come.code() != Code::timed_out) return failure(come, request);
      return failure(Code::timed_out, "queue_pop(" + quoted(request.keys[0]) +
                                          "): nothing came into the queue within " +
                                          describe(steady_clock().now() - begin));
    }
    if (!popped) return failure(popped.status(), request);
    return {{}, 0, {shared(std::move(*popped))}};
  }

  static Status none() { return Status(Code::closed, "the queue is empty"); }

  /// Takes the oldest value. Code::closed: there is none.
  Result<std::string> oldest_entry(const std::string& prefix, TimePoint until) {
    while (true) {
      Txn txn;
      txn.then.push_back(KeyRange{
          .key = prefix, .range_end = prefix_end(prefix), .limit = 1, .oldest_first = true});
      const auto oldest = client().txn(txn, until);
      if (!oldest) return oldest.status();
      if (oldest->replies.size() != 1) return too_few();
      if (oldest->replies[0].values.empty()) return none();
      auto taken = take_entry(oldest->replies[0].values[0], until);
      if (taken || taken.status().code() != Code::closed) return taken;
    }
  }

  /// Code::closed if another user has taken it.
  Result<std::string> take_entry(const KeyValue& entry, TimePoint until) {
    const std::string pieces = keys().pieces(entry.key);
    auto value = writer().restore(pieces, entry.value, until);
    if (!value) return value;
    Txn txn;
    txn.when.push_back({.key = entry.key,
                        .target = Compare::EtcdTarget::mod_revision,
                        .number = entry.mod_revision});
    txn.then.push_back(Delete{.key = entry.key});
    txn.then.push_back(Delete{.key = pieces, .range_end = prefix_end(pieces)});
    const auto written = writer().commit(std::move(txn), until);
    if (!written) return written.status();
    if (!written->done) return Status(Code::closed, "another user has taken it");
    return value;
  }

  static Status too_few() {
    return Status(Code::store, "etcd answered a transaction with too few replies");
  }

  const std::shared_ptr<Cluster> cluster_;
};

}  // namespace
}  // namespace etcd

Result<std::shared_ptr<Store>> make_etcd_store(EtcdOptions options) {
  etcd::ClientOptions client_options{.endpoints = std::move(options.endpoints),
                                     .user = std::move(options.user),
                                     .password = std::move(options.password),
                                     .tls = {.authority = std::move(options.authority_file),
                                             .certificate = std::move(options.certificate_file),
                                             .key = std::move(options.key_file)}};
  auto client = etcd::EtcdClient::make(std::move(client_options));
  if (!client) return client.status();
  auto store = make_etcd_store_over(std::move(*client), std::move(options.prefix), options.timeout);
  // One read shows whether the cluster answers and admits this user.
  if (const auto answers = store->num_keys(); !answers)
    return answers.status().with_context("opening the etcd store");
  return store;
}

std::shared_ptr<Store> make_etcd_store_over(std::shared_ptr<etcd::EtcdClient> client,
                                            std::string prefix, Duration timeout) {
  if (!prefix.ends_with('/')) prefix += '/';
  return std::make_shared<etcd::EtcdBackedStore>(
      std::make_shared<etcd::Cluster>(std::move(client), std::move(prefix)), timeout);
}

EtcdOptions etcd_options_from_environment(const std::string& endpoints) {
  etcd::ClientOptions client = etcd::options_from_environment(endpoints);
  EtcdOptions options;
  options.endpoints = std::move(client.endpoints);
  options.user = std::move(client.user);
  options.password = std::move(client.password);
  options.authority_file = std::move(client.tls.authority);
  options.certificate_file = std::move(client.tls.certificate);
  options.key_file = std::move(client.tls.key);
  return options;
}

}  // namespace muster::store
