// SPDX-License-Identifier: BSD-3-Clause
/// Files and folders as a checkpoint uses them. Errors name the path, the system's reason and what
/// was being done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/base/descriptor.h"
#include "muster/status.h"

namespace muster::shards {
/// A new file that is written from its beginning to its end.
class FileWriter {
 public:
  /// The file must not exist.
  static Result<FileWriter> create(const std::string& path);
  Status write(std::span<const std::byte> bytes);
  /// `durable`: the bytes are on the disk when it returns.
  Status close(bool durable);
  /// The open file, which is no longer written by this.
  Descriptor release() { return std::move(file_); }

 private:
  FileWriter(std::string path, Descriptor file) : path_(std::move(path)), file_(std::move(file)) {}
  std::string path_;
  Descriptor file_;
};

class FileReader {
 public:
  static Result<FileReader> open(const std::string& path);
  std::uint64_t bytes() const { return bytes_; }
  /// All of `to`; fails where the file ends before.
  Status read_at(std::uint64_t offset, std::span<std::byte> to) const;

 private:
  FileReader(std::string path, Descriptor file, std::uint64_t bytes)
      : path_(std::move(path)), file_(std::move(file)), bytes_(bytes) {}
  std::string path_;
  Descriptor file_;
  std::uint64_t bytes_ = 0;
};

/// A file of at most `limit` bytes.
Result<std::string> read_text(const std::string& path, std::uint64_t limit);
/// Written beside it, brought to the disk, then renamed: there is the old file or the new one.
Status write_text(const std::string& path, std::string_view text, bool durable);
/// The names in it are on the disk when it returns.
Status sync_folder(const std::string& path);

bool exists(const std::string& path);
/// When a file's contents last changed, in nanoseconds since 1970; 0 where there is none.
std::int64_t changed_ns(const std::string& path);
/// The folder that the path stands in: "." for a name alone.
std::string folder_of(const std::string& path);
/// Without slashes at its end.
std::string without_slash(std::string path);
Status make_folder(const std::string& path);
/// Fails where it is there already.
Status make_new_folder(const std::string& path);
/// One that is not there is no failure.
Status remove_file(const std::string& path);
/// Replaces a file that is there.
Status rename_file(const std::string& from, const std::string& to);
/// Does nothing where the folder is not there or not empty.
Status remove_empty_folder(const std::string& path);
/// `from` takes the name `to`, which must not be there. `replaces`: it must be, the two change
/// their names in one step, and the old folder is then `from`; fails on file systems that cannot do
/// so.
Status put_in_place(const std::string& from, const std::string& to, bool replaces);

// The folder that a checkpoint's name means.

/// A path of this machine's file systems, without slashes at its end: "~/run" begins in the home
/// folder, "file:///run" is "/run". Refuses an empty name and names of other stores (s3://bucket).
Result<std::string> local_path(const std::string& name);

}  // namespace muster::shards
