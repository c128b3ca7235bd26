// SPDX-License-Identifier: BSD-3-Clause
#include "core/store/observer_rights.h"

#include <algorithm>
#include <string>
#include <vector>

#include "core/store/factory.h"
#include "core/store/job_keys.h"

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

/// A key as part of a job's trace. It is parsed from its end, since the job's name before it may be
/// anything.
struct TraceKey {
  Part part = Part::none;
  std::string_view prefix;  // of the job's keys, with its slash
  std::string_view rank;    // empty: the job
};

TraceKey read_trace_key(std::string_view key) {
  const std::string_view whole = key, last = cut_last(key);
  TraceKey trace;
  const auto is_in_trace = [&] {
    const std::string_view folder = cut_last(key);
    trace.prefix = whole.substr(0, static_cast<std::size_t>(folder.data() - whole.data()));
    return folder == "trace";
  };
  if (last != "job") {
    if (!is_number(last)) return {};
    trace.rank = last;
  }
  if (ends_in(key, "trace")) {
    trace.part = Part::word;
  } else if (last == "job") {
    return {};
  } else if (const std::string_view before = cut_last(key); before == "ask") {
    trace.part = Part::question;
  } else if (cut_last(key) == "answer") {
    trace.part = Part::answer;
  }
  return trace.part != Part::none && is_in_trace() ? trace : TraceKey();
}

/// Whether a job that runs now has such a rank. Every rank has one name.
bool is_of_a_job(const TraceKey& trace, const StoreTable& table) {
  if (trace.part == Part::none) return false;
  const Value said = table.find(std::string(trace.prefix).append(kJobKey));
  const auto job = said ? decode_job(*said) : std::nullopt;
  if (!job) return false;
  if (trace.rank.empty()) return true;
  const int rank = std::stoi(std::string(trace.rank));
  return rank < job->world_size && std::to_string(rank) == trace.rank;
}

bool all_are(const std::vector<std::string_view>& keys, std::initializer_list<Part> parts,
             const StoreTable& table) {
  return !keys.empty() && std::ranges::all_of(keys, [&](std::string_view key) {
    const TraceKey trace = read_trace_key(key);
    return std::ranges::find(parts, trace.part) != parts.end() && is_of_a_job(trace, table);
  });
}

bool is_allowed(const Request& request, const StoreTable& table) {
  switch (request.op) {
    case StoreOp::list_keys:
    case StoreOp::count_refusals: return true;
    case StoreOp::get:
    case StoreOp::wait:
    case StoreOp::check:
    case StoreOp::multi_get: return all_are(request.keys, {Part::word, Part::answer}, table);
    case StoreOp::queue_len: return all_are(request.keys, {Part::question}, table);
    case StoreOp::queue_push:
      return request.keys.size() == 1 && request.values.size() == 1 &&
             request.values[0].size() <= kLongestQuestion &&
             all_are(request.keys, {Part::question}, table);
    case StoreOp::delete_key: return all_are(request.keys, {Part::answer}, table);
    default: return false;
  }
}

/// The store's memory for a question besides its bytes.
constexpr std::size_t kQuestionOverhead = 128;

std::size_t bytes_in(const StoreTable::QueueLoad& load, std::string_view key) {
  return load.bytes + load.entries * (kQuestionOverhead + key.size());
}

}  // namespace

Status ObserverRights::may(const Request& request, const StoreTable& table) {
  if (is_allowed(request, table))
    return request.op == StoreOp::queue_push ? has_room(request, table) : Status();
  return Status(Code::refused,
                std::string(name_of(request.op)) +
                    (request.keys.empty() ? "" : "(" + quoted(request.keys) + ")") +
                    ": an observer may read the traces of a running job's ranks and do nothing "
                    "else; what joins the job needs its secret");
}

Status ObserverRights::has_room(const Request& question, const StoreTable& table) {
  const std::string_view key = question.keys[0];
  if (table.queue_load(key).entries >= static_cast<std::size_t>(kMostQuestions))
    return Status(Code::exhausted, std::to_string(kMostQuestions) +
                                       " questions wait for this rank already; ask again later");
  const std::size_t bytes = bytes_in({1, question.values[0].size()}, key);
  if (question_bytes_ + bytes > kMostQuestionBytes) {
    question_bytes_ = 0;
    std::erase_if(asked_, [&](const std::string& each) {
      const auto load = table.queue_load(each);
      question_bytes_ += bytes_in(load, each);
      return load.entries == 0;
    });
    if (question_bytes_ + bytes > kMostQuestionBytes)
      return Status(Code::exhausted, "questions of " + std::to_string(question_bytes_) +
                                         " bytes wait in this store already; ask again later");
  }
  question_bytes_ += bytes;
  if (!asked_.contains(key)) asked_.emplace(key);
  return {};
}

void ObserverRights::hide(StoreTable::Answers& answers, const StoreTable& table) {
  for (auto& each : answers) {
    std::erase_if(each.reply.values, [&](const Value& key) {
      const TraceKey trace = read_trace_key(*key);
      return trace.part != Part::word || !is_of_a_job(trace, table);
    });
  }
}

}  // namespace muster::store
