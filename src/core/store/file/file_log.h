// SPDX-License-Identifier: BSD-3-Clause
/// A string map in a file shared by several processes: a log of transactions, each written under an
/// fcntl lock of the whole file and mirrored in memory.
///
///   file         "muster store 2\n\0", then transactions
///   transaction  length (u32), checksum (u32), then changes: kind (u8: put, append, erase), key
///                length (u32), value length (u32), key, value
/// A process that dies while writing leaves a torn tail, which the next writer truncates. Locks are
/// open-file-description locks (F_OFD_SETLK): they also exclude threads of one process, and closing
/// another descriptor of the file does not release them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/base/process/fork_guard.h"
#include "core/store/request.h"
#include "muster/clock.h"
#include "muster/status.h"

namespace muster::store {

class FileLog {
 public:
  using Map = std::unordered_map<std::string, std::string>;

  /// The operations under one lock. A transaction sees its own changes; they are written together
  /// at the end, or not at all.
  class Transaction {
   public:
    const Map& map() const { return log_.map_; }
    /// Null if the key is missing. Valid until the next change.
    const std::string* find(const std::string& key) const;
    void put(const std::string& key, std::string_view value);
    void append(const std::string& key, std::string_view value);
    void erase(const std::string& key);
    /// Removes the file itself. Other processes notice in their next transaction.
    void remove_file() { remove_file_ = true; }

   private:
    friend class FileLog;
    explicit Transaction(FileLog& log) : log_(log) {}
    void note(char kind, std::string_view key, std::string_view value);
    FileLog& log_;
    std::string changes_;
    bool remove_file_ = false;
  };

  /// Creates the file if it is missing; its directory must exist. Refuses a link, and a file that
  /// another user owns or can write (`own_files.h`).
  static Result<std::shared_ptr<FileLog>> open(std::string path);

  /// Waits for the lock until the deadline (Code::timed_out), reads what others wrote, calls `body`
  /// and writes its changes. Code::closed if the file has been removed or replaced. Thread-safe.
  Status transact(TimePoint deadline, const std::function<void(Transaction&)>& body);
  /// Blocks until `condition` returns true. It is evaluated in a transaction each time the file has
  /// changed. Code::timed_out at the deadline.
  Status transact_until(TimePoint deadline, const std::function<bool(Transaction&)>& condition);
  /// As transact_until, for a condition that changes nothing. Reads the file without the lock, so
  /// that many waiting processes do not block the one they wait for.
  Status await(TimePoint deadline, const std::function<bool(const Map&)>& condition);
  const std::string& path() const { return path_; }

 private:
  class Backoff;
  explicit FileLog(std::string path) : path_(std::move(path)) {}
  Status reopen();
  bool try_lock();
  void unlock();
  bool is_removed() const;
  bool has_changed();
  enum class LogNews { nothing, news, what_was_awaited, trouble };
  LogNews look(const std::function<bool(const Map&)>& condition);
  Status pause(Backoff& backoff, TimePoint deadline) const;
  Status read_news();
  void reread_all();
  Result<std::string> read_from(std::int64_t size) const;
  Status take(std::string_view news);
  Status apply(std::string_view changes);
  Status write_changes(const std::string& changes);

  const std::string path_;
  // Guards all below. Locked before the file, whose lock excludes other processes; both are held
  // while the body of a transaction runs, and neither while a thread sleeps.
  std::mutex mutex_;
  GuardedDescriptor file_;
  ProcessMark mark_;
  Map map_;
  std::int64_t read_to_ = 0;  // the end of the last transaction in `map_`
};

/// Barrier and all_gather among the clients of a file, with the rules of `StoreTable` and their
/// state in the file: one member's participation in one meeting. Every call except `finished` is
/// made inside a transaction.
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
