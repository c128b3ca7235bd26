// SPDX-License-Identifier: BSD-3-Clause
#include "core/store/file/file_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <random>
#include <thread>

#include "core/base/bytes.h"
#include "core/base/hash.h"
#include "core/base/process/interruption.h"
#include "core/base/process/limits.h"
#include "core/net/socket_address.h"
#include "core/security/own_files.h"
#include "core/tunables/tunables.h"

namespace muster::store {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr std::string_view kFileMagic("muster store 2\n\0", 16);
constexpr std::size_t kFrameBytes = 8;
constexpr char kPut = 1, kAppend = 2, kErase = 3;

/// Detects torn writes, not forgeries.
std::uint32_t checksum(std::string_view bytes) {
  return static_cast<std::uint32_t>(hash_of(bytes));
}

Status failed(const std::string& what, const std::string& path) {
  return Status(Code::store,
                "cannot " + what + " the store's file " + path + ": " + errno_text(errno));
}

// Checking the file's size is cheap. Even if it has not changed, the lock is taken at this
// interval, because a network file system may report an old size.
constexpr Duration kBlindLook = milliseconds(200);  // limit: staleness of network file systems
// For the lock of the last look, after the deadline.
constexpr Duration kLastLook = milliseconds(50);  // limit: overrun of a deadline

}  // namespace

/// Sleeps with exponential backoff and per-process jitter.
class FileLog::Backoff {
 public:
  explicit Backoff(Duration first = tunables().file_poll)
      : pause_(first),
        random_(static_cast<unsigned>(steady_clock().now().time_since_epoch().count())) {}
  void sleep(TimePoint deadline) {
    const Duration jittered = pause_ / 2 + pause_ * static_cast<int>(random_() % 64) / 64;
    const Duration left = deadline == TimePoint::max() ? jittered : deadline - steady_clock().now();
    std::this_thread::sleep_for(std::clamp<Duration>(left, Duration::zero(), jittered));
    pause_ = std::min(pause_ * 2, 100 * tunables().file_poll);
  }

 private:
  Duration pause_;
  std::minstd_rand random_;
};

const std::string* FileLog::Transaction::find(const std::string& key) const {
  const auto entry = log_.map_.find(key);
  return entry == log_.map_.end() ? nullptr : &entry->second;
}

void FileLog::Transaction::note(char kind, std::string_view key, std::string_view value) {
  ByteWriter record;
  record.put(kind)
      .put(static_cast<std::uint32_t>(key.size()))
      .put(static_cast<std::uint32_t>(value.size()));
  changes_ += record.view();
  changes_.append(key).append(value);
}

void FileLog::Transaction::put(const std::string& key, std::string_view value) {
  note(kPut, key, value);
  log_.map_.insert_or_assign(key, std::string(value));
}

void FileLog::Transaction::append(const std::string& key, std::string_view value) {
  note(kAppend, key, value);
  log_.map_[key].append(value);
}

void FileLog::Transaction::erase(const std::string& key) {
  note(kErase, key, {});
  log_.map_.erase(key);
}

Result<std::shared_ptr<FileLog>> FileLog::open(std::string path) {
  std::shared_ptr<FileLog> log(new FileLog(std::move(path)));
  if (Status opened = log->reopen(); !opened) return opened;
  return log;
}

Status FileLog::reopen() {
  auto file = open_own_file(path_, O_RDWR | O_CREAT, {.name = "the store's file"});
  if (!file) return Status(Code::store, file.status().message());
  file_ = GuardedDescriptor(std::move(*file));
  mark_ = ProcessMark();
  map_.clear();
  read_to_ = 0;
  return {};
}

bool FileLog::try_lock() {
  struct flock whole {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  return ::fcntl(file_.get(), F_OFD_SETLK, &whole) == 0;
}

/// Can fail only on a network file system that is gone; the lock then ends with the descriptor.
void FileLog::unlock() {
  struct flock whole {};
  whole.l_type = F_UNLCK;
  whole.l_whence = SEEK_SET;
  ::fcntl(file_.get(), F_OFD_SETLK, &whole);
}

bool FileLog::is_removed() const {
  struct stat mine {
  }, named{};
  return ::fstat(file_.get(), &mine) != 0 || mine.st_nlink == 0 ||
         ::stat(path_.c_str(), &named) != 0 || named.st_ino != mine.st_ino ||
         named.st_dev != mine.st_dev;
}

bool FileLog::has_changed() {
  const std::lock_guard lock(mutex_);
  struct stat info {};
  return ::fstat(file_.get(), &info) != 0 || info.st_size != read_to_ || info.st_nlink == 0;
}

/// Reads without the file lock: complete transactions never change, and an incomplete one is
/// recognised by its checksum. Errors are left for a transaction to report.
FileLog::LogNews FileLog::look(const std::function<bool(const Map&)>& condition) {
  const std::lock_guard lock(mutex_);
  struct stat info {};
  if (mark_.forked() || ::fstat(file_.get(), &info) != 0 || info.st_size < read_to_ ||
      info.st_nlink == 0)
    return LogNews::trouble;
  const bool grown = info.st_size > read_to_;
  if (grown) {
    const auto news = read_from(info.st_size);
    if (!news.ok() || !take(*news).ok()) return LogNews::trouble;
  }
  if (condition(map_)) return LogNews::what_was_awaited;  // another thread may have read it
  return grown ? LogNews::news : LogNews::nothing;
}

Status FileLog::transact(TimePoint deadline, const std::function<void(Transaction&)>& body) {
  const TimePoint begin = steady_clock().now();
  Backoff backoff;
  for (;;) {
    const TimePoint now = steady_clock().now();  // before it looks: it may stand still afterwards
    {
      const std::lock_guard lock(mutex_);
      if (mark_.forked()) {
        if (Status opened = reopen(); !opened) return opened;
      }
      if (try_lock()) {
        // If `body` throws, the mirror has changes that the file will never get.
        struct LockedFile {
          FileLog& log;
          bool is_whole = false;
          ~LockedFile() {
            if (!is_whole) log.reread_all();
            log.unlock();
          }
        } locked{*this};
        Transaction transaction(*this);
        Status status = is_removed()
                            ? Status(Code::closed, "the store's file " + path_ +
                                                       " has been removed; its last user has gone")
                            : read_news();
        if (status) {
          body(transaction);
          status = write_changes(transaction.changes_);
          if (status && transaction.remove_file_ && ::unlink(path_.c_str()) != 0)
            status = failed("remove", path_);
        }
        locked.is_whole = true;
        return status;
      }
      if (errno != EAGAIN && errno != EACCES && errno != EINTR) return failed("lock", path_);
    }
    if (now >= deadline) {
      return Status(Code::timed_out, "another process has kept the store's file " + path_ +
                                         " locked for " + describe(now - begin) +
                                         "; it may be stopped");
    }
    backoff.sleep(deadline);
  }
}

Status FileLog::pause(Backoff& backoff, TimePoint deadline) const {
  if (Status interrupted = Interruption::of_thread(); !interrupted) return interrupted;
  backoff.sleep(deadline);
  return {};
}

// Both look once more when the deadline has passed: this process may have stood still, and the
// others may have written meanwhile.

Status FileLog::transact_until(TimePoint deadline,
                               const std::function<bool(Transaction&)>& condition) {
  for (;;) {
    const TimePoint now = steady_clock().now();
    bool holds = false;
    if (Status done = transact(std::max(deadline, now + kLastLook),
                               [&](Transaction& transaction) { holds = condition(transaction); });
        !done)
      return done;
    if (holds) return {};
    if (now >= deadline) return Status(Code::timed_out, "the deadline has passed");
    Backoff backoff;
    const TimePoint look_again = std::min(deadline, deadline_after(steady_clock(), kBlindLook));
    while (steady_clock().now() < look_again && !has_changed()) {
      if (Status paused = pause(backoff, deadline); !paused) return paused;
    }
  }
}

Status FileLog::await(TimePoint deadline, const std::function<bool(const Map&)>& condition) {
  for (;;) {
    Backoff backoff;
    const TimePoint look_again = std::min(deadline, deadline_after(steady_clock(), kBlindLook));
    while (steady_clock().now() < look_again) {
      const LogNews seen = look(condition);
      if (seen == LogNews::what_was_awaited) return {};
      if (seen == LogNews::trouble) break;
      if (seen == LogNews::news)
        backoff = Backoff(10 * tunables().file_poll);  // members arrive one after another
      if (Status paused = pause(backoff, deadline); !paused) return paused;
    }
    const TimePoint now = steady_clock().now();
    bool holds = false;
    if (Status done =
            transact(std::max(deadline, now + kLastLook),
                     [&](Transaction& transaction) { holds = condition(transaction.map()); });
        !done)
      return done;
    if (holds) return {};
    if (now >= deadline) return Status(Code::timed_out, "the deadline has passed");
  }
}

/// The mirror has changes that the file lacks.
void FileLog::reread_all() {
  map_.clear();
  read_to_ = 0;
}

/// The part of the file that has not been read yet, up to its size.
Result<std::string> FileLog::read_from(std::int64_t size) const {
  std::string news(static_cast<std::size_t>(size - read_to_), '\0');
  std::size_t have = 0;
  while (have < news.size()) {
    const ssize_t n = ::pread(file_.get(), news.data() + have, news.size() - have,
                              read_to_ + static_cast<std::int64_t>(have));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return failed("read", path_);
    have += static_cast<std::size_t>(n);
  }
  return news;
}

Status FileLog::read_news() {
  struct stat info {};
  if (::fstat(file_.get(), &info) != 0) return failed("read", path_);
  if (info.st_size < read_to_)
    return Status(Code::store,
                  "the store's file " + path_ +
                      " has been cut short by somebody else; remove it and start again");
  const auto news = read_from(info.st_size);
  if (!news) return news.status();
  if (Status taken = take(*news); !taken) return taken;
  // The rest was being written by a process that has died, because this process holds the lock.
  if (info.st_size > read_to_ && ::ftruncate(file_.get(), read_to_) != 0)
    return failed("repair", path_);
  return {};
}

/// Applies the complete transactions in `left`, which begins where the last one ended.
Status FileLog::take(std::string_view left) {
  if (read_to_ == 0 && !left.empty()) {
    if (left.substr(0, kFileMagic.size()) != kFileMagic.substr(0, left.size()))
      return Status(Code::store,
                    path_ + " exists and is not a store's file; give a new or empty one");
    if (left.size() >= kFileMagic.size()) {
      left.remove_prefix(kFileMagic.size());
      read_to_ = static_cast<std::int64_t>(kFileMagic.size());
    } else {
      left = {};  // its creator died while writing the first bytes
    }
  }
  while (left.size() >= kFrameBytes) {
    ByteReader frame(left.substr(0, kFrameBytes));
    const auto length = frame.get<std::uint32_t>(), sum = frame.get<std::uint32_t>();
    if (length > left.size() - kFrameBytes) break;
    const std::string_view changes = left.substr(kFrameBytes, length);
    if (checksum(changes) != sum) break;
    if (Status applied = apply(changes); !applied) return applied;
    left.remove_prefix(kFrameBytes + length);
    read_to_ += static_cast<std::int64_t>(kFrameBytes + length);
  }
  return {};
}

Status FileLog::apply(std::string_view changes) {
  constexpr std::size_t kRecordBytes = 9;
  while (!changes.empty()) {
    ByteReader record(changes.substr(0, kRecordBytes));
    const char kind = record.get<char>();
    const auto key_bytes = record.get<std::uint32_t>(), value_bytes = record.get<std::uint32_t>();
    if (!record.ok() || std::size_t{key_bytes} + value_bytes > changes.size() - kRecordBytes) {
      return Status(Code::store,
                    "the store's file " + path_ + " is damaged; remove it and start again");
    }
    const std::string key(changes.substr(kRecordBytes, key_bytes));
    const std::string_view value = changes.substr(kRecordBytes + key_bytes, value_bytes);
    if (kind == kPut) map_.insert_or_assign(key, std::string(value));
    if (kind == kAppend) map_[key].append(value);
    if (kind == kErase) map_.erase(key);
    changes.remove_prefix(kRecordBytes + key_bytes + value_bytes);
  }
  return {};
}

Status FileLog::write_changes(const std::string& changes) {
  if (changes.empty()) return {};
  ByteWriter frame;
  if (read_to_ == 0) frame.put_bytes(kFileMagic);
  frame.put(static_cast<std::uint32_t>(changes.size())).put(checksum(changes));
  std::string whole = frame.take() + changes;
  const FileSizeSignalBlock block;
  std::size_t written = 0;
  while (written < whole.size()) {
    const ssize_t n = ::pwrite(file_.get(), whole.data() + written, whole.size() - written,
                               read_to_ + static_cast<std::int64_t>(written));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      Status status = failed("write to", path_);
      reread_all();  // the next transaction also cuts off what was written of this one
      return status;
    }
    written += static_cast<std::size_t>(n);
  }
  read_to_ += static_cast<std::int64_t>(whole.size());
  return {};
}

}  // namespace muster::store
