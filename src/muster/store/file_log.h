/// A map of texts in a file that several processes change: a log of transactions, each under an
/// fcntl lock of the whole file, mirrored in memory.
///
///   file         "muster store 1\n\0", then transactions
///   transaction  length (u32), checksum (u32), then changes: kind (u8: put, append, erase), key
///                length (u32), value length (u32), key, value
/// A process that dies while it writes leaves a broken tail, which the next one cuts off. The locks
/// are those of open file descriptions (F_OFD_SETLK): they hold between threads too, and closing
/// another descriptor of the file does not lose them.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "muster/base/clock.h"
#include "muster/base/fork_guard.h"
#include "muster/base/status.h"

namespace muster::store {

class FileLog {
 public:
  using Map = std::unordered_map<std::string, std::string>;

  /// What happens under one lock: sees its own changes; they are written together at the end, or
  /// not at all.
  class Transaction {
   public:
    const Map& map() const { return log_.map_; }
    /// Null where there is no such key. Valid until the next change.
    const std::string* find(const std::string& key) const;
    void put(const std::string& key, std::string_view value);
    void append(const std::string& key, std::string_view value);
    void erase(const std::string& key);
    /// Removes the file itself; whoever holds it open sees that in its next transaction.
    void remove_file() { remove_file_ = true; }

   private:
    friend class FileLog;
    explicit Transaction(FileLog& log) : log_(log) {}
    void note(char kind, std::string_view key, std::string_view value);
    FileLog& log_;
    std::string changes_;
    bool remove_file_ = false;
  };

  /// Makes the file when it is missing; its directory must exist.
  static Result<std::shared_ptr<FileLog>> open(std::string path);

  /// Waits for the lock until the deadline (Code::timed_out), reads what others wrote, calls
  /// `body`, writes what it changed. Code::closed when the file has been removed or replaced
  /// meanwhile. Thread-safe.
  Status transact(TimePoint deadline, const std::function<void(Transaction&)>& body);
  /// Blocks until `condition`, asked in a transaction each time that the file has changed, is true:
  /// success; else Code::timed_out.
  Status transact_until(TimePoint deadline, const std::function<bool(Transaction&)>& condition);
  /// The same for a condition that changes nothing. The file is read without the lock: many that
  /// wait for the last of them do not keep each other from it.
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
  enum class Seen { nothing, news, what_was_awaited, trouble };
  Seen look(const std::function<bool(const Map&)>& condition);
  Status pause(Backoff& backoff, TimePoint deadline) const;
  Status read_news();
  Result<std::string> read_from(std::int64_t size) const;
  Status take(std::string_view news);
  Status apply(std::string_view changes);
  Status write_changes(const std::string& changes);

  const std::string path_;
  std::mutex mutex_;
  GuardedDescriptor file_;
  ProcessMark mark_;
  Map map_;
  std::int64_t read_to_ = 0;
};

}  // namespace muster::store
