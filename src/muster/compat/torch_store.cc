#include "muster/compat/torch_store.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "muster/store/request_store.h"

namespace muster::compat {
namespace {

using Bytes = std::vector<std::uint8_t>;
using store::Op;
using store::Reply;
using store::Request;
using store::Value;

/// torch takes milliseconds, and no negative ones.
std::chrono::milliseconds limit_of(Duration timeout) {
  constexpr auto kLongest = std::chrono::hours(24 * 365);
  if (timeout < Duration::zero() || timeout > kLongest) return kLongest;
  return std::max(std::chrono::ceil<std::chrono::milliseconds>(timeout), std::chrono::milliseconds(1));
}

Bytes bytes_of(std::string_view text) { return {text.begin(), text.end()}; }
Value value_of(const Bytes& bytes) { return std::make_shared<const std::string>(bytes.begin(), bytes.end()); }
Reply reply_of(std::vector<Value> values) { return {{}, 0, std::move(values)}; }
Reply failure(Code code, std::string text) { return {Status(code, std::move(text)), 0, {}}; }

class TorchStore : public store::RequestStore<store::Store> {
 public:
  TorchStore(c10::intrusive_ptr<c10d::Store> store, Duration timeout) : RequestStore(timeout), store_(std::move(store)) {}

  Result<std::shared_ptr<store::Store>> clone() override {
    try {
      return std::shared_ptr<store::Store>(std::make_shared<TorchStore>(store_->clone(), timeout()));
    } catch (const std::exception& error) {
      return Status(Code::store, std::string("torch's store cannot be cloned: ") + error.what());
    }
  }
  const char* kind() const override { return "torch"; }

 protected:
  Reply call(const Request& request) override {
    const auto begin = steady_clock().now();
    try {
      return carry_out(request);
    } catch (const std::exception& error) {
      const bool late = request.timeout >= Duration::zero() && steady_clock().now() - begin >= request.timeout;
      return failure(late ? Code::timed_out : Code::store,
                     std::string(name_of(request.op)) + "(" + store::quoted(request.keys) +
                         ") on torch's store: " + (late ? "not there after " + describe(request.timeout) : std::string(error.what())));
    }
  }

 private:
  static std::string text(std::string_view view) { return std::string(view); }
  static std::vector<std::string> texts(const std::vector<std::string_view>& views) { return {views.begin(), views.end()}; }

  Reply carry_out(const Request& request) {
    const std::string key = request.keys.empty() ? std::string() : text(request.keys[0]);
    switch (request.op) {
      case Op::set: store_->set(key, bytes_of(request.values[0])); return {};
      case Op::get: store_->wait({key}, limit_of(request.timeout)); return reply_of({value_of(store_->get(key))});
      case Op::add: return {{}, store_->add(key, request.number), {}};
      case Op::compare_set: return reply_of({value_of(store_->compareSet(key, bytes_of(request.values[0]), bytes_of(request.values[1])))});
      case Op::wait: store_->wait(texts(request.keys), limit_of(request.timeout)); return {};
      case Op::num_keys: return {{}, store_->getNumKeys(), {}};
      case Op::delete_key: return {{}, store_->deleteKey(key) ? 1 : 0, {}};
      case Op::check: return {{}, store_->check(texts(request.keys)) ? 1 : 0, {}};
      case Op::append: store_->append(key, bytes_of(request.values[0])); return {};
      case Op::multi_get: return read(texts(request.keys), request.timeout);
      case Op::multi_set:
        for (std::size_t i = 0; i < request.keys.size(); ++i) store_->set(text(request.keys[i]), bytes_of(request.values[i]));
        return {};
      case Op::barrier: return meet(request, key);
      case Op::all_gather: return gather(request, key);
      default: return failure(Code::unsupported, "torch's stores have no " + text(name_of(request.op)));
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

  /// Which meeting under `key` this is: every member comes to all of them.
  std::string meeting(const std::string& key) {
    const std::lock_guard lock(mutex_);
    return key + "/" + std::to_string(meetings_[key]++) + "/";
  }

  Reply gather(const Request& request, const std::string& key) {
    const auto prefix = meeting(key);
    std::vector<std::string> keys;
    for (int member = 0; member < request.members; ++member) keys.push_back(prefix + std::to_string(member));
    store_->set(keys[static_cast<std::size_t>(request.index)], bytes_of(request.values[0]));
    try {
      return read(keys, request.timeout);
    } catch (const std::exception& error) {
      std::vector<int> missing;
      for (int member = 0; member < request.members; ++member) {
        if (!store_->check({keys[static_cast<std::size_t>(member)]})) missing.push_back(member);
      }
      if (missing.empty()) throw;
      return {Status(Code::timed_out,
                     "rank " + store::listed(missing) + " did not come within " + describe(request.timeout) + " (" + error.what() + ")",
                     missing),
              0,
              {}};
    }
  }

  Reply meet(const Request& request, const std::string& key) {
    const auto prefix = meeting(key);
    if (store_->add(prefix + "count", 1) == request.members) store_->set(prefix + "all", Bytes{1});
    store_->wait({prefix + "all"}, limit_of(request.timeout));
    return {};
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  std::mutex mutex_;
  std::map<std::string, std::uint64_t> meetings_;
};

}  // namespace

std::shared_ptr<store::Store> adapt_store(c10::intrusive_ptr<c10d::Store> store, Duration timeout) {
  return std::make_shared<TorchStore>(std::move(store), timeout);
}

}  // namespace muster::compat
