// SPDX-License-Identifier: BSD-3-Clause
#include "checkpoint/format/staging.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "checkpoint/format/files/disk.h"
#include "checkpoint/format/files/index.h"
#include "checkpoint/format/history.h"
#include "core/net/socket_address.h"
#include "core/net/this_host.h"
#include "core/security/secret.h"

namespace muster::shards {
namespace {

using nlohmann::json;

constexpr std::string_view kSaving = ".saving", kRemoved = ".old";
constexpr const char* kWriting = ".writing";
constexpr std::size_t kTokenBytes = 8, kTokenDigits = 16;
constexpr std::uint64_t kSaverLimit = 65536;

Status refuse_saver(const std::string& why) {
  return {Code::invalid_argument, "checkpoint: " + why};
}

bool is_folder(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_directory(std::filesystem::symlink_status(path, error));
}

bool all_digits(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(),
                                      [](char each) { return each >= '0' && each <= '9'; });
}

/// Takes `end` from the end of `text`.
bool strip(std::string_view& text, std::string_view end) {
  if (!text.ends_with(end)) return false;
  text.remove_suffix(end.size());
  return true;
}

struct StagingName {
  std::string target;  ///< the name of a folder, without the folder around it
  std::int64_t number = 0;
  std::string token;
  bool is_removed = false;
};

/// The parts of "<target>.<number>-<token>.saving" and of "<target>.<number>-<token>.old.saving".
std::optional<StagingName> staging_name(std::string_view name) {
  if (!strip(name, kSaving)) return {};
  StagingName parts;
  parts.is_removed = strip(name, kRemoved);
  const std::size_t dot = name.rfind('.');
  if (dot == std::string_view::npos || dot == 0) return {};
  const std::string_view stamp = name.substr(dot + 1);
  const std::size_t dash = stamp.find('-');
  if (dash == std::string_view::npos || dash > 18 || !all_digits(stamp.substr(0, dash)) ||
      stamp.size() != dash + 1 + kTokenDigits ||
      stamp.find_first_not_of("0123456789abcdef", dash + 1) != std::string_view::npos)
    return {};
  parts.target = name.substr(0, dot);
  parts.number = std::stoll(std::string(stamp.substr(0, dash)));
  parts.token = stamp.substr(dash + 1);
  return parts;
}

/// Whether saves write files of this name.
bool is_name_of_ours(std::string_view name) {
  for (const std::string whole : {kSaverName, kIndexName})
    if (name == whole || name == whole + kWriting) return true;
  return name.starts_with("shard-") && strip(name, ".safetensors") &&
         name.find("-model-") != std::string_view::npos;
}

}  // namespace

Status remove_files_of_ours(const std::string& path) {
  std::error_code error;
  std::vector<std::string> names{kIndexName};
  for (auto at = std::filesystem::directory_iterator(path, error);
       !error && at != std::filesystem::directory_iterator(); at.increment(error))
    if (const std::string name = at->path().filename().string(); is_name_of_ours(name))
      names.push_back(name);
  for (const std::string& name : names)
    if (Status done = remove_file(path + "/" + name); !done) return done;
  return remove_empty_folder(path);
}

namespace {

enum class SaverLife { running, ended, unknown };

SaverLife life_of_saver(const std::string& staging) {
  const std::string path = staging + "/" + kSaverName;
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!file) return SaverLife::unknown;
  int result = 0;
  do result = ::flock(file.get(), LOCK_SH | LOCK_NB);
  while (result != 0 && errno == EINTR);
  if (result == 0) return SaverLife::ended;
  return errno == EWOULDBLOCK ? SaverLife::running : SaverLife::unknown;
}

/// The saver of an unfinished save, as far as its folder's name and its saver file say.
CommitRecord claim_of(const UnfinishedSave& save) {
  CommitRecord record;
  if (const auto name = staging_name(std::filesystem::path(save.path).filename().string())) {
    record.number = name->number;
    record.token = name->token;
  }
  const auto text = read_text(save.path + "/" + kSaverName, kSaverLimit);
  if (!text) return record;
  const json told = json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (!told.is_object()) return record;
  if (told.contains("job") && told["job"].is_string()) record.job = told["job"];
  if (told.contains("launch") && told["launch"].is_string()) record.launch = told["launch"];
  if (told.contains("epoch") && told["epoch"].is_number_integer()) record.epoch = told["epoch"];
  if (!told.contains("before") || !told["before"].is_array()) return record;
  for (const json& each : told["before"])
    if (each.is_string()) record.before.push_back(each);
  return record;
}

}  // namespace

Status refuse_link(const std::string& path) {
  return refuse_saver(path +
                      " is a symbolic link, and what it leads to is not replaced or removed: give "
                      "the name of a folder");
}

std::string staging_path(const std::string& target, const std::string& stamp) {
  std::string path = target;
  return path.append(".").append(stamp).append(kSaving);
}

Status superseded(const std::string& target) {
  return {Code::refused, "checkpoint: this save of " + target +
                             " is refused: another saver has begun to save " + target +
                             " after it; end the one of the two jobs that should not save, or give "
                             "each a folder of its own"};
}

std::string removed_name(const std::string& folder) {
  std::string name = folder;
  return name.append(".0-").append(random_name(kTokenBytes)).append(kRemoved).append(kSaving);
}

std::string StagingFolder::stamp() const {
  return std::to_string(record_.number) + "-" + record_.token;
}

Result<StagingFolder> StagingFolder::begin(const std::string& target, const SaverIdentity& saver,
                                           bool overwrite) {
  StagingFolder made;
  made.target_ = target;
  made.overwrite_ = overwrite;
  made.record_.job = saver.job;
  made.record_.launch = saver.launch;
  made.record_.before = saver.before;
  made.record_.epoch = saver.epoch;
  made.record_.name = std::filesystem::path(target).filename().string();
  made.record_.token = random_name(kTokenBytes);
  const std::string around = folder_of(target);
  if (Status done = make_folder(around); !done) return done;
  made.record_.number = highest_number_in(around) + 1;
  if (Status free = made.check_target(); !free) return free;
  made.path_ = staging_path(target, made.stamp());
  if (Status done = make_new_folder(made.path_); !done) return done;
  Status done = made.claim(saver);
  if (done.ok()) done = made.settle_with_others();
  if (done.ok()) done = made.check_target();
  if (!done) {
    if (!exists(made.path_)) done = superseded(target);
    made.discard();
    return done;
  }
  return made;
}

/// Says in the folder who saves there. The file gets its name once it is locked: a saver that is
/// seen without the lock has ended.
Status StagingFolder::claim(const SaverIdentity& saver) {
  const json about{{"job", saver.job},         {"launch", saver.launch}, {"epoch", saver.epoch},
                   {"before", record_.before}, {"host", host_name()},    {"process", ::getpid()}};
  const std::string text = about.dump(-1, ' ', false, json::error_handler_t::replace);
  const std::string path = path_ + "/" + kSaverName;
  auto file = FileWriter::create(path + kWriting);
  if (!file) return file.status();
  if (Status done = file->write(std::as_bytes(std::span(text))); !done) return done;
  lock_ = file->release();
  // Any other failure means a file system without locks, whose savers are told apart by their
  // order.
  while (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0 && errno == EINTR) {
  }
  return rename_file(path + kWriting, path);
}

/// After the own folder is there: takes over the saves that are less, or gives way.
Status StagingFolder::settle_with_others() {
  const auto own_name = std::filesystem::path(path_).filename();
  for (const UnfinishedSave& other : unfinished_saves_of(target_)) {
    // Both are in one folder, which may be spelt in two ways ("c" and "./c").
    if (std::filesystem::path(other.path).filename() == own_name) continue;
    if (!exists(path_)) return superseded(target_);
    if (!other.is_removed) {
      const SaverLife life = life_of_saver(other.path);
      const CommitRecord theirs = claim_of(other);
      const bool is_later = theirs.is_later_than(record_);
      // If it lives it takes over this save; if not, the next one removes what it left.
      if (life == SaverLife::ended && is_later) continue;
      const auto is_older = [](const CommitRecord& one, const CommitRecord& than) {
        return one.is_older_epoch_than(than) || one.was_left_behind_by(than);
      };
      const bool is_behind = life != SaverLife::ended && is_older(record_, theirs);
      if (is_behind || (life != SaverLife::ended && is_later && !is_older(theirs, record_)))
        return {Code::refused, "checkpoint: this save of " + target_ + " is refused: " +
                                   theirs.saver_text() + " is saving it at the same time (" +
                                   other.path + "); end the one of the two jobs that should not " +
                                   "save, or give each a folder of its own"};
      if (!record_.job.empty()) record_.go_on_from(theirs);
    }
    if (Status done = take_over(other.path, /*durable=*/true); !done) return done;
  }
  return exists(path_) ? Status() : superseded(target_);
}

/// Whether what is at the target may be replaced by this save, and what that is.
Status StagingFolder::check_target() {
  has_target_ = false;
  seen_digest_.reset();
  std::error_code error;
  const auto kind = std::filesystem::symlink_status(target_, error).type();
  if (kind == std::filesystem::file_type::not_found) return {};
  if (kind == std::filesystem::file_type::symlink) return refuse_link(target_);
  has_target_ = true;
  if (!exists(target_ + "/" + kIndexName)) {
    if (is_folder(target_) && std::filesystem::is_empty(target_, error) && !error) return {};
    return refuse_saver(target_ +
                        " is there and is no checkpoint; its files are not replaced: save under "
                        "another name");
  }
  if (!overwrite_) return refuse_saver(target_ + " is a checkpoint already, and overwrite is off");
  const auto index = open_index(target_);
  if (!index)
    return index.status().with_context("checkpoint: " + target_ +
                                       " is not replaced, because its index does not tell which "
                                       "files are its own; remove it or save under another name");
  if (Status own = check_only_own_files(target_, *index); !own) return own;
  const CommitRecord& there = index->commit;
  if (record_.is_older_epoch_than(there))
    return {
        Code::refused,
        "checkpoint: this save of " + target_ + " is refused: it is of " + record_.saver_text() +
            ", and " + there.saver_text() +
            " has saved it already in the same launch; a process that was left behind must end"};
  if (record_.was_left_behind_by(there))
    return {Code::refused,
            "checkpoint: this save of " + target_ + " is refused: a later launch" +
                (record_.job.empty() ? "" : " of job '" + record_.job + "'") +
                " has gone on from what this one saved, and has saved " + target_ +
                " since; a process that was left behind must end. To go on from what is there, "
                "start the job again"};
  if (there.is_later_than(record_)) return superseded(target_);
  // Programs without a job's name may have only the folder in common: a program goes on from the
  // one whose checkpoint it has loaded, and from no other.
  if (!record_.job.empty()) record_.go_on_from(there);
  seen_digest_ = index->digest;
  return {};
}

Status StagingFolder::commit(std::string_view index, bool durable) {
  const auto unless_superseded = [this](const Status& failed) {
    return exists(path_) ? failed : superseded(target_);
  };
  if (Status done = write_text(path_ + "/" + kIndexName, index, durable); !done)
    return unless_superseded(done);
  if (Status free = check_target(); !free) return free;
  if (Status done = put_in_place(path_, target_, has_target_); !done)
    return unless_superseded(done);
  static_cast<void>(remove_file(target_ + "/" + kSaverName));  // a later save has none there
  if (durable)
    if (Status done = sync_folder(folder_of(target_)); !done) return done;
  return has_target_ ? remove_replaced() : Status();
}

/// After the two folders have changed their names: removes what was seen at the target, nothing
/// else.
Status StagingFolder::remove_replaced() const {
  const auto index = open_index(path_);
  if (!exists(path_)) return {};  // a later save has removed it
  if (seen_digest_ && index.ok() && index->digest == *seen_digest_)
    return remove_files_of_ours(path_);
  if (!seen_digest_ && !index && remove_empty_folder(path_).ok() && !exists(path_)) return {};
  const std::string kept = target_ + ".replaced-" + record_.token;
  if (Status done = put_in_place(path_, kept, /*replaces=*/false); !done) return done;
  return refuse_saver(target_ +
                      " is saved, but what lay there was changed by others at the same "
                      "time; it is kept as " +
                      kept);
}

void StagingFolder::discard() {
  if (exists(path_)) static_cast<void>(remove_files_of_ours(path_));
  lock_.reset();
}

std::vector<UnfinishedSave> unfinished_saves_in(const std::string& folder) {
  std::vector<UnfinishedSave> found;
  std::error_code error;
  for (auto at = std::filesystem::directory_iterator(folder, error);
       !error && at != std::filesystem::directory_iterator(); at.increment(error)) {
    const std::string name = at->path().filename().string(), path = folder + "/" + name;
    if (const auto parts = staging_name(name); parts && is_folder(path))
      found.push_back({path, parts->number, parts->is_removed});
  }
  return found;
}

namespace {

/// Whether a folder has what a save of the first versions left: an index, finished or not, and no
/// files of others; or nothing.
bool is_of_first_versions(const std::string& path) {
  if (!is_folder(path)) return false;
  bool has_index = false, has_any = false;
  std::error_code error;
  for (auto at = std::filesystem::directory_iterator(path, error);
       !error && at != std::filesystem::directory_iterator(); at.increment(error)) {
    const std::string name = at->path().filename().string();
    if (!is_name_of_ours(name)) return false;
    has_any = true;
    has_index = has_index || name.starts_with(kIndexName);
  }
  return !error && (has_index || !has_any);
}

}  // namespace

std::vector<UnfinishedSave> unfinished_saves_of(const std::string& target) {
  auto found = unfinished_saves_in(folder_of(target));
  const std::string name = std::filesystem::path(target).filename().string();
  std::erase_if(found, [&](const UnfinishedSave& each) {
    return staging_name(std::filesystem::path(each.path).filename().string())->target != name;
  });
  const std::string first = target + std::string(kSaving);
  if (is_of_first_versions(first)) found.push_back({.path = first});
  return found;
}

bool saver_has_ended(const std::string& staging) {
  return life_of_saver(staging) == SaverLife::ended;
}

Status take_over(const std::string& staging, bool durable) {
  std::string removed = staging;
  const auto name = staging_name(std::filesystem::path(staging).filename().string());
  if (!name || !name->is_removed) {
    if (name) removed.resize(removed.size() - kSaving.size());
    removed = name ? removed.append(kRemoved).append(kSaving) : removed_name(staging);
    const Status renamed = put_in_place(staging, removed, /*replaces=*/false);
    if (!renamed) return exists(staging) ? renamed : Status();  // it has been committed or removed
  }
  // Its saver may have changed names and not have brought that to the disk: what it has replaced is
  // removed only when that is there.
  if (durable)
    if (Status done = sync_folder(folder_of(staging)); !done) return done;
  return remove_files_of_ours(removed);
}

}  // namespace muster::shards
