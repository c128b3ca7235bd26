/// Whether programs and libraries at a place can only be there by this user's or root's will.
#pragma once

#include <string>

#include "muster/status.h"

namespace muster {

/// For what was found by looking around (beside this program, in a folder above it), not for what
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
