// SPDX-License-Identifier: BSD-3-Clause
/// Files and folders that only this user can have written.
///
/// A path may lead through folders that others can write to (/tmp, a shared project), so a file is
/// checked before it is trusted: it must belong to this user and be closed to others, as ssh and
/// munge require of their keys. The last component of the path must not be a link, a file with a
/// second hard link is refused, and a pipe in place of a file does not block. The checks apply to
/// the opened file, not to what the path leads to afterwards. The containing folders are not
/// checked: a user who can write to them can replace the file, but the replacement is refused.
#pragma once

#include <fcntl.h>

#include <string>

#include "core/base/descriptor.h"
#include "muster/status.h"

namespace muster {

struct OwnRules {
  std::string name;            ///< what messages call it: "the store's file"
  unsigned closed = 022;       ///< permissions that others must not have; 077: none at all
  bool from_root = false;      ///< may be root's too, and then readable by its group
  bool root_may_look = false;  ///< a process of root may open any user's
};

/// Opens or makes (`flags` with O_CREAT; `mode`) a regular file. O_TRUNC empties it once it has
/// been judged. A relative `path` is looked up in the opened folder `at`. Code::refused for a
/// link, a file with several names, another user's file and loose permissions;
/// Code::invalid_argument where it cannot be opened. The message names the path and what to change.
Result<Descriptor> open_own_file(const std::string& path, int flags, const OwnRules& rules,
                                 unsigned mode = 0600, int at = AT_FDCWD);

/// Opens a folder to look at it and to open what it holds. Errors as above.
Result<Descriptor> open_own_folder(const std::string& path, const OwnRules& rules,
                                   int at = AT_FDCWD);

/// The folder of this user's own files on this host: `$XDG_RUNTIME_DIR/muster`, else
/// `/tmp/muster-UID`. srun, su and containers pass on an XDG_RUNTIME_DIR that does not exist or is
/// another user's; it does not count then.
std::string own_runtime_folder();

/// Makes the folder `path` (one level, `mode`) unless it is there, and opens it.
Result<Descriptor> make_own_folder(const std::string& path, const OwnRules& rules,
                                   unsigned mode = 0700, int at = AT_FDCWD);

/// Whether programs and libraries at a place can only be there by this user's or root's will. For
/// what was found by looking around (beside this program, in a folder above it), not for what
/// the user named. Ok: the file or folder `path`, every folder above it and every link on the way
/// belong to root or to this user, and nobody else can write to them; a folder that all may write
/// to counts if it is sticky (/tmp), as its entries are judged too, and so does one of the group
/// that a user has alone. Those who could have replaced `own_file` are trusted as well, since its
/// code runs already: the owners of it and of the folders above it, and groups that may write to
/// them.
/// Code::refused names the first that is not so. Code::invalid_argument: there is nothing.
/// `own_file`: the program or library that this code is in; empty: found by itself.
Status check_trusted_place(const std::string& path, const std::string& own_file = {});

/// The same as a yes or no. A place that is there and refused is logged as a warning, once.
bool is_trusted_place(const std::string& path);

}  // namespace muster
