// SPDX-License-Identifier: BSD-3-Clause
#include <signal.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <span>
#include <thread>
#include <vector>

#include "core/base/bytes.h"
#include "core/base/process/limits.h"
#include "core/base/process/process_start.h"
#include "core/rendezvous/join.h"
#include "core/security/secret.h"
#include "core/store/file/file_store.h"

namespace muster::store {
namespace {

using Transaction = FileLog::Transaction;
const std::string kMembersKey = std::string(1, kFileOwnKey) + "members";

std::string machine_id() {
  const std::string text = small_file("/etc/machine-id").value_or("");
  return text.substr(0, text.find('\n'));
}

std::string process_namespace() {
  char name[128] = "";
  const ssize_t n = ::readlink("/proc/self/ns/pid", name, sizeof name - 1);
  return n > 0 ? std::string(name, static_cast<std::size_t>(n)) : std::string();
}

/// By the clock that counts from boot.
std::int64_t seconds_since_boot() {
  timespec now{};
  ::clock_gettime(CLOCK_BOOTTIME, &now);
  return now.tv_sec;
}

/// The kernel does not reuse a process id within this time.
constexpr std::int64_t kSoon = 2;

/// One user of the file, with what is needed to tell whether it is alive.
struct FileMember {
  std::uint64_t id = 0;
  std::string boot, machine, space, host, started;
  std::int64_t pid = 0;
  std::int64_t entered = 0;  ///< `seconds_since_boot`

  static FileMember self(std::uint64_t id) {
    char host[256] = "";
    ::gethostname(host, sizeof host - 1);
    const auto start = process_start(::getpid());
    return {id,           boot_id(),
            machine_id(), process_namespace(),
            host,         start ? std::to_string(*start) : "",
            ::getpid(),   seconds_since_boot()};
  }
  /// As seen from `here`. True only if certain: a process of this boot that has ended, or a process
  /// from before this machine's last boot. Unknown (empty) fields make it uncertain. `lately`: the
  /// process was alive shortly before, so a check that takes a tenth of the time is enough.
  bool is_dead(const FileMember& here, bool lately = false) const {
    if (boot.empty() || here.boot.empty()) return false;
    if (boot != here.boot) return !machine.empty() && machine == here.machine && host == here.host;
    if (space != here.space) return false;
    if (lately || started.empty()) return ::kill(static_cast<pid_t>(pid), 0) != 0 && errno == ESRCH;
    const auto start = process_start(pid);
    return start && std::to_string(*start) != started;
  }
  std::string text() const { return "process " + std::to_string(pid) + " on " + host; }
};

std::vector<FileMember> read_members(Transaction& file) {
  std::vector<FileMember> members;
  const std::string* text = file.find(kMembersKey);
  if (text == nullptr) return members;
  ByteReader in(*text);
  while (in.ok() && in.left() > 0) {
    FileMember member;
    member.id = in.get<std::uint64_t>();
    member.pid = in.get<std::int64_t>();
    member.entered = in.get<std::int64_t>();
    for (std::string* field :
         {&member.boot, &member.machine, &member.space, &member.host, &member.started})
      *field = in.get_text();
    if (in.ok()) members.push_back(std::move(member));
  }
  return members;
}

std::string encode(std::span<const FileMember> members) {
  ByteWriter out;
  for (const FileMember& member : members) {
    out.put(member.id).put(member.pid).put(member.entered);
    for (const std::string* field :
         {&member.boot, &member.machine, &member.space, &member.host, &member.started})
      out.put_text(*field);
  }
  return out.take();
}

/// Removes this process, and those that have died, from the list. The last one removes the file.
void leave(FileLog& log, std::uint64_t id) {
  const FileMember here = FileMember::self(id);
  const Status ignored =
      log.transact(steady_clock().now() + kFileGoodbyeLimit, [&](Transaction& file) {
        auto members = read_members(file);
        std::erase_if(members, [&](const FileMember& member) {
          return member.id == id || member.is_dead(here);
        });
        file.put(kMembersKey, encode(members));
        if (members.empty()) file.remove_file();
      });
  static_cast<void>(ignored);  // the next run reports a leftover file
}

Status check_directory(const std::string& path) {
  const std::string directory = path.substr(0, std::max<std::size_t>(path.rfind('/'), 1));
  struct stat info {};
  if (::stat(directory.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) return {};
  return Status(
      Code::invalid_argument,
      "the directory " + directory + " does not exist; file:// makes the file, not the directory");
}

/// The file with this process on its list. Code::closed: its last user removed it at the same
/// moment; try again.
Result<std::shared_ptr<FileLog>> enter(const std::string& path, std::uint64_t id,
                                       TimePoint deadline) {
  auto log = FileLog::open(path);
  if (!log) return log;
  const FileMember here = FileMember::self(id);
  std::vector<FileMember> dead, alive;
  const Status entered = (*log)->transact(deadline, [&](Transaction& file) {
    auto members = read_members(file);
    // The last process on the list found the earlier ones alive.
    const bool lately = !members.empty() && members.back().boot == here.boot &&
                        here.entered - members.back().entered <= kSoon;
    for (const FileMember& member : members)
      (member.is_dead(here, lately) ? dead : alive).push_back(member);
    if (!dead.empty()) return;
    file.append(kMembersKey, encode({&here, 1}));
  });
  if (!entered) return entered;
  if (dead.empty()) return log;
  return Status(
      Code::store,
      "the file " + path + " is left over from an earlier run: " + dead.front().text() +
          (dead.size() > 1 ? " and " + std::to_string(dead.size() - 1) + " more used it and have"
                           : " used it and has") +
          " ended without leaving it" +
          (alive.empty() ? "" : ", while " + alive.front().text() + " still uses it") +
          "; remove the file, or give a new one");
}

}  // namespace

Result<Rendezvous> rendezvous_by_file(const std::string& path, MeetingOptions options) {
  if (Status directory = check_directory(path); !directory)
    return directory.with_context(cannot_join(options.rank, options));
  std::uint64_t id = 0;
  fill_random(std::as_writable_bytes(std::span(&id, 1)));
  for (;;) {
    auto log = enter(path, id, options.deadline);
    if (!log && log.status().code() == Code::closed && steady_clock().now() < options.deadline)
      continue;
    if (!log) return log.status().with_context(cannot_join(options.rank, options));
    const auto store = make_file_store_over(*log, time_left(steady_clock(), options.deadline),
                                            [id](FileLog& file) { leave(file, id); });
    auto joined = join(store, options);
    if (joined) joined->any_host = true;
    return joined;
  }
}

}  // namespace muster::store
