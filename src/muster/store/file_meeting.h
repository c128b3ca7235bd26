/// Barrier and all_gather among the users of a file: the rules of `StoreTable`, kept in the file
/// itself.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "muster/store/file_log.h"
#include "muster/store/request.h"

namespace muster::store {

/// One member's way through one meeting. Every call but `finished` stands within a transaction.
class FileMeeting {
 public:
  explicit FileMeeting(const Request& request);

  /// Joins the round that is going on. False: `reply()` says why not.
  bool arrive(FileLog::Transaction& file);
  /// True once this member's round has come to its end, well or not; `reply()` holds how. Call
  /// until then; only reads, so that no transaction is needed.
  bool finished(const FileLog::Map& map);
  /// Ends the round for all who are in it, unless it has ended meanwhile. `reply()` holds how.
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

  Op op_;
  std::string key_;   // of the user
  std::string name_;  // of the records in the file
  std::int32_t index_;
  std::int32_t members_;
  std::string_view value_;
  std::uint64_t round_ = 0;
  Reply reply_;
};

}  // namespace muster::store
