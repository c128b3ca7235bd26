// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/elastic/commit_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <new>
#include <string>
#include <utility>

#include "core/base/process/limits.h"
#include "core/net/socket_address.h"

namespace muster::elastic {
namespace {

constexpr std::uint64_t kMagic = 0x74696d6d6f63756d;  // "mucommit"
constexpr std::size_t kDataAlignment = 64;

Status no_room(std::size_t bytes, int error) {
  return {Code::exhausted, "elastic::State: no memory of " + std::to_string(bytes) +
                               " bytes for a commit: " + errno_text(error) +
                               "; two commits of each rank are kept, and two of a rank of another "
                               "node"};
}

Result<std::byte*> map(int file, std::size_t bytes) {
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return no_room(bytes, errno);
  return static_cast<std::byte*>(memory);
}

/// All pages now: later there would be no way to say that there are none left. False: see errno.
bool take_pages(int file, std::size_t bytes) {
  const FileSizeSignalBlock block;
  int done = 0;
  do {
    done = ::fallocate(file, 0, 0, static_cast<off_t>(bytes));
  } while (done != 0 && errno == EINTR);
  return done == 0;
}

}  // namespace

/// `whole` is cleared before the first byte of a commit is written and set (release) after the last
/// one; `agreed` is set later and cleared earlier. `label` reads `whole` with acquire, so a process
/// that reads after the death of the writer, at any point, finds a whole commit or none.
struct CommitMemory::Front {
  std::uint64_t magic = kMagic;
  std::atomic<std::uint64_t> whole = 0, agreed = 0;  // 0 or 1
  CommitLabel label;
};

CommitMemory::Front& CommitMemory::front() const {
  static_assert(sizeof(Front) <= kFront);
  return *reinterpret_cast<Front*>(memory_);
}

std::size_t CommitMemory::data_at(const CommitLabel& label) {
  return kFront + (label.description_bytes + kDataAlignment - 1) / kDataAlignment * kDataAlignment;
}

Result<CommitMemory> CommitMemory::make() {
  Descriptor file(::memfd_create("muster-commit", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  // Another process holds the file too: if it could shrink it, reads of this mapping would fault.
  if (!file || !take_pages(file.get(), kFront) ||
      ::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0)
    return no_room(kFront, errno);
  auto memory = map(file.get(), kFront);
  if (!memory) return memory.status();
  new (*memory) Front;
  return CommitMemory(std::move(file), *memory, kFront);
}

Result<CommitMemory> CommitMemory::open(Descriptor file) {
  const Status refused(Code::refused,
                       "elastic::State: the launcher holds a file that is no commit");
  struct stat about {};
  if (::fstat(file.get(), &about) != 0 || static_cast<std::size_t>(about.st_size) < kFront)
    return refused;
  const int seals = ::fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) return refused;
  const auto bytes = static_cast<std::size_t>(about.st_size);
  auto memory = map(file.get(), bytes);
  if (!memory) return memory.status();
  CommitMemory opened(std::move(file), *memory, bytes);
  const CommitLabel& label = opened.front().label;
  const bool fits = label.description_bytes <= bytes && label.data_bytes <= bytes &&
                    data_at(label) <= bytes - label.data_bytes;
  if (opened.front().magic != kMagic || (opened.label() && !fits)) return refused;
  return opened;
}

CommitMemory::CommitMemory(CommitMemory&& other) noexcept
    : file_(std::move(other.file_)),
      memory_(std::exchange(other.memory_, nullptr)),
      bytes_(other.bytes_),
      label_(other.label_) {}

CommitMemory::~CommitMemory() {
  if (memory_ != nullptr) ::munmap(memory_, bytes_);
}

Status CommitMemory::grow(std::size_t bytes) {
  if (!take_pages(file_.get(), bytes)) return no_room(bytes, errno);
  auto memory = map(file_.get(), bytes);
  if (!memory) return memory.status();
  ::munmap(memory_, bytes_);
  memory_ = *memory;
  bytes_ = bytes;
  return {};
}

Status CommitMemory::begin(const CommitLabel& label) {
  clear();
  const std::size_t bytes = data_at(label) + label.data_bytes;
  if (bytes > bytes_)
    if (Status grown = grow(bytes); !grown) return grown;
  label_ = label;
  return {};
}

void CommitMemory::finish() {
  front().label = label_;
  front().whole.store(1, std::memory_order_release);
}

void CommitMemory::set_agreed() { front().agreed.store(1, std::memory_order_release); }

void CommitMemory::clear() {
  front().agreed.store(0, std::memory_order_relaxed);
  front().whole.store(0, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // before anything is written
}

std::optional<CommitLabel> CommitMemory::label() const {
  if (front().whole.load(std::memory_order_acquire) != 1) return std::nullopt;
  return front().label;
}

bool CommitMemory::is_agreed() const {
  return label() && front().agreed.load(std::memory_order_acquire) == 1;
}

}  // namespace muster::elastic
