// SPDX-License-Identifier: BSD-3-Clause
#include "core/store/request.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>

#include "core/base/bytes.h"
#include "muster/key_value_store.h"

namespace muster::store {
namespace {

/// Limit for all values of one multi_set: safely within the 32-bit lengths of a file store's
/// transaction.
constexpr std::size_t kMaxRequestBytes = std::size_t{2} << 30;  // limit: protocol

constexpr std::size_t kAny = std::numeric_limits<std::size_t>::max();

struct Shape {
  std::string_view name;
  std::size_t keys;    // kAny: any number
  std::size_t values;  // kAny: as many as keys
};

constexpr std::array<Shape, kLastOp + 1> kShapes{{
    {"no operation", 0, 0},
    {"set", 1, 1},
    {"get", 1, 0},
    {"add", 1, 0},
    {"compare_set", 1, 2},
    {"wait", kAny, 0},
    {"num_keys", 0, 0},
    {"delete_key", 1, 0},
    {"check", kAny, 0},
    {"append", 1, 1},
    {"multi_get", kAny, 0},
    {"multi_set", kAny, kAny},
    {"queue_push", 1, 1},
    {"queue_pop", 1, 0},
    {"queue_len", 1, 0},
    {"list_keys", 0, 0},
    {"barrier", 1, 0},
    {"all_gather", 1, 1},
    {"register_member", 1, 0},
    {"leave", 1, 0},
    {"count_joins", 0, 0},
    {"count_refusals", 0, 0},
    {"hold", 1, 1},
    {"renew", 1, 0},
    {"stay", 1, 0},
    {"release", 1, 0},
    {"watch", 2, 0},
    {"commit", 1, 2},
    {"enter", 1, 0},
    {"abandon", 1, 1},
}};

constexpr int kMostMembers = 1 << 20;  // limit: a number that is a mistake

const Shape& shape_of(StoreOp op) {
  const auto index = static_cast<std::size_t>(op);
  return kShapes[index <= kLastOp ? index : 0];
}

}  // namespace

std::string_view name_of(StoreOp op) { return shape_of(op).name; }

Status validate(const Request& request) {
  const Shape& shape = shape_of(request.op);
  const auto wrong = [&](const std::string& what) {
    return Status(Code::invalid_argument, std::string(shape.name) + ": " + what);
  };
  if (shape.name == kShapes[0].name)
    return wrong("number " + std::to_string(static_cast<int>(request.op)));
  if (shape.keys != kAny && request.keys.size() != shape.keys)
    return wrong("takes " + std::to_string(shape.keys) + " key(s), not " +
                 std::to_string(request.keys.size()));
  const std::size_t values = shape.values == kAny ? request.keys.size() : shape.values;
  if (request.values.size() != values)
    return wrong("takes " + std::to_string(values) + " value(s), not " +
                 std::to_string(request.values.size()));
  for (const std::string_view key : request.keys) {
    if (key.size() > kMaxKeyBytes)
      return wrong("a key of " + std::to_string(key.size()) +
                   " bytes is longer than the limit of " + std::to_string(kMaxKeyBytes));
  }
  std::size_t all = 0;
  for (const std::string_view value : request.values) {
    if (value.size() > kMaxValueBytes) {
      return wrong("a value of " + std::to_string(value.size()) +
                   " bytes is longer than the limit of " + std::to_string(kMaxValueBytes));
    }
    all += value.size();
  }
  if (all > kMaxRequestBytes)
    return wrong("values of " + std::to_string(all) +
                 " bytes together are more than the limit of " + std::to_string(kMaxRequestBytes) +
                 "; give them in several calls");
  if (request.op == StoreOp::barrier || request.op == StoreOp::all_gather ||
      request.op == StoreOp::register_member) {
    if (request.members < 1 || request.members > kMostMembers)
      return wrong("the number of members is " + std::to_string(request.members) + ", not 1 to " +
                   std::to_string(kMostMembers));
  }
  if ((request.op == StoreOp::all_gather || request.op == StoreOp::register_member) &&
      (request.index < 0 || request.index >= request.members)) {
    return wrong("index " + std::to_string(request.index) + " is not within 0 to " +
                 std::to_string(request.members - 1));
  }
  return {};
}

std::string quoted(std::string_view key) {
  constexpr std::size_t kShown = 100;
  std::string text = "\"";
  for (const char c : key.substr(0, kShown)) {
    if (c >= ' ' && c <= '~') {
      text += c;
    } else {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\x%02x", static_cast<unsigned char>(c));
      text += escaped;
    }
  }
  if (key.size() > kShown) text += "...";
  return text + "\"";
}

std::string quoted(const std::vector<std::string_view>& keys) {
  constexpr std::size_t kShown = 8;
  std::string text;
  for (std::size_t i = 0; i < keys.size() && i < kShown; ++i)
    text += (i == 0 ? "" : ", ") + quoted(keys[i]);
  if (keys.size() > kShown) text += " and " + std::to_string(keys.size() - kShown) + " more";
  return text;
}

Status came_too_late(const Status& cause, int members) {
  if (cause.code() != Code::timed_out || cause.ranks().empty())
    return cause.with_context("came too late");
  std::vector<int> gave_up;
  std::vector<int> late = cause.ranks();
  std::ranges::sort(late);
  for (int rank = 0; rank < members; ++rank)
    if (!std::ranges::binary_search(late, rank)) gave_up.push_back(rank);
  return Status(Code::peer_failed,
                "came too late: " + named_ranks(gave_up) + " gave up waiting for " +
                    named_ranks(cause.ranks()) + " (" + cause.message() + ")",
                gave_up);
}

Status other_number_of_members(const std::string& call, std::int64_t there, std::int64_t given) {
  return Status(Code::mismatch, call + ": others wait there for " + std::to_string(there) +
                                    " members, this call is for " + std::to_string(given) +
                                    "; all must give the same number");
}

Status index_is_taken(const std::string& call, std::int32_t index) {
  return Status(Code::mismatch,
                call + ": index " + std::to_string(index) +
                    " is already there; two members use one index, or one called twice");
}

Status members_are_missing(const std::string& call, std::size_t came, std::int64_t members,
                           Duration waited, std::vector<int> absent) {
  std::string text = call + ": " + std::to_string(came) + " of " + std::to_string(members) +
                     " members came within " + describe(waited);
  if (!absent.empty()) text += "; missing: " + named_ranks(absent);
  return Status(Code::timed_out, std::move(text), std::move(absent));
}

std::string call_text(StoreOp op, std::string_view key) {
  return std::string(name_of(op)) + "(" + quoted(key) + ")";
}

std::string encode_reason(const Status& why) {
  ByteWriter out;
  out.put_text(why.message());
  if (why.code() == Code::timed_out) return out.take();
  for (const int rank : why.ranks()) out.put(static_cast<std::int32_t>(rank));
  return out.take();
}

Status why_left(const Request& request) {
  const int rank = request.index;
  const std::string who = "rank " + std::to_string(rank);
  if (request.op != StoreOp::abandon)
    return Status(Code::peer_failed, who + " has left the job", {rank});
  ByteReader in(request.values[0]);
  const std::string_view text = in.get_text();
  std::vector<int> ranks;
  while (in.ok() && in.left() >= sizeof(std::int32_t)) ranks.push_back(in.get<std::int32_t>());
  if (ranks.empty()) ranks.push_back(rank);
  return Status(Code::peer_failed, who + " gave up joining: " + std::string(text),
                std::move(ranks));
}

std::string named_ranks(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + listed(ranks);
}

std::string listed(const std::vector<int>& numbers) {
  constexpr std::size_t kShown = 16;
  std::string text;
  for (std::size_t i = 0; i < numbers.size() && i < kShown; ++i) {
    if (i > 0) text += i + 1 == numbers.size() ? " and " : ", ";
    text += std::to_string(numbers[i]);
  }
  if (numbers.size() > kShown) text += " and " + std::to_string(numbers.size() - kShown) + " more";
  return text;
}

}  // namespace muster::store
