/// Implements `Store` on top of `call(Request) -> Reply`. The kinds differ only in how they answer
/// a request.
#pragma once

#include <atomic>
#include <optional>
#include <string>
#include <utility>

#include "core/store/request.h"
#include "muster/key_value_store.h"

namespace muster::store {

/// `Base` is `Store` or an interface derived from it.
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

  std::atomic<Duration> timeout_;
};

}  // namespace muster::store
