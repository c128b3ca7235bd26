// SPDX-License-Identifier: BSD-3-Clause
/// A store request and its reply as values, used by the hash store, the file store, the wire
/// protocol and the server, and the shapes of what answers them: at once, later, or over a
/// connection.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/clock.h"
#include "muster/key_value_store.h"
#include "muster/status.h"

namespace muster::store {

/// Values are part of the wire protocol: never change one, append only.
enum class StoreOp : std::uint8_t {
  set = 1,
  get,
  add,
  compare_set,
  wait,
  num_keys,
  delete_key,
  check,
  append,
  multi_get,
  multi_set,
  queue_push,
  queue_pop,
  queue_len,
  list_keys,
  barrier,
  all_gather,
  register_member,
  leave,
  count_joins,
  count_refusals,
  hold,  // from here on: lease_table.h
  renew,
  stay,
  release,
  watch,
  commit,
  enter,
  abandon,  ///< leave, because joining or starting the job failed
};
inline constexpr std::uint8_t kLastOp = static_cast<std::uint8_t>(StoreOp::abandon);

/// "set", "get", ...
std::string_view name_of(StoreOp op);

/// Holds views into the caller's memory, which must live until the call that takes the request
/// returns.
struct Request {
  StoreOp op = StoreOp::get;
  Duration timeout{-1};      ///< how long it may block; negative: no limit
  std::int64_t number = 0;   ///< add: amount; queue_pop: 1 blocks, 0 does not
  std::int32_t index = 0;    ///< all_gather, register_member, leave, abandon
  std::int32_t members = 0;  ///< barrier, all_gather, register_member
  std::vector<std::string_view> keys{};
  std::vector<std::string_view>
      values{};  ///< compare_set: expected, desired; abandon: encode_reason
};

/// Shared, so that many readers of one value cost one copy.
using Value = std::shared_ptr<const std::string>;

struct Reply {
  Status status;
  std::int64_t number = 0;
  std::vector<Value> values;
};

/// Checks that number and size of keys and values suit the op; otherwise Code::invalid_argument
/// with an explanation.
Status validate(const Request& request);

/// `"a", "b" and 3 more`: keys formatted for a message, truncated if long or many, with unprintable
/// bytes escaped.
std::string quoted(const std::vector<std::string_view>& keys);
std::string quoted(std::string_view key);
/// "1, 2 and 5", truncated if there are many.
std::string listed(const std::vector<int>& numbers);
/// The error of a member that comes to an all_gather of `members` after that failed with `cause`. A
/// deadline that has passed names those who gave up, not those who were late.
Status came_too_late(const Status& cause, int members);
// The other verdicts of a barrier or an all_gather, for every kind of store. `call` names it and
// its key.
Status other_number_of_members(const std::string& call, std::int64_t there, std::int64_t given);
Status index_is_taken(const std::string& call, std::int32_t index);
/// `absent`: the missing indices of an all_gather; a barrier does not know who is missing.
Status members_are_missing(const std::string& call, std::size_t came, std::int64_t members,
                           Duration waited, std::vector<int> absent);
std::string call_text(StoreOp op, std::string_view key);
/// Why a rank abandons a job.
std::string encode_reason(const Status& why);
/// The error of the others after a `leave` or `abandon`. A rank that could not wait for longer is
/// named itself, otherwise the ranks that it blames.
Status why_left(const Request& request);
/// "rank 1", "ranks 1, 2 and 5".
std::string named_ranks(const std::vector<int>& ranks);

/// Chosen by the caller; unique among waiting requests.
using Ticket = std::uint64_t;

/// The answer of a store's state machine to a request that may have waited.
struct TicketReply {
  Ticket ticket = 0;
  Reply reply;
};
using Answers = std::vector<TicketReply>;

/// Implements `Store` on top of `call(Request) -> Reply`. The kinds differ only in how they answer
/// a request. `Base` is `Store` or an interface derived from it.
template <class Base>
class RequestStore : public Base {
 public:
  using Timeout = Store::Timeout;
  explicit RequestStore(Duration timeout) : timeout_(timeout) {}

  Status set(std::string_view key, std::string_view value) override {
    return ask({.op = StoreOp::set, .keys = {key}, .values = {value}}).status;
  }
  Result<std::string> get(std::string_view key, Timeout timeout) override {
    return text(ask({.op = StoreOp::get, .timeout = limit(timeout), .keys = {key}}));
  }
  Result<std::int64_t> add(std::string_view key, std::int64_t amount) override {
    return number(ask({.op = StoreOp::add, .number = amount, .keys = {key}}));
  }
  Result<std::string> compare_set(std::string_view key, std::string_view expected,
                                  std::string_view desired) override {
    return text(ask({.op = StoreOp::compare_set, .keys = {key}, .values = {expected, desired}}));
  }
  Status wait(std::span<const std::string> keys, Timeout timeout) override {
    return ask({.op = StoreOp::wait, .timeout = limit(timeout), .keys = views(keys)}).status;
  }
  Result<std::int64_t> num_keys() override { return number(ask({.op = StoreOp::num_keys})); }
  Result<bool> delete_key(std::string_view key) override {
    return truth(ask({.op = StoreOp::delete_key, .keys = {key}}));
  }
  Result<bool> check(std::span<const std::string> keys) override {
    return truth(ask({.op = StoreOp::check, .keys = views(keys)}));
  }
  Status append(std::string_view key, std::string_view value) override {
    return ask({.op = StoreOp::append, .keys = {key}, .values = {value}}).status;
  }
  Result<std::vector<std::string>> multi_get(std::span<const std::string> keys,
                                             Timeout timeout) override {
    return texts(ask({.op = StoreOp::multi_get, .timeout = limit(timeout), .keys = views(keys)}),
                 keys.size());
  }
  Status multi_set(std::span<const std::string> keys,
                   std::span<const std::string> values) override {
    return ask({.op = StoreOp::multi_set, .keys = views(keys), .values = views(values)}).status;
  }
  Status queue_push(std::string_view key, std::string_view value) override {
    return ask({.op = StoreOp::queue_push, .keys = {key}, .values = {value}}).status;
  }
  Result<std::string> queue_pop(std::string_view key, bool block, Timeout timeout) override {
    return text(ask({.op = StoreOp::queue_pop,
                     .timeout = limit(timeout),
                     .number = block ? 1 : 0,
                     .keys = {key}}));
  }
  Result<std::int64_t> queue_len(std::string_view key) override {
    return number(ask({.op = StoreOp::queue_len, .keys = {key}}));
  }
  Result<std::vector<std::string>> list_keys() override {
    return texts(ask({.op = StoreOp::list_keys}));
  }
  Status barrier(std::string_view key, int members, Timeout timeout) override {
    return ask({.op = StoreOp::barrier,
                .timeout = limit(timeout),
                .members = members,
                .keys = {key}})
        .status;
  }
  Result<std::vector<std::string>> all_gather(std::string_view key, int index, int members,
                                              std::string_view value, Timeout timeout) override {
    return texts(ask({.op = StoreOp::all_gather,
                      .timeout = limit(timeout),
                      .index = index,
                      .members = members,
                      .keys = {key},
                      .values = {value}}),
                 static_cast<std::size_t>(members));
  }

  Duration timeout() const override { return timeout_.load(std::memory_order_relaxed); }
  void set_timeout(Duration timeout) override {
    timeout_.store(timeout, std::memory_order_relaxed);
  }

 protected:
  /// Carries out a valid request. A blocking operation blocks up to the request's timeout.
  virtual Reply call(const Request& request) = 0;

 private:
  Reply ask(const Request& request) {
    if (Status valid = validate(request); !valid) return {std::move(valid), 0, {}};
    return call(request);
  }
  Duration limit(Timeout given) const { return given.value_or(timeout()); }
  static std::vector<std::string_view> views(std::span<const std::string> texts) {
    return {texts.begin(), texts.end()};
  }

  static Status malformed() {
    return Status(Code::internal, "the store's reply does not hold the values that were asked for");
  }
  static Result<std::string> text(const Reply& reply) {
    if (!reply.status) return reply.status;
    if (reply.values.size() != 1) return malformed();
    return *reply.values[0];
  }
  static Result<std::vector<std::string>> texts(const Reply& reply,
                                                std::optional<std::size_t> count = {}) {
    if (!reply.status) return reply.status;
    if (count && reply.values.size() != *count) return malformed();
    std::vector<std::string> all;
    all.reserve(reply.values.size());
    for (const Value& value : reply.values) all.push_back(*value);
    return all;
  }
  static Result<std::int64_t> number(const Reply& reply) {
    if (!reply.status) return reply.status;
    return reply.number;
  }
  static Result<bool> truth(const Reply& reply) {
    if (!reply.status) return reply.status;
    return reply.number != 0;
  }

  std::atomic<Duration> timeout_;  // relaxed: it goes with no other data
};

/// A dedicated connection to the server of a TCP store, for requests for which `Store` has no
/// method
/// (`lease_table.h`). `exchange` and `post` must be called from one thread; `cut` is thread-safe.
/// The server notices at once when the connection ends, also if the process is killed.
class ServerConnection {
 public:
  virtual ~ServerConnection() = default;
  /// Sends the request and waits for its reply. After an error of the connection (Code::network,
  /// Code::timed_out, Code::aborted after `cut`) every later exchange fails in the same way.
  virtual Reply exchange(const Request& request, TimePoint deadline) = 0;
  /// Sends a request without waiting for its reply. The connection must not be used for anything
  /// else afterwards.
  virtual Status post(const Request& request, TimePoint deadline) = 0;
  /// Ends the connection and any exchange in progress.
  virtual void cut() = 0;
};

}  // namespace muster::store
