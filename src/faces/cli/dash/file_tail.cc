// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/dash/file_tail.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "core/base/descriptor.h"
#include "core/security/own_files.h"

namespace muster::cli {

Result<FileTail> tail_of_file(const std::string& path, const std::string& name, std::size_t most) {
  const auto file = open_own_file(path, O_RDONLY, {.name = name, .root_may_look = true});
  if (!file) return file.status();
  struct stat info {};
  if (::fstat(file->get(), &info) != 0)
    return Status(Code::invalid_argument, "cannot look at " + path + ": " + errno_text(errno));
  FileTail tail;
  tail.bytes = static_cast<std::uint64_t>(info.st_size);
  const std::uint64_t begin = tail.bytes - std::min<std::uint64_t>(tail.bytes, most);
  tail.text.resize(static_cast<std::size_t>(tail.bytes - begin));
  std::size_t got = 0;
  while (got < tail.text.size()) {
    const ssize_t count = ::pread(file->get(), tail.text.data() + got, tail.text.size() - got,
                                  static_cast<off_t>(begin + got));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0)
      return Status(Code::invalid_argument, "cannot read " + path + ": " + errno_text(errno));
    if (count == 0) break;  // it was cut meanwhile
    got += static_cast<std::size_t>(count);
  }
  tail.text.resize(got);
  return tail;
}

}  // namespace muster::cli
