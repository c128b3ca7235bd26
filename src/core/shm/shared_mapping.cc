// SPDX-License-Identifier: BSD-3-Clause
#include "core/shm/shared_mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "core/base/process/limits.h"
#include "core/net/socket_address.h"

namespace muster::shm {
namespace {

using FileId = std::pair<dev_t, ino_t>;

struct Mappings {
  std::mutex lock;  // guards `known`; held during mmap, so that a file is mapped once
  std::map<FileId, std::weak_ptr<SharedMapping>> known;
};
Mappings& mappings() {
  static constinit PerProcess<Mappings> of_process;
  return of_process.get();
}

}  // namespace

Result<Descriptor> make_memory_file(const char* name, std::size_t bytes) {
  if (Status fits = check_file_size(std::string("the memory file ") + name, bytes); !fits)
    return fits;
  Descriptor file(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file)
    return Status(Code::exhausted,
                  std::string("cannot make the memory file ") + name + ": " + errno_text(errno));
  if (::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) {
    return Status(Code::exhausted, std::string("cannot make the memory file ") + name + " " +
                                       std::to_string(bytes) + " bytes long: " + errno_text(errno));
  }
  if (::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL) != 0) {
    return Status(Code::internal,
                  std::string("cannot seal the memory file ") + name + ": " + errno_text(errno));
  }
  return file;
}

SharedMapping::~SharedMapping() { ::munmap(memory_, bytes_); }

Result<std::shared_ptr<SharedMapping>> map_shared(int descriptor, std::size_t at_least) {
  struct stat file {};
  if (::fstat(descriptor, &file) != 0)
    return Status(Code::refused, "cannot stat a memory file: " + errno_text(errno));
  const auto bytes = static_cast<std::size_t>(file.st_size);
  if (bytes < at_least || bytes == 0) {
    return Status(Code::refused, "a memory file that a peer passed has " + std::to_string(bytes) +
                                     " bytes, expected at least " + std::to_string(at_least));
  }
  const int seals = ::fcntl(descriptor, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return Status(Code::refused,
                  "a memory file that a peer passed is not sealed against shrinking: it could be "
                  "truncated while in use");
  }
  Mappings& all = mappings();
  const std::lock_guard hold(all.lock);
  auto& known = all.known[FileId{file.st_dev, file.st_ino}];
  if (auto mapping = known.lock(); mapping != nullptr && !mapping->forked()) return mapping;
  const bool writable = (::fcntl(descriptor, F_GETFL) & O_ACCMODE) == O_RDWR;
  void* const memory = ::mmap(nullptr, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ,
                              MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  if (memory == MAP_FAILED) {
    all.known.erase(FileId{file.st_dev, file.st_ino});
    return Status(Code::exhausted, "cannot map a memory file of " + std::to_string(bytes) +
                                       " bytes: " + errno_text(errno) +
                                       " (is address space limited, ulimit -v?)");
  }
  auto mapping = std::make_shared<SharedMapping>(static_cast<std::byte*>(memory), bytes);
  known = mapping;
  std::erase_if(all.known, [](const auto& entry) { return entry.second.expired(); });
  return mapping;
}

}  // namespace muster::shm
