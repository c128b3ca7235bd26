#include "muster/store/observer_rights.h"

#include <algorithm>
#include <string>
#include <vector>

namespace muster::store {
namespace {

enum class Part { none, word, question, answer };

bool is_number(std::string_view text) {
  return !text.empty() && text.size() < 10 &&
         text.find_first_not_of("0123456789") == std::string_view::npos;
}

/// Cuts off what stands behind the last slash, and returns it.
std::string_view cut_last(std::string_view& key) {
  const auto slash = key.rfind('/');
  const std::string_view last = slash == std::string_view::npos ? key : key.substr(slash + 1);
  key = slash == std::string_view::npos ? std::string_view() : key.substr(0, slash);
  return last;
}

bool ends_in(std::string_view folder, std::string_view name) { return cut_last(folder) == name; }

/// What `key` is of a job's trace. Read from its end: the job's name before it may be anything.
Part part_of(std::string_view key) {
  const std::string_view last = cut_last(key);
  if (ends_in(key, "trace")) return last == "job" || is_number(last) ? Part::word : Part::none;
  const std::string_view before = cut_last(key);
  if (!is_number(last)) return Part::none;
  if (before == "ask" && ends_in(key, "trace")) return Part::question;
  if (ends_in(key, "answer") && (cut_last(key), ends_in(key, "trace"))) return Part::answer;
  return Part::none;
}

bool all_are(const std::vector<std::string_view>& keys, std::initializer_list<Part> parts) {
  return !keys.empty() && std::ranges::all_of(keys, [&](std::string_view key) {
    return std::ranges::find(parts, part_of(key)) != parts.end();
  });
}

bool is_allowed(const Request& request) {
  switch (request.op) {
    case StoreOp::list_keys:
    case StoreOp::count_refusals: return true;
    case StoreOp::get:
    case StoreOp::wait:
    case StoreOp::check:
    case StoreOp::multi_get: return all_are(request.keys, {Part::word, Part::answer});
    case StoreOp::queue_len: return all_are(request.keys, {Part::question});
    case StoreOp::queue_push:
      return all_are(request.keys, {Part::question}) &&
             std::ranges::all_of(request.values, [](std::string_view value) {
               return value.size() <= kLongestQuestion;
             });
    case StoreOp::delete_key: return all_are(request.keys, {Part::answer});
    default: return false;
  }
}

}  // namespace

Status observer_may(const Request& request) {
  if (is_allowed(request)) return {};
  return Status(Code::refused,
                std::string(name_of(request.op)) +
                    (request.keys.empty() ? "" : "(" + quoted(request.keys) + ")") +
                    ": an observer may read the traces of a job's ranks and do nothing else; what "
                    "joins the job needs its secret");
}

void hide_from_observers(StoreTable::Answers& answers) {
  for (auto& each : answers)
    std::erase_if(each.reply.values, [](const Value& key) { return part_of(*key) != Part::word; });
}

}  // namespace muster::store
