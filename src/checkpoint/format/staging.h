// SPDX-License-Identifier: BSD-3-Clause
/// The folder in which one save writes until it is whole, and the step that gives it its name.
///
/// Several processes may save to one path at once: a job that was started again beside its old
/// self, or one that stood still and goes on. Each writes into a folder of its own,
/// `<path>.<number>-<token>.saving`. The save that began later takes the right to the path: it
/// renames the folders of the others. The commit of such a save is a rename of its folder, which
/// then is not there, at whatever moment its process goes on. So a save is committed only while no
/// later one has begun, and what a commit replaces is never later than itself.
///
///   begin()    makes the folder with the next number, then looks for other savers of the path.
///              Both of two that begin at once look after they have made theirs, so at least one
///              of them sees the other, and number and token decide between them alike.
///   commit()   writes the index, looks at the path again, renames, removes what was replaced.
///   discard()  removes the folder. No call removes what another save can still commit.
///
/// A saver holds a lock on a file in its folder, which ends with its process: folders of killed
/// saves are told from those of others by it. The file is locked before it has its name. No save
/// takes over one that began later, also if that seems to have ended: on file systems whose locks
/// hold on one host only, savers of other hosts always do.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/format/files/index.h"
#include "core/base/descriptor.h"
#include "muster/status.h"

namespace muster::shards {

/// Locked by the saver as long as it lives; says who it is.
inline constexpr const char* kSaverName = "saver.lock";

/// The identity of a saver, which decides between two that save to one path. Within one launch of a
/// job, savers of older epochs give way to those of later ones. Between two launches of a job, the
/// one that the other has gone on from gives way: the other has loaded a checkpoint of it, has
/// saved over one, or has taken a save over from it. In any other case the one that began first
/// gives way.
struct SaverIdentity {
  std::string job = {};
  std::string launch = {};
  std::int64_t epoch = 0;                ///< 0: none
  std::vector<std::string> before = {};  ///< launches that it has gone on from by loading
};

class StagingFolder {
 public:
  /// Refuses where a save has begun or been committed that this one must not replace.
  static Result<StagingFolder> begin(const std::string& target, const SaverIdentity& saver,
                                     bool overwrite);

  /// "<number>-<token>": what the other ranks need to know of it.
  std::string stamp() const;
  /// For the index; `step` and all else is the caller's.
  const CommitRecord& record() const { return record_; }
  const std::string& path() const { return path_; }

  /// Puts the folder, with the index, in the target's place. Refuses where a later save has begun.
  Status commit(std::string_view index, bool durable);
  void discard();

 private:
  StagingFolder() = default;
  Status claim(const SaverIdentity& saver);
  Status settle_with_others();
  Status check_target();
  Status remove_replaced() const;

  std::string target_, path_;
  CommitRecord record_;
  bool overwrite_ = true;
  Descriptor lock_;                         ///< of the file that says who saves
  bool has_target_ = false;                 ///< a folder is there
  std::optional<std::string> seen_digest_;  ///< of the index there
};

Status refuse_link(const std::string& path);
/// The folder of a save by what rank 0 has told of it.
std::string staging_path(const std::string& target, const std::string& stamp);
/// Why a save whose folder is gone cannot go on.
Status superseded(const std::string& target);

/// A folder that a save has left or writes now.
struct UnfinishedSave {
  std::string path;
  std::int64_t number = 0;  ///< 0: not known
  bool is_removed = false;  ///< another save has taken its right to be committed
};
/// Those of a target; with the one that the first versions left as "<target>.saving". A folder of
/// that name with anything that those did not write is the user's own.
std::vector<UnfinishedSave> unfinished_saves_of(const std::string& target);
/// Those in a folder.
std::vector<UnfinishedSave> unfinished_saves_in(const std::string& folder);
/// Whether the process that saves there has ended. False where the file system cannot tell.
bool saver_has_ended(const std::string& staging);

/// A new name for a folder that is going to be removed; what a kill leaves of it is known by that.
std::string removed_name(const std::string& folder);
/// Removes the files that saves write, the index first, then the folder where it is empty.
Status remove_files_of_ours(const std::string& path);

/// Takes the right to be committed from a save, by another name of its folder; then removes from
/// that what saves write.
Status take_over(const std::string& staging, bool durable);

}  // namespace muster::shards
