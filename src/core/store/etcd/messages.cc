// SPDX-License-Identifier: BSD-3-Clause
#include "core/store/etcd/messages.h"

#include <array>
#include <charconv>
#include <nlohmann/json.hpp>

#include "core/store/http/connection.h"

namespace muster::store::etcd {
namespace {

using nlohmann::json;

const char* name_of(Compare::EtcdTarget target) {
  constexpr std::array kNames{"VERSION", "CREATE", "MOD", "VALUE"};
  return kNames[static_cast<std::size_t>(target)];
}
const char* field_of(Compare::EtcdTarget target) {
  constexpr std::array kNames{"version", "create_revision", "mod_revision", "value"};
  return kNames[static_cast<std::size_t>(target)];
}
const char* name_of(Compare::Relation relation) {
  constexpr std::array kNames{"EQUAL", "GREATER", "LESS", "NOT_EQUAL"};
  return kNames[static_cast<std::size_t>(relation)];
}

json as_json(const Compare& compare) {
  json out{{"key", base64(compare.key)},
           {"target", name_of(compare.target)},
           {"result", name_of(compare.relation)}};
  if (compare.target == Compare::EtcdTarget::value)
    out[field_of(compare.target)] = base64(compare.value);
  else
    out[field_of(compare.target)] = compare.number;
  if (!compare.range_end.empty()) out["range_end"] = base64(compare.range_end);
  return out;
}

json as_json(const KeyRange& range) {
  json out{{"key", base64(range.key)}};
  if (!range.range_end.empty()) out["range_end"] = base64(range.range_end);
  if (range.limit != 0) out["limit"] = range.limit;
  if (range.revision != 0) out["revision"] = range.revision;
  if (range.keys_only) out["keys_only"] = true;
  if (range.count_only) out["count_only"] = true;
  if (range.oldest_first) {
    out["sort_order"] = "ASCEND";
    out["sort_target"] = "CREATE";
  }
  return {{"request_range", std::move(out)}};
}
json as_json(const Put& put) {
  json out{{"key", base64(put.key)}, {"value", base64(put.value)}};
  if (put.lease != 0) out["lease"] = put.lease;
  return {{"request_put", std::move(out)}};
}
json as_json(const Delete& erase) {
  json out{{"key", base64(erase.key)}};
  if (!erase.range_end.empty()) out["range_end"] = base64(erase.range_end);
  return {{"request_delete_range", std::move(out)}};
}

json as_json(const std::vector<Operation>& operations) {
  json out = json::array();
  for (const Operation& each : operations)
    out.push_back(std::visit([](const auto& operation) { return as_json(operation); }, each));
  return out;
}

/// Reads fields leniently (what is missing has its zero, as protobuf's JSON has it) and remembers
/// what had the wrong type.
class JsonReader {
 public:
  bool ok() const { return ok_; }

  const json& child(const json& from, const char* name) {
    static const json none = json::object();
    const auto found = from.is_object() ? from.find(name) : from.end();
    if (!from.is_object()) ok_ = false;
    if (!from.is_object() || found == from.end() || found->is_null()) return none;
    return *found;
  }
  /// 64-bit numbers are text in protobuf's JSON.
  std::int64_t integer(const json& from, const char* name) {
    const json& field = child(from, name);
    if (field.is_object() && field.empty()) return 0;
    if (field.is_number_integer()) return field.get<std::int64_t>();
    std::int64_t value = 0;
    if (field.is_string()) {
      const auto& text = field.get_ref<const std::string&>();
      const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
      if (error == std::errc() && stop == text.data() + text.size()) return value;
    }
    ok_ = false;
    return 0;
  }
  bool flag(const json& from, const char* name) {
    const json& field = child(from, name);
    if (field.is_boolean()) return field.get<bool>();
    if (!field.is_object() || !field.empty()) ok_ = false;
    return false;
  }
  std::string text(const json& from, const char* name) {
    const json& field = child(from, name);
    if (field.is_string()) return field.get<std::string>();
    if (!field.is_object() || !field.empty()) ok_ = false;
    return {};
  }
  std::string bytes(const json& from, const char* name) {
    std::string out;
    const json& field = child(from, name);
    if (field.is_string()) {
      if (!from_base64(field.get_ref<const std::string&>(), out)) ok_ = false;
    } else if (!field.is_object() || !field.empty()) {
      ok_ = false;
    }
    return out;
  }
  /// Calls `each` with the elements of a list that may be missing.
  template <class Each>
  void list(const json& from, const char* name, Each each) {
    const json& field = child(from, name);
    if (field.is_array()) {
      for (const json& element : field) each(element);
    } else if (!field.is_object() || !field.empty()) {
      ok_ = false;
    }
  }
  KeyValue key_value(const json& from) {
    KeyValue out;
    out.key = bytes(from, "key");
    out.value = bytes(from, "value");
    out.create_revision = integer(from, "create_revision");
    out.mod_revision = integer(from, "mod_revision");
    out.version = integer(from, "version");
    out.lease = integer(from, "lease");
    return out;
  }

 private:
  bool ok_ = true;
};

Status malformed(std::string_view what, std::string_view json) {
  constexpr std::size_t kShown = 200;  // limit: text of an error
  return Status(Code::store,
                "etcd's reply to " + std::string(what) +
                    " is not what its v3 API describes: " + std::string(json.substr(0, kShown)));
}

json parsed(std::string_view text) { return json::parse(text, nullptr, false); }

OperationReply operation_reply(JsonReader& reader, const json& from) {
  OperationReply out;
  const json& range = reader.child(from, "response_range");
  reader.list(range, "kvs", [&](const json& kv) { out.values.push_back(reader.key_value(kv)); });
  out.count = reader.integer(range, "count");
  out.deleted = reader.integer(reader.child(from, "response_delete_range"), "deleted");
  return out;
}

}  // namespace

std::string prefix_end(std::string prefix) {
  while (!prefix.empty() && prefix.back() == '\xff') prefix.pop_back();
  if (prefix.empty()) return std::string(1, '\0');  // etcd's word for "to the last key"
  prefix.back() = static_cast<char>(static_cast<unsigned char>(prefix.back()) + 1);
  return prefix;
}

std::string encode(const Txn& txn) {
  json compare = json::array();
  for (const Compare& each : txn.when) compare.push_back(as_json(each));
  return json{{"compare", std::move(compare)},
              {"success", as_json(txn.then)},
              {"failure", as_json(txn.otherwise)}}
      .dump();
}

std::string encode_grant(std::int64_t ttl_s) { return json{{"TTL", ttl_s}}.dump(); }
std::string encode_lease(std::int64_t id) { return json{{"ID", id}}.dump(); }

std::string encode_login(std::string_view user, std::string_view password) {
  return json{{"name", user}, {"password", password}}.dump(-1, ' ', false,
                                                           json::error_handler_t::replace);
}

std::string encode_watch(std::string_view key, std::string_view range_end) {
  json request{{"key", base64(key)}};
  if (!range_end.empty()) request["range_end"] = base64(range_end);
  return json{{"create_request", std::move(request)}}.dump();
}

Result<TxnReply> decode_txn(std::string_view text) {
  const json body = parsed(text);
  JsonReader reader;
  TxnReply out;
  out.succeeded = reader.flag(body, "succeeded");
  out.revision = reader.integer(reader.child(body, "header"), "revision");
  reader.list(body, "responses",
              [&](const json& each) { out.replies.push_back(operation_reply(reader, each)); });
  if (!reader.ok()) return malformed("a transaction", text);
  return out;
}

Result<EtcdLease> decode_grant(std::string_view text) {
  const json body = parsed(text);
  JsonReader reader;
  const EtcdLease out{reader.integer(body, "ID"), reader.integer(body, "TTL")};
  if (!reader.ok() || out.id == 0 || out.ttl_s <= 0) return malformed("a lease's grant", text);
  return out;
}

Result<EtcdLease> decode_keep_alive(std::string_view text) {
  const json body = parsed(text);
  JsonReader reader;
  const json& result = reader.child(body, "result");
  const EtcdLease out{reader.integer(result, "ID"), reader.integer(result, "TTL")};
  if (!reader.ok() || out.id == 0) return malformed("a lease's keep-alive", text);
  return out;
}

Result<std::string> decode_token(std::string_view text) {
  const json body = parsed(text);
  JsonReader reader;
  std::string token = reader.text(body, "token");
  // It goes into a header: what could end the line would begin another.
  const bool printable = token.find_first_of(std::string_view("\r\n\0", 3)) == std::string::npos;
  if (!reader.ok() || token.empty() || !printable)
    return malformed("a login", "(not shown: it may hold the token)");
  return token;
}

Result<WatchMessage> decode_watch(std::string_view text) {
  const json body = parsed(text);
  JsonReader reader;
  WatchMessage out;
  const json& error = reader.child(body, "error");
  if (!error.empty()) {
    out.cancelled = true;
    out.reason = error.is_string() ? error.get<std::string>() : reader.text(error, "message");
  }
  const json& result = reader.child(body, "result");
  out.created = reader.flag(result, "created");
  out.revision = reader.integer(reader.child(result, "header"), "revision");
  if (reader.flag(result, "canceled")) {
    out.cancelled = true;
    out.reason = reader.text(result, "cancel_reason");
  }
  reader.list(result, "events", [&](const json& each) {
    Event event;
    event.deleted = reader.text(each, "type") == "DELETE";
    event.value = reader.key_value(reader.child(each, "kv"));
    out.events.push_back(std::move(event));
  });
  if (!reader.ok()) return malformed("a watch", text);
  return out;
}

Refusal decode_refusal(std::string_view text, int http_status) {
  constexpr std::size_t kShown = 300;  // limit: text of an error
  Refusal out;
  const json body = parsed(text);
  JsonReader reader;
  if (body.is_object()) {
    // A call that fails at once has its error flat, one that has begun to answer in an object.
    const json& error = reader.child(body, "error");
    const json& from = error.is_object() && !error.empty() ? error : body;
    out.message = error.is_string() ? error.get<std::string>() : reader.text(from, "message");
    if (out.message.empty()) out.message = reader.text(body, "message");
    out.code =
        static_cast<int>(reader.integer(from, from.contains("grpc_code") ? "grpc_code" : "code"));
  }
  if (out.message.empty()) out.message = std::string(text.substr(0, kShown));
  if (out.message.empty()) out.message = "HTTP status " + std::to_string(http_status);
  if (out.code == 0) {
    constexpr int kUnavailable = 14, kUnauthenticated = 16, kUnknown = 2;
    out.code = http_status == 503 ? kUnavailable : http_status == 401 ? kUnauthenticated : kUnknown;
  }
  return out;
}

}  // namespace muster::store::etcd
