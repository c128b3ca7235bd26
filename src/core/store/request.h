/// A store request and its reply as values, used by the hash store, the file store, the wire
/// protocol and the server.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "muster/clock.h"
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
  attend,
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
  std::int32_t index = 0;    ///< all_gather, attend, leave, abandon
  std::int32_t members = 0;  ///< barrier, all_gather, attend
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
/// What a member of an all_gather of `members` is told that comes after it failed with `cause`. A
/// deadline that has passed names those who gave up, not those who were late.
Status came_too_late(const Status& cause, int members);
/// Why a rank abandons a job.
std::string encode_reason(const Status& why);
/// What the others are told of a `leave` or `abandon`. A rank that could not wait for longer is
/// named itself, otherwise the ranks that it blames.
Status why_left(const Request& request);
/// "rank 1", "ranks 1, 2 and 5".
std::string named_ranks(const std::vector<int>& ranks);

}  // namespace muster::store
