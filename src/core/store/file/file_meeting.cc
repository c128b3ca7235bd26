// SPDX-License-Identifier: BSD-3-Clause
#include "core/store/file/file_log.h"

#include <algorithm>

#include "core/base/bytes.h"

namespace muster::store {

/// The state of a key: the current round, and the failure of the previous one, if it failed.
struct FileMeeting::Round {
  std::uint64_t number = 0;
  std::int32_t members = 0;
  std::vector<std::int32_t> present;
  std::vector<std::int32_t> unnotified;  // missed the failed round and have not been told yet
  Status cause;                          // of that failure
};

namespace {

/// Results of this many earlier rounds are kept, because a slow member may not have read them yet.
constexpr std::uint64_t kKeptRounds = 16;  // limit: rounds that a slow rank may still read

void put_numbers(ByteWriter& out, const std::vector<std::int32_t>& numbers) {
  out.put(static_cast<std::uint32_t>(numbers.size()));
  for (const std::int32_t number : numbers) out.put(number);
}

std::vector<std::int32_t> get_numbers(ByteReader& in) {
  const auto count = in.get<std::uint32_t>();
  if (!in.ok() || count > in.left() / sizeof(std::int32_t)) return {};
  std::vector<std::int32_t> numbers(count);
  for (std::int32_t& number : numbers) number = in.get<std::int32_t>();
  return numbers;
}

void put_status(ByteWriter& out, const Status& status) {
  out.put(status.code()).put_text(status.message());
  put_numbers(out, status.ranks());
}

Status get_status(ByteReader& in) {
  const auto code = in.get<Code>();
  std::string message(in.get_text());
  return Status(code, std::move(message), get_numbers(in));
}

}  // namespace

FileMeeting::FileMeeting(const Request& request)
    : op_(request.op),
      key_(request.keys[0]),
      name_((request.op == StoreOp::barrier ? "b" : "g") + key_),
      index_(request.index),
      members_(request.members),
      value_(request.op == StoreOp::all_gather ? request.values[0] : std::string_view()) {}

std::string FileMeeting::value_key(std::uint64_t round, std::int32_t index) const {
  ByteWriter out;
  out.put('v').put(round).put(index).put_bytes(name_);
  return out.take();
}

std::string FileMeeting::outcome_key(std::uint64_t round) const {
  ByteWriter out;
  out.put('o').put(round).put_bytes(name_);
  return out.take();
}

FileMeeting::Round FileMeeting::read(FileLog::Transaction& file) const {
  Round round;
  const std::string* text = file.find(name_);
  if (text == nullptr) return round;
  ByteReader in(*text);
  round.number = in.get<std::uint64_t>();
  round.members = in.get<std::int32_t>();
  round.present = get_numbers(in);
  round.unnotified = get_numbers(in);
  round.cause = get_status(in);
  return round;
}

void FileMeeting::write(FileLog::Transaction& file, const Round& round) const {
  ByteWriter out;
  out.put(round.number).put(round.members);
  put_numbers(out, round.present);
  put_numbers(out, round.unnotified);
  put_status(out, round.cause);
  file.put(name_, out.view());
}

bool FileMeeting::arrive(FileLog::Transaction& file) {
  Round round = read(file);
  const std::string call = call_text(op_, key_);
  if (!round.unnotified.empty()) {
    const bool late = std::erase(round.unnotified, index_) > 0;
    if (late) {
      reply_.status = came_too_late(round.cause, round.members);
      write(file, round);
      return false;
    }
    round.unnotified.clear();  // a member that was told starts a new round
  }
  if (round.present.empty()) round.members = members_;
  if (round.members != members_) {
    reply_.status = other_number_of_members(call, round.members, members_);
    return false;
  }
  if (op_ == StoreOp::barrier) index_ = static_cast<std::int32_t>(round.present.size());
  if (std::find(round.present.begin(), round.present.end(), index_) != round.present.end()) {
    reply_.status = index_is_taken(call, index_);
    return false;
  }
  round_ = round.number;
  round.present.push_back(index_);
  if (op_ == StoreOp::all_gather) file.put(value_key(round_, index_), value_);
  if (static_cast<std::int32_t>(round.present.size()) == round.members) {
    end(file, round, {});
  } else {
    write(file, round);
  }
  return true;
}

/// Erases results that every member has read.
void FileMeeting::forget(FileLog::Transaction& file, const Round& round) const {
  if (round.number < kKeptRounds) return;
  const std::uint64_t old = round.number - kKeptRounds;
  const auto erase = [&](const std::string& key) {
    if (file.find(key) == nullptr) return false;
    file.erase(key);
    return true;
  };
  erase(outcome_key(old));
  std::int32_t index = 0;
  while (op_ == StoreOp::all_gather && (erase(value_key(old, index)) || index < round.members))
    ++index;
}

void FileMeeting::end(FileLog::Transaction& file, Round& round, const Status& outcome) {
  ByteWriter out;
  put_status(out, outcome);
  file.put(outcome_key(round.number), out.view());
  forget(file, round);
  round.unnotified.clear();
  if (!outcome.ok() && op_ == StoreOp::all_gather)
    round.unnotified.assign(outcome.ranks().begin(), outcome.ranks().end());
  round.cause = outcome;
  round.present.clear();
  ++round.number;
  write(file, round);
}

bool FileMeeting::finished(const FileLog::Map& map) {
  const auto found = map.find(outcome_key(round_));
  if (found == map.end()) return false;
  ByteReader in(found->second);
  const Status outcome = get_status(in);
  reply_ = {outcome, 0, {}};
  if (outcome.ok() && op_ == StoreOp::all_gather) {
    for (std::int32_t index = 0; index < members_; ++index) {
      const auto value = map.find(value_key(round_, index));
      reply_.values.push_back(
          std::make_shared<const std::string>(value == map.end() ? "" : value->second));
    }
  }
  return true;
}

void FileMeeting::give_up(FileLog::Transaction& file, Duration waited) {
  if (finished(file.map())) return;
  Round round = read(file);
  std::vector<int> absent;
  for (std::int32_t index = 0; index < round.members && op_ == StoreOp::all_gather; ++index) {
    if (std::find(round.present.begin(), round.present.end(), index) == round.present.end())
      absent.push_back(index);
  }
  end(file, round,
      members_are_missing(call_text(op_, key_), round.present.size(), round.members, waited,
                          std::move(absent)));
  finished(file.map());
}

}  // namespace muster::store
