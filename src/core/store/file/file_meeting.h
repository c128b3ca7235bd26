/// Barrier and all_gather among the clients of a file, with the rules of `StoreTable` and their
/// state in the file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/store/file/file_log.h"
#include "core/store/request.h"

namespace muster::store {

/// One member's participation in one meeting. Every call except `finished` is made inside a
/// transaction.
class FileMeeting {
 public:
  explicit FileMeeting(const Request& request);

  /// Joins the current round. On false, `reply()` holds the reason.
  bool arrive(FileLog::Transaction& file);
  /// True once this member's round has ended, successfully or not; `reply()` holds the result. Call
  /// until then. Only reads, so it needs no transaction.
  bool finished(const FileLog::Map& map);
  /// Ends the round for all its members, unless it has ended already. `reply()` holds the result.
  void give_up(FileLog::Transaction& file, Duration waited);
  Reply& reply() { return reply_; }

 private:
  struct Round;
  Round read(FileLog::Transaction& file) const;
  void write(FileLog::Transaction& file, const Round& round) const;
  void end(FileLog::Transaction& file, Round& round, const Status& outcome);
  void forget(FileLog::Transaction& file, const Round& round) const;
  std::string value_key(std::uint64_t round, std::int32_t index) const;
  std::string outcome_key(std::uint64_t round) const;

  StoreOp op_;
  std::string key_;   // the caller's key
  std::string name_;  // name of its records in the file
  std::int32_t index_;
  std::int32_t members_;
  std::string_view value_;
  std::uint64_t round_ = 0;
  Reply reply_;
};

}  // namespace muster::store
